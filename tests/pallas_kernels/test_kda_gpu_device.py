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
from tests.pallas_kernels import kda_support
from tests.pallas_kernels.kda_support import Tokens, base, correlated_keys, rounded
from tests.support import BF16_FORWARD, BF16_GRADIENT, assert_close

pytestmark = pytest.mark.gpu

BF16 = jnp.bfloat16
gpu = partial(kda, backend="mosaic_gpu")
check = partial(kda_support.check, dtype=BF16, backend="mosaic_gpu")
run = partial(kda_support.run, kda, dtype=BF16, backend="mosaic_gpu")

FUSED = {"qk_l2norm": True, "beta_sigmoid": True}
SOFTPLUS = {"gate": "softplus", **FUSED}
BOUNDED = {"gate": "bounded", "lower_bound": -5.0, **FUSED}
PROMISED = {"lower_bound": -5.0}
EACH = pytest.mark.parametrize("options", [{}, PROMISED], ids=["any_gate", "bounded"])


@pytest.fixture(autouse=True)
def hopper():
    """Memory that a kernel is given and does not write holds NaN."""
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) != "9.0":
        pytest.skip(f"runs on a Hopper GPU, not on a {device.device_kind}")
    jnp.full((1 << 28,), jnp.nan).block_until_ready().delete()


def gated(tokens: Tokens, g) -> Tokens:
    return tokens._replace(g=np.broadcast_to(np.asarray(g, np.float64), tokens.g.shape).copy())


def spread(seed, tokens: Tokens, lowest=-np.inf) -> Tokens:
    """Log-decays from -0.002 to -20 a step, not below lowest."""
    return gated(tokens, np.maximum(lowest, -np.exp(np.random.default_rng(seed).uniform(-6, 3, tokens.g.shape))))


def same_bits(results, others):
    assert results.keys() == others.keys()
    for name, value in results.items():
        np.testing.assert_array_equal(value, others[name], err_msg=name)


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


class Fused(NamedTuple):
    name: str
    options: dict
    packed: bool = False


ACTIVATIONS = [
    Fused("softplus", SOFTPLUS),
    Fused("bounded", BOUNDED),
    Fused("bounded_beyond_a_tile", BOUNDED | {"lower_bound": -20.0}),
    Fused("softplus_packed", SOFTPLUS, packed=True),
    Fused("bounded_packed", BOUNDED, packed=True),
    Fused("softplus_segments", SOFTPLUS | {"num_segments": 4}, packed=True),
    Fused("bounded_segments", BOUNDED | {"num_segments": 4}, packed=True),
]


def raw(case: Fused) -> tuple[Tokens, dict]:
    """Two rows of logits with HV = 2H, rounded, and the keywords of their call."""
    r = np.random.default_rng(7)
    tokens = base(7, 2, 200, 1, 128, 128, HV=2)
    if "num_segments" in case.options:
        tokens = tokens._replace(initial_state=0.1 * r.standard_normal((2, 4, 2, 128, 128)))
    beta, g = r.standard_normal(tokens.beta.shape), 2 * r.standard_normal(tokens.g.shape)
    parameters = {"A_log": np.log1p(np.arange(2)), "dt_bias": r.standard_normal((2, 128))}
    tokens = tokens._replace(q=3 * tokens.q, k=2 * tokens.k, beta=beta, g=g, **parameters)
    return rounded(tokens, BF16), {"ids": PACKED if case.packed else None, **case.options}


@pytest.mark.parametrize("case", ACTIVATIONS, ids=lambda c: c.name)
def test_fused_activations(case):
    """Raw logits, norm and sigmoid inside, with gradients of A_log and dt_bias."""
    tokens, keywords = raw(case)
    check(tokens, **keywords)


@pytest.mark.parametrize("case", ACTIVATIONS[:2], ids=lambda c: c.name)
def test_gate_gradients_at_extreme_logits(case):
    """Finite at any logit and rate, and right where the gate is one that trains."""
    x = np.resize([0, 1e-8, -1e-8, 20, -20, 88.5, -88.5, 104, -104, 1e4, -1e4, 3e38, -3e38], 200)
    tokens, keywords = raw(case)
    tokens = rounded(gated(tokens, x[:, None, None]), BF16)
    check(tokens._replace(A_log=np.array([0.0, 2.0])), **keywords)
    for name, value in run(tokens._replace(A_log=np.array([-30.0, 100.0])), **keywords).items():
        assert np.isfinite(value).all(), name


def test_float32_gates_beside_bfloat16_tokens():
    """g, beta and the state in float32 are not rounded on the way."""

    def mixed(q, k, v, g, beta, **options):
        return gpu(*(x.astype(BF16) for x in (q, k, v)), g, beta, **options)

    tokens = spread(3, base(12, 1, 130, 2, 128, 128))
    tokens = tokens._replace(**{n: getattr(rounded(tokens, BF16), n) for n in "qkv"})
    tokens = rounded(tokens, jnp.float32)
    result = kda_support.run(mixed, tokens, jnp.float32)
    reference = kda_support.run(kda_reference, tokens, jnp.float64)
    for name, value in result.items():
        assert_close(value, reference[name], BF16_FORWARD if name in ("output", "state") else BF16_GRADIENT, name)


# --- Packing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ACTIVATIONS[3:], ids=lambda c: c.name)
def test_field_SV02_poisoned_padding_changes_nothing(case):
    tokens, keywords = raw(case)
    clean = run(tokens, **keywords)
    for poison in (np.nan, 1e30, np.inf):
        where = lambda x: (PACKED < 0).reshape(2, 200, *[1] * (x.ndim - 2))  # noqa: B023, E731
        poisoned = Tokens(*(np.where(where(x), poison, x) for x in tokens[:5]), *tokens[5:])
        same_bits(run(poisoned, **keywords), clean)
    for name in ("output", "dq", "dk", "dv", "dg", "dbeta"):
        assert not clean[name][PACKED < 0].any(), name


@EACH
@pytest.mark.parametrize("num_segments", [None, 2])
def test_field_SV01_boundary_inside_a_tile(num_segments, options):
    """At gates from 0 to -5, where a boundary falls at 63, 1, 64 or 127."""
    tokens = base(11, 1, 128, 1, 64, 64)
    tokens = gated(tokens, -5 / (1 + np.exp(-12 * np.random.default_rng(1).standard_normal(tokens.g.shape))))
    if num_segments:
        states = 0.5 * np.random.default_rng(2).standard_normal((1, 2, 1, 64, 64))
        tokens = tokens._replace(initial_state=states)
    for boundary in (63, 1, 64, 127):
        ids = (np.arange(128) >= boundary)[None].astype(int)
        check(tokens, ids=ids, num_segments=num_segments, **options)


def test_untouched_slots_are_exact():
    """5 of 8 segments have tokens; the others pass their state and its cotangent to the bit."""
    tokens = base(31, 1, 100, 2, 64, 64)
    ids = np.repeat([1, 2, -1, 4, 5, 7], [5, 64, 3, 1, 20, 7])[None]
    states = np.random.default_rng(3).standard_normal((1, 8, 2, 64, 64)).astype(np.float32).astype(np.float64)
    dS = np.random.default_rng(4).standard_normal(states.shape).astype(np.float32)
    result, _ = check(tokens._replace(initial_state=states), ids=ids, num_segments=8, dS=dS)
    for absent in (0, 3, 6):
        np.testing.assert_array_equal(result["state"][:, absent], states[:, absent])
        np.testing.assert_array_equal(result["dinitial_state"][:, absent], dS[:, absent])


def test_segments_without_a_state():
    """With a row that is padding alone; a segment without tokens ends in zeros."""
    ids = np.stack([np.where(np.arange(70) < 30, 0, 2), np.full(70, -1)])
    result, _ = check(base(33, 2, 70, 1, 64, 64, HV=2, h0=False), ids=ids, num_segments=3)
    assert not result["state"][0, 1].any() and not result["state"][1].any()
    assert all(not value[1].any() for value in result.values())


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
    check(gated(field(2), np.where(np.arange(128) % 2, -0.01, fast)), **options)
    g = np.full((256, 1, 1), -0.02)
    g[70] = spike
    check(gated(field(2), g), **options)


@pytest.mark.parametrize("per_channel", [False, True], ids=["token", "channel"])
def test_field_KN03_precision_after_resets(per_channel):
    hit = np.random.default_rng(8).random((1, 256, 1, 128 if per_channel else 1)) < (0.1 if per_channel else 0.5)
    check(gated(field(8), np.where(hit, -1000.0, -0.05)))


@EACH
def test_field_KN04_nearly_parallel_keys(options):
    tokens = field(4)
    k = correlated_keys(4, tokens.k.shape)
    g = -np.random.default_rng(4).uniform(0.0121, 0.0341, tokens.g.shape)
    check(gated(tokens._replace(k=k, beta=np.ones_like(tokens.beta)), g), **options)


@EACH
def test_field_KN05_strong_writes(options):
    tokens = field(1)
    check(gated(tokens._replace(beta=np.full_like(tokens.beta, 1.9)), -0.01), **options)


@EACH
def test_field_GR02_gate_gradient_is_not_rounding_noise(options):
    """Orthogonal keys that are forgotten before they come again: nothing depends on the gates."""
    eye = np.tile(np.eye(128), (2, 1))[None, :, None, :].repeat(2, axis=2)
    zeros = np.zeros((1, 2, 128, 128))
    tokens = gated(field(4)._replace(q=eye, k=eye, initial_state=zeros), -5.0)
    assert np.abs(run(tokens, dS=zeros, **options)["dg"]).max() <= 1e-7


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


@EACH
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_later_token_changes_no_earlier_output(packed, options):
    """No rounding anchor lies in the future."""
    tokens = rounded(base(10, 1, 200, 2, 128, 128, h0=False), BF16)
    segments = {"ids": (np.arange(200) >= 37)[None].astype(int), "num_segments": 2} if packed else {}
    forward = partial(run, gradients=False, **segments, **options)
    before = forward(tokens)["output"]
    for t in (1, 20, 40, 64, 90, 127, 128, 199):
        changed = Tokens(*(None if x is None else x.copy() for x in tokens))
        for x in changed[:5]:
            x[:, t] *= 1e3
        after = forward(changed._replace(g=np.maximum(changed.g, options.get("lower_bound", -np.inf))))["output"]
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).any()


@pytest.mark.parametrize("case", [ACTIVATIONS[0], ACTIVATIONS[1], ACTIVATIONS[5]], ids=lambda c: c.name)
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
