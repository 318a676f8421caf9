"""The TPU's decode kernel, interpreted on the CPU against float64, and compiled for TPUs that are not there."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, PartitionSpec

from experiments.quiet_tpu import SINGLE_HOST
from pallas_kernels import kda_reference
from pallas_kernels.kda.mosaic_tpu import step as kernel
from pallas_kernels.kda.mosaic_tpu.step import step_limits, tpu_step
from pallas_kernels.kda.step import step_token
from tests.pallas_kernels.kda_support import QUICK, base, rounded, run
from tests.support import BF16_FORWARD, F32_FORWARD, assert_close

STRONG = np.array([-1000.0, -20.0, -0.01, 0.0, -np.inf])
LOG = ("log", None, None, None, False, False)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of few rows and heads, so that small arrays fill many: units of 2 heads of 64 by 64, four buffers."""
    monkeypatch.setattr(kernel, "UNIT_BYTES", 64 * 1024)
    monkeypatch.setattr(kernel, "RING_BYTES", 1)
    monkeypatch.setattr(kernel, "WINDOW_BYTES", 1)


def interpreted(arrays, slots=None, *, activations=LOG, scale=0.3, interpret=True):
    """Output and state of the kernel; slots are traced."""
    call = partial(tpu_step, scale=scale, activations=activations, interpret=interpret)
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


CASES = [
    Case("one_row"),
    Case("one_head", B=2, H=1, HV=1, dtype=jnp.bfloat16),
    Case("strong_gates", B=3, strong=True),
    Case("softplus", B=3, HV=6, V=128, gate="softplus", fused=True),
    Case("softplus_bfloat16", B=2, HV=4, K=128, gate="softplus", fused=True, dtype=jnp.bfloat16),
    Case("bounded_bfloat16", B=5, H=1, HV=3, gate="bounded", fused=True, dtype=jnp.bfloat16),
    Case("bounded", B=2, H=3, HV=3, K=128, gate="bounded", fused=True),
    Case("two_groups_of_heads", B=3, H=6, HV=18, dtype=jnp.bfloat16, strong=True),
    Case("large_heads", K=256, V=256, dtype=jnp.bfloat16),
    Case("bfloat16_state", B=3, H=2, HV=4, dtype=jnp.bfloat16, state_dtype=jnp.bfloat16),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_token(case):
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
    out, state = interpreted(arrays, activations=activations)
    want_out, want_state = expected(arrays, activations=activations)
    assert (out.dtype, state.dtype) == (case.dtype, case.state_dtype)
    tolerance = {jnp.float32: F32_FORWARD, jnp.bfloat16: BF16_FORWARD}
    assert_close(out, want_out, tolerance[case.dtype], "output")
    assert_close(state, want_state, tolerance[case.state_dtype], "state")


def test_steps_are_a_sequence():
    """Six tokens one by one are the float64 scan over them, in output and state."""
    tokens = rounded(base(5, 2, 6, 1, 64, 64, HV=2), jnp.float32)
    reference = run(kda_reference, tokens, jnp.float64, gradients=False)

    def one(state, arrays):
        out, state = tpu_step(*arrays, state, scale=64**-0.5, slots=None, activations=LOG, interpret=True)
        return state, out

    rows_last = [jnp.moveaxis(jnp.asarray(x, jnp.float32), 1, 0) for x in tokens[:5]]
    state, out = jax.jit(partial(jax.lax.scan, one), compiler_options=QUICK)(
        jnp.asarray(tokens.initial_state, jnp.float32), rows_last
    )
    assert_close(jnp.moveaxis(out, 0, 1), reference["output"], F32_FORWARD, "output")
    assert_close(state, reference["state"], F32_FORWARD, "state")


def test_field_KN10_no_product_has_a_precision_to_lose():
    """Both reductions are on the vector unit: the caller's default precision finds no product to lower."""
    arrays = token(6, 1, 1, 64, 64)
    with jax.default_matmul_precision("bfloat16"):
        jaxpr = str(jax.make_jaxpr(partial(tpu_step, scale=1.0, slots=None, activations=LOG, interpret=True))(*arrays))
    assert "pallas_call" in jaxpr and "reduce_sum" in jaxpr and "dot_general" not in jaxpr


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


# One compilation for all of them that have slots of one type.
pooled = jax.jit(partial(tpu_step, scale=0.3, activations=LOG, interpret=True), compiler_options=QUICK)


@pytest.mark.parametrize("case", PADS, ids=lambda case: case.name)
def test_field_DC03_padded_rows_touch_nothing(case, small_blocks):
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


class Mode(NamedTuple):
    name: str
    interpret: object
    slots: bool = True


MODES = [
    Mode("plain", True),
    Mode("plain_without_slots", True, slots=False),
    Mode("tpu_with_races", pltpu.InterpretParams(detect_races=True)),
    Mode("tpu_without_slots", pltpu.InterpretParams(detect_races=True), slots=False),
    Mode("tpu_eager_transfers", pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True)),
    Mode("tpu_two_cores", pltpu.InterpretParams(num_cores_or_threads=2)),
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_field_TL03_every_interpreter_agrees(mode, small_blocks):
    """5 of 8 slots touched by 7 rows of 3 units, 4 buffers: rows and units outnumber blocks, and the last is ragged.

    Uninitialised memory is NaN in both interpreters; the TPU's also looks for races, and draws the order of parts.
    """
    slots = np.array([6, -1, 2, 7, 0, -1, 5], np.int32) if mode.slots else None
    arrays = token(8, 7, 2, 64, 64, 6, P=8 if mode.slots else 7)
    plan = kernel._plan(arrays[:5], arrays[5])
    assert (plan.parts, plan.steps, plan.rows, plan.heads, plan.ring) == (2, 4, 1, 2, 4)
    out, new = interpreted(arrays, slots, interpret=mode.interpret)
    want_out, want_new = expected(arrays, slots)
    assert_close(out, want_out, F32_FORWARD, "output")
    assert_close(new, want_new, F32_FORWARD, "states")
    if mode.slots:
        np.testing.assert_array_equal(new[np.array([1, 3, 4])], arrays[5][np.array([1, 3, 4])])
    if getattr(mode.interpret, "detect_races", False):
        assert not interpret_pallas_call.races.races_found


def test_buffers_are_used_again_over_several_rows_a_step(monkeypatch):
    """13 rows of a unit each, 4 a step in 2 parts: buffers pass from step to step, pads between them or not."""
    monkeypatch.setattr(kernel, "RING_BYTES", 1)
    monkeypatch.setattr(kernel, "WINDOW_BYTES", 4 * 5 * 16 * 128 * 4)
    arrays = token(9, 13, 1, 64, 64, P=16)
    plan = kernel._plan(arrays[:5], arrays[5])
    assert (plan.parts, plan.steps, plan.rows, plan.ring) == (2, 2, 4, 4)
    for slots in (np.arange(13)[::-1] + 2, np.where(np.arange(13) % 3 == 1, -1, np.arange(13))):
        slots = slots.astype(np.int32)
        out, new = interpreted(arrays, slots, interpret=pltpu.InterpretParams(detect_races=True))
        want_out, want_new = expected(arrays, slots)
        assert_close(out, want_out, F32_FORWARD, "output")
        assert_close(new, want_new, F32_FORWARD, "pool")
        assert not interpret_pallas_call.races.races_found


# --- Plans, limits and transformations ---------------------------------------------------------------------------


def test_plans_cover_the_batch_and_fit():
    """Every row and head has its place; buffers and windows stay within the smallest default of 16 MiB of VMEM."""
    array = jax.ShapeDtypeStruct
    for B in (1, 2, 3, 7, 8, 100, 128, 1023, 1024):
        for H, HV in ((1, 1), (32, 32), (96, 96), (4, 12), (8, 64), (97, 97)):
            for K, V, dtype in ((128, 128, jnp.float32), (64, 256, jnp.bfloat16), (256, 256, jnp.float32)):
                q, v, g = (array((B, *s), jnp.float32) for s in ((H, K), (HV, V), (HV, K)))
                p = kernel._plan((q, q, v, g, None), array((B, HV, K, V), dtype))
                assert p.parts * p.steps * p.rows >= B > (p.parts * p.steps - p.parts) * p.rows
                assert HV % p.heads == 0 and 1 <= p.ahead < p.ring
                unit = p.heads * K * V * dtype.dtype.itemsize
                windows = 2 * 4 * p.rows * (2 * (-H % 16 + H) * K + (-HV % 16 + HV) * (K + 2 * V))
                assert p.ring * unit <= 4 << 20 and windows <= 4 << 20


def test_limits_name_what_is_not_served():
    def limit(B=2, H=2, K=128, V=128, **dtypes):
        array = jax.ShapeDtypeStruct
        q, v, state = (array(s, jnp.float32) for s in ((B, H, K), (B, H, V), (B, H, K, V)))
        return step_limits(q, v, state, *(array((B, H), d) for d in dtypes.values()))

    for K in (64, 128, 256):
        for V in (64, 128, 256):
            assert limit(K=K, V=V, beta=jnp.bfloat16) is None
    assert limit(B=1024, H=96) is None
    for named, said in ((limit(K=96), "K = 96"), (limit(V=32), "V = 32"), (limit(H=2048), "HV = 2048")):
        assert said in named
    assert "float64" in limit(g=np.float64) and "float16" in limit(beta=jnp.float16) and "70000" in limit(B=70000)
    arrays = token(10, 1, 1, 32, 64)
    with pytest.raises(NotImplementedError, match="K = 32, V = 64"):
        tpu_step(*arrays, scale=1.0, slots=None, activations=LOG, interpret=True)


@pytest.mark.parametrize("shared", [False, True], ids=["own_states", "one_pool"])
def test_vmap(shared):
    """A batch of calls is each call, whether every call has a pool or all start from one."""
    calls = [token(20 + i, 3, 1, 64, 64, 2, P=4) for i in range(2)]
    slots = np.array([[3, -1, 0], [1, 3, 4]], np.int32)
    arrays = [jnp.stack(x) for x in zip(*calls, strict=True)]
    axes = (0,) * 5 + (None if shared else 0,)
    arrays[5] = calls[0][5] if shared else arrays[5]
    call = partial(tpu_step, scale=0.3, activations=LOG, interpret=True)
    mapped = jax.vmap(lambda arrays, slots: call(*arrays, slots=slots), in_axes=(axes, 0))
    out, new = jax.jit(mapped, compiler_options=QUICK)(tuple(arrays), slots)
    for i, one in enumerate(calls):
        want_out, want_new = expected((*one[:5], calls[0][5] if shared else one[5]), slots[i])
        assert_close(out[i], want_out, F32_FORWARD, "output")
        assert_close(new[i], want_new, F32_FORWARD, "pool")


def test_vmap_over_parameters_of_the_gate():
    arrays = token(23, 2, 1, 64, 64)
    A_log = jnp.array([[0.5], [-1.0]])
    dt_bias = jnp.ones((1, 64))

    def call(A_log):
        activations = ("bounded", A_log, dt_bias, -5.0, False, False)
        return tpu_step(*arrays, scale=0.3, slots=None, activations=activations, interpret=True)

    out, new = jax.jit(jax.vmap(call), compiler_options=QUICK)(A_log)
    for i in range(2):
        want_out, want_new = expected(arrays, activations=("bounded", A_log[i], dt_bias, -5.0, False, False))
        assert_close(out[i], want_out, F32_FORWARD, "output")
        assert_close(new[i], want_new, F32_FORWARD, "state")


@pytest.mark.parametrize("slots", [None, [1, -1, 0, 1]], ids=["states", "pools"])
def test_shard_map(slots):
    """Rows and heads over four devices, each with the slots of its own pool, with the check of varying axes on."""
    arrays = token(24, 4, 2, 64, 64, 4)
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    split = PartitionSpec("rows", "heads")

    def call(arrays, slots):
        return tpu_step(*arrays, scale=0.3, slots=slots, activations=LOG, interpret=True)

    specs = ((split,) * 6, PartitionSpec("rows"))
    sharded = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=(split, split)), compiler_options=QUICK)
    out, new = sharded(arrays, None if slots is None else np.array(slots, np.int32))
    want_out, want_new = expected(arrays, None if slots is None else np.array([1, -1, 2, 3], np.int32))
    assert_close(out, want_out, F32_FORWARD, "output")
    assert_close(new, want_new, F32_FORWARD, "states")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_x64_changes_nothing(dtype):
    """Indices and words stay 32 bits wide where jax's default is 64."""
    arrays, slots = token(25, 3, 1, 64, 64, P=4, dtype=dtype), np.array([2, -1, 0], np.int64)
    with jax.enable_x64(True):
        out, new = interpreted(arrays, slots)
    want_out, want_new = expected(arrays, slots)
    assert (out.dtype, new.dtype) == (dtype, jnp.float32)
    assert_close(out, want_out, F32_FORWARD if dtype == jnp.float32 else BF16_FORWARD, "output")
    assert_close(new, want_new, F32_FORWARD, "pool")


# --- The compiler ------------------------------------------------------------------------------------------------

TOPOLOGIES = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]


class Decode(NamedTuple):
    B: int
    H: int
    HV: int
    K: int
    V: int
    P: int | None
    gate: str
    state_dtype: str


DECODES = [
    Decode(1, 32, 32, 128, 128, None, "log", "float32"),
    Decode(8, 96, 96, 128, 128, 12, "bounded", "bfloat16"),
    Decode(128, 32, 32, 128, 128, None, "softplus", "bfloat16"),
    Decode(1024, 8, 32, 128, 128, 1024, "softplus", "float32"),
    Decode(5, 3, 9, 64, 64, 7, "softplus", "float32"),
    Decode(3, 16, 16, 256, 256, None, "bounded", "float32"),
]


def compiled_facts(topology: str) -> list[dict]:
    """Per decode: bytes that alias the state, its size as the device lays it out, and the bytes of temporaries."""
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

    device = topologies.get_topology_desc(topology, "tpu").devices[0]
    kind = AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu")
    mesh = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=kind)
    array = partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
    facts = []
    for B, H, HV, K, V, P, gate, state_dtype in DECODES:
        shapes = ((H, K), (H, K), (HV, V), (HV, K), (HV,))
        tokens = [array((B, *s), jnp.bfloat16) for s in shapes]
        state = array((P or B, HV, K, V), state_dtype)
        slots = array((B,), jnp.int32) if P else None
        parameters = (None, None) if gate == "log" else (array((HV,), jnp.float32), array((HV, K), jnp.float32))

        def call(state, tokens, slots, parameters, gate=gate):
            activations = (gate, *parameters, -5.0 if gate == "bounded" else None, True, True)
            return tpu_step(*tokens, state, scale=0.1, slots=slots, activations=activations)

        with jax.sharding.use_abstract_mesh(mesh), jax.enable_x64(B < 10):  # Mosaic takes no index of 64 bits
            lowered = jax.jit(call, donate_argnums=0).lower(state, tokens, slots, parameters)
            memory = lowered.compile().memory_analysis()
        size = (P or B) * HV * K * max(V, 128) * state.dtype.itemsize
        facts.append({"alias": memory.alias_size_in_bytes / size, "temp": memory.temp_size_in_bytes})
    return facts


def test_compiles_in_place():
    """The TPUs' own compiler takes the kernel within its default VMEM, and a donated pool is not copied."""
    pytest.importorskip("libtpu", reason="compiling for TPU needs libtpu")
    environment = os.environ | SINGLE_HOST | {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    code = (
        "import json; from tests.pallas_kernels.test_kda_tpu_step import TOPOLOGIES, compiled_facts;"
        "print('facts', json.dumps([compiled_facts(topology) for topology in TOPOLOGIES]))"
    )
    root = Path(__file__).parents[2]
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr[-3000:]
    for topology, decodes in zip(TOPOLOGIES, json.loads(child.stdout.split("facts")[-1]), strict=True):
        for decode, facts in zip(DECODES, decodes, strict=True):
            assert facts["alias"] == 1, (topology, decode)
            assert facts["temp"] < 2 << 20, (topology, decode)
