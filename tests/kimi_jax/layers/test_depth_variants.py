"""Each other way to weigh the sources: its formula in numpy, unrolled and as a scan carries it; and step 0."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.layers.depth_variants import VariantMix, Weighing
from kimi_jax.layers.residuals import DepthState
from tests.kimi_jax.layers.layer_support import call
from tests.support import BF16_FORWARD, assert_close

N, D, EPS, MOST_SOURCES = 5, 12, 1e-5, 8


def rms(x):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS)


def softmax(scores):
    return np.exp(scores) / np.exp(scores).sum(0)


def softmax1(scores):
    return np.exp(scores) / (1 + np.exp(scores).sum(0))


def sigmoid(scores):
    return 1 / (1 + np.exp(-scores))


def weigh(weights, v):
    return np.sum(weights[..., None] * v, 0)


def attend(v, p):
    return weigh(softmax(np.sum(rms(v) * p["key_scale"] * p["query"], -1)), v)


def attend_by_head(v, p, heads):
    products = rms(v) * p["key_scale"] * p["query"]  # the norm over all channels, the softmax over a head's
    parts = [
        weigh(softmax(product.sum(-1)), part)
        for product, part in zip(np.split(products, heads, -1), np.split(v, heads, -1), strict=True)
    ]
    return np.concatenate(parts, -1)


def attend_from_hidden(v, p):
    return attend(v, {"query": rms(v[-1]) @ p["query_proj"], "key_scale": p["key_scale"]})


def static(v, p):
    weights = softmax(p["scalars"][: len(v)])
    return np.tensordot(weights, v, 1)


class Case(NamedTuple):
    name: str
    weighing: Weighing
    formula: Callable
    adds: bool = False
    step_zero: float | None = 1 / N  # the common weight of all sources with initial parameters


CASES = [
    Case(
        "sigmoid",
        Weighing("sigmoid"),
        lambda v, p: weigh(sigmoid(np.sum(rms(v) * p["key_scale"] * p["query"], -1)), v),
        step_zero=1 / 2,
    ),
    Case(
        "softmax1",
        Weighing("softmax1"),
        lambda v, p: weigh(softmax1(np.sum(rms(v) * p["key_scale"] * p["query"], -1)), v),
        step_zero=1 / (N + 1),
    ),
    Case(
        "softmax1_window",
        Weighing("softmax1", key_norm=False, window=2),
        lambda v, p: weigh(softmax1(v[[0, -2, -1]] @ p["query"]), v[[0, -2, -1]]),
        step_zero=None,
    ),
    Case("no_key_norm", Weighing(key_norm=False), lambda v, p: weigh(softmax(v @ p["query"]), v)),
    Case("static", Weighing("static"), static),
    Case(
        "dense_former",
        Weighing("dense_former"),
        lambda v, p: np.tensordot(p["scalars"][: len(v)], v, 1),
        step_zero=1,
    ),
    Case("hidden", Weighing(query="hidden"), attend_from_hidden),
    Case("heads", Weighing(heads=4), lambda v, p: attend_by_head(v, p, 4)),
    Case("window", Weighing(window=2), lambda v, p: attend(v[[0, -2, -1]], p), step_zero=None),
    Case("static_window", Weighing("static", window=2), lambda v, p: static_in_window(v, p), step_zero=None),
    Case("window_of_all", Weighing(window=N - 1), attend),
    Case("delta", Weighing(), lambda v, p: v.sum(0) + attend(v, p), True, 1 + 1 / N),
    Case("delta_heads", Weighing(heads=3), lambda v, p: v.sum(0) + attend_by_head(v, p, 3), True, 1 + 1 / N),
    Case("delta_window", Weighing(window=1), lambda v, p: v.sum(0) + attend(v[[0, -1]], p), True, None),
]


def static_in_window(v, p):
    return np.tensordot(softmax(p["scalars"][[0, N - 2, N - 1]]), v[[0, -2, -1]], 1)


def site_of(case: Case, dtype=jnp.float64) -> VariantMix:
    return VariantMix(D, case.weighing, sources=MOST_SOURCES, adds=case.adds, eps=EPS, param_dtype=dtype)


def values_of(site, rng) -> dict[str, np.ndarray]:
    """Every parameter away from its initial value."""
    paths = nnx.to_flat_state(nnx.state(site, nnx.Param))
    return {path[0]: leaf[...] + 0.4 * rng.normal(size=leaf.shape) for path, leaf in paths}


def mixing(case: Case):
    """A function of (parameters, sources [n, ..., D], a bank with dead rows?)."""
    graphdef, state = nnx.split(site_of(case))

    def mix(values, v, dead_rows: bool):
        flat = [(path, leaf.replace(values[path[0]])) for path, leaf in nnx.to_flat_state(state)]
        site = nnx.merge(graphdef, nnx.from_flat_state(flat))
        dead = [jnp.full(v.shape[1:], jnp.nan)] * 3 if dead_rows else []
        return site(DepthState((*v[:-1], *dead), v[-1], jnp.int32(len(v) - 1) if dead_rows else None))

    return mix


@pytest.mark.parametrize("dead_rows", [False, True], ids=["unrolled", "scan"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_its_formula(case, dead_rows):
    """Values, and gradients of parameters and sources along one direction; dead rows are NaN."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        mix = mixing(case)
        values, v = values_of(site_of(case), rng), rng.normal(size=(N, 2, 3, D)) * [[[[s]]] for s in (1, 5, 0.2, 2, 1)]
        values = {name: np.asarray(value) for name, value in values.items()}
        cotangent = rng.normal(size=v.shape[1:])
        out, pull_back = jax.vjp(lambda values, v: jax.jit(mix, static_argnums=2)(values, v, dead_rows), values, v)
        assert_close(out, case.formula(v, values), 1e-12)

        bars, v_bar = jax.tree.map(np.asarray, pull_back(cotangent))
        for name, bar in bars.items():
            assert np.isfinite(bar).all()
            live = bar
            if name == "scalars":
                assert not bar[N:].any(), "scalars of sources that do not exist"
                live = bar[[0, N - 2, N - 1]] if case.weighing.window else bar[:N]
            assert np.abs(live).min() > 0, name
        directions = {name: rng.normal(size=value.shape) for name, value in values.items()}
        v_direction = rng.normal(size=v.shape)

        def along(step):
            moved = {name: value + step * directions[name] for name, value in values.items()}
            return np.sum(cotangent * case.formula(v + step * v_direction, moved))

        slope = np.sum(v_bar * v_direction) + sum(np.sum(bars[name] * directions[name]) for name in bars)
        assert_close(slope, (along(1e-5) - along(-1e-5)) / 2e-5, 1e-6, "gradient")


@pytest.mark.parametrize("case", [case for case in CASES if case.step_zero], ids=lambda case: case.name)
def test_a_fresh_site_weighs_all_sources_alike(case):
    """So that what it reads is the plain stream times a constant; and what was zero has a gradient to leave zero by."""
    v = np.random.default_rng(1).normal(size=(N, 2, 3, D))
    with jax.enable_x64(True):
        graphdef, params = nnx.split(site_of(case))
        state = DepthState(tuple(v[:-1]), jnp.asarray(v[-1]))
        out, pull_back = jax.vjp(jax.jit(lambda params: nnx.merge(graphdef, params)(state)), params)
        assert_close(out, case.step_zero * v.sum(0), 1e-14)
        bars = nnx.merge(graphdef, pull_back(jnp.asarray(np.random.default_rng(2).normal(size=out.shape)))[0])
        first = next(name for name in ("query", "query_proj", "scalars") if hasattr(bars, name))
        assert np.abs(getattr(bars, first)[...]).max() > 1e-3


def test_a_window_that_leaves_sources_out_reads_their_mean_without_them():
    v = np.random.default_rng(1).normal(size=(N, 2, 3, D))
    with jax.enable_x64(True):
        site = VariantMix(D, Weighing(window=2), sources=N, adds=False, eps=EPS, param_dtype=jnp.float64)
        out = site(DepthState(tuple(v[:-1]), jnp.asarray(v[-1])))
    assert_close(out, v[[0, -2, -1]].mean(0), 1e-14)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bfloat16_sources_are_mixed_in_float32_and_rounded_once(case):
    rng = np.random.default_rng(0)
    site = site_of(case, jnp.float32)
    values = values_of(site, rng)
    nnx.update(site, nnx.from_flat_state([((name,), nnx.Param(jnp.asarray(x))) for name, x in values.items()]))
    v = jnp.asarray(rng.normal(size=(N, 2, 3, D)), jnp.bfloat16)
    out = call(site, DepthState(tuple(v[:-1]), v[-1]))
    assert out.dtype == jnp.bfloat16 and out.shape == (2, 3, D)
    exact = case.formula(np.asarray(v, np.float64), {name: np.asarray(x, np.float64) for name, x in values.items()})
    if case.name == "hidden":  # its query is itself a product in bfloat16
        assert_close(out, exact, BF16_FORWARD)
    else:  # one rounding: half a unit in the last of 8 bits
        np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=1.01 * 2**-8, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_in_float32_is_kept_for_the_backward_pass(case):
    """Of the size of a source, that is; the sources themselves are kept as they are."""
    graphdef, params = nnx.split(site_of(case, jnp.float32))
    v = [jnp.ones((64, D), jnp.bfloat16)] * N

    def mix(params, v):
        return nnx.merge(graphdef, params)(DepthState(tuple(v[:-1]), v[-1]))

    pull_back = jax.eval_shape(lambda params, v: jax.vjp(mix, params, v)[1], params, v)
    large = [leaf for leaf in jax.tree.leaves(pull_back) if getattr(leaf, "size", 0) >= 64 * D]
    assert large and all(leaf.dtype == jnp.bfloat16 for leaf in large)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="heads=5 .*divisor of dim=12"):
        VariantMix(D, Weighing(heads=5), sources=N, adds=False, eps=EPS)
