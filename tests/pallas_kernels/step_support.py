"""What every machine's decode kernel is held to: tokens of each kind, padded pools, vmap and meshes, against float64.

`step` is the machine's kernel with its interpreter, called as `step_token` is.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels import kda_reference
from pallas_kernels.kda.step import step_token
from tests.pallas_kernels.kda_support import QUICK, base, rounded, run
from tests.support import BF16_FORWARD, F32_FORWARD, assert_close

STRONG = np.array([-1000.0, -20.0, -0.01, 0.0, -np.inf])
LOG = ("log", None, None, None, False, False)  # activations
SCALE = 0.3


def token(seed, B, H, K, V, HV=None, *, P=None, dtype=jnp.float32, state_dtype=jnp.float32):
    """q, k, v, g, beta of one token and P (or B) states that tell K from V and slot from slot."""
    r = np.random.default_rng(seed)
    tokens = base(seed, B, 1, H, K, V, HV)
    state = r.standard_normal((P or B, HV or H, K, V)) + np.linspace(-1, 1, K)[:, None]
    return (*(jnp.asarray(x[:, 0], dtype) for x in tokens[:5]), jnp.asarray(state, state_dtype))


def expected(arrays, slots=None, *, activations=LOG):
    """`step_token` of the same values in float64."""
    with jax.enable_x64(True):
        wide = lambda x: jnp.asarray(np.asarray(x, np.float64)) if hasattr(x, "shape") else x  # noqa: E731
        arrays, activations = tuple(map(wide, arrays)), tuple(map(wide, activations))
        slots = None if slots is None else jnp.asarray(slots)
        out, state = step_token(*arrays, scale=SCALE, slots=slots, activations=activations)
        return np.asarray(out), np.asarray(state)


def jitted(step, activations=LOG):
    """A program of (*arrays, slots=slots); slots are traced."""
    return jax.jit(partial(step, scale=SCALE, activations=activations), compiler_options=QUICK)


def check(step, arrays, slots=None, *, activations=LOG):
    """Output and states of the kernel, which are those of float64."""
    out, new = jitted(step, activations)(*arrays, slots=slots)
    assert_both(out, new, expected(arrays, slots, activations=activations))
    return out, new


def assert_both(out, new, want, output=F32_FORWARD, states=F32_FORWARD):
    assert_close(out, want[0], output, "output")
    assert_close(new, want[1], states, "states")


# --- One token ---------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    name: str
    B: int = 1
    H: int = 2
    HV: int = 2
    K: int = 64
    V: int = 64
    gate: str = "log"
    fused: bool = False
    strong: bool = False
    dtype: type = jnp.float32
    state_dtype: type = jnp.float32


CASES = [  # each machine adds those of its own blocks
    Case("one_row"),
    Case("softplus", B=3, HV=6, V=128, gate="softplus", fused=True),
    Case("softplus_bfloat16", B=2, HV=4, K=128, gate="softplus", fused=True, dtype=jnp.bfloat16),
    Case("bounded_bfloat16", B=5, H=1, HV=3, gate="bounded", fused=True, dtype=jnp.bfloat16),
    Case("bfloat16_state", B=3, H=2, HV=4, dtype=jnp.bfloat16, state_dtype=jnp.bfloat16),
]


def check_one_token(step, case: Case):
    """float32 arithmetic whatever the inputs are stored in: only an output or state in bfloat16 is rounded to it."""
    r = np.random.default_rng(3)
    arrays = list(token(1, case.B, case.H, case.K, case.V, case.HV, dtype=case.dtype, state_dtype=case.state_dtype))
    A_log = dt_bias = None
    if case.strong:
        arrays[3] = jnp.asarray(r.choice(STRONG, arrays[3].shape), case.dtype)
    if case.gate != "log":
        arrays[3] = jnp.asarray(4 * r.standard_normal(arrays[3].shape), case.dtype)
        A_log, dt_bias = (jnp.asarray(r.standard_normal(n), jnp.float32) for n in (case.HV, (case.HV, case.K)))
    if case.fused:
        arrays[0], arrays[1], arrays[4] = 3 * arrays[0], 5 * arrays[1], 2 * arrays[4] - 1
    lower_bound = -5.0 if case.gate == "bounded" else None
    activations = (case.gate, A_log, dt_bias, lower_bound, case.fused, case.fused)
    out, state = jitted(step, activations)(*arrays, slots=None)
    assert (out.dtype, state.dtype) == (case.dtype, case.state_dtype)
    tolerance = {jnp.float32: F32_FORWARD, jnp.bfloat16: BF16_FORWARD}
    want = expected(arrays, activations=activations)
    assert_both(out, state, want, tolerance[case.dtype], tolerance[case.state_dtype])


def check_softplus_of_every_size_of_logit(step):
    """Decays of logits from -100 to 100 under a fast rate are those of float64: log(1 + e^y) loses no digit."""
    logits = np.linspace(-100, 100, 256).reshape(2, 2, 64)
    arrays = list(token(2, 2, 2, 64, 64))
    arrays[3], arrays[4] = jnp.asarray(logits, jnp.float32), jnp.zeros((2, 2))  # nothing written: S is its decay
    arrays[5] = jnp.ones_like(arrays[5])
    activations = ("softplus", jnp.full(2, 9.0), jnp.zeros((2, 64)), None, False, False)
    _, state = jitted(step, activations)(*arrays, slots=None)
    _, want = expected(arrays, activations=activations)
    assert np.count_nonzero((want > 0.01) & (want < 0.99)) > 5 * 64
    np.testing.assert_allclose(state, want, rtol=0, atol=3e-6)


def check_steps_are_a_sequence(step):
    """Six tokens one by one are the float64 scan over them, in output and state."""
    tokens = rounded(base(5, 2, 6, 1, 64, 64, HV=2), jnp.float32)
    reference = run(kda_reference, tokens, jnp.float64, gradients=False)

    def one(state, arrays):
        out, state = step(*arrays, state, scale=64**-0.5, slots=None, activations=LOG)
        return state, out

    rows_last = [jnp.moveaxis(jnp.asarray(x, jnp.float32), 1, 0) for x in tokens[:5]]
    state, out = jax.jit(partial(jax.lax.scan, one), compiler_options=QUICK)(
        jnp.asarray(tokens.initial_state, jnp.float32), rows_last
    )
    assert_both(jnp.moveaxis(out, 0, 1), state, (reference["output"], reference["state"]))


# --- Pools -------------------------------------------------------------------------------------------------------


class Pads(NamedTuple):
    name: str
    slots: np.ndarray


PADS = [
    Pads("minus_one", np.array([3, -1, -1, 0, -1, -1, -1, -1], np.int32)),
    Pads("first_and_last", np.array([-1, -1, 3, -1, -1, 0, -1, -1], np.int32)),
    Pads("other_negatives", np.array([-2, 3, -(2**31), -5, 0, -4, -3, -2], np.int32)),
    Pads("past_the_pool", np.array([0, 4, 4, 2**31 - 1, 3, 5, 4, 4], np.int32)),
    Pads("unsigned", np.array([0, 255, 4, 255, 3, 255, 4, 4], np.uint8)),
    Pads("all", np.full(8, -1, np.int32)),
]


def check_padded_rows_touch_nothing(pooled, case: Pads):
    """Live slots 0 and 3 of 4 in a batch padded to 8: the others stay to the bit, even if the pad rows are NaN.

    pooled is `jitted`, once for all cases: those that have slots of one type share its compilation.
    """
    live = np.isin(case.slots, (0, 3))
    *arrays, pool = token(7, 8, 1, 64, 64, 2, P=4)
    arrays = [x.at[~live].set(jnp.nan) for x in arrays]
    out, new = pooled(*arrays, pool, slots=case.slots)
    still = [i for i in range(4) if i not in case.slots[live]]
    np.testing.assert_array_equal(new[np.array(still)], pool[np.array(still)])
    np.testing.assert_array_equal(out[~live], np.zeros_like(out[~live]))
    assert_both(out, new, expected((*arrays, pool), case.slots))
    assert all(not np.array_equal(new[i], pool[i]) for i in case.slots[live])


def check_no_rows_and_no_slots(step):
    arrays = token(9, 0, 1, 64, 64, P=3)
    out, new = step(*arrays, scale=1.0, slots=jnp.zeros(0, jnp.int32), activations=LOG)
    assert out.shape == (0, 1, 64) and new is arrays[5]
    arrays = token(9, 2, 1, 64, 64)
    out, new = step(*arrays[:5], arrays[5][:0], scale=1.0, slots=jnp.zeros(2, jnp.int32), activations=LOG)
    np.testing.assert_array_equal(out, np.zeros((2, 1, 64)))
    assert new.shape == (0, 1, 64, 64)


# --- Transformations ---------------------------------------------------------------------------------------------


class Mapped(NamedTuple):
    name: str
    slots: np.ndarray | None
    shared: bool


MAPPED = [
    Mapped("states", None, False),
    Mapped("pools", np.array([[3, -1, 0], [1, 3, 4]], np.int32), False),
    Mapped("one_pool", np.array([[3, -1, 0], [1, 3, 4]], np.int32), True),
]


def check_vmap(step, case: Mapped):
    """A batch of calls is each call, whether every call has states or a pool of its own or all start from one."""
    calls = [token(20 + i, 3, 1, 64, 64, 2, P=3 if case.slots is None else 4) for i in range(2)]
    arrays = [jnp.stack(x) for x in zip(*calls, strict=True)]
    axes = (0,) * 5 + (None if case.shared else 0,)
    arrays[5] = calls[0][5] if case.shared else arrays[5]
    call = partial(step, scale=SCALE, activations=LOG)
    mapped = jax.vmap(lambda arrays, slots: call(*arrays, slots=slots), in_axes=(axes, 0))
    out, new = jax.jit(mapped, compiler_options=QUICK)(tuple(arrays), case.slots)
    for i, one in enumerate(calls):
        slots = None if case.slots is None else case.slots[i]
        assert_both(out[i], new[i], expected((*one[:5], calls[0][5] if case.shared else one[5]), slots))


def check_vmap_over_parameters_of_the_gate(step):
    arrays = token(23, 2, 1, 64, 64)
    A_log = jnp.array([[0.5], [-1.0]])
    bounded = lambda A_log: ("bounded", A_log, jnp.ones((1, 64)), -5.0, False, False)  # noqa: E731
    call = lambda A_log: step(*arrays, scale=SCALE, slots=None, activations=bounded(A_log))  # noqa: E731
    out, new = jax.jit(jax.vmap(call), compiler_options=QUICK)(A_log)
    for i in range(2):
        assert_both(out[i], new[i], expected(arrays, activations=bounded(A_log[i])))


def check_shard_map(step, pools: bool, check_vma=True):
    """Rows and heads over four devices, each with the slots of its own pool."""
    arrays = token(24, 4, 2, 64, 64, 4)
    own, of_all = (np.array(x, np.int32) for x in ([1, -1, 0, 1], [1, -1, 2, 3])) if pools else (None, None)
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    split = PartitionSpec("rows", "heads")
    call = lambda arrays, slots: step(*arrays, scale=SCALE, slots=slots, activations=LOG)  # noqa: E731
    specs = ((split,) * 6, PartitionSpec("rows"))
    sharded = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=(split, split), check_vma=check_vma)
    out, new = jax.jit(sharded, compiler_options=QUICK)(arrays, own)
    assert_both(out, new, expected(arrays, of_all))


def check_x64_changes_nothing(step, dtype):
    """Indices and words stay 32 bits wide where jax's default is 64; slots are narrowed after they are checked."""
    arrays, slots = token(25, 4, 1, 64, 64, dtype=dtype), np.array([2, -1, 0, 2**32], np.int64)
    with jax.enable_x64(True):
        out, new = jitted(step)(*arrays, slots=slots)
    assert (out.dtype, new.dtype) == (dtype, jnp.float32)
    want = expected(arrays, np.array([2, -1, 0, -1]))
    assert_both(out, new, want, F32_FORWARD if dtype == jnp.float32 else BF16_FORWARD)


# --- Programs to lower and compile -------------------------------------------------------------------------------


class Decode(NamedTuple):
    B: int
    H: int
    HV: int
    K: int
    V: int
    P: int | None
    gate: str
    state_dtype: str
    dtype: str = "bfloat16"


def decode_program(step, decode: Decode, array=jax.ShapeDtypeStruct):
    """A jitted step that donates its state, all activations fused, and its arguments: state, tokens, slots, parameters.

    array makes one of a shape and a dtype.
    """
    B, H, HV, K, V, P, gate, state_dtype, dtype = decode
    tokens = [array((B, *s), dtype) for s in ((H, K), (H, K), (HV, V), (HV, K), (HV,))]
    state = array((P or B, HV, K, V), state_dtype)
    slots = array((B,), jnp.int32) if P else None
    parameters = (None, None) if gate == "log" else (array((HV,), jnp.float32), array((HV, K), jnp.float32))

    def call(state, tokens, slots, parameters):
        activations = (gate, *parameters, -5.0 if gate == "bounded" else None, True, True)
        return step(*tokens, state, scale=0.1, slots=slots, activations=activations)

    return jax.jit(call, donate_argnums=0), (state, tokens, slots, parameters)
