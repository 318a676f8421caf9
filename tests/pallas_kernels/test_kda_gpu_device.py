"""The Hopper kernels on a Hopper GPU against the float64 scan: `pytest -m gpu -n0`, skipped where there is none.

Every gradient is compared on its own. How the kernels lower and compile is the matter of test_kda_gpu_compile.py.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kda, kda_reference, kda_step, which_backend
from tests.pallas_kernels import field_support, kda_support
from tests.pallas_kernels.field_support import Fused, gated, same_bits
from tests.pallas_kernels.kda_support import BOUNDED, SOFTPLUS, Tokens, base, rounded
from tests.support import assert_close

pytestmark = pytest.mark.gpu

BF16 = jnp.bfloat16
gpu = partial(kda, backend="mosaic_gpu")
check = partial(kda_support.check, dtype=BF16, backend="mosaic_gpu")
run = partial(kda_support.run, kda, dtype=BF16, backend="mosaic_gpu")

PROMISED = {"lower_bound": -5.0}
EACH = pytest.mark.parametrize("options", [{}, PROMISED], ids=["any_gate", "bounded"])


@pytest.fixture(autouse=True)
def hopper():
    """Memory that a kernel is given and does not write holds NaN."""
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) != "9.0":
        pytest.skip(f"runs on a Hopper GPU, not on a {device.device_kind}")
    jnp.full((1 << 28,), jnp.nan).block_until_ready().delete()


def spread(seed, tokens: Tokens, lowest=-np.inf) -> Tokens:
    """Log-decays from -0.002 to -20 a step, not below lowest."""
    return gated(tokens, np.maximum(lowest, -np.exp(np.random.default_rng(seed).uniform(-6, 3, tokens.g.shape))))


# --- Shapes and activations --------------------------------------------------------------------------------------


class Shape(NamedTuple):
    name: str
    T: int
    B: int = 1
    H: int = 2
    HV: int = 2
    K: int = 128
    V: int = 128
    state: bool = True


SHAPES = [
    Shape("whole_chunks", 256, B=2),
    Shape("one_token", 1),
    Shape("under_a_chunk", 63, K=64, V=64),
    Shape("one_over", 65, state=False),
    Shape("small_keys", 130, K=64),
    Shape("small_values", 130, V=64),
    Shape("two_on_six", 193, B=2, HV=6),
    Shape("one_on_three", 100, H=1, HV=3, K=64, V=64),
    Shape("thirteen", 70, H=13, HV=13),
]


@EACH
@pytest.mark.parametrize("case", SHAPES, ids=lambda c: c.name)
def test_shapes(case, options):
    tokens = base(case.T, case.B, case.T, case.H, case.K, case.V, case.HV, case.state)
    check(spread(1, tokens, options.get("lower_bound", -np.inf)), **options)


PACKED = np.where(np.arange(200) % 37 == 3, -1, np.arange(200) // 70) * np.ones((2, 1), int)  # 0, 1 and 2


ACTIVATIONS = [
    Fused("softplus", SOFTPLUS),
    Fused("bounded", BOUNDED),
    Fused("bounded_beyond_a_tile", BOUNDED | {"lower_bound": -20.0}),
    Fused("softplus_own_keys", SOFTPLUS, H=2),
    Fused("bounded_own_keys", BOUNDED, H=2),
    Fused("softplus_packed", SOFTPLUS, packed=True),
    Fused("bounded_packed", BOUNDED, packed=True),
    Fused("softplus_segments", SOFTPLUS | {"num_segments": 4}, packed=True),
    Fused("bounded_segments", BOUNDED | {"num_segments": 4}, packed=True),
]


def raw(case: Fused, K: int = 128) -> tuple[Tokens, dict]:
    """Whole chunks unless packed: of others the gate is activated before the kernels."""
    return field_support.raw(case, K, PACKED if case.packed else PACKED[:, :192])


@pytest.mark.parametrize("case", ACTIVATIONS, ids=lambda c: c.name)
def test_fused_activations(case):
    """Raw logits, norm and sigmoid inside, with gradients of A_log and dt_bias."""
    tokens, keywords = raw(case)
    check(tokens, **keywords)


@pytest.mark.parametrize("case", ACTIVATIONS[2:5], ids=lambda c: c.name)
def test_fused_activations_of_small_heads(case):
    tokens, keywords = raw(case, K=64)
    check(tokens, **keywords)


@pytest.mark.parametrize("case", ACTIVATIONS[:2], ids=lambda c: c.name)
def test_gate_gradients_at_extreme_logits(case):
    """Finite at any logit and rate, and right where the gate is one that trains."""
    x = np.resize(field_support.EXTREME_LOGITS, 192)
    tokens, keywords = raw(case)
    tokens = rounded(gated(tokens, x[:, None, None]), BF16)
    check(tokens._replace(A_log=np.array([0.0, 2.0])), **keywords)
    for name, value in run(tokens._replace(A_log=np.array([-30.0, 100.0])), **keywords).items():
        assert np.isfinite(value).all(), name


def test_float32_gates_beside_bfloat16_tokens():
    field_support.check_float32_gates_beside_bfloat16_tokens(gpu, spread(3, base(12, 1, 130, 2, 128, 128)))


# --- Packing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ACTIVATIONS[5:], ids=lambda c: c.name)
def test_field_SV02_poisoned_padding_changes_nothing(case):
    tokens, keywords = raw(case)
    field_support.check_poisoned_padding_changes_nothing(run, tokens, **keywords)


@EACH
@pytest.mark.parametrize("num_segments", [None, 2])
def test_field_SV01_boundary_inside_a_tile(num_segments, options):
    """At gates from 0 to -5, where a boundary falls at 63, 1, 64 or 127."""
    tokens = field_support.from_end_to_end(base(11, 1, 128, 1, 64, 64))
    if num_segments:
        states = 0.5 * np.random.default_rng(2).standard_normal((1, 2, 1, 64, 64))
        tokens = tokens._replace(initial_state=states)
    for boundary in (63, 1, 64, 127):
        ids = (np.arange(128) >= boundary)[None].astype(int)
        check(tokens, ids=ids, num_segments=num_segments, **options)


def test_untouched_slots_are_exact():
    field_support.check_untouched_slots_are_exact(check)


def test_segments_without_a_state():
    field_support.check_segments_without_a_state(check)


# --- Numerics: all cases are calls of two programs ---------------------------------------------------------------


def field(seed) -> Tokens:
    return base(seed, 1, 256, 2, 128, 128)


CONSTANT = [(g, options) for g in (0.0, -1.4, -5.0, -6.0, -60.0, -1e4, -np.inf) for options in ({}, PROMISED)
            if g >= options.get("lower_bound", -np.inf)]  # fmt: skip


@pytest.mark.parametrize("g, options", CONSTANT, ids=[f"{g}{'_bounded' * bool(options)}" for g, options in CONSTANT])
def test_field_KN01_constant_gates(g, options):
    check(gated(field(0), g), **options)


@EACH
def test_field_KN02_fast_beside_slow_channels(options):
    fast, spike = (-5.0, -5.0) if options else (-20.0, -200.0)
    check(field_support.fast_beside_slow(field(2), fast), **options)
    check(field_support.spiked(field(2), spike), **options)


@pytest.mark.parametrize("case", field_support.RESETS, ids=lambda c: c.name)
def test_field_KN03_precision_after_resets(case):
    check(field_support.reset(field(8), case))


@EACH
def test_field_KN04_nearly_parallel_keys(options):
    check(field_support.nearly_parallel(field(4)), **options)


@EACH
def test_field_KN05_strong_writes(options):
    check(gated(field_support.written(field(1), 1.9), -0.01), **options)


@EACH
def test_field_GR02_gate_gradient_is_not_rounding_noise(options):
    tokens = field_support.orthogonal(field(4))
    assert np.abs(run(tokens, dS=tokens.initial_state, **options)["dg"]).max() <= 1e-7


@EACH
def test_field_GR04_gradients_of_the_state_alone_and_of_the_output_alone(options):
    result, _ = check(field(13), do=np.zeros((1, 256, 2, 128)), **options)
    assert not result["dq"].any()
    check(field(13), dS=np.zeros((1, 2, 128, 128)), **options)


@EACH
def test_few_heads_and_a_long_sequence(options):
    """What is written first is still read last: a thousand tokens lose a factor of e."""
    tokens = base(6, 1, 8192, 1, 128, 128)
    g = -np.random.default_rng(4).uniform(0.0, 0.002, tokens.g.shape)
    check(gated(tokens, g), **options)


# --- To the bit --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ACTIVATIONS, ids=lambda c: c.name)
def test_the_same_call_gives_the_same_bits(case):
    tokens, keywords = raw(case)
    first = run(tokens, **keywords)
    for _ in range(3):
        same_bits(run(tokens, **keywords), first)


@pytest.mark.parametrize("T, H", [(4096, 8), (16384, 2)], ids=["many_programs", "cut"])
def test_many_programs_give_the_same_bits(T, H):
    """More programs than run at once, in whatever order; or a sequence cut into pieces."""
    tokens = gated(rounded(base(14, 1, T, H, 128, 128), BF16), -0.01)
    first = run(tokens)
    for _ in range(5):
        same_bits(run(tokens), first)


@EACH
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_later_token_changes_no_earlier_output(packed, options):
    tokens = rounded(base(10, 1, 200, 2, 128, 128, h0=False), BF16)
    segments = {"ids": (np.arange(200) >= 37)[None].astype(int), "num_segments": 2} if packed else {}
    field_support.check_a_later_token_changes_no_earlier_output(
        partial(run, **segments, **options),
        tokens,
        (1, 20, 40, 64, 90, 127, 128, 199),
        options.get("lower_bound", -np.inf),
    )


@pytest.mark.parametrize("case", [ACTIVATIONS[0], ACTIVATIONS[4], ACTIVATIONS[7]], ids=lambda c: c.name)
def test_a_row_does_not_depend_on_the_others(case):
    """Whatever they hold, and however many there are."""
    tokens, keywords = raw(case)
    r = np.random.default_rng(99)
    weights = {"do": r.standard_normal(tokens.v.shape)}
    weights["dS"] = r.standard_normal(tokens.initial_state.shape)
    clean = run(tokens, **keywords, **weights)
    poisoned = Tokens(*(np.concatenate([x[:1], x[1:] * np.nan]) for x in tokens[:6]), *tokens[6:])
    other = run(poisoned, **keywords, **weights)
    first = lambda x: x[:1]  # noqa: E731
    alone = run(
        Tokens(*map(first, tokens[:6]), *tokens[6:]),
        **keywords | {"ids": None if keywords["ids"] is None else first(keywords["ids"])},
        **{n: first(x) for n, x in weights.items()},
    )
    for name in clean.keys() - {"dA_log", "ddt_bias"}:
        np.testing.assert_array_equal(other[name][0], clean[name][0], err_msg=name)
        np.testing.assert_array_equal(alone[name][0], clean[name][0], err_msg=name)
        assert np.isnan(other[name][1]).any(), name


# --- Transformations, decoding, dispatch -------------------------------------------------------------------------


def test_vmap_is_the_calls_one_by_one():
    """Over tokens and gate parameters, with gradients; the second call's tokens are the first's in reverse."""
    tokens, _ = raw(ACTIVATIONS[0])
    arrays = [jnp.asarray(x, BF16 if i < 5 else jnp.float32) for i, x in enumerate(tokens)]

    def both(*a):
        call = lambda *a: tuple(gpu(*a[:5], initial_state=a[5], A_log=a[6], dt_bias=a[7], **SOFTPLUS))  # noqa: E731
        outputs, vjp = jax.vjp(call, *a)
        return outputs, vjp(outputs)

    second = [x[:, ::-1] if i < 5 else x + 0.1 for i, x in enumerate(arrays)]
    got = jax.jit(jax.vmap(both))(*(jnp.stack(pair) for pair in zip(arrays, second, strict=True)))
    one = jax.jit(both)
    for i, call in enumerate((arrays, second)):
        for x, ref in zip(jax.tree.leaves(got), jax.tree.leaves(one(*call)), strict=True):
            assert_close(x[i].astype(jnp.float32), ref.astype(jnp.float32), 1e-2)


@pytest.mark.parametrize("slots", [None, [5, -1, 0]], ids=["rows", "pool"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
def test_steps_continue_a_sequence(slots, dtype):
    """Six steps from the state of 70 tokens give what the sequence of 76 gives; padded rows touch nothing."""
    tokens = rounded(base(21, 3, 76, 2, 128, 128, HV=4, h0=False), dtype)
    arrays = [jnp.asarray(x, dtype) for x in tokens[:5]]
    reference = kda_support.run(kda_reference, tokens, jnp.float64, gradients=False)
    state = kda_reference(*(x[:, :70] for x in arrays)).state
    if slots:
        pool = jnp.full((6, *state.shape[1:]), jnp.nan)
        state, slots = pool.at[jnp.array([5, 0])].set(state[jnp.array([0, 2])]), jnp.array(slots)
    rows = [0, 1, 2] if slots is None else [0, 2]
    step = jax.jit(partial(kda_step, backend="mosaic_gpu"), donate_argnums=5)
    for t in range(70, 76):
        output, state = step(*(x[:, t] for x in arrays), state, slots=slots)
        assert_close(output[jnp.array(rows)], reference["output"][rows, t], 1e-2 if dtype == BF16 else 2e-5)
    places = jnp.array(rows if slots is None else [5, 0])
    assert_close(state[places], reference["state"][rows], 1e-2 if dtype == BF16 else 2e-5)
    if slots is not None:
        assert not output[1].any() and jnp.isnan(state[1:5]).all()


def test_the_card_chooses_the_kernels():
    x = jnp.ones((1, 70, 2, 128), BF16)
    assert which_backend("kda", x, x, x, x, x[..., 0]) == "mosaic_gpu"
    assert which_backend("kda_step", *(x[:, 0],) * 4, x[:, 0, :, 0], jnp.ones((1, 2, 128, 128))) == "mosaic_gpu"
    wide = x.astype(jnp.float32)
    assert which_backend("kda", wide, wide, wide, wide, wide[..., 0]) == "xla"
    with pytest.raises(NotImplementedError, match="q is float32 and the kernel multiplies in 16 bits"):
        gpu(wide, wide, wide, wide * 0, wide[..., 0])
