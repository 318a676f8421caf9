"""Rotary positions: relative, and counted within each document. Equations, packing and caches are in test_mla.py."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.layers import MLA
from kimi_jax.layers.rope import document_positions, rotate
from tests.kimi_jax.layers.layer_support import call, inputs
from tests.kimi_jax.layers.test_mla import HIDDEN, layer
from tests.support import F32_FORWARD, assert_close, rel_l2


def test_a_shift_of_all_positions_changes_no_score():
    q, k, position = inputs(2, 7, 3, 10), inputs(2, 7, 3, 10, seed=2), jnp.arange(7)[None]

    def scores(by_q, by_k):
        turned = (rotate(x, position + by, 50.0, 8) for x, by in ((q, by_q), (k, by_k)))
        return jnp.einsum("btnd,bsnd->bnts", *turned)

    assert_close(scores(100, 100), scores(0, 0), F32_FORWARD)
    assert rel_l2(scores(100, 99), scores(0, 0)) > 0.1
    np.testing.assert_array_equal(rotate(q, position, 50.0, 8)[..., :2], q[..., :2])
    assert_close(jnp.square(rotate(q, position, 50.0, 8)).sum(-1), jnp.square(q).sum(-1), F32_FORWARD)


def test_the_order_of_earlier_tokens_is_seen():
    mla, x = layer("rope"), inputs(2, 9, HIDDEN)
    moved = x[:, jnp.asarray([5, 2, 7, 0, 3, 6, 1, 4, 8])]
    assert rel_l2(call(mla, moved)[0][:, 8], call(mla, x)[0][:, 8]) > 1e-2
    nope = layer("kimi_linear")
    assert_close(call(nope, moved)[0][:, 8], call(nope, x)[0][:, 8], F32_FORWARD)


def test_positions_begin_again_in_each_document():
    ids = jnp.asarray([[-1, 0, 0, -1, 0, 3, 3, -1, 3, 4], [2] * 10, [-1] * 10])
    found = np.asarray(document_positions(jnp.zeros((3, 10, 1)), ids))
    assert found[0][ids[0] >= 0].tolist() == [0, 1, 2, 0, 1, 2, 0] and found[1].tolist() == [*range(10)]


def test_padding_inside_a_document_is_not_counted():
    """As in a cache, which skips it."""
    mla, x = layer("rope"), inputs(2, 9, HIDDEN)
    ids = jnp.asarray([[-1, 0, 0, -1, -1, 0, 0, -1, 0]] * 2)
    y = call(mla, x, ids)[0][:, ids[0] >= 0]
    assert_close(y, call(mla, x[:, ids[0] >= 0])[0], F32_FORWARD)
    assert_close(call(mla, x, ids, cache=mla.init_cache(2, 6))[0][:, ids[0] >= 0], y, F32_FORWARD)


@pytest.mark.parametrize("dim", [0, 3])
def test_what_cannot_be_rotated_is_refused(dim):
    sizes = dict(num_heads=2, kv_lora_rank=4, qk_nope_dim=4, v_dim=4)
    with pytest.raises(ValueError, match=f"qk_rope_dim={dim} is not allowed with rope_theta=100.0: even, at least 2"):
        MLA(8, **sizes, qk_rope_dim=dim, rope_theta=100.0, rngs=nnx.Rngs(0))
