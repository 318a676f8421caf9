"""The suite tpu_schedule_attn_res: what the TPU compiler's static schedule says of the attn_res kernels.

As tpu_schedule does for KDA, without a TPU. Each training program (forward and backward) is compiled once per
generation, at so few tokens that the compiler's profiler takes seconds; cycles and bytes are proportional to tokens,
but for the first block's transfer, which no arithmetic hides. A time is beside its floor: the least that must pass
through HBM, which is the sources and the mixture once (backward: the sources, its cotangent, the sources' gradients).

The profiler miscounts loops within loops. At these shapes the kernels have none.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.tpu_aot import GENERATIONS, CompileError, Generation, Kernel, compile_for
from pallas_kernels.attn_res import mosaic_tpu
from pallas_kernels.attn_res.inputs import check_inputs
from pallas_kernels.attn_res.kernels import mix_by

__all__ = ["MIXES", "Mix", "find_mix", "measure", "mix_forward", "mix_training", "table"]

PROFILED = 1024  # tokens


class Mix(NamedTuple):
    """One call: N sources `[M, D]`, or a buffer `[N, M, D]` with a traced count."""

    name: str
    N: int
    D: int
    M: int = 8192
    dtype: str = "bfloat16"
    output_scale: bool = False
    buffer: bool = False


MIXES = (
    Mix("kimi_k3-9", 9, 7168),
    Mix("kimi_k3-9-normed", 9, 7168, output_scale=True),
    Mix("kimi_linear_48b-8", 8, 2304),
    Mix("kimi_linear_48b-27", 27, 2304),
    Mix("attn_res_436m-17", 17, 1168),
    Mix("kimi_linear_48b-8-float32", 8, 2304, dtype="float32"),
)


# Compiled and profiled in some minutes on two cores; the tests compile the others as well.
MEASURED = ("kimi_linear_48b-8", "kimi_k3-9", "attn_res_436m-17")


def find_mix(name: str) -> Mix:
    """The mix of that name; ValueError that lists them for an unknown one."""
    for mix in MIXES:
        if mix.name == name:
            return mix
    raise ValueError(f"unknown mix {name!r}; mixes: {', '.join(mix.name for mix in MIXES)}")


def measure(
    generations: Sequence[str] = tuple(GENERATIONS),
    mixes: Sequence[str] = MEASURED,
    jobs: int | None = None,
) -> dict[str, Any]:
    """A row for each generation, mix and kernel, or with "error" where a program does not compile.

    Prints a line for each compile. jobs: how many at a time (default: the number of cores, at most four).
    """
    tasks = [(GENERATIONS[generation], find_mix(name)) for generation in generations for name in mixes]

    def run(task):
        machine, mix = task
        row = {"generation": machine.name, "mix": mix.name}
        few = mix._replace(M=min(mix.M, PROFILED))
        try:
            compiled = compile_for(
                "experiments.tpu_schedule_attn_res:mix_training", {"mix": few._asdict()}, machine.name
            )
        except CompileError as error:
            print(f"{machine.name} {mix.name}: {error}", flush=True)
            return [row | {"error": str(error)}]
        print(f"{machine.name} {mix.name} in {compiled.compile_seconds} s", flush=True)
        return [row | _figures(machine, mix, few, kernel) for kernel in compiled.kernels.values()]

    with ThreadPoolExecutor(jobs or min(4, os.cpu_count() or 1)) as pool:
        rows = [row for found in pool.map(run, tasks) for row in found]
    return {
        "card": "none (compiled ahead of time, cycles simulated)",
        "case": {"profiled_tokens": PROFILED, "mixes": [find_mix(name)._asdict() for name in mixes]},
        "rows": rows,
    }


def _figures(machine: Generation, mix: Mix, few: Mix, kernel: Kernel) -> dict[str, Any]:
    """Times of one kernel at the mix's own number of tokens."""
    passes = 2 * mix.N + 1 if "backward" in kernel.name else mix.N + 1
    floor = passes * mix.M * mix.D * jnp.dtype(mix.dtype).itemsize / machine.hbm_gb_per_s / 1e3
    known = kernel.cycles is not None
    cycles = kernel.cycles if known else kernel.loop_bundles * kernel.steps / kernel.cores
    per_token = cycles / few.M
    return {
        "kernel": kernel.name,
        "profiled": known,
        "cycles_per_64_tokens": round(64 * per_token, 1),
        "us": round(mix.M * per_token / machine.clock_ghz / 1e3, 2),
        "floor_us": round(floor, 2),
        "profiled_grid": kernel.grid,
        "cores": kernel.cores,
        "vmem_mib": round(kernel.vmem_bytes / 2**20, 2),
        "spills": kernel.spills,
        "fills": kernel.fills,
        "bundles": kernel.bundles,
    }


def table(result: Mapping[str, Any]) -> str:
    """One line a kernel, by generation."""
    head = (
        f"{'mix':27}{'kernel':20}{'cyc/64 tokens':>14}{'us':>10}{'floor us':>10}{'x':>6}{'VMEM MiB':>10}"
        f"{'spill/fill':>12}"
    )
    lines = [f"{result['suite']} on {result['card']}, libtpu {result['versions'].get('libtpu', 'unknown')}"]
    generation = None
    for row in result["rows"]:
        if row["generation"] != generation:
            generation = row["generation"]
            lines += ["", generation, head]
        if "error" in row:
            lines.append(f"{row['mix']:27}{row['error']}")
            continue
        least = "" if row["profiled"] else ">="
        spills = f"{row['spills']}/{row['fills']}"
        lines.append(
            f"{row['mix']:27}{row['kernel']:20}{least + format(row['cycles_per_64_tokens'], '.0f'):>14}"
            f"{least + format(row['us'], '.1f'):>10}{row['floor_us']:10.1f}{row['us'] / row['floor_us']:6.2f}"
            f"{row['vmem_mib']:10.2f}{spills:>12}"
        )
    lines += [
        "",
        "us: simulated arithmetic beside its own transfers; the time is the floor where that is more (x below 1).",
    ]
    return "\n".join(lines)


def mix_forward(mix: Mapping[str, Any]) -> tuple[Callable, tuple]:
    """The mixture."""
    m = Mix(**mix)
    return (lambda *arguments: _mix(m, *arguments)), _arguments(m)


def mix_training(mix: Mapping[str, Any]) -> tuple[Callable, tuple]:
    """The mixture, and the gradient of every float input for a cotangent of it."""
    m = Mix(**mix)

    def step(cotangent, count, *arguments):
        mixture, pullback = jax.vjp(lambda *xs: _mix(m, count, *xs), *arguments)
        return mixture, pullback(cotangent)

    return step, (jax.ShapeDtypeStruct((m.M, m.D), m.dtype), *_arguments(m))


def _arguments(m: Mix) -> tuple:
    """count, sources, query, key_scale, output_scale."""
    tokens, vector = jax.ShapeDtypeStruct((m.M, m.D), m.dtype), jax.ShapeDtypeStruct((m.D,), jnp.float32)
    sources = jax.ShapeDtypeStruct((m.N, m.M, m.D), m.dtype) if m.buffer else (tokens,) * m.N
    count = jax.ShapeDtypeStruct((), jnp.int32) if m.buffer else None
    return count, sources, vector, vector, vector if m.output_scale else None


def _mix(m: Mix, count, sources, query, key_scale, output_scale):
    inputs = check_inputs(sources, query, key_scale, count=count, output_scale=output_scale)
    return mix_by(mosaic_tpu.MACHINE, inputs, return_lse=False)
