"""Prefill, chunked prefill and decode are one function, and equal the full forward pass."""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.kimi_jax.small_models import EXPERTS, forward, small_config, small_model, tokens_for
from tests.support import F32_FORWARD, assert_close


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
    full = forward(model)(tokens)
    extend, cache = extender(model), model.init_cache(3, 20)
    prompt, position = np.array([3, 12, 10]), np.zeros(3, int)

    def check(logits, lengths):
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
    with pytest.raises(ValueError, match="max_len=0"):
        model.init_cache(2, 0)
