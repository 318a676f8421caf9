"""Compiling for TPUs that are not there: what is read from the compiler, and how its failures come out."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments import benchmark, tpu_aot, tpu_schedule
from experiments.tpu_aot import GENERATIONS, Compiled, CompileError, Kernel, compile_for
from kimi_jax.configs import get_config
from pallas_kernels.kda.shapes import SHAPES, find_shape

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPU needs libtpu (pip install libtpu)"
)
HERE = "tests.experiments.test_tpu_aot"


def toy_scan(x, scratch_rows=64):
    """x [heads, T, 128]: a running sum over chunks of 64 rows, in scratch, of (x x^T) x."""

    def kernel(x_ref, o_ref, sum_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        pairs = jnp.dot(x_ref[...], x_ref[...].T, preferred_element_type=jnp.float32).astype(x.dtype)
        sum_ref[:64] = 0.5 * sum_ref[:64] + jnp.dot(pairs, x_ref[...], preferred_element_type=jnp.float32)
        o_ref[...] = sum_ref[:64].astype(x.dtype)

    block = pl.BlockSpec((None, 64, 128), lambda h, t: (h, t, 0))
    return pl.pallas_call(
        kernel,
        name="toy",
        grid=(x.shape[0], x.shape[1] // 64),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((scratch_rows, 128), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    )(x)


def toy(chunks=4, **options):
    program = lambda x: toy_scan(jnp.swapaxes(x, 0, 1), **options)  # noqa: E731
    return program, (jax.ShapeDtypeStruct((64 * chunks, 2, 128), jnp.bfloat16),)


def sharded_toy(gather, mesh):
    """Heads over an axis of the mesh; `gather` then asks for all of them everywhere."""
    heads = NamedSharding(mesh, P("heads"))

    def program(x):
        out = jax.shard_map(toy_scan, in_specs=P("heads"), out_specs=P("heads"), check_vma=False)(x)
        if not gather:
            return out
        everywhere = NamedSharding(mesh, P())
        explicit = AxisType.Explicit in mesh.axis_types
        return (jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint)(out, everywhere)

    return program, (jax.ShapeDtypeStruct((8, 64, 128), jnp.bfloat16, sharding=heads),)


def no_program():
    raise NotImplementedError("heads of 96 channels")


@needs_libtpu
@pytest.mark.parametrize("generation", ["v5e", "v5p"])
def test_what_is_read_of_a_kernel(generation, tmp_path):
    compiled = compile_for(f"{HERE}:toy", {}, generation, critical_path=True, keep=tmp_path)
    assert list(compiled.kernels) == ["toy"] and compiled.profiler_error is None
    kernel = compiled.kernels["toy"]
    assert kernel.grid == (2, 4) and kernel.cores == compiled.generation.cores
    assert kernel.hbm_bytes == 2 * 2 * 256 * 128 * 2
    assert kernel.steps * kernel.cores == 8 and kernel.cycles_per_step == kernel.cycles / kernel.steps
    assert 0 < kernel.loop_bundles < kernel.bundles and kernel.loop_bundles < kernel.cycles_per_step < 3000
    # Two buffers of 64 x 128 bfloat16 for the input and two for the output, 64 x 128 float32 of scratch, and its own.
    assert 96 * 1024 <= kernel.vmem_bytes <= 192 * 1024
    assert kernel.spills == kernel.fills == 0
    assert kernel.ops["vmatmul"] > 0 and 0 < kernel.utilisation["MXU_0 matmul_packed"] < 1
    assert sum(kernel.critical_path.values()) <= kernel.cycles and "dma" in kernel.critical_path
    assert compiled.argument_bytes == compiled.output_bytes == 2 * 256 * 128 * 2
    assert compiled.other_cycles > 0  # of the transpose
    assert not compiled.collectives and 0 < compiled.compile_seconds < 30
    assert list(tmp_path.glob("*/*-toy.1-*-final_bundles.txt"))


@needs_libtpu
def test_an_abort_of_the_profiler(monkeypatch):
    """Without the flags that avoid it the profiler ends the process, after the estimate: that is kept."""
    flags = tpu_aot._profiler_flags(False)
    monkeypatch.setattr(tpu_aot, "_profiler_flags", lambda _: [flags[0], *flags[2:]])
    compiled = compile_for(f"{HERE}:toy", {}, "v5e")
    assert "Check failed" in compiled.profiler_error
    assert compiled.kernels["toy"].cycles > 1000 and compiled.kernels["toy"].utilisation


@needs_libtpu
def test_too_much_vmem():
    with pytest.raises(CompileError, match=r"toy for v5e: a kernel needs 20\.\S*M of VMEM .* 16.* up to 128 MiB"):
        compile_for(f"{HERE}:toy", {"scratch_rows": 40 * 1024}, "v5e", profile=False)


@needs_libtpu
@pytest.mark.parametrize("axes", ["auto", pytest.param("explicit", marks=pytest.mark.exhaustive)])
def test_collectives_on_a_mesh(axes):
    for gather in (False, True):
        compiled = compile_for(
            f"{HERE}:sharded_toy", {"gather": gather}, "tpu7x", mesh={"rows": 2, "heads": 2}, mesh_axes=axes
        )
        assert compiled.kernels["toy"].grid == (4, 1) and compiled.kernels["toy"].cycles is None
        assert compiled.collectives == ({"all-gather": 8 * 64 * 128 * 2} if gather else {})


@needs_libtpu
def test_what_a_program_raises():
    with pytest.raises(CompileError, match="no_program for v6e: NotImplementedError: heads of 96") as caught:
        compile_for(f"{HERE}:no_program", {}, "v6e")
    assert caught.value.kind == "NotImplementedError"


def test_without_libtpu(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="install libtpu"):
        compile_for(f"{HERE}:toy", {}, "v5e")


def kernel(name, **fields):
    figures = dict(grid=(2, 8), cores=1, hbm_bytes=0, vmem_bytes=2**20, bundles=90, loop_bundles=80, spills=1, fills=2)
    return Kernel(name, **figures | dict(cycles=None, ops={}, utilisation={}, critical_path={}) | fields)


def compiled(machine, *kernels):
    return Compiled(machine, {k.name: k for k in kernels}, 2**20, 2**21, 2**22, 1750, {}, 0.1, "Check failed: no DMA")


def test_schedule_of_programs(monkeypatch, capsys):
    """Cycles come from the profiled part, memory and the cores from the real size; what fails is said in its row."""
    asked = []

    def compile_for(target, kwargs, generation, profile):
        machine, program = GENERATIONS[generation], target.partition(":")[2]
        asked.append((program, kwargs["shape"]["name"], profile))
        if program == "decode":
            raise CompileError("no decode")
        if program == "forward":
            return compiled(machine, kernel("kda_forward", cycles=12800 if profile else None, cores=2, hbm_bytes=10**9))
        return compiled(machine, kernel("kda_backward", hbm_bytes=10**6))

    monkeypatch.setattr(tpu_schedule, "compile_for", compile_for)
    names = ["kimi_linear_48b-4096", "kimi_linear_48b-8192", "kimi_linear_48b-decode-32"]
    result = benchmark.measure("tpu_schedule", generations=["v5p"], shapes=names, jobs=1)
    assert len(asked) == len(set(asked)) == 8  # two profiles and four sizes of sequences; a profile and a size of steps
    rows = {(row["shape"], row["program"]): row for row in result["rows"]}
    row = rows["kimi_linear_48b-8192", "forward"]
    # 512 tokens of 16 heads are 128 units, in 12,800 cycles on each of two cores; 8192 of 32 are 4096 units.
    assert row["cycles_per_unit"] == 200 and row["profiled"]
    assert row["floor_us"] == pytest.approx(1e6 / 2765, abs=0.01) and row["us"] == row["floor_us"]
    assert row["temp_mib"] == 4 and row["vmem_mib"] == 1 and row["around_us"] == 1
    row = rows["kimi_linear_48b-8192", "training"]
    assert row["cycles_per_unit"] == 10 and not row["profiled"]  # 16 steps of at least 80 bundles, 128 units
    assert row["us"] == pytest.approx(4096 * 10 / 1750, abs=0.01)
    assert rows["kimi_linear_48b-decode-32", "decode"]["error"] == "no decode"
    assert result["card"].startswith("none") and result["command"].endswith("--suite=tpu_schedule")
    shown = benchmark.table(result)
    assert all(text in shown for text in ("v5p", "kda_backward", ">=10", "200", "1/2", "no decode", *names))
    assert shown.endswith("instructions:\n  v5p kda_backward: Check failed: no DMA")
    assert "kda_forward in 0.1 s" in capsys.readouterr().out
    with pytest.raises(CompileError, match="no program compiled; the first: no decode"):
        tpu_schedule.measure(["v5p"], names[2:])


def test_profiled_part_is_small_and_keeps_the_heads_ratio():
    for shape in SHAPES:
        part = tpu_schedule.profiled(shape)
        assert part.B * part.HV * -(-part.T // 64) <= 256
        assert part.HV // part.H == shape.HV // shape.H and part.decodes == shape.decodes
        assert shape._replace(name="", B=0, T=0, H=0, HV=0) == part._replace(name="", B=0, T=0, H=0, HV=0)


@pytest.mark.parametrize("program, shape", [("forward", "grouped_values-8192"), ("training", "kimi_k3-4096"),
                                            ("decode", "grouped_values-decode-32")])  # fmt: skip
def test_programs_trace(program, shape):
    """On the portable backend: arguments, activations and gradients fit the public functions."""
    function, arguments = getattr(tpu_schedule, program)(find_shape(shape)._asdict(), backend="xla")
    first, *rest = jax.tree.leaves(jax.eval_shape(function, *arguments))
    assert first.dtype == jnp.bfloat16
    if program == "training":
        assert [(x.shape, x.dtype) for x in rest] == [(x.shape, x.dtype) for x in arguments[1:]]


def test_shapes_are_those_of_the_presets():
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)
    for shape in SHAPES:
        model = shape.name.partition("-")[0]
        if model != "grouped_values":
            config = get_config(model)
            assert (shape.H, shape.HV) == (config.kda_num_heads, config.value_heads)
            assert (shape.K, shape.V) == (config.kda_head_dim, config.value_head_dim)
            assert shape.lower_bound == config.lower_bound and shape.dtype == config.dtype
            assert shape.gate == ("softplus" if config.lower_bound is None else "bounded")
    assert find_shape("kimi_k3-decode-128").B == 128
    with pytest.raises(ValueError, match="unknown shape 'k3'; shapes: kimi_linear_48b-4096"):
        find_shape("k3")
