"""Field case LY01 for both kinds of attention: padding on either side, with and without cache, then decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.layers import MLA, KDALayer
from tests.kimi_jax.layers.layer_support import call, inputs, randomise
from tests.support import F32_FORWARD, assert_close

HIDDEN, PADDED, NEW = 16, 80, 8
PROMPTS = (3, 17, 64)


@functools.cache
def layer(kind):
    if kind == "kda":
        kda = randomise(KDALayer(HIDDEN, num_heads=2, head_k=64, head_v=64, rngs=nnx.Rngs(0)))
        kda.A_log[...] = jnp.log(jnp.full(2, 0.05))  # slow decay: a leak stays visible
        return kda
    sizes = dict(kv_lora_rank=8, qk_nope_dim=8, qk_rope_dim=4, v_dim=8)
    return randomise(MLA(HIDDEN, num_heads=2, **sizes, output_gate=True, rngs=nnx.Rngs(0)))


def empty(attention, batch):
    return attention.init_cache(batch) if isinstance(attention, KDALayer) else attention.init_cache(batch, 96)


@functools.cache
def unpadded(kind):
    """Per prompt: its tokens and the NEW ones to decode, outputs of all of them, the cache after the prompt."""
    attention, rows = layer(kind), []
    for length in PROMPTS:
        x = inputs(1, length + NEW, HIDDEN, seed=length)
        _, cache = call(attention, x[:, :length], cache=empty(attention, 1))
        rows.append((x[0], call(attention, x)[0][0], cache))
    return rows


def pad(kind, side, rows, fill):
    """Prompts padded with random tokens (or NaN), and their segment ids."""
    x = (
        inputs(len(rows), PADDED, HIDDEN, seed=99)
        if fill == "random"
        else jnp.full((len(rows), PADDED, HIDDEN), jnp.nan)
    )
    ids = np.full((len(rows), PADDED), -1)
    for i, row in enumerate(rows):
        n = PROMPTS[row]
        place = slice(PADDED - n, PADDED) if side == "left" else slice(0, n)
        x = x.at[i, place].set(unpadded(kind)[row][0][:n])
        ids[i, place] = 0
    return x, jnp.asarray(ids)


def valid(y, ids, row):
    return y[row][np.asarray(ids[row]) >= 0]


@pytest.mark.parametrize("kind", ["kda", "mla"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rows", [(0, 1, 2), (1,)], ids=["batch3", "batch1"])
def test_padding_equals_no_padding(kind, side, rows):
    attention = layer(kind)
    for fill in ("random", "nan"):
        x, ids = pad(kind, side, rows, fill)
        y, _ = call(attention, x, ids)
        assert (y[ids < 0] == 0).all()
        for i, row in enumerate(rows):
            assert_close(valid(y, ids, i), unpadded(kind)[row][1][: PROMPTS[row]], F32_FORWARD, f"row {row}, {fill}")


@pytest.mark.parametrize("kind", ["kda", "mla"])
@pytest.mark.parametrize("marked_by", ["left ids", "right ids", "lengths"])
def test_the_cache_of_padded_prompts_decodes_the_same(kind, marked_by):
    attention, rows = layer(kind), (0, 1, 2)
    x, ids = pad(kind, "left" if marked_by == "left ids" else "right", rows, "random")
    marks = dict(lengths=jnp.asarray(PROMPTS)) if marked_by == "lengths" else dict(segment_ids=ids)
    y, cache = call(attention, x, cache=empty(attention, 3), **marks)
    for row in rows:
        _, expected, cache_alone = unpadded(kind)[row]
        assert_close(valid(y, ids, row), expected[: PROMPTS[row]], F32_FORWARD, f"prompt {row}")
        for part, alone in zip(cache, cache_alone, strict=True):
            assert_close(part[row], alone[0], F32_FORWARD, f"cache of row {row}")

    # a chunk of three tokens that has padding of its own, then one token at a time
    new = jnp.stack([x[PROMPTS[row] :] for row, (x, _, _) in enumerate(unpadded(kind))])
    chunk = jnp.concatenate([jnp.full((3, 2, HIDDEN), jnp.nan), new[:, :3]], axis=1)
    chunk_ids = jnp.asarray([[-1, -1, 0, 0, 0]] * 3)
    y, cache = call(attention, chunk, chunk_ids, cache)
    outputs = [y[:, 2:]]
    for t in range(3, NEW):
        y, cache = call(attention, new[:, t : t + 1], cache=cache)
        outputs.append(y)
    decoded = jnp.concatenate(outputs, axis=1)
    for row in rows:
        assert_close(decoded[row], unpadded(kind)[row][1][PROMPTS[row] :], F32_FORWARD, f"decoding row {row}")


@pytest.mark.parametrize("kind", ["kda", "mla"])
def test_marks_may_be_constants_of_a_compiled_function(kind):
    """Concrete arrays that jit closes over are checked like any other, and no check trips over being inside jit."""
    attention, x, cache = layer(kind), inputs(2, 6, HIDDEN), empty(layer(kind), 2)
    ids, lengths = jnp.asarray([[0, 0, 0, 0, 1, 1], [-1, 0, 0, 0, 0, 0]]), jnp.asarray([6, 4])
    one_document = jnp.minimum(ids, 0)

    def closed_over(*args, **kwargs):
        return jax.jit(lambda x: attention(x, *args, **kwargs))(x)

    for args in ((ids,), (one_document, cache)):
        expected = call(attention, x, *args, lengths=lengths)
        jax.tree.map(lambda a, b: assert_close(a, b, F32_FORWARD), closed_over(*args, lengths=lengths), expected)
    with pytest.raises(ValueError, match="may only mark padding"):
        closed_over(ids, cache)
