"""The two-phase schedule computes what Block AttnRes computes: in training, recomputed, scanned, and when decoding."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.model import lm_loss
from pallas_kernels import attn_res, attn_res_ahead, attn_res_merge
from tests.kimi_jax.small_models import forward, small_config, small_model, tokens_for
from tests.support import BF16_FORWARD, BF16_GRADIENT, F32_FORWARD, F32_GRADIENT, assert_close


class Case(NamedTuple):
    name: str
    fields: dict


# Five layers in blocks of two: the last block is short.
CASES = [
    Case("unrolled", dict(num_layers=5, block_size=4)),
    Case("recomputed", dict(num_layers=3, block_size=2, remat="block")),
    Case("scanned", dict(num_layers=7, block_size=4, scan_layers=True, remat="block")),
    Case("scanned_dots", dict(num_layers=6, block_size=2, scan_layers=True, remat="dots")),
    Case("one_block", dict(num_layers=2, block_size=8)),
]
SAME_AGAIN = ("recomputed", "scanned_dots", "one_block")


def pair(case: Case):
    """Two models of the same parameters: in one phase and unrolled, and in two."""
    config = small_config(**case.fields)
    one = small_model(dataclasses.replace(config, scan_layers=False))
    two = small_model(dataclasses.replace(config, depth_two_phase=True), seed=1)
    two.embedding[...], two.head[...] = one.embedding[...], one.head[...]
    for name in ("final_norm", "final_mix"):
        nnx.update(getattr(two, name), nnx.state(getattr(one, name)))
    for index in range(config.num_layers):
        layer, row = two.layers.locate(index)
        given = nnx.state(one.layers.layer(index))
        if row is not None:
            given = jax.tree.map(lambda stack, x, row=row: stack.at[row].set(x), nnx.state(layer), given)
        nnx.update(layer, given)
    return one, two


def by_part(model, parameters):
    """Parameters, or what has their structure, as {name: array} with one entry per layer."""
    model = nnx.merge(nnx.graphdef(model), parameters)
    parts = {f"layer {i}": model.layers.layer(i) for i in range(model.config.num_layers)}
    parts |= {"final norm": model.final_norm, "final mix": model.final_mix}
    named = {"embedding": model.embedding[...], "head": model.head[...]}
    for name, part in parts.items():
        named |= {name + jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(nnx.state(part))}
    return named


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=[pytest.mark.exhaustive] if c.name in SAME_AGAIN else []) for c in CASES],
)
def test_equals_one_phase(case):
    one, two = pair(case)
    assert (two.layers.repetition.count > 1) == case.name.startswith("scanned")
    tokens = tokens_for(one.config, 2, 12)
    ids = jnp.asarray([[0] * 7 + [1] * 5, [0] * 9 + [-1] * 3])

    def value_and_grads(model):
        graphdef, state = nnx.split(model)

        def loss(state):
            logits = nnx.merge(graphdef, state)(tokens, ids)
            return lm_loss(nnx.merge(graphdef, state), tokens, ids)[0], logits

        (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(state)
        return logits, grads

    (expected, bars), (logits, found) = value_and_grads(one), value_and_grads(two)
    valid = np.asarray(ids) >= 0
    assert_close(logits[valid], expected[valid], F32_FORWARD, "logits")
    found, bars = by_part(two, found), by_part(one, bars)
    assert found.keys() == bars.keys()
    for name in bars:
        assert_close(found[name], bars[name], F32_GRADIENT, name)


def test_decoding_equals_the_full_forward():
    _, model = pair(CASES[2])
    tokens = tokens_for(model.config, 2, 9)
    expected = forward(model)(tokens)
    graphdef, state = nnx.split(model)
    extend = jax.jit(lambda state, tokens, cache: nnx.merge(graphdef, state).extend(tokens, cache))
    logits, cache = extend(state, tokens[:, :6], model.init_cache(2, 9))
    assert_close(logits, expected[:, :6], F32_FORWARD, "prefill")
    for t in range(6, 9):
        logits, cache = extend(state, tokens[:, t : t + 1], cache)
        assert_close(logits[:, 0], expected[:, t], F32_FORWARD, f"token {t}")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_phases_merge_to_the_mixture(norm, dtype):
    """Values, and each gradient, of three queries over five sources and one more, against one softmax in float64."""
    low = dtype == "bfloat16"
    with jax.enable_x64():
        r = np.random.default_rng(0)
        draw = lambda *shape: jnp.asarray(r.normal(size=shape))  # noqa: E731
        sources = tuple((x * jnp.exp(draw(3, 1))).astype(dtype) for x in draw(6, 3, 64))
        queries, scales, bars = draw(3, 64) / 4, draw(3, 64), draw(3, 3, 64).astype(dtype)
        arguments = sources, queries, scales, *([draw(64)] if norm else [])

        def once(sources, queries, scales, norm=None):
            wide = [x.astype(jnp.float64) for x in sources]
            mixtures = [attn_res(wide, q, k, output_scale=norm) for q, k in zip(queries, scales, strict=True)]
            return jnp.sum(jnp.stack(mixtures) * bars), mixtures

        def twice(sources, queries, scales, norm=None):
            vectors = [[v.astype(jnp.float32) if low else v for v in x] for x in (queries, scales)]
            ahead, _ = attn_res_ahead(sources[:5], *vectors)
            mixtures = [
                attn_res_merge(*a, sources[5], q, k, output_scale=None if norm is None else norm.astype(q.dtype))
                for a, q, k in zip(ahead, *vectors, strict=True)
            ]
            return jnp.sum((jnp.stack(mixtures) * bars).astype(jnp.float64)), mixtures

        run = lambda f: jax.jit(jax.value_and_grad(f, range(len(arguments)), has_aux=True))(*arguments)  # noqa: E731
        ((_, expected), expected_bars), ((_, found), found_bars) = run(once), run(twice)
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b, BF16_FORWARD if low else 1e-12, "mixture")
        for a, b in zip(jax.tree.leaves(found_bars), jax.tree.leaves(expected_bars), strict=True):
            assert_close(a, b, BF16_GRADIENT if low else 1e-12, "gradient")


def test_bad_input():
    x, q = jnp.ones((2, 3, 8)), jnp.ones(8)
    with pytest.raises(ValueError, match="2 queries and 1 key_scales"):
        attn_res_ahead(x, [q, q], [None])
    with pytest.raises(ValueError, match=r"lse has shape \(2,\); .*must be \(3,\)"):
        attn_res_merge(x[0], jnp.ones(2), x[1], q)
    with pytest.raises(ValueError, match="sources"):
        attn_res_merge(x[0].astype(jnp.bfloat16), jnp.ones(3), x[1], q)
