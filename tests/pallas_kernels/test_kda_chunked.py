"""Properties of the chunkwise path that hold at any input: random shapes, limits, causality, memory, activations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import bounded_gate, gated_delta_net, kda, kda_reference, linear_attention, softplus_gate
from tests.pallas_kernels.field_support import EXTREME_LOGITS, check_a_later_token_changes_no_earlier_output, gated
from tests.pallas_kernels.kda_support import Tokens, base, check, run
from tests.quick_compile import quick_compile  # noqa: F401 (a fixture for all tests here)
from tests.support import F32_FORWARD, F32_GRADIENT, assert_close


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    T=st.integers(1, 80), H=st.integers(1, 2), group=st.integers(1, 2), K=st.integers(1, 20), V=st.integers(1, 20),
    chunk=st.sampled_from([16, 32, 64]), segments=st.sampled_from([None, 0, 3]),
    strength=st.sampled_from([0.01, 1.0, 30.0]), seed=st.integers(0, 10_000),
)  # fmt: skip
def test_random_shapes(T, H, group, K, V, chunk, segments, strength, seed):
    """Packing (None: absent, 0: without num_segments) with padding anywhere, any gate strength, grouped heads."""
    r = np.random.default_rng(seed)
    tokens = base(seed, 2, T, H, K, V, HV=group * H)
    tokens = tokens._replace(g=strength * tokens.g)
    options = {"chunk_size": chunk}
    ids = None
    if segments is not None:
        ids = np.sort(r.integers(0, segments or 4, (2, T)), axis=1)
        ids = np.where(r.random((2, T)) < 0.15, -1, ids)
        if segments:
            options["num_segments"] = segments
            tokens = tokens._replace(initial_state=r.standard_normal((2, segments, group * H, K, V)))
    check(
        tokens,
        ids=ids,
        forward=F32_FORWARD if strength < 30 else 5e-4,
        gradient=F32_GRADIENT if strength < 30 else 2e-3,
        **options,
    )


@pytest.mark.parametrize("gate, bound", [("softplus", None), ("bounded", -5.0)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_fused_activations(gate, bound, dtype):
    """Raw logits, norm and sigmoid inside, with gradients of A_log and dt_bias; HV = 2H, packed, padded."""
    r = np.random.default_rng(7)
    tokens = base(7, 2, 70, 2, 16, 24, HV=4)
    tokens = tokens._replace(
        q=2 * r.standard_normal(tokens.q.shape), k=2 * r.standard_normal(tokens.k.shape),
        beta=r.standard_normal(tokens.beta.shape), g=2 * r.standard_normal(tokens.g.shape),
        A_log=np.log1p(np.arange(4)), dt_bias=r.standard_normal((4, 16)),
    )  # fmt: skip
    ids = np.where(np.arange(70) % 11 == 3, -1, np.arange(70) // 25) * np.ones((2, 1), int)
    check(tokens, dtype, ids=ids, gate=gate, lower_bound=bound, qk_l2norm=True, beta_sigmoid=True)


def test_fused_equals_unfused_and_flat_bias():
    tokens = base(8, 1, 40, 2, 16, 16)
    q, k, v, g, beta = (jnp.asarray(x, jnp.float32) for x in tokens[:5])
    A, b = jnp.array([0.3, -0.5]), jnp.linspace(-1, 1, 32)
    for fused, g_plain in (
        (dict(gate="softplus"), softplus_gate(g, A, b)),
        (dict(gate="bounded", lower_bound=-4.0), bounded_gate(g, A, b, -4.0)),
    ):
        x = kda(q, k, v, g, beta, A_log=A, dt_bias=b, beta_sigmoid=True, **fused).output
        assert_close(x, kda(q, k, v, g_plain, jax.nn.sigmoid(beta)).output, F32_FORWARD)
        grad = jax.grad(lambda b: kda(q, k, v, g, beta, A_log=A, dt_bias=b, **fused).output.sum())(b)  # noqa: B023
        assert grad.shape == (32,) and np.isfinite(grad).all() and np.abs(grad).min() > 0


@pytest.mark.parametrize("gate, bound", [("softplus", None), ("bounded", -5.0)])
def test_gate_gradients_at_extreme_logits(gate, bound):
    """Finite at any logit, with rates from e^-30 to e^100: what is forgotten in full gives 0, not 0 * inf."""
    tokens = base(9, 1, len(EXTREME_LOGITS), 3, 4, 4)._replace(A_log=np.array([-30.0, 0.0, 100.0]))
    tokens = gated(tokens, np.reshape(EXTREME_LOGITS, (-1, 1, 1)))
    for name, value in run(kda, tokens, jnp.float32, gate=gate, lower_bound=bound).items():
        assert np.isfinite(value).all(), name


@pytest.mark.parametrize("options", [{}, {"num_segments": 2}], ids=["plain", "packed"])
def test_a_later_token_changes_no_earlier_output(options):
    tokens = base(10, 1, 140, 2, 32, 32, h0=False)
    ids = None if not options else (np.arange(140) >= 37)[None].astype(int)
    forward = partial(run, kda, dtype=jnp.float32, ids=ids, **options)
    check_a_later_token_changes_no_earlier_output(forward, tokens, (20, 40, 64, 90, 139))


def test_a_row_alone_equals_the_row_in_a_batch():
    tokens = base(11, 3, 100, 2, 16, 16)
    together = run(kda, tokens, jnp.float32, gradients=False)
    for row in range(3):
        alone = run(kda, Tokens(*(x[row : row + 1] for x in tokens[:6])), jnp.float32, gradients=False)
        for name, value in alone.items():
            assert_close(value[0], together[name][row], 1e-6, name)


def test_chunk_sizes_and_groups_agree(monkeypatch):
    """Chunks of any size, in one group or many, are one function."""
    import sys

    tokens = base(12, 1, 300, 2, 16, 16)
    expected, _ = check(tokens)
    for chunk in (16, 128):
        check(tokens, chunk_size=chunk)
    module = sys.modules["pallas_kernels.kda.chunked"]
    monkeypatch.setitem(module.GROUP_ELEMENTS, "cpu", 2 * 2 * 64 * 16)  # two chunks a group: three groups
    arrays = [jnp.asarray(x, jnp.float32) for x in tokens[:6]]
    grads = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(kda(*a[:5], initial_state=a[5]).output)), argnums=range(6)))
    many = grads(*arrays)
    monkeypatch.setitem(module.GROUP_ELEMENTS, "cpu", 1 << 30)
    one = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(kda(*a[:5], initial_state=a[5]).output)), argnums=range(6)))(
        *arrays
    )
    for a, b in zip(many, one, strict=True):
        assert_close(a, b, 1e-5)


def test_per_head_gates_equal_gated_delta_net():
    tokens = base(13, 1, 70, 2, 16, 24)
    g = tokens.g[..., :1]
    check(gated(tokens, g))
    args = [jnp.asarray(x, jnp.float32) for x in (tokens.q, tokens.k, tokens.v, g[..., 0], tokens.beta)]
    spread = kda(*args[:3], jnp.broadcast_to(args[3][..., None], tokens.g.shape), args[4]).output
    assert_close(gated_delta_net(*args).output, spread, 1e-6)


def test_no_write_is_pure_decay():
    tokens = base(14, 1, 70, 1, 16, 16)._replace(beta=np.zeros((1, 70, 1)))
    result, _ = check(tokens)
    decayed = np.exp(np.cumsum(tokens.g, 1))[..., None] * tokens.initial_state[:, None]
    assert_close(result["output"], 0.25 * np.einsum("bthk,bthkv->bthv", tokens.q, decayed), F32_FORWARD)


@pytest.mark.parametrize("kind", ["plain", "scalar", "channel"])
def test_linear_attention(kind):
    """The lineage without the erase step, against attention written out over all pairs, and its scan."""
    tokens = base(15, 1, 70, 2, 16, 24, HV=4, h0=False)
    g = {
        "plain": np.zeros_like(tokens.g),
        "scalar": np.broadcast_to(tokens.g[..., :1], tokens.g.shape),
        "channel": tokens.g,
    }[kind]
    given = {"plain": None, "scalar": jnp.asarray(g[..., 0], jnp.float32), "channel": jnp.asarray(g, jnp.float32)}[kind]
    q, k, v = (jnp.asarray(x, jnp.float32) for x in tokens[:3])
    sums = np.cumsum(g, 1)
    D = np.exp(np.minimum(sums[:, :, None] - sums[:, None], 0)) * np.tri(70)[None, :, :, None, None]
    scores = np.einsum("bihk,bjhk,bijhk->bhij", np.repeat(tokens.q, 2, 2), np.repeat(tokens.k, 2, 2), D)
    expected = 0.25 * np.einsum("bhij,bjhv->bihv", scores, tokens.v)
    assert_close(linear_attention(q, k, v, given).output, expected, F32_FORWARD)
    beta = jnp.asarray(tokens.beta, jnp.float32)
    assert_close(
        linear_attention(q, k, v * beta[..., None], given).output,
        linear_attention(q, k, v, given, beta=beta).output,
        1e-6,
    )

    def grads(backend):
        f = lambda q, k, v, g, b: jnp.sum(jnp.sin(linear_attention(q, k, v, g, beta=b, backend=backend).output))  # noqa: E731
        return jax.jit(jax.grad(f, argnums=range(5)))(q, k, v, jnp.asarray(g, jnp.float32), beta)

    for name, a, b in zip("qkvgb", grads("xla"), grads("reference"), strict=True):
        assert_close(a, b, F32_GRADIENT, name)


def test_memory_of_the_gradient_is_linear_in_T():
    """Residuals are the inputs and one state per group; the rest is recomputed group by group."""

    def temporary(T):
        args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(1, T, 4, 64)] * 4 + [(1, T, 4)]]
        f = jax.jit(jax.grad(lambda *a: kda(*a).output.sum(), argnums=range(5)))
        return f.lower(*args).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(4096), temporary(16384)
    assert long <= 4.2 * short
    per_token = (long - short) / (16384 - 4096)
    inputs = 4 * 4 * (4 * 64 + 1)
    assert per_token <= 3 * inputs, "more than the gradients themselves and the carried states"


def test_kda_reference_takes_the_widest_dtype():
    tokens = base(16, 1, 5, 1, 4, 4)
    with jax.enable_x64(True):
        q, k, v, g, beta = (jnp.asarray(x, jnp.float32) for x in tokens[:5])
        assert kda_reference(q, k, v, g, beta).state.dtype == jnp.float32
        assert kda_reference(q, k, v, g.astype(jnp.float64), beta).state.dtype == jnp.float64
        assert kda_reference(q, k, v.astype(jnp.bfloat16), g, beta).output.dtype == jnp.bfloat16
