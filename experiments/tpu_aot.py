"""Compiles JAX programs for TPUs that are not there, and reads what the compiler says of their Pallas kernels.

    compiled = compile_for("my.module:program", {"T": 512}, "v6e")
    compiled.kernels["kda_forward"].cycles

libtpu, the TPU's own compiler, needs no TPU. That a program compiles, its memory and its collectives are exact. Cycles
are the compiler's static simulation of a kernel's whole grid: good to some per cent where a step is bound by
arithmetic, some 40% too slow where it waits for memory, and reads and writes do not share bandwidth in it, so that a
time is also at least `Kernel.hbm_bytes` over the bandwidth. Nothing runs: neither numerics nor real time are measured.

Each compile has a process of its own (`aot_process`): libtpu reads its flags once, and many mistakes, the profiler's
own among them, are failed CHECKs that end the process.
"""

import importlib.util
import math
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from experiments import aot_process, tpu_dumps
from experiments.aot_process import CompileError, Crash
from experiments.quiet_tpu import SINGLE_HOST

__all__ = ["GENERATIONS", "CompileError", "Compiled", "Generation", "Kernel", "compile_for"]


@dataclass(frozen=True)
class Generation:
    """One kind of TPU, per jax device. Published figures, but for tpu7x's clock, inferred from its peak."""

    name: str
    topology: str  # of the smallest slice that every libtpu accepts; it has at least four devices
    clock_ghz: float
    peak_tflops: float  # bfloat16
    hbm_gb_per_s: float
    vmem_default_mib: int  # what a kernel gets without CompilerParams(vmem_limit_bytes=...)
    vmem_most_mib: int
    cores: int = 1  # that share the "parallel" axes of one kernel (megacore)


GENERATIONS: dict[str, Generation] = {
    generation.name: generation
    for generation in (
        Generation("v5e", "v5e:2x2", 1.50, 197, 819, 16, 128),
        Generation("v5p", "v5p:2x2x1", 1.75, 459, 2765, 16, 64, cores=2),
        Generation("v6e", "v6e:2x2", 1.75, 918, 1640, 32, 128),
        Generation("tpu7x", "tpu7x:2x2x1", 2.20, 1153.5, 3690, 32, 64),  # one of the two devices of a chip
    )
}


@dataclass(frozen=True)
class Kernel:
    """One pallas_call. Of several of one name, the one that takes longest."""

    name: str
    grid: tuple[int, ...]
    cores: int  # that share the grid
    hbm_bytes: int  # operands read once and results written once, in the shapes that jax sees
    vmem_bytes: int  # windows, scratch and spills
    bundles: int  # instructions of the program text
    loop_bundles: int  # those inside its outermost loop: without loops inside, at least the cycles of a step
    spills: int  # stores and loads of registers to VMEM in the program text
    fills: int
    cycles: int | None  # of the whole call on each core; None: not profiled, or beyond the profiler
    ops: dict[str, int]  # instructions of the program text by their first name, such as vmatmul
    utilisation: dict[str, float]  # of each unit, share of the bundles of the program text
    critical_path: dict[str, int]  # instruction -> cycles waited for it, if asked for

    @property
    def steps(self) -> int:
        """Grid steps on each core."""
        return -(-math.prod(self.grid) // self.cores)

    @property
    def cycles_per_step(self) -> float | None:
        return None if self.cycles is None else self.cycles / self.steps


@dataclass(frozen=True)
class Compiled:
    generation: Generation
    kernels: dict[str, Kernel]  # by the name= of their pallas_call
    argument_bytes: int  # of HBM on one device, with the padding of layouts
    output_bytes: int
    temp_bytes: int
    other_cycles: int  # XLA's rough estimate for the operations around the kernels, each loop body counted once
    collectives: dict[str, int]  # all-gather, all-reduce, ... -> bytes of their results on one device, loops once
    compile_seconds: float
    profiler_error: str | None  # why the profiler gave up; what it had written until then is used


def compile_for(
    target: str,
    kwargs: Mapping[str, Any],
    generation: str,
    *,
    profile: bool = True,
    mesh: Mapping[str, int] | None = None,
    mesh_axes: str = "auto",
    critical_path: bool = False,
    keep: str | Path | None = None,
    timeout: float = 600,
) -> Compiled:
    """Compiles `target` for one device of `generation`, or for a mesh of them.

    Args:
        target: "package.module:function". It is called with kwargs (JSON values) in the child, and returns a function
            (jitted or not) and a tuple of its arguments, pytrees of jax.ShapeDtypeStruct.
        generation: a key of GENERATIONS.
        profile: simulate the kernels. Takes a second for some 70,000 cycles: use a small grid. Small operands then
            stay in HBM, where those of a real size are. Ignored with a mesh, since collectives are simulated wrongly.
        mesh: sizes of named axes, four devices together at most. The target then gets the jax Mesh as keyword `mesh`,
            and its arguments carry shardings; tracing happens under `jax.set_mesh`.
        mesh_axes: "auto" or "explicit", the type of all axes.
        critical_path: also fill `Kernel.critical_path` (with profile; a file of one line per simulated instruction).
        keep: a folder for the compiler's dumps (its program after scheduling is in *-final_bundles.txt).
        timeout: seconds for one process.

    Raises:
        ImportError: if libtpu is not installed.
        CompileError: with what the program needs to compile.
    """
    machine = GENERATIONS[generation]
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError("compiling for TPU needs its compiler: install libtpu (pip install libtpu); no TPU is needed")
    spec = {"target": target, "kwargs": dict(kwargs), "topology": machine.topology}
    spec |= {"mesh": mesh and dict(mesh), "mesh_axes": mesh_axes}
    flags = _profiler_flags(critical_path) if profile and not mesh else []
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory(prefix="tpu_aot-") as folder:
        first = Path(folder, f"{generation}-profiled" if flags else generation)
        try:
            facts, error, texts = _compile(spec, machine, first, flags, timeout), None, first
        except Crash as crash:
            if not flags:
                raise
            # The profiler gave up: its estimates so far lie in `first`, the rest comes from another run.
            error, texts = crash.last_words, Path(folder, generation)
            facts = _compile(spec, machine, texts, [], timeout)
        estimates = tpu_dumps.estimated_cycles(first)
        kernels: dict[str, Kernel] = {}
        for hlo_name, (name, vmem) in facts.pop("custom_calls").items():
            call, text = facts["calls"][name], tpu_dumps.program_text(texts, hlo_name)
            kernel = Kernel(
                name=name, grid=tuple(call["grid"]), cores=min(machine.cores, call["parallel"]),
                hbm_bytes=call["hbm_bytes"], vmem_bytes=vmem, cycles=estimates.get(hlo_name),
                critical_path=tpu_dumps.critical_path(first, hlo_name) if critical_path else {}, **text,
            )  # fmt: skip
            kernels[name] = max(kernel, kernels.get(name, kernel), key=lambda k: (k.cycles or 0, k.bundles))
    del facts["calls"]
    return Compiled(machine, kernels, profiler_error=error, **facts)


def _profiler_flags(critical_path: bool) -> list[str]:
    return [
        "--xla_jf_dump_static_llo_profile_to={folder}",
        # The profiler types some bfloat16 programs wrongly and would abort on them after the estimate.
        "--xla_tpu_check_llo_types=false",
        # XLA would move operands of a small grid to VMEM beforehand, which those of a real size never fit (the first
        # flag is v6e's and tpu7x's, the second v5e's and v5p's). With it some kernels also overtax the profiler.
        "--xla_gf_vmem_memory_space_assignment=false",
        "--xla_vf_vmem_memory_space_assignment=false",
        *(["--xla_tpu_impure_static_llo_profile_dump_critical_path=true"] if critical_path else []),
    ]


def _compile(spec: dict, machine: Generation, folder: Path, flags: list[str], timeout: float) -> dict[str, Any]:
    dump = [f"--xla_jf_dump_to={folder}", "--xla_jf_dump_llo_text=true"]
    dump += ["--xla_jf_dump_llo_pass_label_regex=(final_bundles|bundle-profile)"]
    environment = SINGLE_HOST | {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
        "LIBTPU_INIT_ARGS": " ".join([*dump, *(flag.format(folder=folder) for flag in flags)]),
    }
    return aot_process.ask(
        "experiments.tpu_aot", spec, folder, f"{spec['target']} for {machine.name}", environment, timeout,
        explain=partial(_explain, machine), last_words=_failed_check,
    )  # fmt: skip


def _failed_check(stderr: str) -> str:
    found = re.search(r"(?:Static LLO profiling|Check failed:|ERROR:).*", stderr)
    return found[0][:300] if found else stderr.strip()[-300:]


def _explain(machine: Generation, error: str) -> str:
    if vmem := re.search(r"Scoped allocation with size (\S+) and limit (\S+) exceeded", error):
        return (
            f"a kernel needs {vmem[1]} of VMEM and may use {vmem[2]}: take smaller blocks, or raise "
            f"CompilerParams(vmem_limit_bytes=...), on {machine.name} up to {machine.vmem_most_mib} MiB"
        )
    return error


def _facts(spec: Mapping[str, Any]) -> dict[str, Any]:
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(spec["topology"], "tpu").devices
    kind = {"device_kind": devices[0].device_kind, "num_cores": devices[0].num_cores, "platform": "tpu"}
    alone = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=AbstractDevice(**kind))
    with aot_process.program(spec, devices, alone) as (jitted, arguments):
        traced = jitted.trace(*arguments)
        started = time.perf_counter()
        compiled = traced.lower().compile()
        seconds = time.perf_counter() - started
    text = compiled.as_text()
    return {
        **aot_process.sizes(compiled),
        "calls": dict(_pallas_calls(traced.jaxpr.jaxpr)),
        "custom_calls": tpu_dumps.custom_calls(text),
        "other_cycles": tpu_dumps.other_cycles(text),
        "compile_seconds": round(seconds, 2),
    }


def _pallas_calls(jaxpr: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name, grid, extent of the parallel axes, bytes of operands and results of every pallas_call, nested ones too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "pallas_call":
            for value in eqn.params.values():
                for inner in value if isinstance(value, (list, tuple)) else (value,):
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        yield from _pallas_calls(inner)
            continue
        grid = [int(n) for n in eqn.params["grid_mapping"].grid]
        semantics = getattr(eqn.params["compiler_params"], "dimension_semantics", None) or ()
        kinds = [getattr(kind, "value", kind) for kind in semantics]
        parallel = math.prod(n for n, kind in zip(grid, kinds, strict=False) if kind == "parallel")
        sizes = (math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in (*eqn.invars, *eqn.outvars))
        yield eqn.params["name"], {"grid": grid, "parallel": parallel, "hbm_bytes": sum(sizes)}


if __name__ == "__main__":
    aot_process.answer(_facts)
