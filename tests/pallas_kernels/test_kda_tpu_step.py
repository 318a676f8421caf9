"""The TPU's decode kernel, interpreted on the CPU against float64, and compiled for TPUs that are not there."""

import json
import math
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
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from experiments.quiet_tpu import SINGLE_HOST
from experiments.tpu_aot import GENERATIONS
from pallas_kernels.kda.mosaic_tpu import step as kernel
from pallas_kernels.kda.mosaic_tpu.step import step_limits, tpu_step
from tests.pallas_kernels import step_support as support
from tests.pallas_kernels.step_support import LOG, Case, Decode, token

interpreted = partial(tpu_step, interpret=True)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of few rows and heads, so that small arrays fill many: units of 2 heads of 64 by 64, four buffers."""
    monkeypatch.setattr(kernel, "UNIT_BYTES", 64 * 1024)
    monkeypatch.setattr(kernel, "RING_BYTES", 1)
    monkeypatch.setattr(kernel, "WINDOW_BYTES", 1)


# --- One token ---------------------------------------------------------------------------------------------------

CASES = [
    *support.CASES,
    Case("one_head", B=2, H=1, HV=1, dtype=jnp.bfloat16),
    Case("strong_gates", B=3, strong=True),
    Case("bounded", B=2, H=3, HV=3, K=128, gate="bounded", fused=True),
    Case("two_groups_of_heads", B=3, H=6, HV=18, dtype=jnp.bfloat16, strong=True),
    Case("large_heads", K=256, V=256, dtype=jnp.bfloat16),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_token(case):
    support.check_one_token(interpreted, case)


def test_softplus_of_every_size_of_logit():
    support.check_softplus_of_every_size_of_logit(interpreted)


def test_steps_are_a_sequence():
    support.check_steps_are_a_sequence(interpreted)


def test_field_KN10_no_product_has_a_precision_to_lose():
    """Both reductions are on the vector unit: the caller's default precision finds no product to lower."""
    arrays = token(6, 1, 1, 64, 64)
    with jax.default_matmul_precision("bfloat16"):
        jaxpr = str(jax.make_jaxpr(partial(interpreted, scale=1.0, slots=None, activations=LOG))(*arrays))
    assert "pallas_call" in jaxpr and "reduce_sum" in jaxpr and "dot_general" not in jaxpr


# --- Pools -------------------------------------------------------------------------------------------------------

pooled = support.jitted(interpreted)


@pytest.mark.parametrize("case", support.PADS, ids=lambda case: case.name)
def test_field_DC03_padded_rows_touch_nothing(case, small_blocks):
    support.check_padded_rows_touch_nothing(pooled, case)


def test_no_rows_and_no_slots():
    support.check_no_rows_and_no_slots(tpu_step)


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
    _, new = support.check(partial(tpu_step, interpret=mode.interpret), arrays, slots)
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
    racing = partial(tpu_step, interpret=pltpu.InterpretParams(detect_races=True))
    for slots in (np.arange(13)[::-1] + 2, np.where(np.arange(13) % 3 == 1, -1, np.arange(13))):
        support.check(racing, arrays, slots.astype(np.int32))
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
        tpu_step(*arrays, scale=1.0, slots=None, activations=LOG)


@pytest.mark.parametrize("case", support.MAPPED, ids=lambda case: case.name)
def test_vmap(case):
    support.check_vmap(interpreted, case)


def test_vmap_over_parameters_of_the_gate():
    support.check_vmap_over_parameters_of_the_gate(interpreted)


@pytest.mark.parametrize("pools", [False, True], ids=["states", "pools"])
def test_shard_map(pools):
    support.check_shard_map(interpreted, pools)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_x64_changes_nothing(dtype):
    support.check_x64_changes_nothing(interpreted, dtype)


# --- The compiler ------------------------------------------------------------------------------------------------

TOPOLOGIES = [generation.topology for generation in GENERATIONS.values()]
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

    device = topologies.get_topology_desc(topology, "tpu").devices[0]
    kind = AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu")
    mesh = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=kind)
    array = partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
    facts = []
    for decode in DECODES:
        call, arguments = support.decode_program(tpu_step, decode, array)
        with jax.sharding.use_abstract_mesh(mesh), jax.enable_x64(decode.B < 10):  # Mosaic takes no index of 64 bits
            memory = call.lower(*arguments).compile().memory_analysis()
        *rows, V = arguments[0].shape
        size = math.prod(rows) * max(V, 128) * arguments[0].dtype.itemsize
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
