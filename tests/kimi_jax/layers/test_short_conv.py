import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.layers import ShortConv
from tests.kimi_jax.layers.layer_support import call, inputs
from tests.support import BF16_FORWARD, F32_FORWARD, F32_GRADIENT, assert_close, golden


def conv_of(weight, **kwargs):
    conv = ShortConv(*weight.shape, rngs=nnx.Rngs(0), **kwargs)
    conv.weight[...] = weight
    return conv


def random_conv(channels=6, width=4, seed=0):
    return conv_of(np.random.default_rng(seed).normal(size=(channels, width)).astype(np.float32))


@pytest.mark.parametrize("name", ["shortconv", "shortconv_t2"])
def test_equals_the_published_one(name):
    z = golden("layer_ops", name)

    def loss(x, weight):
        y, tail = call(conv_of(weight), x)
        return (y * z["do"]).sum(), (y, tail)

    (dx, dweight), (y, tail) = jax.grad(loss, (0, 1), has_aux=True)(z["x"], z["weight"][:, 0])
    assert_close(y, z["y_f64"], F32_FORWARD, "y")
    assert_close(dx, z["dx_f64"], F32_GRADIENT, "dx")
    assert_close(dweight, z["dweight_f64"][:, 0], F32_GRADIENT, "dweight")
    np.testing.assert_array_equal(tail, z["tail_f64"])


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_documents_do_not_see_each_other(width):
    conv = random_conv(width=width)
    lengths = [5, 1, 2, 7]  # some shorter than the filter
    x = inputs(1, sum(lengths), 6)
    ids = np.repeat(np.arange(4), lengths)[None]
    starts = np.cumsum([0, *lengths])
    alone = [call(conv, x[:, a:b])[0] for a, b in zip(starts[:-1], starts[1:], strict=True)]
    y, tail = call(conv, x, jnp.asarray(ids))
    assert_close(y, np.concatenate(alone, axis=1), 1e-6)
    np.testing.assert_array_equal(tail, call(conv, x[:, starts[-2] :])[1])

    # and no gradient flows back either
    touched = jax.grad(lambda x: call(conv, x, jnp.asarray(ids))[0][:, starts[2] :].sum())(x)
    assert (touched[:, : starts[2]] == 0).all() and (touched[:, starts[2] :] != 0).all()


@pytest.mark.parametrize("cuts", [(4,), (1, 2, 3), (2, 9), (11,)])
def test_a_sequence_in_pieces_equals_the_whole(cuts):
    conv = random_conv()
    x = inputs(2, 12, 6)
    whole, last_tail = call(conv, x)
    tail, pieces = jnp.zeros((2, 3, 6)), []
    for start, stop in zip((0, *cuts), (*cuts, 12), strict=True):
        y, tail = call(conv, x[:, start:stop], tail=tail)
        pieces.append(y)
    assert_close(np.concatenate(pieces, axis=1), whole, 1e-6)
    np.testing.assert_array_equal(tail, last_tail)


def test_the_tail_holds_the_last_valid_inputs_of_each_row():
    conv = random_conv()
    old = inputs(4, 3, 6, seed=2)
    x = inputs(4, 5, 6)
    lengths = jnp.asarray([0, 1, 3, 5])
    y, tail = call(conv, x, tail=old, lengths=lengths)
    for row, length in enumerate(lengths):
        alone, alone_tail = call(conv, x[row : row + 1, :length], tail=old[row : row + 1])
        assert_close(y[row : row + 1, :length], alone, 1e-6)
        np.testing.assert_array_equal(tail[row : row + 1], alone_tail)
        np.testing.assert_array_equal(y[row, length:], 0)


def test_padding_is_not_read_even_if_nan():
    conv = random_conv()
    x = inputs(1, 9, 6)
    ids = jnp.asarray([[-1, -1, -1, 0, 0, 0, 0, -1, -1]])
    dirty = jnp.where((ids < 0)[..., None], jnp.nan, x)
    y, tail = call(conv, dirty, ids)
    alone, alone_tail = call(conv, x[:, 3:7])
    assert_close(y[:, 3:7], alone, 1e-6)
    np.testing.assert_array_equal(tail, alone_tail)
    gradient = jax.grad(lambda x: call(conv, x, ids)[0].sum())(dirty)
    assert np.isfinite(gradient).all() and (gradient[ids < 0] == 0).all()


def test_bfloat16_accumulates_in_float32():
    conv = random_conv(width=8)
    x = jnp.asarray(inputs(2, 33, 6), jnp.bfloat16)
    exact, _ = call(conv, x.astype(jnp.float32))
    low = conv_of(conv.weight[...], dtype=jnp.bfloat16)
    y, tail = call(low, x)
    assert y.dtype == tail.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))  # one rounding, at the end
    assert_close(y, exact, BF16_FORWARD)


def test_bad_shapes():
    conv = random_conv()
    with pytest.raises(ValueError, match=r"tail must be \[B, W-1, D\] = \(2, 3, 6\), got \(2, 4, 6\)"):
        conv(inputs(2, 5, 6), tail=inputs(2, 4, 6))
    with pytest.raises(ValueError, match=r"segment_ids must be .*\(2, 5\).*got \(2, 6\)"):
        conv(inputs(2, 5, 6), jnp.zeros((2, 6), jnp.int32))
    with pytest.raises(ValueError, match="width must be at least 1"):
        ShortConv(4, 0, rngs=nnx.Rngs(0))
