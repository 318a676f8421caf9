"""Compiling for GPUs that are not there: what is read from Mosaic's dumps, and how failures come out."""

import importlib.util
import re
import subprocess
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments import gpu_aot
from experiments.gpu_aot import CompileError, Kernel, compile_for, hopper_mesh, lower_for_hopper

needs_plugin = pytest.mark.skipif(not gpu_aot.has_compiler(), reason="compiling for GPU needs jax's CUDA plugin")
HERE = "tests.experiments.test_gpu_aot"
TILES = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def toy_product(x, scratch_rows=64):
    """x [heads, 64, 64] bfloat16: x x of each head, on the tensor cores."""

    def kernel(x_ref, o_ref, a_smem, b_smem, o_smem, unused, barrier):
        head = jax.lax.axis_index("head")
        plgpu.copy_gmem_to_smem(x_ref.at[head], a_smem, barrier)
        plgpu.copy_gmem_to_smem(x_ref.at[head], b_smem, barrier)
        plgpu.barrier_wait(barrier)

        def product(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        o_smem[...] = pl.run_scoped(product, plgpu.ACC((64, 64), jnp.float32)).astype(x.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_ref.at[head])
        plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM((64, 64), x.dtype, transforms=TILES)
    vma = jax.typeof(x).manual_axis_type
    return plgpu.kernel(
        kernel,
        kernel_name="toy",
        grid=(x.shape[0],),
        grid_names=("head",),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=vma),
        scratch_types=[tile, tile, tile, plgpu.SMEM((scratch_rows, 64), x.dtype), plgpu.Barrier(num_arrivals=2)],
    )(x)


def toy(heads=4, **options):
    return lambda x: toy_product(toy_product(x, **options) + 1), (jax.ShapeDtypeStruct((heads, 64, 64), jnp.bfloat16),)


def sharded_toy(gather, mesh):
    """Heads over an axis of the mesh; `gather` then asks for all of them everywhere."""

    def program(x):
        out = jax.shard_map(toy_product, in_specs=P("heads"), out_specs=P("heads"), check_vma=False)(x)
        return jax.sharding.reshard(out, NamedSharding(mesh, P())) if gather else out

    shape = jax.ShapeDtypeStruct((8, 64, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("heads")))
    return program, (shape,)


def no_program():
    raise NotImplementedError("heads of 96 channels")


def test_lowering_without_the_plugin():
    program, shapes = toy()
    assert lower_for_hopper(program, *shapes).as_text().count("@mosaic_gpu_v2") == 2
    mesh = hopper_mesh({"heads": 2})
    program, shapes = sharded_toy(False, mesh)
    lowered = lower_for_hopper(jax.jit(program), *shapes, mesh=mesh)
    assert lowered.as_text().count("@mosaic_gpu_v2") == 1 and "tensor<4x64x64xbf16>" in lowered.as_text()


@needs_plugin
@pytest.mark.parametrize("gpu", gpu_aot.GPUS)
def test_what_is_read_of_a_kernel(gpu, tmp_path):
    compiled = compile_for(f"{HERE}:toy", {}, gpu, keep=tmp_path)
    assert list(compiled.kernels) == ["toy", "toy.1"] and compiled.gpu.name == gpu
    kernel = compiled.kernels["toy"]
    assert kernel.threads == 128 and 24 < kernel.registers <= 168
    assert kernel.spill_store_bytes == kernel.spill_load_bytes == kernel.stack_bytes == 0 and not kernel.warnings
    assert 4 * 8192 <= kernel.smem_bytes <= 4 * 8192 + 4096  # four tiles, and Mosaic's own
    assert kernel.blocks_per_sm >= 2
    assert kernel.ops["wgmma.mma_async"] == 4 and kernel.ops["cp.async"] == 5  # two in, one out, commit and wait
    assert compiled.argument_bytes == compiled.output_bytes == 4 * 64 * 64 * 2
    assert compiled.alias_bytes == 0 and not compiled.collectives and 0 < compiled.compile_seconds < 60
    assert (tmp_path / "toy_0.ptx").exists()


@needs_plugin
def test_more_shared_memory_than_a_block_may_have():
    with pytest.raises(CompileError, match="toy for h200: .*shared memory: smem_bytes=548872 > max_smem_bytes=232448"):
        compile_for(f"{HERE}:toy", {"scratch_rows": 4096})


@needs_plugin
def test_collectives_on_a_mesh():
    for gather in (False, True):
        compiled = compile_for(f"{HERE}:sharded_toy", {"gather": gather}, mesh={"rows": 2, "heads": 2})
        assert list(compiled.kernels) == ["toy"]
        assert compiled.collectives == ({"all-gather": 8 * 64 * 64 * 2} if gather else {})


@needs_plugin
def test_what_a_program_raises():
    with pytest.raises(CompileError, match="no_program for h200: NotImplementedError: heads of 96") as caught:
        compile_for(f"{HERE}:no_program", {})
    assert caught.value.kind == "NotImplementedError"


def test_a_process_that_does_not_end_well(monkeypatch):
    monkeypatch.setattr(gpu_aot, "has_compiler", lambda: True)
    with pytest.raises(CompileError, match="toy for h200: not compiled within 0.01 s"):
        compile_for(f"{HERE}:toy", {}, timeout=0.01)
    died = subprocess.CompletedProcess([], -6, "", "F0000 Check failed: registers")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: died)
    with pytest.raises(CompileError, match="toy for h200: the compiler ended its process: F0000 Check failed"):
        compile_for(f"{HERE}:toy", {})


def test_without_the_plugin(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    version = re.escape(jax.__version__)
    says = rf"jax-cuda13-plugin and jax-cuda13-pjrt \(pip install jax-cuda13-plugin=={version} jax-cuda13-pjrt="
    with pytest.raises(ImportError, match=says):
        compile_for(f"{HERE}:toy", {})


def test_instructions_are_counted_by_what_they_do():
    ptx = """
.entry toy(.param .u64 p)
.reqntid 128, 1, 1
{
	.reg .b32 	%r<9>;
	ld.param::entry.b64 	%rd1, [p];
$L__BB0_1:
	@%p1 bra 	$L__BB0_2;
	@!%p2 ld.global.v2.b32 	{%r1, %r2}, [%rd1];
	ex2.approx.ftz.f32 	%r3, %r1;
	{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.m64n64k16.f32 {%r1, %r2}, %rd1, %rd2, p, 1, 1; }
	{ // callseq 0
	st.shared.b32 	[%r4], %r3;
	ret;
}
"""
    counted = {"ld.param::entry", "bra", "ld.global", "ex2", "setp", "wgmma.mma_async", "st.shared", "ret"}
    assert gpu_aot._ops(ptx) == dict.fromkeys(counted, 1)


def test_blocks_of_a_processor():
    kernel = Kernel("k", 384, 168, 0, 0, 0, 100 << 10, {}, ())
    assert kernel.blocks_per_sm == 1  # by registers
    assert replace(kernel, registers=64).blocks_per_sm == 2  # by shared memory
    assert replace(kernel, registers=64, smem_bytes=114 << 10).blocks_per_sm == 1
    assert replace(kernel, smem_bytes=228 << 10).blocks_per_sm == 0
    assert replace(kernel, threads=1024, registers=32, smem_bytes=0).blocks_per_sm == 2  # by threads
    assert hopper_mesh({"a": 2}, AxisType.Auto).axis_sizes == (2,)
