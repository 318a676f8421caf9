"""The GPU's decode kernel, interpreted on the CPU against float64, and lowered for Hopper GPUs that are not there."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from experiments.gpu_aot import lower_for_hopper
from pallas_kernels.kda.mosaic_gpu import step as kernel
from pallas_kernels.kda.mosaic_gpu.step import gpu_step, gpu_step_limits
from tests.pallas_kernels import step_support as support
from tests.pallas_kernels.step_support import LOG, Case, Decode, token

# What was not written is NaN; the barrier that orders reads for the GPU's assembler has no meaning here.
interpreted = partial(gpu_step, interpret=plgpu.InterpretGPUParams(inline_mgpu="ignore"))


# --- One token ---------------------------------------------------------------------------------------------------

LARGE = Case("large_programs", B=3, H=1, HV=2, K=128, V=128, gate="softplus", fused=True)
CASES = [
    *support.CASES,
    Case("strong_gates", B=3, K=128, strong=True),
    Case("bounded", B=2, H=3, HV=3, K=128, V=128, gate="bounded", fused=True),
    LARGE,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_token(case, monkeypatch):
    if case is LARGE:
        monkeypatch.setattr(kernel, "FILLED", 1)  # programs above which they are large
    support.check_one_token(interpreted, case)


def test_softplus_of_every_size_of_logit():
    support.check_softplus_of_every_size_of_logit(interpreted)


def test_steps_are_a_sequence():
    support.check_steps_are_a_sequence(interpreted)


# --- Pools -------------------------------------------------------------------------------------------------------

pooled = support.jitted(interpreted)


@pytest.mark.parametrize("case", support.PADS, ids=lambda case: case.name)
def test_field_DC03_padded_rows_touch_nothing(case):
    support.check_padded_rows_touch_nothing(pooled, case)


def test_no_rows_and_no_slots():
    support.check_no_rows_and_no_slots(gpu_step)


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


@pytest.mark.parametrize("case", support.MAPPED, ids=lambda case: case.name)
def test_vmap(case):
    support.check_vmap(interpreted, case)


def test_vmap_over_parameters_of_the_gate():
    support.check_vmap_over_parameters_of_the_gate(interpreted)


@pytest.mark.parametrize("check_vma", [False, True], ids=["refs", "varying"])
@pytest.mark.parametrize("pools", [False, True], ids=["states", "pools"])
def test_shard_map(pools, check_vma):
    """jax refuses Refs that vary over axes: where it tells which do, the kernel has none."""
    support.check_shard_map(interpreted, pools, check_vma)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_x64_changes_nothing(dtype):
    support.check_x64_changes_nothing(interpreted, dtype)


# --- The compiler ------------------------------------------------------------------------------------------------

DECODES = [
    Decode(1, 32, 32, 128, 128, None, "log", "float32"),
    Decode(128, 32, 32, 128, 128, None, "bounded", "float32"),
    Decode(1024, 8, 32, 128, 128, 1024, "softplus", "bfloat16"),
    Decode(5, 3, 9, 64, 64, 7, "softplus", "float32", dtype="float32"),
    Decode(3, 16, 48, 128, 64, 8, "bounded", "bfloat16", dtype="float32"),
    Decode(33, 4, 4, 64, 128, None, "log", "float32"),
]


@pytest.mark.parametrize("decode", DECODES, ids=lambda d: f"B{d.B}_K{d.K}_V{d.V}_{d.state_dtype}_{d.gate}")
def test_lowers_for_hopper_in_place(decode):
    """One kernel and nothing else, and its second result is the donated state's buffer.

    Layouts that the kernel cannot have would be refused.
    """
    call, arguments = support.decode_program(gpu_step, decode)
    with jax.enable_x64(decode.B == 5):
        text = lower_for_hopper(call, *arguments).as_text()
    body = [line for line in text.splitlines() if "stablehlo." in line]
    assert len(body) == 1 and "@mosaic_gpu_v2" in body[0], body
    operand = 5 + (decode.gate != "log") * 2 + (decode.P is not None)
    assert f"output_tuple_indices = [1], operand_index = {operand}" in body[0]
