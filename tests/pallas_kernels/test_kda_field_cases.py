"""Failures that users of other KDA and GDN libraries met, each ruled out as a kind: kernel numerics, shapes, gradients.

Every case runs the XLA path against the float64 scan. Where a case names a closed form, that is the reference too.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import delta_net, gated_delta_net, kda, kda_reference, kda_step
from tests.pallas_kernels.field_support import (
    RESETS,
    check_poisoned_padding_changes_nothing,
    fast_beside_slow,
    from_end_to_end,
    gated,
    nearly_parallel,
    one_key,
    reset,
    spiked,
    written,
)
from tests.pallas_kernels.kda_support import Tokens, base, check, run, unit
from tests.quick_compile import quick_compile  # noqa: F401 (a fixture for all tests here)
from tests.support import (
    BF16_FORWARD,
    BF16_GRADIENT,
    F32_FORWARD,
    F32_GRADIENT,
    RESET_FORWARD,
    assert_close,
    equations,
    rel_l2,
)

BOTH = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])


# --- KN: numerics ------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("g", [-0.5, -1.0, -1.4, -2.0, -3.0, -5.0, -5.5, -20.0, -60.0, -1e4, -np.inf])
def test_field_KN01_constant_gates(g, dtype):
    check(gated(base(0, 1, 130, 2, 64, 64), g), dtype)


@pytest.mark.parametrize("heads", [1, 64])
def test_field_KN02_fast_beside_slow_channels(heads):
    K = 64 if heads == 1 else 8
    tokens = base(2, 1, 298, heads, K, K, h0=False)
    check(fast_beside_slow(tokens))
    check(spiked(tokens), forward=RESET_FORWARD)


@pytest.mark.parametrize("case", RESETS, ids=lambda c: c.name)
def test_field_KN03_precision_after_resets(case):
    """Sums of gates are never subtracted, so even resets keep the ordinary float32 budget."""
    check(reset(base(8, 1, 256, 1, 64, 64), case))


def test_field_KN03_closed_form_when_everything_is_forgotten():
    tokens = gated(base(8, 1, 256, 1, 64, 64), -1000.0)
    out = run(kda, tokens, jnp.float32, gradients=False)["output"]
    dots = np.einsum("bthk,bthk->bth", tokens.q, tokens.k)
    assert_close(out, 64**-0.5 * (dots * tokens.beta)[..., None] * tokens.v, F32_FORWARD)


@BOTH
def test_field_KN04_nearly_parallel_keys(dtype):
    check(nearly_parallel(base(4, 1, 256, 1, 64, 128, h0=False)), dtype)


def test_field_KN04_identical_keys_have_a_closed_form():
    tokens = one_key(base(5, 1, 256, 1, 64, 64, h0=False))
    tokens = gated(written(tokens._replace(q=tokens.k), 1.0), 0.0)
    assert_close(run(kda, tokens, jnp.float32, gradients=False)["output"], 64**-0.5 * tokens.v, F32_FORWARD)


@pytest.mark.slow
def test_field_KN04_long_correlated_sequence():
    check(nearly_parallel(base(6, 1, 8192, 2, 64, 64, h0=False), seed=6), gradients=False)


def test_field_KN05_no_decay_does_not_drift():
    tokens = gated(base(1, 2, 512, 2, 64, 64), 0.0)
    result, _ = check(tokens)
    args = [jnp.asarray(x, jnp.float32) for x in (tokens.q, tokens.k, tokens.v, tokens.beta)]
    ungated = delta_net(*args, initial_state=jnp.asarray(tokens.initial_state, jnp.float32))
    assert_close(ungated.output, result["output"], 1e-6)


def test_field_KN05_strong_writes():
    """beta up to 2 is accepted; one repeated key at beta = 2 is as ill-conditioned as the recurrence gets."""
    tokens = base(1, 1, 256, 1, 64, 64)
    check(gated(written(one_key(tokens), 2.0), 0.0), forward=5e-4, gradient=5e-4)
    check(gated(written(tokens, 1.9), -0.01))


def test_field_KN10_precision_does_not_depend_on_the_caller():
    """CPUs hide the precision of a dot, so it is read off the jaxpr: every one at HIGHEST for float32 inputs."""
    tokens = base(3, 1, 130, 2, 32, 48)
    args = [jnp.asarray(x, jnp.float32) for x in tokens[:6]]

    def loss(*a):
        out, state = kda(*a[:5], initial_state=a[5], qk_l2norm=True, beta_sigmoid=True)
        return out.sum() + state.sum()

    highest = (jax.lax.Precision.HIGHEST,) * 2
    with jax.default_matmul_precision("bfloat16"):
        for name, f in {
            "kda": jax.grad(loss, argnums=range(6)),
            "scan": lambda *a: kda_reference(*a[:5], initial_state=a[5]),
            "step": lambda *a: kda_step(*(x[:, 0] for x in a[:5]), a[5]),
        }.items():
            dots = [e for e in equations(jax.make_jaxpr(f)(*args).jaxpr) if e.primitive.name == "dot_general"]
            assert dots and all(e.params["precision"] == highest for e in dots), name
            assert not [e for e in equations(jax.make_jaxpr(f)(*args).jaxpr) if e.primitive.name.startswith("cumsum")]
    low = [jnp.asarray(x, jnp.bfloat16) for x in tokens[:5]] + [args[5]]
    dots = [
        e
        for e in equations(jax.make_jaxpr(jax.grad(loss, argnums=range(6)))(*low).jaxpr)
        if e.primitive.name == "dot_general"
    ]
    assert all(e.params["precision"] is not None for e in dots), "bf16 inputs: pinned too"


def test_field_KN12_gates_are_summed_in_float32():
    """A bf16 running sum of -0.01 stalls at -4; the decay over 1024 tokens must be e^-10.25 of the rounded gate."""
    T = 1024
    tokens = gated(written(base(12, 1, T, 1, 16, 16), 0.0), -0.01)
    result, _ = check(tokens, jnp.bfloat16, gradients=False)
    step = float(jnp.asarray(-0.01, jnp.bfloat16))
    assert_close(result["state"], np.exp(T * step) * np.asarray(tokens.initial_state, np.float32), 1e-5)


# --- SV: shapes and packing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cu", [(0, 63, 128), (0, 1, 128), (0, 64, 128), (0, 127, 128)], ids=str)
@BOTH
def test_field_SV01_boundary_inside_a_tile(cu, dtype):
    tokens = from_end_to_end(base(11, 1, 128, 2, 32, 32, h0=False))
    states = 0.5 * np.random.default_rng(2).standard_normal((1, 2, 2, 32, 32))
    ids = np.searchsorted(cu[1:], np.arange(128), side="right")[None]
    packed, _ = check(tokens._replace(initial_state=states), dtype, ids=ids, num_segments=2)
    for n, (a, b) in enumerate(zip(cu, cu[1:], strict=False)):
        alone = Tokens(*(x[:, a:b] for x in tokens[:5]), states[:, n])
        result = run(kda, alone, dtype, gradients=False)
        tol = F32_FORWARD if dtype == jnp.float32 else BF16_FORWARD
        assert_close(packed["output"][:, a:b], result["output"], tol, f"segment {n}")
        assert_close(packed["state"][:, n], result["state"], tol, f"state {n}")


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 63, 65, 100, 127, 500])
def test_field_SV02_any_length(T):
    check(base(T, 1, T, 1, 32, 32))


def test_field_SV02_poisoned_padding_changes_nothing():
    tokens = base(21, 2, 100, 2, 16, 16)
    ids = np.where((np.arange(100) < 7) | (np.arange(100) >= 90), -1, 0) * np.ones((2, 1), int)
    check_poisoned_padding_changes_nothing(partial(run, kda, dtype=jnp.float32), tokens, ids)


def test_field_SV03_empty_segments():
    tokens = base(31, 1, 69, 2, 16, 16)
    cu = np.array([0, 0, 5, 5, 69, 69])
    ids = np.searchsorted(cu[1:], np.arange(69), side="right")[None]
    states = np.random.default_rng(3).standard_normal((1, 5, 2, 16, 16)).astype(np.float32).astype(np.float64)
    dS = np.random.default_rng(4).standard_normal(states.shape).astype(np.float32)
    result, _ = check(tokens._replace(initial_state=states), ids=ids, num_segments=5, do=np.zeros_like(tokens.v), dS=dS)
    for empty in (0, 2, 4):
        np.testing.assert_array_equal(result["state"][:, empty], states[:, empty])
        np.testing.assert_array_equal(result["dinitial_state"][:, empty], dS[:, empty])
    assert not result["dq"].any()  # only the states were asked for


@pytest.mark.parametrize("K, V", [(32, 32), (48, 48), (80, 96), (96, 64), (64, 128), (192, 192), (256, 256), (7, 5)])
def test_field_SV05_head_sizes(K, V):
    check(base(K, 1, 40, 1, K, V), chunk_size=16)


def test_field_SV06_gate_shape_is_never_guessed():
    T = H = K = 16
    tokens = base(6, 1, T, H, K, K)
    args = [jnp.asarray(x, jnp.float32) for x in tokens[:5]]
    per_head = args[3][..., 0]
    with pytest.raises(ValueError, match="gated_delta_net"):
        kda(*args[:3], per_head, args[4])
    spread = kda(*args[:3], jnp.repeat(per_head[..., None], K, -1), args[4])
    np.testing.assert_array_equal(gated_delta_net(*args[:3], per_head, args[4]).output, spread.output)


def test_field_SV07_grouped_values_repeat_and_do_not_tile():
    tokens = base(7, 1, 70, 2, 32, 32, HV=6)
    q = tokens.q.copy()
    q[:, :, 1] = unit(q[:, :, 1] - (q[:, :, 1] * q[:, :, 0]).sum(-1, keepdims=True) * q[:, :, 0])
    tokens = tokens._replace(q=q)
    grouped, _ = check(tokens)
    spread = run(kda, tokens._replace(q=np.repeat(q, 3, 2), k=np.repeat(tokens.k, 3, 2)), jnp.float32)
    assert_close(grouped["output"], spread["output"], F32_FORWARD)
    for n in ("dq", "dk"):
        assert_close(grouped[n], spread[n].reshape(1, 70, 2, 3, 32).sum(3), F32_GRADIENT, n)


def test_field_SV10_no_flat_offsets():
    """Nothing indexes across the whole array: rows, heads and chunks are axes of their own, past 2^31 elements too."""
    T, H, K = 262_208, 64, 128
    shapes = [(1, T, H, K)] * 4 + [(1, T, H)]
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    jaxpr = jax.make_jaxpr(lambda *a: kda(*a))(*args)
    gathers = [e for e in equations(jaxpr.jaxpr) if e.primitive.name in ("gather", "scatter", "scatter-add", "iota")]
    sizes = [max(v.aval.shape, default=0) for e in gathers for v in e.outvars]
    assert max(sizes, default=0) < 2**31 and jaxpr.out_avals[0].shape == (1, T, H, K)


# --- GR: gradients -----------------------------------------------------------------------------------------------


def test_field_GR01_zero_rows_under_the_norm():
    tokens = base(41, 1, 32, 2, 16, 16)
    q, k = 3 * tokens.q, 2 * tokens.k
    pads = np.array([0, 5, 6, 17, 20, 30, 31])
    q[:, pads] = k[:, pads] = 0
    check(tokens._replace(q=q, k=k), qk_l2norm=True)
    ids = np.zeros((1, 32), int)
    ids[:, pads] = -1
    masked = run(kda, tokens._replace(q=q, k=k), jnp.float32, ids=ids, qk_l2norm=True)
    keep = np.setdiff1d(np.arange(32), pads)
    short = Tokens(*(x[:, keep] for x in (q, k, *tokens[2:5])), tokens.initial_state)
    r = np.random.default_rng(99).standard_normal(tokens.v.shape)
    dS = np.random.default_rng(98).standard_normal(tokens.initial_state.shape)
    masked = run(kda, tokens._replace(q=q, k=k), jnp.float32, ids=ids, qk_l2norm=True, do=r, dS=dS)
    alone = run(kda, short, jnp.float32, qk_l2norm=True, do=r[:, keep], dS=dS)
    for n in ("dq", "dk", "dv", "dg", "dbeta"):
        assert not masked[n][:, pads].any(), n
        assert_close(masked[n][:, keep], alone[n], F32_GRADIENT, n)


def test_field_GR01_eps_is_inside_the_root():
    k = np.zeros((1, 1, 1, 16))
    k[..., 0] = 1e-4
    one = np.ones((1, 1, 1))
    tokens = Tokens(k, k, np.eye(16)[None, None, :1], np.zeros((1, 1, 1, 16)), one)
    out = run(kda, tokens, jnp.float32, gradients=False, qk_l2norm=True, scale=1.0)["output"]
    assert_close(out[0, 0, 0, 0], 0.0995037**2, 1e-6)


def test_field_GR02_gate_gradient_is_not_rounding_noise():
    eye = np.eye(64)[None, :, None]
    r = np.random.default_rng(2)
    tokens = Tokens(
        eye, eye, r.standard_normal((1, 64, 1, 64)), np.full((1, 64, 1, 64), -5.0), np.full((1, 64, 1), 0.7)
    )
    for dtype in (jnp.float32, jnp.bfloat16):
        assert np.abs(run(kda, tokens, dtype, dS=np.zeros((1, 1, 64, 64)))["dg"]).max() <= 1e-7


@BOTH
@pytest.mark.parametrize("g", [-5.0, -0.1])
def test_field_GR02_gate_gradient_alone(g, dtype):
    result, reference = check(gated(base(4, 1, 100, 2, 64, 64), g), dtype)
    assert rel_l2(result["dg"], reference["dg"]) <= (F32_GRADIENT if dtype == jnp.float32 else BF16_GRADIENT)


@pytest.mark.parametrize("T", [65, 127])
def test_field_GR02_tail_chunk(T):
    result, _ = check(base(42, 1, T, 1, 32, 32, h0=False))
    assert not result["dg"][:, 0].any()  # nothing was there to be forgotten


@pytest.mark.parametrize("T", [1, 65, 130])
def test_field_GR04_state_gradients(T):
    tokens = gated(base(44, 1, T, 2, 16, 16), -0.01)
    zero_do, zero_dS = np.zeros_like(tokens.v), np.zeros_like(tokens.initial_state)
    zeros = run(kda, tokens._replace(initial_state=zero_dS), jnp.float32)
    for name, value in run(kda, tokens._replace(initial_state=None), jnp.float32).items():
        np.testing.assert_array_equal(value, zeros[name], err_msg=f"None against zeros: {name}")
    result, _ = check(tokens, do=zero_do)
    assert not result["dq"].any()
    check(tokens, dS=zero_dS)
    check(tokens)


def test_field_GR04_packed_with_a_bf16_query():
    tokens = gated(base(45, 1, 70, 2, 16, 16), -0.01)
    states = np.random.default_rng(5).standard_normal((1, 3, 2, 16, 16))
    ids = np.where(np.arange(70) < 30, 0, 2)[None]
    check(tokens._replace(initial_state=states), jnp.bfloat16, ids=ids, num_segments=3)
    args = [jnp.asarray(x, jnp.bfloat16) for x in tokens[:5]]
    h0 = jnp.asarray(states, jnp.float32)
    dh0 = jax.grad(lambda h: kda(*args, initial_state=h, segment_ids=jnp.asarray(ids), num_segments=3).state.sum())(h0)
    assert dh0.dtype == jnp.float32
    np.testing.assert_array_equal(dh0[:, 1], np.ones_like(dh0[:, 1]))
