"""The TPU's sequence kernels, interpreted on the CPU against the float64 scan: shapes, activations, packing, numerics.

How they compile is test_kda_tpu_compile.py's matter, interpreters and transformations are
test_kda_tpu_transforms.py's.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kda
from tests.pallas_kernels import field_support, kda_support
from tests.pallas_kernels.field_support import Fused, gated, one_key, poisoned, same_bits, written
from tests.pallas_kernels.kda_support import BOUNDED, NORMS, SOFTPLUS, Tokens, base, interpreted, rounded
from tests.support import F32_FORWARD, RESET_FORWARD, assert_close, equations

tpu = partial(kda, backend="mosaic_tpu")
check = partial(kda_support.check, backend="mosaic_tpu")
run = partial(kda_support.run, kda, backend="mosaic_tpu")


class Kernel(NamedTuple):
    name: str
    dtype: type
    options: dict = {}


# A promised bound of -5 or more selects, for bf16, a faster way to form decays within tiles.
KERNELS = [
    Kernel("f32", jnp.float32),
    Kernel("bf16", jnp.bfloat16),
    Kernel("bf16_bounded", jnp.bfloat16, {"lower_bound": -5.0}),
]
EACH = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


@pytest.fixture(autouse=True)
def interpreter():
    with interpreted():
        yield


# --- Shapes ------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    name: str
    T: int
    H: int = 1
    HV: int = 1
    K: int = 64
    V: int = 64
    dtype: type = jnp.float32
    state: bool = True


SHAPES = [
    Shape("one_token", 1, K=48, V=32, state=False),
    Shape("padded_heads", 63, 2, 2, K=32, V=100, dtype=jnp.bfloat16),
    Shape("heads_of_128", 128, K=128, V=128),
    Shape("heads_of_128_bf16", 130, K=128, V=128, dtype=jnp.bfloat16, state=False),
    Shape("small_values", 70, K=192, V=48, dtype=jnp.bfloat16),
    Shape("two_on_four", 130, 2, 4),
    Shape("one_on_three", 70, 1, 3),  # an odd number of heads of half a register, in one window
    Shape("thirteen", 40, 13, 13, V=256),  # and in windows of their own, widened
    Shape("seven_on_fourteen", 64, 7, 14, V=256),  # pairs whose two queries would be no whole register: repeated
    Shape("one_on_twelve", 70, 1, 12, K=256, V=256, dtype=jnp.bfloat16),  # forward in fours, backward in twos
]


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=[pytest.mark.exhaustive] if c.name == "one_on_twelve" else []) for c in SHAPES],
)
def test_shapes(case):
    check(base(case.T, 1, case.T, case.H, case.K, case.V, case.HV, case.state), case.dtype)


def test_field_TL03_many_blocks_along_each_axis():
    """2 rows, 7 heads that read one query in programs of their own, 3 chunks, the last of 8 tokens."""
    tokens = base(3, 2, 136, 1, 256, 256, HV=7)
    check(tokens)
    step = jax.grad(lambda *x: tpu(*x).output.sum())
    jaxpr = jax.make_jaxpr(step)(*(jnp.asarray(x, jnp.float32) for x in tokens[:5])).jaxpr
    calls = [e for e in equations(jaxpr) if e.primitive.name == "pallas_call"]
    assert [e.params["grid_mapping"].grid for e in calls] == [(2, 7, 3)] * 2


# --- Activations -------------------------------------------------------------------------------------------------


PACKED_SOFTPLUS = Fused("softplus_packed", SOFTPLUS, jnp.float32, packed=True)
SEGMENTS = Fused("bounded_bf16_segments", {"num_segments": 4, **BOUNDED}, packed=True)
ACTIVATIONS = [
    PACKED_SOFTPLUS,
    SEGMENTS,
    Fused("softplus_bf16", SOFTPLUS),
    Fused("bounded", {"gate": "bounded", "lower_bound": -5.0}, jnp.float32),
    Fused("bounded_bf16_packed", BOUNDED, packed=True),
]
PACKED = np.where(np.arange(100) % 11 == 3, -1, np.arange(100) // 40) * np.ones((2, 1), int)


raw = partial(field_support.raw, K=64, packing=PACKED)


@pytest.mark.parametrize("case", ACTIVATIONS, ids=lambda c: c.name)
def test_fused_activations(case):
    """Raw logits, norm and sigmoid inside, with gradients of A_log and dt_bias."""
    tokens, keywords = raw(case)
    check(tokens, **keywords)


@pytest.mark.parametrize("case", [PACKED_SOFTPLUS, SEGMENTS, ACTIVATIONS[3]], ids=lambda c: c.name)
def test_gate_gradients_at_extreme_logits(case):
    """Right at any logit, and finite with any rate: what is forgotten in full gives 0, not 0 * inf."""
    x = np.resize(field_support.EXTREME_LOGITS, 100)
    tokens, keywords = raw(case)
    tokens = rounded(gated(tokens, x[:, None, None]), case.dtype)
    for rates in ((1.0, 2.0), (0.0, 40.0)):
        check(tokens._replace(A_log=np.array(rates)), **keywords)
    for name, value in run(tokens._replace(A_log=np.array([-30.0, 100.0])), **keywords).items():
        assert np.isfinite(value).all(), name


def test_field_GR01_zero_rows_under_the_norm():
    tokens, keywords = raw(PACKED_SOFTPLUS)
    live = np.isin(np.arange(100), (0, 5, 6, 47, 99), invert=True)[:, None, None]
    check(tokens._replace(q=tokens.q * live, k=tokens.k * live), **keywords)


# --- Packing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [PACKED_SOFTPLUS, SEGMENTS], ids=lambda c: c.name)
def test_field_SV02_poisoned_padding_changes_nothing(case):
    tokens, keywords = raw(case)
    field_support.check_poisoned_padding_changes_nothing(run, tokens, **keywords)


def test_a_row_does_not_depend_on_the_others():
    """To the bit, whatever they hold."""
    tokens, keywords = raw(PACKED_SOFTPLUS)
    clean, other = (run(x, **keywords) for x in (tokens, poisoned(tokens, np.array([[False], [True]]), np.nan)))
    for name in clean.keys() - {"dA_log", "ddt_bias"}:
        np.testing.assert_array_equal(other[name][0], clean[name][0], err_msg=name)
        assert np.isnan(other[name][1]).any(), name


@pytest.mark.parametrize("kernel", [KERNELS[0], KERNELS[2]], ids=lambda kernel: kernel.name)
def test_field_SV01_boundary_inside_a_tile(kernel):
    """At a bounded gate driven to its ends, with a state per segment, where a boundary falls at 63, 1, 64 or 127."""
    tokens = field_support.from_end_to_end(base(11, 1, 128, 1, 64, 64, h0=False))
    tokens = tokens._replace(initial_state=0.5 * np.random.default_rng(2).standard_normal((1, 2, 1, 64, 64)))
    for boundary in (63, 1, 64, 127):
        ids = (np.arange(128) >= boundary)[None].astype(int)
        check(tokens, kernel.dtype, ids=ids, num_segments=2, **kernel.options)


def test_field_TL03_untouched_slots_are_exact():
    field_support.check_untouched_slots_are_exact(check)


def test_segments_without_a_state():
    field_support.check_segments_without_a_state(partial(check, dtype=jnp.bfloat16))


# --- Numerics: every case is a call of one of three programs -----------------------------------------------------


def field(seed) -> Tokens:
    return base(seed, 1, 256, 2, 64, 128)


CONSTANT = [
    (kernel, g) for kernel in KERNELS for g in (0.0, -1.4, -5.0, -5.5, -6.0, -60.0, -1e4, -np.inf)
    if g >= kernel.options.get("lower_bound", -np.inf)
]  # fmt: skip


@pytest.mark.parametrize("kernel, g", CONSTANT, ids=[f"{kernel.name}{g}" for kernel, g in CONSTANT])
def test_field_KN01_constant_gates(kernel, g):
    check(gated(field(0), g), kernel.dtype, **kernel.options)


@EACH
def test_field_KN02_fast_beside_slow_channels(kernel):
    fast, spike = (-5.0, -5.0) if kernel.options else (-20.0, -200.0)
    check(field_support.fast_beside_slow(field(2), fast), kernel.dtype, **kernel.options)
    budget = RESET_FORWARD if kernel.dtype == jnp.float32 else None
    check(field_support.spiked(field(2), spike), kernel.dtype, forward=budget, **kernel.options)


@pytest.mark.parametrize("case", field_support.RESETS, ids=lambda c: c.name)
def test_field_KN03_precision_after_resets(case):
    """Decays are multiplied, never subtracted as sums, so even resets keep the ordinary float32 budget."""
    check(field_support.reset(field(8), case))


@EACH
def test_field_KN04_nearly_parallel_keys(kernel):
    check(field_support.nearly_parallel(field(4)), kernel.dtype, **kernel.options)


def test_field_KN04_identical_keys_have_a_closed_form():
    tokens = one_key(rounded(field(5), jnp.float32))
    tokens = gated(written(tokens._replace(q=tokens.k), 1.0), 0.0)
    tokens = tokens._replace(initial_state=np.zeros_like(tokens.initial_state))
    out = run(tokens, jnp.float32)["output"]
    assert_close(out, 64**-0.5 * tokens.v, F32_FORWARD)


def test_field_KN05_strong_writes():
    """One repeated key at beta = 2 is as ill-conditioned as the recurrence gets."""
    tokens = field(1)
    check(gated(written(one_key(tokens), 2.0), 0.0), forward=5e-4, gradient=5e-4)
    check(gated(written(tokens, 1.9), -0.01))


@EACH
def test_field_GR02_gate_gradient_is_not_rounding_noise(kernel):
    tokens = field_support.orthogonal(field(4))
    result = run(tokens, kernel.dtype, dS=tokens.initial_state, **kernel.options)
    assert np.abs(result["dg"]).max() <= 1e-7
    check(gated(field(4), -0.1), kernel.dtype, **kernel.options)


@EACH
def test_field_GR04_gradients_of_the_state_alone(kernel):
    result, _ = check(field(13), kernel.dtype, do=np.zeros((1, 256, 2, 128)), **kernel.options)
    assert not result["dq"].any()


@EACH
def test_the_same_call_gives_the_same_bits(kernel):
    tokens = rounded(field(6), kernel.dtype)
    same_bits(*(run(tokens, kernel.dtype, **kernel.options) for _ in range(2)))


@EACH
def test_field_KN10_precision_does_not_depend_on_the_caller(kernel):
    """CPUs hide the precision of a dot, so it is read off the jaxpr.

    float32 inputs: HIGHEST. bf16 inputs: DEFAULT of two bf16 operands, which alone the TPU compiles.
    """
    tokens = [jnp.asarray(x, kernel.dtype if i < 5 else jnp.float32) for i, x in enumerate(field(3)[:6])]

    def loss(*a):
        out, state = tpu(*a[:5], initial_state=a[5], qk_l2norm=True, beta_sigmoid=True, **kernel.options)
        return out.astype(jnp.float32).sum() + state.sum()

    jaxprs = []
    for precision in (None, "bfloat16", "highest"):
        with jax.default_matmul_precision(precision):
            jaxprs.append(jax.make_jaxpr(jax.grad(loss, argnums=range(6)))(*tokens))
    assert str(jaxprs[0]) == str(jaxprs[1]) == str(jaxprs[2])
    dots = [e for e in equations(jaxprs[0].jaxpr) if e.primitive.name == "dot_general"]
    precision = jax.lax.Precision.HIGHEST if kernel.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    assert dots
    for e in dots:
        assert e.params["precision"] == (precision,) * 2
        assert {x.aval.dtype for x in e.invars} == {jnp.dtype(kernel.dtype)}, e
        assert e.outvars[0].aval.dtype == jnp.float32


@pytest.mark.parametrize("kernel", [KERNELS[0], KERNELS[2]], ids=lambda kernel: kernel.name)
def test_a_later_token_changes_no_earlier_output(kernel):
    """The second kernel is given segments as well."""
    tokens = rounded(base(10, 1, 140, 2, 64, 64, h0=False), kernel.dtype)
    segments = {"ids": (np.arange(140) >= 37)[None].astype(int), "num_segments": 2} if kernel.options else {}
    forward = partial(run, dtype=kernel.dtype, **segments, **kernel.options)
    lowest = kernel.options.get("lower_bound", -np.inf)
    field_support.check_a_later_token_changes_no_earlier_output(forward, tokens, (20, 40, 64, 90, 139), lowest)


def test_mixed_dtypes():
    """Raw bf16 q, k and v beside float32 g, beta and state: bf16's budget. Gradients have their input's dtype."""
    tokens = field(12)
    tokens = tokens._replace(q=3 * tokens.q, k=2 * tokens.k, beta=4 * tokens.beta - 2)

    field_support.check_float32_gates_beside_bfloat16_tokens(tpu, tokens, **NORMS)

    def results(arrays):
        return jax.vjp(lambda arrays: tuple(tpu(*arrays[:5], initial_state=arrays[5])), arrays)

    for low in ((0, 1, 2), (3, 4, 5), (2,)):
        arrays = [jnp.asarray(x, jnp.bfloat16 if i in low else jnp.float32) for i, x in enumerate(tokens[:6])]
        (out, state), vjp = jax.eval_shape(results, arrays)
        assert out.dtype == arrays[2].dtype and state.dtype == jnp.float32
        (gradients,) = jax.eval_shape(lambda vjp, *d: vjp(d), vjp, out, state)
        assert [x.dtype for x in gradients] == [x.dtype for x in arrays]
