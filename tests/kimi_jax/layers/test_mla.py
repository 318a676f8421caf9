import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.layers import MLA
from tests.kimi_jax.layers.layer_support import call, inputs, randomise
from tests.support import BF16_FORWARD, F32_FORWARD, F32_GRADIENT, assert_close, rel_l2

HIDDEN, HEADS, NOPE, ROPE, V, LATENT = 12, 3, 4, 2, 5, 6
NOPE_VARIANTS = {"kimi_linear": {}, "kimi_k3": dict(q_lora_rank=7, output_gate=True), "wide_values": dict(v_dim=9)}
OTHERS = {"rope": dict(qk_rope_dim=4, rope_theta=5.0), "softmax1": dict(softmax1=True)}
BOTH = {"rope_softmax1": OTHERS["rope"] | OTHERS["softmax1"]}
VARIANTS = NOPE_VARIANTS | OTHERS | BOTH
IN_TURN = [*NOPE_VARIANTS, *BOTH, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS)]


@functools.cache
def layer(variant="kimi_k3", dtype=jnp.float32, param_dtype=jnp.float32):
    sizes = dict(num_heads=HEADS, kv_lora_rank=LATENT, qk_nope_dim=NOPE, qk_rope_dim=ROPE, v_dim=V)
    return randomise(MLA(HIDDEN, **(sizes | VARIANTS[variant]), rngs=nnx.Rngs(0), dtype=dtype, param_dtype=param_dtype))


def by_hand(mla, x_TD):
    """One row in float64, head by head and token by token."""
    w = {name: np.asarray(p[...], np.float64) for name, p in vars(mla).items() if isinstance(p, nnx.Param)}

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * np.asarray(weight[...], np.float64)

    x = np.asarray(x_TD, np.float64)
    q = x @ w["q"] if mla.q_lora_rank is None else norm(x @ w["q_a"], mla.q_norm.weight) @ w["q_b"]
    latent, k_rope = norm(x @ w["kv_a"][:, :LATENT], mla.kv_norm.weight), x @ w["kv_a"][:, LATENT:]
    R = mla.qk_rope_dim
    q = q.reshape(-1, HEADS, NOPE + R)
    if mla.rope_theta is not None:  # turned in the complex plane
        turn = np.exp(1j * np.arange(len(x))[:, None] * mla.rope_theta ** (-2 * np.arange(R // 2) / R))
        k_rope, q_rope = (y[..., : R // 2] + 1j * y[..., R // 2 :] for y in (k_rope, q[..., NOPE:]))
        k_rope, q_rope = k_rope * turn, q_rope * turn[:, None]
        k_rope, q_rope = (np.concatenate([y.real, y.imag], axis=-1) for y in (k_rope, q_rope))
        q = np.concatenate([q[..., :NOPE], q_rope], axis=-1)
    heads = []
    for n in range(HEADS):
        kv = latent @ w["kv_b"].reshape(LATENT, HEADS, NOPE + mla.v_dim)[:, n]
        key, value = np.concatenate([kv[:, :NOPE], k_rope], axis=1), kv[:, NOPE:]
        out = []
        for t in range(len(x)):
            score = key[: t + 1] @ q[t, n] * (NOPE + R) ** -0.5
            weight = np.exp(score - score.max())
            out.append(weight @ value[: t + 1] / (weight.sum() + mla.softmax1 * np.exp(-score.max())))
        heads.append(out)
    o = np.stack(heads, axis=1).reshape(len(x), -1)
    if mla.output_gate:
        o = o / (1 + np.exp(-(x @ w["g"])))
    return o @ w["o"]


@pytest.mark.parametrize("variant", IN_TURN)
def test_equals_the_equations(variant):
    mla, x = layer(variant), inputs(2, 9, HIDDEN)
    y, cache = call(mla, x)
    assert cache is None
    for row in range(2):
        assert_close(y[row], by_hand(mla, x[row]), F32_FORWARD, f"row {row}")


@pytest.mark.parametrize("variant", IN_TURN)
def test_packed_documents_equal_separate_ones(variant):
    mla, x = layer(variant), inputs(1, 12, HIDDEN)
    ids = jnp.asarray([[0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2]])

    def packed(x):
        return call(mla, x, ids)[0]

    def separate(x):
        return jnp.concatenate([call(mla, x[:, a:b])[0] for a, b in ((0, 5), (5, 6), (6, 12))], axis=1)

    assert_close(packed(x), separate(x), F32_FORWARD, "y")
    dy = inputs(1, 12, HIDDEN, seed=2)
    dx, dx_separate = (jax.jit(lambda x, f=f: jax.vjp(f, x)[1](dy)[0])(x) for f in (packed, separate))
    assert_close(dx, dx_separate, F32_GRADIENT, "dx")


@pytest.mark.parametrize("variant", ["kimi_k3", "softmax1"])
def test_padding_gives_exact_zeros_whatever_it_holds(variant):
    mla = layer(variant)
    x = inputs(3, 8, HIDDEN)
    ids = jnp.asarray([[-1, -1, 0, 0, 0, 1, 1, -1], [0] * 8, [-1] * 8])
    dirty = jnp.where((ids < 0)[..., None], jnp.nan, x)

    def loss(x, state):
        y, _ = nnx.merge(nnx.graphdef(mla), state)(x, ids)
        return (y * x.shape[-1]).sum(), y

    (dx, dstate), y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(dirty, nnx.state(mla))
    assert (y[ids < 0] == 0).all() and (dx[ids < 0] == 0).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((y, dx, dstate)))
    assert_close(y[0, 2:5], call(mla, x[:1, 2:5])[0][0], F32_FORWARD, "valid tokens")


@pytest.mark.parametrize("variant", IN_TURN)
def test_prefill_then_decode_equals_the_whole(variant):
    mla, x = layer(variant), inputs(2, 10, HIDDEN)
    whole, _ = call(mla, x)
    cache, outputs = mla.init_cache(2, 12), []
    for start, stop in ((0, 4), (4, 7), (7, 8), (8, 9), (9, 10)):
        y, cache = call(mla, x[:, start:stop], cache=cache)
        outputs.append(y)
    assert_close(jnp.concatenate(outputs, axis=1), whole, F32_FORWARD)
    np.testing.assert_array_equal(cache.length, [10, 10])


@pytest.mark.parametrize("variant", NOPE_VARIANTS)  # not softmax1, whose null key does not shift
def test_shifted_positions_change_nothing(variant):
    """Field case CK04. The layer is told no positions, so tokens are shifted by 100 by 100 rows of padding before them.

    Bitwise in a row of one size (the keys before add exact zeros). The row without any padding sums in another order.
    """
    mla, x = layer(variant), inputs(2, 9, HIDDEN)

    def shifted(by):
        here = slice(by, by + 9)
        row, ids = jnp.full((2, 128, HIDDEN), 7.0).at[:, here].set(x), jnp.full((2, 128), -1).at[:, here].set(0)
        return call(mla, row, ids)[0][:, here]

    np.testing.assert_array_equal(shifted(100), shifted(0))
    assert_close(shifted(100), call(mla, x)[0], 1e-6)


@pytest.mark.parametrize("variant", NOPE_VARIANTS)
def test_nothing_is_rotated(variant):
    """Field case CK04, the part that a rotation fails (it too survives a shift of all): the order of keys is unseen."""
    mla, x = layer(variant), inputs(2, 9, HIDDEN)
    _, cache = call(mla, x[:, :8], cache=mla.init_cache(2, 9))
    order = jnp.asarray([5, 2, 7, 0, 3, 6, 1, 4, 8])
    keys_moved = cache._replace(k_rope=cache.k_rope[:, order])
    all_moved = keys_moved._replace(latent=cache.latent[:, order])
    y, y_all_moved, y_keys_moved = (call(mla, x[:, 8:], cache=c)[0] for c in (cache, all_moved, keys_moved))
    assert_close(y_all_moved, y, F32_FORWARD)
    assert rel_l2(y_keys_moved, y) > 1e-2


def test_rows_of_different_lengths_share_a_cache():
    mla = layer("rope")  # each row has positions of its own
    cache = mla.init_cache(3, 9)
    consumed = np.zeros(3, int)
    history = [[] for _ in range(3)]
    for lengths in ([6, 2, 0], [1, 5, 3], [0, 1, 2]):
        T = max(lengths)
        dirty = np.full((3, T, HIDDEN), np.nan, np.float32)
        for row, length in enumerate(lengths):
            new = inputs(length, HIDDEN, seed=10 * row + consumed[row])
            history[row].extend(new)
            dirty[row, :length] = new
        y, cache = call(mla, dirty, cache=cache, lengths=jnp.asarray(lengths))
        for row, length in enumerate(lengths):
            if length:
                alone, _ = call(mla, np.asarray(history[row])[None])
                assert_close(y[row, :length], alone[0, -length:], F32_FORWARD, f"row {row}")
            assert (y[row, length:] == 0).all()
        consumed += lengths
    np.testing.assert_array_equal(cache.length, consumed)


def test_a_full_cache_is_refused():
    mla, x = layer(), inputs(2, 3, HIDDEN)
    _, cache = call(mla, x, cache=mla.init_cache(2, 4))
    with pytest.raises(ValueError, match="room for 4 tokens per row, its longest row would have 6"):
        mla(x, cache=cache)
    lengths = jnp.asarray([1, 2])
    with pytest.raises(ValueError, match="longest row would have 5"):
        jax.jit(lambda x: mla(x, cache=cache, lengths=lengths)[0])(x)
    y, cache = call(mla, x, cache=cache, lengths=lengths)
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()


def test_a_long_cache_has_whole_groups_of_slots():
    """As the GPU's kernel wants them; one of any length is taken."""
    mla, cache = layer(), layer().init_cache(1, 1001)
    assert [mla.init_cache(1, L).latent.shape[1] for L in (300, 1001, 1008)] == [300, 1008, 1008]
    odd = cache._replace(latent=cache.latent[:, :1001], k_rope=cache.k_rope[:, :1001])
    y, after = jax.eval_shape(lambda cache: mla(inputs(1, 3, HIDDEN), cache=cache), odd)
    assert y.shape == (1, 3, HIDDEN) and after.latent.shape == odd.latent.shape


def test_bfloat16_is_close():
    x = inputs(2, 40, HIDDEN)
    exact, _ = call(layer(), x)
    y, _ = call(layer(dtype=jnp.bfloat16), x)
    assert y.dtype == jnp.bfloat16
    assert_close(y, exact, 2 * BF16_FORWARD)


def test_softmax1_has_the_gradients_of_its_equation():
    """In a packed row of 7 (odd: no token behind) and of 8 ids, whose documents all see the null key."""

    def equation(mla, x_BTD, ids):
        q, (latent, k_rope) = mla._queries(x_BTD), mla._latents(x_BTD)
        kv = (latent @ mla.kv_b[...]).reshape(*x_BTD.shape[:2], HEADS, -1)
        shared = jnp.broadcast_to(k_rope[:, :, None], (*kv.shape[:3], ROPE))
        scores = jnp.einsum("BTNH,BSNH->BNTS", q, jnp.concatenate([kv[..., :NOPE], shared], -1)) * mla.scale
        T = x_BTD.shape[1]
        seen = (ids[:, None, :, None] == ids[:, None, None]) & (jnp.arange(T) <= jnp.arange(T)[:, None])
        weights = jnp.where(seen, jnp.exp(scores), 0)
        weights = weights / (1 + weights.sum(-1, keepdims=True))
        return jnp.einsum("BNTS,BSNV->BTNV", weights, kv[..., NOPE:]).reshape(*x_BTD.shape[:2], -1) @ mla.o[...]

    with jax.enable_x64(True):
        graphdef, state = nnx.split(layer.__wrapped__("softmax1", jnp.float64, jnp.float64))
        for row in ([0, 0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 0, 4, 4, 4]):
            ids, x = jnp.asarray([row]), np.random.default_rng(0).normal(size=(1, len(row), HIDDEN))
            dy = np.random.default_rng(1).normal(size=x.shape)
            pulls = [
                jax.jit(lambda state, x, f=f, ids=ids, dy=dy: jax.vjp(f, state, x)[1](dy))(state, x)
                for f in (
                    lambda state, x, ids=ids: nnx.merge(graphdef, state)(x, ids)[0],
                    lambda state, x, ids=ids: equation(nnx.merge(graphdef, state), x, ids),
                )
            ]
            for ours, theirs in zip(*map(jax.tree.leaves, pulls), strict=True):
                assert np.abs(theirs).max() > 0
                assert_close(ours, theirs, 1e-12)


def test_float64_is_float64():
    with jax.enable_x64(True):
        mla = layer.__wrapped__("kimi_k3", jnp.float64, jnp.float64)
        x = np.random.default_rng(0).normal(size=(1, 9, HIDDEN))
        assert_close(call(mla, x)[0][0], by_hand(mla, x[0]), 1e-12)


def test_several_documents_in_a_cached_call_are_refused():
    mla = layer()
    with pytest.raises(ValueError, match="may only mark padding"):
        mla(inputs(1, 3, HIDDEN), jnp.asarray([[0, 0, 1]]), cache=mla.init_cache(1, 4))
