"""Prefill, chunked prefill and decode are one function, and equal the full forward pass."""

import dataclasses
import functools
import re
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.cache import trim
from kimi_jax.layers import latents
from tests.kimi_jax.small_models import EXPERTS, forward, small_config, small_model, tokens_for
from tests.support import F32_FORWARD, assert_close, rel_l2


class Case(NamedTuple):
    name: str
    fields: dict


CASES = [
    Case("block", EXPERTS),
    Case("scan", dict(num_layers=5, scan_layers=True, mla_every=2, block_size=4, remat="layer")),
    Case("standard_bounded_grouped", dict(residual="standard", lower_bound=-5.0, kda_num_value_heads=8)),
]


@functools.cache
def model_of(name):
    case = next(case for case in CASES if case.name == name)
    return small_model(small_config(**case.fields))


@functools.cache
def extender(model):
    graphdef, state = nnx.split(model)

    @functools.partial(jax.jit, static_argnames="last_only")
    def extend(state, tokens, cache, lengths, last_only):
        return nnx.merge(graphdef, state).extend(tokens, cache, lengths=lengths, last_only=last_only)

    return lambda tokens, cache, lengths=None, last_only=False: extend(state, tokens, cache, lengths, last_only)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_chunks_and_steps_equal_the_full_forward(case):
    """Rows of 3, 17 and 10 tokens through chunks of 6 with ragged lengths, then one token at a time."""
    model = model_of(case.name)
    assert (model.layers.repetition.count > 1) == case.name.startswith("scan")
    tokens = np.asarray(tokens_for(model.config, 3, 17))
    full = np.asarray(forward(model)(tokens))
    extend, cache = extender(model), model.init_cache(3, 20)
    prompt, position = np.array([3, 12, 10]), np.zeros(3, int)

    def check(logits, lengths):
        logits = np.asarray(logits)
        for row in range(3):
            reference = full[row, position[row] : position[row] + lengths[row]]
            assert_close(logits[row, : lengths[row]], reference, F32_FORWARD, f"row {row} at {position[row]}")

    for _ in range(2):
        lengths = np.minimum(prompt - position, 6)
        chunk = np.full((3, 6), 31)  # what stands beyond the lengths must not matter
        for row in range(3):
            chunk[row, : lengths[row]] = tokens[row, position[row] : position[row] + lengths[row]]
        logits, cache = extend(chunk, cache, jnp.asarray(lengths, jnp.int32))
        check(logits, lengths)
        position += lengths
    np.testing.assert_array_equal(cache.length, prompt)
    for _ in range(3):
        logits, cache = extend(tokens[np.arange(3), position][:, None], cache, jnp.ones(3, jnp.int32))
        check(logits, np.ones(3, int))
        position += 1
    np.testing.assert_array_equal(cache.length, prompt + 3)


def test_field_DC02_every_way_to_cut_a_prompt(monkeypatch):
    """Rows cut in other ways, so each at a position of its own; also one-shot, and one-shot but for k single tokens."""
    monkeypatch.setattr(latents, "LEAST_BLOCK", 64)
    T, steps = 257, 9
    cuts = [(T - k,) for k in range(9)] + [(64, 64, 64, 65), (1, 255, 1), (2, 2, 253), (100, 157)]
    fields = dict(num_layers=4, mla_every=4, scan_layers=True, residual="standard", kernel_backend="auto")
    model = small_model(small_config(**fields))
    assert model.config.layer_kinds == ("kda", "kda", "kda", "mla")
    tokens = np.asarray(tokens_for(model.config, 1, T + steps))[0]
    full = np.asarray(forward(model)(tokens[None]))[0]
    extend, cache = extender(model), model.init_cache(len(cuts), T + steps)

    def feed(width, lengths):
        nonlocal cache
        position = np.asarray(cache.length)
        chunk = np.zeros((len(cuts), width), np.int32)
        for row, n in enumerate(lengths):
            chunk[row, :n] = tokens[position[row] : position[row] + n]
        logits, cache = extend(chunk, cache, jnp.asarray(lengths, jnp.int32))
        logits = np.asarray(logits)
        for row, n in enumerate(lengths):
            assert_close(logits[row, :n], full[position[row] : position[row] + n], F32_FORWARD, f"{cuts[row]} at {n}")

    for i in range(4):
        feed(T, [cut[i] if i < len(cut) else 0 for cut in cuts])
    for _ in range(8 + steps):
        feed(1, (np.asarray(cache.length) < T + steps).astype(int))
    group = [leaf for stacked in jax.tree.leaves(cache.layers.groups) for leaf in stacked]
    for leaf in map(np.asarray, group + jax.tree.leaves(cache.layers.tail)):
        for row, cut in enumerate(cuts):
            assert_close(leaf[row], leaf[0], F32_FORWARD, f"cache of {cut}")


def test_last_only_picks_each_rows_last_valid_token():
    model = model_of("block")
    extend, cache = extender(model), model.init_cache(3, 20)
    tokens = tokens_for(model.config, 3, 6)
    lengths = jnp.array([2, 6, 4], jnp.int32)
    logits, _ = extend(tokens, cache, lengths)
    last, after = extend(tokens, cache, lengths, last_only=True)
    chex.assert_shape(last, (3, 1, 32))
    assert_close(last[:, 0], logits[jnp.arange(3), lengths - 1], F32_FORWARD)
    np.testing.assert_array_equal(after.length, lengths)


def test_a_row_of_length_zero_is_left_alone():
    model = model_of("block")
    extend = extender(model)
    tokens = tokens_for(model.config, 3, 6)
    _, cache = extend(tokens, model.init_cache(3, 20), jnp.array([2, 6, 4], jnp.int32))
    _, after = extend(tokens, cache, jnp.array([0, 6, 0], jnp.int32))
    for before, now in zip(jax.tree.leaves(cache.layers), jax.tree.leaves(after.layers), strict=True):
        np.testing.assert_array_equal(before[0], now[0])
        np.testing.assert_array_equal(before[2], now[2])
    np.testing.assert_array_equal(after.length, [2, 12, 4])


def test_padding_on_the_left_and_between_equals_padding_on_the_right():
    model = model_of("block")
    graphdef, state = nnx.split(model)
    tokens, lengths = np.asarray(tokens_for(model.config, 3, 6)), jnp.array([2, 6, 4], jnp.int32)
    expected, expected_cache = extender(model)(tokens, model.init_cache(3, 20), lengths)
    ids = np.array([[-1, -1, -1, -1, 0, 0], [0] * 6, [-1, 0, 0, -1, 0, 0]])
    moved = np.full_like(tokens, 31)
    for row in range(3):
        moved[row, ids[row] >= 0] = tokens[row, : lengths[row]]

    @jax.jit
    def run(state, cache):
        extend = functools.partial(nnx.merge(graphdef, state).extend, moved, cache, segment_ids=jnp.asarray(ids))
        return extend(), extend(last_only=True)[0]

    (logits, cache), last = run(state, model.init_cache(3, 20))
    for row in range(3):
        assert_close(logits[row, ids[row] >= 0], expected[row, : lengths[row]], F32_FORWARD, f"row {row}")
        assert_close(last[row, 0], expected[row, lengths[row] - 1], F32_FORWARD, f"last of row {row}")
    jax.tree.map(lambda x, y: assert_close(x, y, F32_FORWARD), cache, expected_cache)


def test_states_may_be_kept_in_bfloat16():
    model = model_of("block")
    extend, tokens = extender(model), tokens_for(model.config, 3, 6)
    lengths = jnp.array([6, 6, 6], jnp.int32)
    (exact, _), (close, cache) = (
        extend(tokens, extend(tokens, model.init_cache(3, 20, state_dtype=dtype), lengths)[1], lengths)
        for dtype in (None, "bfloat16")
    )
    assert cache.layers.lead[0].state.dtype == jnp.bfloat16
    assert F32_FORWARD < rel_l2(close, exact) < 1e-2
    with pytest.raises(ValueError, match="state_dtype='int8' is not allowed"):
        model.init_cache(1, 8, state_dtype="int8")


@pytest.mark.parametrize(
    "scan", [pytest.param(False, id="unrolled", marks=pytest.mark.exhaustive), pytest.param(True, id="scan")]
)
def test_field_DC08_a_donated_cache_is_updated_in_place(scan, monkeypatch):
    """One array of all slots is written by a scatter, in every other operation it only passes through."""
    L = 1104  # a size that nothing else has, of whole groups of eight
    monkeypatch.setattr(latents, "LEAST_BLOCK", 256)
    fields = dict(CASES[1].fields) if scan else dict(num_layers=2)
    model = small_model(small_config(**fields))
    graphdef, state = nnx.split(model)

    @functools.partial(jax.jit, donate_argnums=2)
    def steps(state, token, cache):
        def step(carry, _):
            token, cache = carry
            logits, cache = nnx.merge(graphdef, state).extend(token, cache, lengths=jnp.ones(2, jnp.int32))
            return (jnp.argmax(logits, -1).astype(jnp.int32), cache), None

        return jax.lax.scan(step, (token, cache), length=3)[0]

    token, cache = jnp.zeros((2, 1), jnp.int32), model.init_cache(2, L, state_dtype="bfloat16")
    jax.config.update("jax_disable_most_optimizations", False)  # conftest's fixture restores it
    compiled = steps.lower(state, token, cache).compile()
    operations = set(re.findall(rf" = \w+\[(?:\d+,)*{L},\d+\]\S* ([\w-]+)\(", compiled.as_text()))
    assert "scatter" in operations
    assert operations <= {"parameter", "get-tuple-element", "scatter", "fusion", "bitcast"}, operations
    slots = sum(leaf.nbytes for leaf in jax.tree.leaves(cache) if L in leaf.shape)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert memory.temp_size_in_bytes < slots / 2
    _, after = compiled(state, token, cache)
    np.testing.assert_array_equal(after.length, [3, 3])
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(cache.length)


def test_states_are_float32_whatever_the_model_computes_in():
    cache = small_model(small_config(dtype="bfloat16")).init_cache(2, 8)
    kda, mla = cache.layers.lead
    assert kda.state.dtype == jnp.float32
    assert kda.q_tail.dtype == mla.latent.dtype == jnp.bfloat16
    chex.assert_shape(kda.state, (2, 4, 8, 8))
    chex.assert_shape(mla.latent, (2, 8, 16))


def test_a_full_cache_raises():
    model = model_of("block")
    tokens = np.zeros((2, 5), np.int32)
    with pytest.raises(ValueError, match="room for 4 tokens per row, its longest row would have 5"):
        model.extend(tokens, model.init_cache(2, 4))
    with pytest.raises(ValueError, match="tokens have 2 rows, the cache has 3"):
        model.extend(tokens, model.init_cache(3, 8))
    with pytest.raises(ValueError, match=r"lengths must be \[B\]"):
        model.extend(tokens, model.init_cache(2, 8), lengths=np.array([1, 2, 3]))
    with pytest.raises(ValueError, match=r"lengths=\[6, 1\] is not allowed: 0 to T=5"):
        model.extend(tokens, model.init_cache(2, 8), lengths=np.array([6, 1]))
    with pytest.raises(ValueError, match="max_len=0"):
        model.init_cache(2, 0)


def test_what_does_not_fit_is_nan_where_it_cannot_be_refused():
    model = small_model(small_config(num_layers=1, mla_every=2))  # a KDA layer alone: nothing would run out of slots
    assert model.config.layer_kinds == ("kda",)
    logits, cache = extender(model)(np.zeros((3, 3), np.int32), model.init_cache(3, 2), jnp.array([1, 3, 4]))
    assert np.isfinite(logits[0]).all() and np.isnan(logits[1:]).all()
    np.testing.assert_array_equal(cache.length, [1, 3, 3])


def test_a_cache_of_another_model_or_layout_is_refused():
    """Field case DC01 too: with K != V the shape tells a transposed state, with K = V the layout tag does."""
    model, tokens = model_of("block"), np.zeros((2, 1), np.int32)
    cache = model.init_cache(2, 8)

    def with_lead(index, **fields):
        lead = list(cache.layers.lead)
        lead[index] = lead[index]._replace(**fields)
        return dataclasses.replace(cache, layers=cache.layers._replace(lead=tuple(lead)))

    swapped = dataclasses.replace(cache, layers=cache.layers._replace(lead=cache.layers.lead[::-1]))
    one_row = with_lead(0, state=cache.layers.lead[0].state[:1])
    transposed = with_lead(0, state=jnp.zeros((2, 4, 8, 4)))
    narrow = with_lead(1, latent=jnp.zeros((2, 8, 16), jnp.bfloat16))
    deeper = dataclasses.replace(cache, layers=cache.layers._replace(lead=cache.layers.lead * 2))
    for bad, message in (
        (dataclasses.replace(cache, layout="states [B, HV, V, K]"), r"cache.layout='states \[B, HV, V, K\]'"),
        (swapped, "cache is a MLACache, this layer's is a KDACache"),
        (one_row, r"cache.state is float32\[1, 4, 8, 8\].*a float type\[2, 4, 8, 8\]"),
        (transposed, r"cache.state is float32\[2, 4, 8, 4\]"),
        (narrow, r"cache.latent is bfloat16\[2, 8, 16\], this layer's MLACache has float32"),
        (deeper, r"another model: layers before, in, after .* are \(4, 0, 0, set\(\)\)"),
    ):
        with pytest.raises(ValueError, match=message):
            model.extend(tokens, bad)


def test_trimming_is_for_latents_alone():
    recurrent, model = model_of("block"), small_model(small_config(mla_layers=(0, 1)))
    with pytest.raises(ValueError, match="a KDA state cannot be cut at a token: use verify and accept"):
        trim(recurrent.init_cache(2, 8), jnp.array([0, 0]))
    extend, tokens, one = extender(model), np.asarray(tokens_for(model.config, 2, 5)), jnp.array([1, 1])
    _, cache = extend(tokens, model.init_cache(2, 8), jnp.array([5, 5]))
    expected, _ = extend(tokens, extend(tokens, model.init_cache(2, 8), jnp.array([2, 5]))[1], one)
    logits, after = extend(tokens, trim(cache, jnp.array([2, 5])), one)
    np.testing.assert_array_equal(logits[:, 0], expected[:, 0])
    np.testing.assert_array_equal(after.length, [3, 6])
    with pytest.raises(ValueError, match=r"length=\[6, 0\] is not allowed: 0 to \[5, 5\]"):
        trim(cache, jnp.array([6, 0]))
