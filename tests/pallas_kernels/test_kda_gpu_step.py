"""The GPU's decode kernel, interpreted on the CPU against float64, and lowered for Hopper GPUs that are not there."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from pallas_kernels import kda_reference
from pallas_kernels.kda.mosaic_gpu import step as kernel
from pallas_kernels.kda.mosaic_gpu.step import gpu_step, gpu_step_limits
from pallas_kernels.kda.step import step_token
from tests.pallas_kernels.kda_support import QUICK, base, rounded, run
from tests.support import BF16_FORWARD, F32_FORWARD, RESET_FORWARD, assert_close

STRONG = np.array([-1000.0, -20.0, -0.01, 0.0, -np.inf])
LOG = ("log", None, None, None, False, False)
# What was not written is NaN; the barrier that orders reads for the GPU's assembler has no meaning here.
INTERPRET = plgpu.InterpretGPUParams(inline_mgpu="ignore")


def interpreted(arrays, slots=None, *, activations=LOG, scale=0.3):
    """Output and state of the kernel; slots are traced."""
    call = partial(gpu_step, scale=scale, activations=activations, interpret=INTERPRET)
    return jax.jit(lambda arrays, slots: call(*arrays, slots=slots), compiler_options=QUICK)(arrays, slots)


def expected(arrays, slots=None, *, activations=LOG, scale=0.3):
    """`step_token` of the same values in float64."""
    with jax.enable_x64(True):
        wide = lambda x: jnp.asarray(np.asarray(x, np.float64)) if hasattr(x, "shape") else x  # noqa: E731
        arrays, activations = tuple(map(wide, arrays)), tuple(map(wide, activations))
        slots = None if slots is None else jnp.asarray(slots)
        out, state = step_token(*arrays, scale=scale, slots=slots, activations=activations)
        return np.asarray(out), np.asarray(state)


def token(seed, B, H, K, V, HV=None, *, P=None, dtype=jnp.float32, state_dtype=jnp.float32):
    """q, k, v, g, beta of one token and P (or B) states that tell K from V and slot from slot."""
    r = np.random.default_rng(seed)
    tokens = base(seed, B, 1, H, K, V, HV)
    state = r.standard_normal((P or B, HV or H, K, V)) + np.linspace(-1, 1, K)[:, None]
    return (*(jnp.asarray(x[:, 0], dtype) for x in tokens[:5]), jnp.asarray(state, state_dtype))


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
    filled: int = kernel.FILLED  # programs above which they are large


CASES = [
    Case("one_row"),
    Case("strong_gates", B=3, K=128, strong=True),
    Case("softplus", B=2, HV=6, V=128, gate="softplus", fused=True),
    Case("large_programs", B=3, H=1, HV=2, K=128, V=128, gate="softplus", fused=True, filled=1),
    Case("softplus_bfloat16", B=2, HV=4, K=128, gate="softplus", fused=True, dtype=jnp.bfloat16),
    Case("bounded", B=2, H=3, HV=3, K=128, V=128, gate="bounded", fused=True),
    Case("bounded_bfloat16", B=3, H=1, HV=3, gate="bounded", fused=True, dtype=jnp.bfloat16),
    Case("bfloat16_state", B=3, H=2, HV=4, dtype=jnp.bfloat16, state_dtype=jnp.bfloat16),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_token(case, monkeypatch):
    """float32 arithmetic whatever the inputs are stored in: only an output or state in bfloat16 is rounded to it."""
    monkeypatch.setattr(kernel, "FILLED", case.filled)
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
    out, state = interpreted(arrays, activations=activations)
    want_out, want_state = expected(arrays, activations=activations)
    assert (out.dtype, state.dtype) == (case.dtype, case.state_dtype)
    tolerance = {jnp.float32: RESET_FORWARD if case.strong else F32_FORWARD, jnp.bfloat16: BF16_FORWARD}
    assert_close(out, want_out, tolerance[case.dtype], "output")
    assert_close(state, want_state, tolerance[case.state_dtype], "state")


def test_softplus_of_every_size_of_logit():
    """Decays of logits from -100 to 100 under a fast rate are those of float64: log(1 + e^y) loses no digit."""
    logits = np.linspace(-100, 100, 256).reshape(2, 2, 64)
    arrays = list(token(2, 2, 2, 64, 64))
    arrays[3], arrays[4] = jnp.asarray(logits, jnp.float32), jnp.zeros((2, 2))  # nothing written: S is its decay
    arrays[5] = jnp.ones_like(arrays[5])
    activations = ("softplus", jnp.full(2, 9.0), jnp.zeros((2, 64)), None, False, False)
    _, state = interpreted(arrays, activations=activations)
    _, want = expected(arrays, activations=activations)
    assert np.count_nonzero((want > 0.01) & (want < 0.99)) > 5 * 64
    np.testing.assert_allclose(state, want, rtol=0, atol=3e-6)


def test_steps_are_a_sequence():
    """Six tokens one by one are the float64 scan over them, in output and state."""
    tokens = rounded(base(5, 2, 6, 1, 64, 64, HV=2), jnp.float32)
    reference = run(kda_reference, tokens, jnp.float64, gradients=False)

    def one(state, arrays):
        out, state = gpu_step(*arrays, state, scale=64**-0.5, slots=None, activations=LOG, interpret=INTERPRET)
        return state, out

    rows_last = [jnp.moveaxis(jnp.asarray(x, jnp.float32), 1, 0) for x in tokens[:5]]
    state, out = jax.jit(partial(jax.lax.scan, one), compiler_options=QUICK)(
        jnp.asarray(tokens.initial_state, jnp.float32), rows_last
    )
    assert_close(jnp.moveaxis(out, 0, 1), reference["output"], F32_FORWARD, "output")
    assert_close(state, reference["state"], F32_FORWARD, "state")


# --- Pools -------------------------------------------------------------------------------------------------------


class Pads(NamedTuple):
    name: str
    slots: np.ndarray


PADS = [
    Pads("minus_one", np.array([3, -1, -1, 0, -1, -1, -1, -1], np.int32)),
    Pads("other_negatives", np.array([-2, 3, -(2**31), -5, 0, -4, -3, -2], np.int32)),
    Pads("past_the_pool", np.array([0, 4, 4, 2**31 - 1, 3, 5, 4, 4], np.int32)),
    Pads("unsigned", np.array([0, 255, 4, 255, 3, 255, 4, 4], np.uint8)),
    Pads("all", np.full(8, -1, np.int32)),
]


# One compilation for all of them that have slots of one type.
pooled = jax.jit(partial(gpu_step, scale=0.3, activations=LOG, interpret=INTERPRET), compiler_options=QUICK)


@pytest.mark.parametrize("case", PADS, ids=lambda case: case.name)
def test_field_DC03_padded_rows_touch_nothing(case):
    """Live slots 0 and 3 of 4 in a batch padded to 8: the others stay to the bit, even if the pad rows are NaN."""
    live = np.isin(case.slots, (0, 3))
    *arrays, pool = token(7, 8, 1, 64, 64, 2, P=4)
    arrays = [x.at[~live].set(jnp.nan) for x in arrays]
    out, new = pooled(*arrays, pool, slots=case.slots)
    want_out, want_new = expected((*arrays, pool), case.slots)
    still = [i for i in range(4) if i not in case.slots[live]]
    np.testing.assert_array_equal(new[np.array(still)], pool[np.array(still)])
    np.testing.assert_array_equal(out[~live], np.zeros_like(out[~live]))
    assert_close(out, want_out, F32_FORWARD, "output")
    assert_close(new, want_new, F32_FORWARD, "pool")
    assert all(not np.array_equal(new[i], pool[i]) for i in case.slots[live])


def test_no_rows_and_no_slots():
    arrays = token(9, 0, 1, 64, 64, P=3)
    out, new = gpu_step(*arrays, scale=1.0, slots=jnp.zeros(0, jnp.int32), activations=LOG)
    assert out.shape == (0, 1, 64) and new is arrays[5]
    arrays = token(9, 2, 1, 64, 64)
    out, new = gpu_step(*arrays[:5], arrays[5][:0], scale=1.0, slots=jnp.zeros(2, jnp.int32), activations=LOG)
    np.testing.assert_array_equal(out, np.zeros((2, 1, 64)))
    assert new.shape == (0, 1, 64, 64)


# --- Limits and transformations ----------------------------------------------------------------------------------


def test_limits_name_what_is_not_served():
    def limit(K=128, V=128, **dtypes):
        array = jax.ShapeDtypeStruct
        q, v, state = (array(s, jnp.float32) for s in ((2, 2, K), (2, 2, V), (2, 2, K, V)))
        return gpu_step_limits(q, v, state, *(array((2, 2), d) for d in dtypes.values()), None)

    for K in (64, 128):
        for V in (64, 128):
            assert limit(K=K, V=V, beta=jnp.bfloat16) is None
    for named, said in ((limit(K=96), "K = 96"), (limit(V=256), "V = 256"), (limit(K=32), "K = 32")):
        assert said in named
    assert "float64" in limit(g=np.float64) and "float16" in limit(beta=jnp.float16)
    arrays = token(10, 1, 1, 32, 64)
    with pytest.raises(NotImplementedError, match="K = 32, V = 64"):
        gpu_step(*arrays, scale=1.0, slots=None, activations=LOG)


def test_few_states_are_spread_over_the_gpu():
    """One row of 32 heads has a program for nearly each of an H200's 132 SMs, and no call cuts a state in vain."""
    programs = lambda states, V: states * V // kernel._columns(states, V)  # noqa: E731
    assert programs(32, 128) == 128
    assert programs(33, 64) == 66 and programs(131, 64) == 262
    assert programs(66, 128) == 132 and programs(4096, 128) == 8192 and programs(132, 64) == 132


class Mapped(NamedTuple):
    name: str
    slots: np.ndarray | None
    shared: bool


MAPPED = [
    Mapped("states", None, False),
    Mapped("pools", np.array([[3, -1, 0], [1, 3, 4]], np.int32), False),
    Mapped("one_pool", np.array([[3, -1, 0], [1, 3, 4]], np.int32), True),
]


@pytest.mark.parametrize("case", MAPPED, ids=lambda case: case.name)
def test_vmap(case):
    """A batch of calls is each call, whether every call has states or a pool of its own or all start from one."""
    calls = [token(20 + i, 3, 1, 64, 64, 2, P=3 if case.slots is None else 4) for i in range(2)]
    arrays = [jnp.stack(x) for x in zip(*calls, strict=True)]
    axes = (0,) * 5 + (None if case.shared else 0,)
    arrays[5] = calls[0][5] if case.shared else arrays[5]
    call = partial(gpu_step, scale=0.3, activations=LOG, interpret=INTERPRET)
    mapped = jax.vmap(lambda arrays, slots: call(*arrays, slots=slots), in_axes=(axes, 0))
    out, new = jax.jit(mapped, compiler_options=QUICK)(tuple(arrays), case.slots)
    for i, one in enumerate(calls):
        slots = None if case.slots is None else case.slots[i]
        want_out, want_new = expected((*one[:5], calls[0][5] if case.shared else one[5]), slots)
        assert_close(out[i], want_out, F32_FORWARD, "output")
        assert_close(new[i], want_new, F32_FORWARD, "states")


def test_vmap_over_parameters_of_the_gate():
    arrays = token(23, 2, 1, 64, 64)
    A_log = jnp.array([[0.5], [-1.0]])
    dt_bias = jnp.ones((1, 64))

    def call(A_log):
        activations = ("bounded", A_log, dt_bias, -5.0, False, False)
        return gpu_step(*arrays, scale=0.3, slots=None, activations=activations, interpret=INTERPRET)

    out, new = jax.jit(jax.vmap(call), compiler_options=QUICK)(A_log)
    for i in range(2):
        want_out, want_new = expected(arrays, activations=("bounded", A_log[i], dt_bias, -5.0, False, False))
        assert_close(out[i], want_out, F32_FORWARD, "output")
        assert_close(new[i], want_new, F32_FORWARD, "state")


@pytest.mark.parametrize("check_vma", [False, True], ids=["refs", "varying"])
@pytest.mark.parametrize("slots", [None, [1, -1, 0, 1]], ids=["states", "pools"])
def test_shard_map(slots, check_vma):
    """Rows and heads over four devices, each with the slots of its own pool; jax refuses Refs that vary over axes."""
    arrays = token(24, 4, 2, 64, 64, 4)
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    split = PartitionSpec("rows", "heads")

    def call(arrays, slots):
        return gpu_step(*arrays, scale=0.3, slots=slots, activations=LOG, interpret=INTERPRET)

    specs = ((split,) * 6, PartitionSpec("rows"))
    sharded = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=(split, split), check_vma=check_vma)
    slots = None if slots is None else np.array(slots, np.int32)
    out, new = jax.jit(sharded, compiler_options=QUICK)(arrays, slots)
    want_out, want_new = expected(arrays, None if slots is None else np.array([1, -1, 2, 3], np.int32))
    assert_close(out, want_out, F32_FORWARD, "output")
    assert_close(new, want_new, F32_FORWARD, "states")


def test_x64_changes_nothing():
    """Indices stay 32 bits wide where jax's default is 64, and wider slots are narrowed after they are checked."""
    arrays, slots = token(25, 3, 1, 64, 64, P=4), np.array([2, -1, 2**32], np.int64)
    with jax.enable_x64(True):
        out, new = interpreted(arrays, slots)
    want_out, want_new = expected(arrays, np.array([2, -1, -1]))
    assert (out.dtype, new.dtype) == (jnp.float32, jnp.float32)
    assert_close(out, want_out, F32_FORWARD, "output")
    assert_close(new, want_new, F32_FORWARD, "pool")


# --- The compiler ------------------------------------------------------------------------------------------------


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


DECODES = [
    Decode(1, 32, 32, 128, 128, None, "log", "float32"),
    Decode(128, 32, 32, 128, 128, None, "bounded", "float32"),
    Decode(1024, 8, 32, 128, 128, 1024, "softplus", "bfloat16"),
    Decode(5, 3, 9, 64, 64, 7, "softplus", "float32", dtype="float32"),
    Decode(3, 16, 48, 128, 64, 8, "bounded", "bfloat16", dtype="float32"),
    Decode(33, 4, 4, 64, 128, None, "log", "float32"),
]


def lowered(call, *arrays, x64=False):
    """The module for an H200; layouts that the kernel cannot have are refused here."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    mesh = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh), jax.enable_x64(x64):
        return jax.jit(call, donate_argnums=0).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("decode", DECODES, ids=lambda d: f"B{d.B}_K{d.K}_V{d.V}_{d.state_dtype}_{d.gate}")
def test_lowers_for_hopper_in_place(decode):
    """One kernel and nothing else, and its second result is the donated state's buffer."""
    B, H, HV, K, V, P, gate, state_dtype, dtype = decode
    array = jax.ShapeDtypeStruct
    tokens = [array((B, *s), dtype) for s in ((H, K), (H, K), (HV, V), (HV, K), (HV,))]
    state = array((P or B, HV, K, V), state_dtype)
    slots = array((B,), jnp.int32) if P else None
    parameters = (None, None) if gate == "log" else (array((HV,), jnp.float32), array((HV, K), jnp.float32))

    def call(state, tokens, slots, parameters):
        activations = (gate, *parameters, -5.0 if gate == "bounded" else None, True, True)
        return gpu_step(*tokens, state, scale=0.1, slots=slots, activations=activations)

    text = lowered(call, state, tokens, slots, parameters, x64=B == 5)
    body = [line for line in text.splitlines() if "stablehlo." in line]
    assert len(body) == 1 and "@mosaic_gpu_v2" in body[0], body
    operand = 5 + (gate != "log") * 2 + (P is not None)
    assert f"output_tuple_indices = [1], operand_index = {operand}" in body[0]
