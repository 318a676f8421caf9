"""Compiles JAX programs for Hopper GPUs that are not there, and reads what the assembler says of their Pallas kernels.

    compiled = compile_for("my.module:program", {"T": 512}, "h200")
    compiled.kernels["kda_state"].registers

Needs the two wheels of jax's CUDA plugin, which hold XLA's compiler and NVIDIA's assembler; no CUDA, no driver and no
GPU. That a program compiles, its registers, spills, shared memory and the memory of all of it are what a real machine
would get. Nothing runs: neither numerics nor time are measured.

Each compile has a process of its own (`aot_process`): Mosaic reads where to leave its dumps once.

    lower_for_hopper(function, *shapes, mesh=hopper_mesh({"data": 2}))

goes as far as jax alone can: to the kernels' own code, in this process and without the plugin. What the assembler
would refuse (registers, shared memory) is not found.
"""

import importlib.util
import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from experiments import aot_process
from experiments.aot_process import CompileError

__all__ = [
    "GPUS",
    "CompileError",
    "Compiled",
    "Gpu",
    "Kernel",
    "compile_for",
    "has_compiler",
    "hopper_mesh",
    "lower_for_hopper",
]

_MISSING = (
    "compiling for a GPU needs jax's CUDA compiler, the packages jax-cuda13-plugin and jax-cuda13-pjrt (pip install "
    "jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}, or uv sync --group gpu-aot; 140 MB); no GPU is needed"
)
SMEM_BLOCK = 227 << 10  # bytes, the most that one block may have
SMEM_SM = 228 << 10  # shared by the blocks of an SM, each of which takes 1 KiB more than it asked for
REGISTERS_SM = 65536


@dataclass(frozen=True)
class Gpu:
    """One kind of Hopper. Published figures."""

    name: str
    kind: str  # jax's device_kind
    memory_bytes: int
    hbm_gb_per_s: float
    sms: int = 132
    clock_ghz: float = 1.98
    l2_bytes: int = 50 << 20


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", "NVIDIA H100 80GB HBM3", 85 * 10**9, 3352),
        Gpu("h200", "NVIDIA H200", 151 * 10**9, 4800),
    )
}


@dataclass(frozen=True)
class Kernel:
    """One Mosaic GPU kernel, as ptxas left it."""

    name: str
    threads: int  # of a block
    registers: int  # of a thread at its start; setmaxnreg may move them between warpgroups
    spill_store_bytes: int  # of a thread, in the program text
    spill_load_bytes: int
    stack_bytes: int
    smem_bytes: int  # of a block: scratch and barriers
    ops: dict[str, int]  # PTX instructions of the program text, such as wgmma.mma_async, ex2, bar.sync
    warnings: tuple[str, ...]  # such as that wgmma is serialised

    @property
    def blocks_per_sm(self) -> int:
        """By registers and shared memory; 0 if a block does not fit at all."""
        per_warp = -(-self.registers * 32 // 256) * 256
        by_registers = REGISTERS_SM // (per_warp * -(-self.threads // 32))
        by_smem = SMEM_SM // (self.smem_bytes + 1024) if self.smem_bytes <= SMEM_BLOCK else 0
        return min(by_registers, by_smem, 2048 // self.threads, 32)


@dataclass(frozen=True)
class Compiled:
    gpu: Gpu
    kernels: dict[str, Kernel]  # by their name; of several of one name the later ones are name.1, name.2, ...
    argument_bytes: int  # of one device's memory
    output_bytes: int
    temp_bytes: int
    alias_bytes: int  # of outputs that take the place of donated arguments
    collectives: dict[str, int]  # all-gather, all-reduce, ... -> bytes of their results on one device, loops once
    compile_seconds: float


def compile_for(
    target: str,
    kwargs: Mapping[str, Any],
    gpu: str = "h200",
    *,
    mesh: Mapping[str, int] | None = None,
    mesh_axes: str = "explicit",
    keep: str | Path | None = None,
    timeout: float = 600,
) -> Compiled:
    """Compiles `target` for one GPU, or for a mesh of them.

    Args:
        target: "package.module:function". It is called with kwargs (JSON values) in the child, and returns a function
            (jitted or not) and a tuple of its arguments, pytrees of jax.ShapeDtypeStruct.
        gpu: a key of GPUS.
        mesh: sizes of named axes, eight devices together at most. The target then gets the jax Mesh as keyword `mesh`,
            and its arguments carry shardings; tracing happens under `jax.set_mesh`.
        mesh_axes: "auto" or "explicit", the type of all axes.
        keep: a folder for Mosaic's dumps (NAME_0.ptx, NAME_0.ptxas, ...).
        timeout: seconds for the process.

    Raises:
        ImportError: without jax's CUDA plugin; says how to get it.
        CompileError: with what jax, Mosaic or ptxas said.
    """
    card = GPUS[gpu]
    if not has_compiler():
        raise ImportError(_MISSING.format(version=jax.__version__))
    spec = {"target": target, "kwargs": dict(kwargs), "gpu": gpu, "mesh": mesh and dict(mesh), "mesh_axes": mesh_axes}
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory(prefix="gpu_aot-") as folder:
        folder = Path(folder)
        environment = {"MOSAIC_GPU_DUMP_TO": str(folder.resolve()), "TF_CPP_MIN_LOG_LEVEL": "3"}
        facts = aot_process.ask("experiments.gpu_aot", spec, folder, f"{target} for {gpu}", environment, timeout)
        kernels = {name: _kernel(folder, stem, name) for stem, name in _named_dumps(folder)}
    return Compiled(card, kernels, **facts)


def has_compiler() -> bool:
    """Whether `compile_for` can work here."""
    plugins = importlib.util.find_spec("jax_plugins")
    return plugins is not None and importlib.util.find_spec("jax_plugins.xla_cuda13") is not None


def lower_for_hopper(
    function: Callable, *shapes: Any, mesh: AbstractMesh | None = None, gpu: str = "h200"
) -> jax.stages.Lowered:
    """function lowered for a GPU that is not there, Mosaic kernels included; shapes are pytrees of ShapeDtypeStruct.

    mesh: one of `hopper_mesh`, whose axes the shapes' shardings name; None is one device. The text holds a custom call
    @mosaic_gpu_v2 for each kernel.
    """
    jitted = function if hasattr(function, "trace") else jax.jit(function)
    with jax.sharding.use_abstract_mesh(mesh or hopper_mesh({"_": 1}, AxisType.Auto, gpu)):
        return jitted.trace(*shapes).lower(lowering_platforms=("cuda",))


def hopper_mesh(axes: Mapping[str, int], axis_type: AxisType = AxisType.Explicit, gpu: str = "h200") -> AbstractMesh:
    """A mesh of GPUs that need not be there, of the given sizes of named axes."""
    device = AbstractDevice(device_kind=GPUS[gpu].kind, num_cores=GPUS[gpu].sms, platform="gpu")
    return AbstractMesh(tuple(axes.values()), tuple(axes), (axis_type,) * len(axes), abstract_device=device)


def _named_dumps(folder: Path) -> list[tuple[str, str]]:
    """(stem of the dumps, name) of each kernel: "kda_state_3" is the fourth kernel of the process."""
    found, seen = [], Counter()
    for path in sorted(folder.glob("*.ptxas"), key=lambda p: int(p.stem.rpartition("_")[2])):
        name = path.stem.rpartition("_")[0]
        found.append((path.stem, f"{name}.{seen[name]}" if seen[name] else name))
        seen[name] += 1
    return found


def _kernel(folder: Path, stem: str, name: str) -> Kernel:
    said, ptx = ((folder / f"{stem}{kind}").read_text() for kind in (".ptxas", ".ptx"))
    resources = (folder / f"{stem}.resources.txt").read_text()
    number = lambda pattern, text: sum(int(n) for n in re.findall(pattern, text))  # noqa: E731
    barriers = sum(int(n) * int(times) for n, times in re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", resources))
    return Kernel(
        name=name,
        threads=math.prod(int(n) for n in re.search(r"\.(?:req|max)ntid\s+([\d, ]+)", ptx)[1].split(",")),
        registers=number(r"Used (\d+) registers", said),
        spill_store_bytes=number(r"(\d+) bytes spill stores", said),
        spill_load_bytes=number(r"(\d+) bytes spill loads", said),
        stack_bytes=number(r"(\d+) bytes stack frame", said),
        smem_bytes=number(r"smem_scratch_bytes=(\d+)", resources) + 8 * barriers,
        ops=_ops(ptx),
        warnings=tuple(re.findall(r"^ptxas .*?((?:warning|Potential Performance Loss).*)", said, re.M)),
    )


# Instructions whose second word says what they do, not on which type.
_FAMILIES = {"bar", "cp", "fence", "ld", "mbarrier", "red", "st", "wgmma"}


def _ops(ptx: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    # One after another in a line where they come out of inline assembly, behind a brace or a predicate.
    for instruction in re.findall(r"(?:^|;)[ \t{]*(?:@!?%?\w+\s+)?([a-z][\w.:]*)(?=[^;\n]*;)", ptx, re.M):
        first, *rest = instruction.split(".")
        found[f"{first}.{rest[0]}" if first in _FAMILIES and rest else first] += 1
    return dict(found.most_common())


def _facts(spec: Mapping[str, Any]) -> dict[str, Any]:
    from jax.experimental import topologies

    card, count = GPUS[spec["gpu"]], math.prod((spec["mesh"] or {}).values())
    devices = topologies.get_topology_desc(
        spec["gpu"], "cuda", topology=f"1x1x{count}", target_config=_target_config(card)
    ).devices
    with aot_process.program(spec, devices, hopper_mesh({"_": 1}, AxisType.Auto, spec["gpu"])) as (jitted, arguments):
        started = time.perf_counter()
        # Named, since jax looks for a GPU before it believes in the platform of these devices.
        compiled = jitted.trace(*arguments).lower(lowering_platforms=("cuda",)).compile()
        seconds = time.perf_counter() - started
    return {
        **aot_process.sizes(compiled),
        "alias_bytes": compiled.memory_analysis().alias_size_in_bytes,
        "compile_seconds": round(seconds, 2),
    }


def _target_config(gpu: Gpu) -> str:
    """What XLA would ask a driver, a stream_executor.GpuTargetConfigProto in text form."""
    device = {
        "threads_per_block_limit": 1024, "threads_per_warp": 32, "threads_per_core_limit": 2048, "fpus_per_core": 128,
        "shared_memory_per_block": 48 << 10, "shared_memory_per_core": SMEM_SM,
        "shared_memory_per_block_optin": SMEM_BLOCK, "core_count": gpu.sms,
        "registers_per_core_limit": REGISTERS_SM, "registers_per_block_limit": REGISTERS_SM,
        "block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535,
        "thread_dim_limit_x": 1024, "thread_dim_limit_y": 1024, "thread_dim_limit_z": 64,
        "memory_bandwidth": int(gpu.hbm_gb_per_s * 10**9), "l2_cache_size": gpu.l2_bytes,
        "clock_rate_ghz": gpu.clock_ghz, "device_memory_size": gpu.memory_bytes, "device_address_bits": 64,
    }  # fmt: skip
    texts = {
        "name": gpu.kind, "device_vendor": "NVIDIA Corporation", "platform_version": "Compute Capability 9.0a",
        "driver_version": "13.0.0", "runtime_version": "13.0.0", "compile_time_toolkit_version": "13.0.0",
        "dnn_version": "9.10.0",
    }  # fmt: skip
    fields = [f"{name}: {value}" for name, value in device.items()]
    fields += [f'{name}: "{value}"' for name, value in texts.items()]
    fields.append("cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }")
    return (
        f'gpu_device_info {{ {" ".join(fields)} }} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} '
        f'runtime_version {{ major: 13 }} device_description_str: "{gpu.kind}"'
    )


if __name__ == "__main__":
    aot_process.answer(_facts)
