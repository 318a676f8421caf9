import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.layers import KDALayer
from pallas_kernels import gated_delta_net
from tests.kimi_jax.layers.layer_support import call, inputs, randomise
from tests.support import BF16_FORWARD, F32_FORWARD, F32_GRADIENT, assert_close

HIDDEN = 12


class Variant(NamedTuple):
    name: str
    options: dict


VARIANTS = [
    Variant("kimi_linear", {}),
    Variant("kimi_k3", dict(lower_bound=-5.0, full_rank_gate=True)),
    Variant("grouped_values", dict(num_value_heads=6, gate_rank=3)),
    Variant("gate_per_head", dict(gate="head", num_value_heads=6, gate_rank=3)),
    Variant("swish_gate", dict(output_gate="swish")),
    Variant("no_output_gate", dict(output_gate=None)),
    Variant("no_convolution", dict(conv_width=0)),
    Variant("two_taps", dict(conv_width=2)),
]


@functools.cache
def layer(name="kimi_linear", **kwargs):
    options = dict(num_heads=2, head_k=8, head_v=4) | dict(VARIANTS)[name] | kwargs
    return randomise(KDALayer(HIDDEN, **options, rngs=nnx.Rngs(0)))


def by_hand(kda, x_TD, state_HKV=0.0):
    """One row in float64, token by token."""
    w = {name: np.asarray(p[...], np.float64) for name, p in vars(kda).items() if isinstance(p, nnx.Param)}
    x = np.asarray(x_TD, np.float64)
    T, H, HV, K, V = len(x), kda.num_heads, kda.num_value_heads, kda.head_k, kda.head_v

    def sigmoid(a):
        return 1 / (1 + np.exp(-a))

    def convolved(name):
        raw = x @ w[name]
        if kda.conv_width:
            taps = np.asarray(getattr(kda, f"{name}_conv").weight[...], np.float64)
            W = taps.shape[1]
            padded = np.concatenate([np.zeros((W - 1, raw.shape[1])), raw])
            raw = sum(padded[i : i + T] * taps[:, i] for i in range(W))
        return raw * sigmoid(raw)

    q, k = (convolved(name).reshape(T, H, K).repeat(HV // H, axis=1) for name in "qk")
    q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    v = convolved("v").reshape(T, HV, V)
    z = (x @ w["f_a"] @ w["f_b"] + w["dt_bias"]).reshape(T, HV, -1)  # a decay per channel or one for all
    A = np.exp(w["A_log"])[:, None]
    g = -A * np.log1p(np.exp(z)) if kda.lower_bound is None else kda.lower_bound * sigmoid(A * z)
    beta = sigmoid(x @ w["b"])

    S, o = np.zeros((HV, K, V)) + state_HKV, np.zeros((T, HV, V))
    for t in range(T):
        S = np.exp(g[t])[..., None] * S
        r = v[t] - np.einsum("hkv,hk->hv", S, k[t])
        S = S + beta[t][:, None, None] * k[t][..., None] * r[:, None]
        o[t] = K**-0.5 * np.einsum("hkv,hk->hv", S, q[t])

    o = o / np.sqrt((o * o).mean(-1, keepdims=True) + 1e-5) * np.asarray(kda.o_norm.weight[...], np.float64)
    if kda.gate_form != "none":
        gate = (x @ w["g"] if kda.gate_form == "full" else x @ w["g_a"] @ w["g_b"]).reshape(T, HV, V)
        o = o * sigmoid(gate) * (gate if kda.o_norm.activation == "swish" else 1)
    return o.reshape(T, HV * V) @ w["o"], S


@pytest.mark.parametrize("name", dict(VARIANTS))
def test_equals_the_equations(name):
    """Field case SV07 too: value head j of the grouped variant reads q/k head j // 3."""
    kda, x = layer(name), inputs(2, 9, HIDDEN)
    y, cache = call(kda, x, cache=kda.init_cache(2))
    for row in range(2):
        y_row, state = by_hand(kda, x[row])
        assert_close(y[row], y_row, F32_FORWARD, "y")
        assert_close(cache.state[row], state, F32_FORWARD, "state")


@pytest.mark.parametrize("name", ["kimi_k3", "grouped_values", "gate_per_head", "no_convolution"])
def test_prefill_then_decode_equals_the_whole(name):
    kda, x = layer(name), inputs(2, 10, HIDDEN)
    whole, no_cache = call(kda, x)
    assert no_cache is None
    cache, outputs = kda.init_cache(2), []
    for start, stop in ((0, 4), (4, 5), (5, 6), (6, 10)):
        y, cache = call(kda, x[:, start:stop], cache=cache)
        outputs.append(y)
    assert_close(jnp.concatenate(outputs, axis=1), whole, F32_FORWARD)


def test_a_gate_per_head_is_gated_delta_net():
    kda, x, ids = layer("gate_per_head", conv_width=0, output_gate=None), inputs(1, 9, HIDDEN), jnp.arange(9)[None] // 5
    q, k, v = (jax.nn.silu(x @ w[...]).reshape(1, 9, -1, d) for w, d in ((kda.q, 8), (kda.k, 8), (kda.v, 4)))
    logits = x @ kda.f_a[...] @ kda.f_b[...]
    g = -jnp.exp(kda.A_log[...]) * jax.nn.softplus(logits + kda.dt_bias[...])
    beta = jax.nn.sigmoid(x @ kda.b[...])
    o = jax.jit(gated_delta_net, static_argnames="qk_l2norm")(q, k, v, g, beta, segment_ids=ids, qk_l2norm=True).output
    assert g.shape == (1, 9, 6)
    assert_close(call(kda, x, ids)[0], kda.o_norm(o).reshape(1, 9, -1) @ kda.o[...], F32_FORWARD)


@pytest.mark.parametrize("T", [1, 4])
def test_rows_without_new_tokens_keep_their_cache(T):
    kda = layer()
    _, cache = call(kda, inputs(2, 4, HIDDEN), cache=kda.init_cache(2))
    dirty = inputs(2, T, HIDDEN, seed=2).at[1].set(jnp.nan)
    y, after = call(kda, dirty, cache=cache, lengths=jnp.asarray([T, 0]))
    assert (y[1] == 0).all() and np.isfinite(y[0]).all()
    for old, new in zip(cache, after, strict=True):
        np.testing.assert_array_equal(new[1], old[1])
        assert (new[0] != old[0]).any()


class Gate(NamedTuple):
    name: str
    lower_bound: float | None
    logit: float
    log_decay: float


GATES = [  # field case LY04: None and -5 are different models, and neither is a clamp
    Gate("bounded_up", -5.0, 1.0, -4.9100690),
    Gate("bounded_down", -5.0, -1.0, -0.0899310),
    Gate("softplus_up", None, 1.0, -5.2530467),
    Gate("softplus_down", None, -1.0, -1.2530467),
]


@pytest.mark.parametrize("K", [pytest.param(32, marks=pytest.mark.exhaustive), 64])
def test_field_DC01_a_state_from_elsewhere_lies_as_documented(K):
    """Only its first row of K is not zero, so that no path can take K for V: a prompt of 100, then 28 single tokens."""
    kda = randomise(KDALayer(HIDDEN, num_heads=2, head_k=K, head_v=64, rngs=nnx.Rngs(0)))
    kda.A_log[...] = jnp.log(jnp.full(2, 0.05))  # slow decay: what was there stays visible
    x, state = inputs(1, 128, HIDDEN), jnp.zeros((1, 2, K, 64)).at[:, :, 0].set(1)

    def decode(cache, x_BD):
        y, cache = kda(x_BD[:, None], cache=cache)
        return cache, y[:, 0]

    y, cache = call(kda, x[:, :100], cache=kda.init_cache(1)._replace(state=state))
    cache, rest = jax.jit(lambda cache, x: jax.lax.scan(decode, cache, x))(cache, jnp.swapaxes(x[:, 100:], 0, 1))
    expected, expected_state = by_hand(kda, x[0], np.asarray(state[0]))
    assert_close(jnp.concatenate([y[0], rest[:, 0]]), expected, F32_FORWARD)
    assert_close(cache.state[0], expected_state, F32_FORWARD, "state")


@pytest.mark.parametrize("case", GATES, ids=lambda case: case.name)
@pytest.mark.parametrize("T", [1, 2])
def test_the_gate_is_the_one_asked_for(case, T):
    """With beta = 0 the state only decays, so that the gate can be read off it."""
    kda = KDALayer(4, num_heads=1, head_k=2, head_v=2, lower_bound=case.lower_bound, rngs=nnx.Rngs(0))
    kda.A_log[...] = jnp.log(jnp.asarray([4.0]))
    kda.dt_bias[...] = jnp.zeros(2)
    kda.f_a[...], kda.f_b[...] = jnp.full((4, 2), 0.5), jnp.full((2, 2), case.logit / 4)
    kda.b[...] = jnp.full((4, 1), -1e4)
    cache = kda.init_cache(1)
    _, after = call(kda, jnp.ones((1, T, 4)), cache=cache._replace(state=jnp.ones((1, 1, 2, 2))))
    np.testing.assert_allclose(np.log(after.state) / T, case.log_decay, rtol=1e-6)


def test_documents_do_not_leak():
    """Field case LY02: slow decay (fast decay would hide a leak), a document shorter than the filter included."""
    kda = randomise(KDALayer(HIDDEN, num_heads=2, head_k=8, head_v=8, rngs=nnx.Rngs(0)))
    kda.A_log[...] = jnp.log(jnp.full(2, 0.05))
    lengths = [37, 51, 2, 40]
    ends = np.cumsum(lengths)
    ids = jnp.asarray(np.repeat(np.arange(4), lengths)[None])
    x, dy = inputs(1, 130, HIDDEN), inputs(1, 130, HIDDEN, seed=2)

    @jax.jit
    def run(x, ids, dy):
        y, pullback = jax.vjp(lambda x: kda(x, ids)[0], x)
        return y, pullback(dy)[0]

    y, dx = run(x, ids, dy)
    # A change at the end of the second document is not noticed by the later ones, not in the last bit ...
    y_changed, _ = run(x.at[:, 86:88].add(3.0), ids, dy)
    assert (y_changed[:, 86:88] != y[:, 86:88]).any()
    np.testing.assert_array_equal(y_changed[:, 88:], y[:, 88:])
    # ... and they send no gradient there.
    _, dx_of_later = run(x, ids, dy.at[:, :88].set(0))
    assert (dx_of_later[:, :88] == 0).all() and (dx_of_later[:, 88:] != 0).any()

    # The documents one to a row.
    starts = ends - lengths
    alone = jnp.arange(max(lengths)) < jnp.asarray(lengths)[:, None]
    token = jnp.where(alone, starts[:, None] + jnp.arange(max(lengths)), 0)
    y_alone, dx_alone = run(x[0, token], jnp.where(alone, 0, -1), dy[0, token])
    assert_close(y[0], y_alone[alone], F32_FORWARD, "y")
    assert_close(dx[0], dx_alone[alone], F32_GRADIENT, "dx")


def test_zero_rows_do_not_explode_the_gradient():
    """Field case GR01: 7 of 32 tokens are padding with zero q and k, four layers deep."""
    layers = [randomise(KDALayer(HIDDEN, num_heads=2, head_k=8, head_v=8, rngs=nnx.Rngs(i)), i) for i in range(4)]
    graphdef, _ = nnx.split(layers[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[nnx.split(kda)[1] for kda in layers])
    x, dy = inputs(1, 32, HIDDEN).at[:, :7].set(0), inputs(1, 32, HIDDEN, seed=2)
    all_valid, ids = jnp.zeros((1, 32), int), jnp.where(jnp.arange(32) < 7, -1, 0)[None]

    @jax.jit
    def gradients(stacked, x, ids, dy):
        def loss(stacked, x):
            def one(x, state):
                return x + nnx.merge(graphdef, state)(x, ids)[0], None

            x, _ = jax.lax.scan(one, x, stacked)
            return (x * jnp.where((ids >= 0)[..., None], dy, 0)).sum()

        return jax.grad(loss, (0, 1))(stacked, x)

    dstate, dx = gradients(stacked, x, ids, dy)
    dstate_alone, dx_alone = gradients(stacked, x[:, 7:], all_valid[:, 7:], dy[:, 7:])
    assert (dx[:, :7] == 0).all()
    assert_close(dx[:, 7:], dx_alone, F32_GRADIENT, "dx")
    for (path, gradient), (_, alone) in zip(*map(nnx.to_flat_state, (dstate, dstate_alone)), strict=True):
        assert_close(gradient[...], alone[...], F32_GRADIENT, ".".join(map(str, path)))
    # Zeros that nobody marked as padding are legal too.
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients(stacked, x, all_valid, dy)))


def test_a_row_alone_equals_the_row_in_a_batch():
    kda, x = layer(), inputs(3, 20, HIDDEN)
    ids = jnp.asarray([[0] * 20, [0] * 7 + [1] * 13, [-1] * 4 + [2] * 16])
    y, _ = call(kda, x, ids)
    for row in range(3):
        assert_close(y[row], call(kda, x[row : row + 1], ids[row : row + 1])[0][0], F32_FORWARD)


def test_bfloat16_is_close():
    x = inputs(2, 40, HIDDEN).astype(jnp.bfloat16)
    low = layer("kimi_k3", dtype=jnp.bfloat16)
    y, cache = call(low, x, cache=low.init_cache(2))
    exact, _ = call(layer("kimi_k3"), x)
    assert y.dtype == jnp.bfloat16 and cache.state.dtype == jnp.float32
    assert_close(y, exact, 3 * BF16_FORWARD)


def test_initial_gates():
    kda = KDALayer(8, num_heads=64, head_k=4, head_v=4, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    assert kda.q.dtype == jnp.bfloat16 and kda.A_log.dtype == kda.dt_bias.dtype == jnp.float32
    A = np.exp(kda.A_log[...])
    assert A.min() >= 1 and A.max() <= 16 and 7 < A.mean() < 10
    dt = np.asarray(jax.nn.softplus(kda.dt_bias[...]))
    assert dt.min() >= 0.999e-3 and dt.max() <= 0.1001
    assert abs(np.log(dt).mean() - np.log(1e-2)) < 0.3  # log-uniform
    bounded = KDALayer(8, num_heads=2, head_k=4, head_v=4, lower_bound=-5.0, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(bounded.A_log[...], 0)


def test_backend_is_passed_on():
    x = inputs(1, 7, HIDDEN)
    assert_close(call(layer(backend="reference"), x)[0], call(layer(), x)[0], F32_FORWARD)
    with pytest.raises(ValueError, match="cuda"):
        layer.__wrapped__(backend="cuda")(x)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(num_value_heads=5), "num_value_heads=5 must be a multiple of num_heads=2"),
        (dict(lower_bound=0.0), "lower_bound must be None .* or negative, got 0.0"),
        (dict(gate="scalar"), "gate='scalar' is not allowed: 'channel' or 'head'"),
        (dict(conv_width=-1), "conv_width must be at least 0"),
        (dict(output_gate="tanh"), "'tanh' is unknown"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        KDALayer(8, num_heads=2, head_k=4, head_v=4, **options, rngs=nnx.Rngs(0))
