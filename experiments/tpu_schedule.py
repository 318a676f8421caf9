"""The suite tpu_schedule: what the TPU compiler's static schedule says of the KDA kernels, for every TPU generation.

No TPU is needed and nothing runs. Per generation and real-model shape, three programs: the forward pass, a training
step's forward and backward, or one decode step. Each is compiled twice: at a few units of work with the compiler's
profiler, for cycles per unit, and at the real size without it, for memory and to see that it compiles at all. A unit
is 64 tokens of one value head, or one value head of one row of a decode step.

Programs take and return tokens as a model's projections do, heads side by side in one axis: XLA then need not lay
them out anew for a kernel that reads them so, and the table shows ("around", "temp") if it must.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from experiments.tpu_aot import GENERATIONS, Compiled, CompileError, Generation, Kernel, compile_for
from pallas_kernels import kda, kda_step
from pallas_kernels.kda.shapes import Shape, find_shape

__all__ = ["SHAPE_NAMES", "decode", "forward", "measure", "profiled", "table", "training"]

# Of pallas_kernels.kda.shapes. Odd heads (13) leave few ways to share a step among them.
SHAPE_NAMES = (
    "kimi_linear_48b-8192", "kimi_k3-8192", "grouped_values-8192", "attn_res_241m-8192",
    "kimi_linear_48b-decode-1", "kimi_linear_48b-decode-128", "kimi_k3-decode-128",
)  # fmt: skip


def measure(
    generations: Sequence[str] = tuple(GENERATIONS),
    shapes: Sequence[str] = SHAPE_NAMES,
    backend: str = "mosaic_tpu",
    jobs: int | None = None,
) -> dict[str, Any]:
    """A row for each generation, shape, program and kernel, or with "error" where a program does not compile.

    Prints a line for each compile. jobs: how many at a time (default: the number of cores, at most four).
    CompileError if nothing compiles, ImportError without libtpu.
    """
    tasks = [
        (GENERATIONS[generation], program, find_shape(name))
        for generation in generations
        for name in shapes
        for program in (("decode",) if find_shape(name).decodes else ("forward", "training"))
    ]
    # Shapes that differ in nothing but size share a profile.
    compiles = {(g.name, program, size): None for g, program, s in tasks for size in (profiled(s), s)}

    def run(key):
        generation, program, shape = key
        what = f"{generation} {program} {shape.name}"
        try:
            compiled = compile_for(
                f"experiments.tpu_schedule:{program}", {"shape": shape._asdict(), "backend": backend}, generation,
                profile=shape == profiled(shape),
            )  # fmt: skip
        except CompileError as error:
            print(f"{what}: {error}", flush=True)
            return error
        print(f"{what}: {', '.join(compiled.kernels)} in {compiled.compile_seconds} s", flush=True)
        return compiled

    with ThreadPoolExecutor(jobs or min(4, os.cpu_count() or 1)) as pool:
        compiles = dict(zip(compiles, pool.map(run, compiles), strict=True))
    rows = []
    for machine, program, shape in tasks:
        small, full = (compiles[machine.name, program, size] for size in (profiled(shape), shape))
        rows += _rows(machine, program, shape, small, full)
    if all("error" in row for row in rows):
        raise CompileError(f"no program compiled; the first: {rows[0]['error']}")
    return {
        "card": "none (compiled ahead of time, cycles simulated)",
        "case": {"backend": backend, "shapes": [find_shape(name)._asdict() for name in shapes]},
        "rows": rows,
    }


def profiled(shape: Shape) -> Shape:
    """A part of the shape that takes seconds to simulate: 512 tokens or 8 rows, and 16 heads if they divide its own.

    Its name says no more than that, so that equal parts of different shapes are equal.
    """
    B, T = (min(shape.B, 8), 1) if shape.decodes else (1, min(shape.T, 512))
    H, HV = shape.H, shape.HV
    if _units(shape._replace(B=B, T=T)) > 128 and HV % 16 == 0 and H % (HV // 16) == 0:
        H, HV = H // (HV // 16), 16
    return shape._replace(name=f"{B}x{T}x{H}x{HV}-{shape.gate}", B=B, T=T, H=H, HV=HV)


def forward(shape: Mapping[str, Any], backend: str) -> tuple[Callable, tuple]:
    """kda with all activations fused, as a model calls it for scoring or prefill: output and state."""
    s = Shape(**shape)
    return _kda(s, backend), _arguments(s)


def training(shape: Mapping[str, Any], backend: str) -> tuple[Callable, tuple]:
    """The output of kda and every input's gradient for a cotangent of the output."""
    s = Shape(**shape)

    def step(cotangent, *arguments):
        output, pullback = jax.vjp(lambda *xs: _kda(s, backend)(*xs)[0], *arguments)
        return output, pullback(cotangent)

    arguments = _arguments(s)
    return step, (arguments[2], *arguments)


def decode(shape: Mapping[str, Any], backend: str) -> tuple[Callable, tuple]:
    """kda_step for B rows, its float32 state donated."""
    s = Shape(**shape)

    def step(state, *arguments):
        *tokens, A_log, dt_bias = arguments
        result = kda_step(*_split(s, tokens), state, A_log=A_log, dt_bias=dt_bias, backend=backend, **_activations(s))
        return result.output.reshape(s.B, s.HV * s.V), result.state

    *tokens, A_log, dt_bias = _arguments(s)
    tokens = [jax.ShapeDtypeStruct((s.B, x.shape[-1]), x.dtype) for x in tokens]
    state = jax.ShapeDtypeStruct((s.B, s.HV, s.K, s.V), jnp.float32)
    return jax.jit(step, donate_argnums=0), (state, *tokens, A_log, dt_bias)


def table(result: Mapping[str, Any]) -> str:
    """One line a kernel, by generation."""
    head = (
        f"{'shape':27}{'program':10}{'kernel':14}{'cyc/unit':>9}{'us':>10}{'floor us':>10}{'x':>6}{'around us':>10}"
        f"{'VMEM MiB':>9}{'spill/fill':>11}{'temp MiB':>9}"
    )
    libtpu = result["versions"].get("libtpu", "unknown")
    lines = [f"{result['suite']} on {result['card']}, libtpu {libtpu}, backend={result['case']['backend']}"]
    generation = None
    for row in result["rows"]:
        if row["generation"] != generation:
            generation = row["generation"]
            lines += ["", f"{generation}", head]
        line = f"{row['shape']:27}{row['program']:10}"
        if "error" in row:
            lines.append(f"{line}{row['error']}")
            continue
        at_least = "" if row["profiled"] else ">="
        cycles = f"{at_least}{row['cycles_per_unit']:.0f}"
        us = f"{at_least}{row['us']:.1f}"
        spills = f"{row['spills']}/{row['fills']}"
        lines.append(
            f"{line}{row['kernel']:14}{cycles:>9}{us:>10}{row['floor_us']:10.1f}{row['us'] / row['floor_us']:6.1f}"
            f"{row['around_us']:10.1f}{row['vmem_mib']:9.2f}{spills:>11}{row['temp_mib']:9.1f}"
        )
    lines += [
        "",
        "unit: 64 tokens of one value head, or one value head of one row of a decode step. us: simulated, or the",
        "floor if that is more. floor: the kernel's operands and results through HBM once. x: us over floor. around:",
        "XLA's own estimate for the rest of the program. >=: the profiler could not model the kernel, for which a step",
        "takes at least its instructions:",
    ]
    unknown = [row for row in result["rows"] if not row.get("profiled", True)]
    reasons = {f"  {row['generation']} {row['kernel']}: {row['profiler_error'] or 'no estimate'}": 0 for row in unknown}
    return "\n".join([*lines, *(reasons or ["  none"])])


def _rows(
    machine: Generation, program: str, shape: Shape, small: Compiled | CompileError, full: Compiled | CompileError
) -> list[dict[str, Any]]:
    """The kernels of one program: cycles of the small size, everything else of the full one."""
    row = {"generation": machine.name, "shape": shape.name, "program": program}
    for compiled in (full, small):
        if isinstance(compiled, CompileError):
            return [row | {"error": str(compiled)}]
    if not full.kernels:
        return [row | {"error": "the program has no kernel: XLA alone would run it"}]
    clock_mhz = 1e3 * machine.clock_ghz
    rows = []
    for name, kernel in full.kernels.items():
        floor = kernel.hbm_bytes / machine.hbm_gb_per_s / 1e3
        simulated = (small.kernels[name], profiled(shape)) if name in small.kernels else (kernel, shape)
        per_unit, known = _cycles_per_unit(*simulated)
        rows.append(row | {
            "kernel": name,
            "profiled": known,
            "cycles_per_unit": round(per_unit, 1),
            "us": round(max(per_unit * _units(shape) / kernel.cores / clock_mhz, floor), 2),
            "floor_us": round(floor, 2),
            "around_us": round(full.other_cycles / clock_mhz, 2),
            "grid": kernel.grid,
            "cores": kernel.cores,
            "vmem_mib": round(kernel.vmem_bytes / 2**20, 2),
            "spills": kernel.spills,
            "fills": kernel.fills,
            "bundles": kernel.bundles,
            "temp_mib": round(full.temp_bytes / 2**20, 2),
            "argument_mib": round(full.argument_bytes / 2**20, 2),
            "output_mib": round(full.output_bytes / 2**20, 2),
            "compile_s": full.compile_seconds,
            "profiler_error": small.profiler_error,
        })  # fmt: skip
    return rows


def _cycles_per_unit(kernel: Kernel, shape: Shape) -> tuple[float, bool]:
    """Cycles of one core, and whether they were simulated: else the instructions of the grid's loop."""
    cycles = kernel.loop_bundles * kernel.steps if kernel.cycles is None else kernel.cycles
    return cycles * kernel.cores / _units(shape), kernel.cycles is not None


def _units(shape: Shape) -> int:
    return shape.B * shape.HV * -(-shape.T // 64)


def _kda(s: Shape, backend: str) -> Callable[..., Any]:
    def call(*arguments):
        *tokens, A_log, dt_bias = arguments
        result = kda(*_split(s, tokens), A_log=A_log, dt_bias=dt_bias, backend=backend, **_activations(s))
        return result.output.reshape(s.B, s.T, s.HV * s.V), result.state

    return call


def _activations(s: Shape) -> dict[str, Any]:
    return {"gate": s.gate, "lower_bound": s.lower_bound, "qk_l2norm": True, "beta_sigmoid": True}


def _arguments(s: Shape) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, k, v, and logits of g and beta, `[B, T, heads * channels]` in the shape's dtype; A_log, dt_bias in float32."""
    widths = (s.H * s.K, s.H * s.K, s.HV * s.V, s.HV * s.K, s.HV)
    tokens = [jax.ShapeDtypeStruct((s.B, s.T, width), s.dtype) for width in widths]
    return *tokens, *(jax.ShapeDtypeStruct((n,), jnp.float32) for n in (s.HV, s.HV * s.K))


def _split(s: Shape, tokens: Sequence[jax.Array]) -> list[jax.Array]:
    """The arguments of kda, or of kda_step, from those of a program."""
    q, k, v, g, beta = tokens
    return [x.reshape(*x.shape[:-1], heads, -1) for x, heads in ((q, s.H), (k, s.H), (v, s.HV), (g, s.HV))] + [beta]
