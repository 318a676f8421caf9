"""One process per compile: how `gpu_aot` and `tpu_aot` start it, what both run in it, how its failures come back.

    facts = ask("experiments.gpu_aot", spec, folder, "toy for h200", environment, timeout)  # parent
    answer(facts_of)  # child, `python -m experiments.gpu_aot SPEC`

Compilers for machines that are not there read once where to leave dumps, or all their flags, and may end their process:
hence one for each compile. A spec, which travels as JSON, has compile_for's target, kwargs, mesh and mesh_axes, and
what its compiler adds. The child leaves its facts, JSON too, beside it.
"""

import importlib
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, SingleDeviceSharding

__all__ = ["CompileError", "Crash", "answer", "ask", "collectives", "program", "sizes"]


class CompileError(RuntimeError):
    """The program could not be traced, lowered or compiled; says why. `kind` is the exception's name in the child."""

    def __init__(self, message: str, kind: str = "abort"):
        super().__init__(message)
        self.kind = kind


class Crash(CompileError):
    """The compiler ended its process by a signal, as at a failed CHECK, with these last words."""

    def __init__(self, message: str, last_words: str = ""):
        super().__init__(message)
        self.last_words = last_words


# --- The parent --------------------------------------------------------------------------------------------------


def ask(
    module: str,
    spec: Mapping[str, Any],
    folder: Path,
    what: str,
    environment: Mapping[str, str],
    timeout: float,
    *,
    explain: Callable[[str], str] = str,
    last_words: Callable[[str], str] = lambda stderr: stderr.strip()[-500:],
) -> dict[str, Any]:
    """The facts that `module`, run as a program, finds out about spec.

    Args:
        folder: for spec.json, facts.json and stderr.txt.
        what: is compiled; errors begin with it.
        environment: on top of this process's, and of a CPU without jax's cache.
        timeout: seconds.
        explain: turns what the child raised into what a user is told.
        last_words: picks the reason out of what a process wrote that left no facts.

    Raises:
        Crash: at a signal.
        CompileError: whatever else went wrong.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program from the cache leaves no dumps
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        **environment,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "facts.json").unlink(missing_ok=True)  # of an earlier compilation
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", module, str(folder / "spec.json")]
    try:
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise CompileError(f"{what}: not compiled within {timeout:g} s", "TimeoutExpired") from None
    (folder / "stderr.txt").write_text(child.stderr)
    try:
        facts = json.loads((folder / "facts.json").read_text())
    except FileNotFoundError:
        said = last_words(child.stderr)
        message = f"{what}: the compiler ended its process: {said}"
        raise (Crash(message, said) if child.returncode < 0 else CompileError(message)) from None
    if error := facts.get("error"):
        raise CompileError(f"{what}: {explain(error)}", facts["kind"])
    return facts


# --- The child ---------------------------------------------------------------------------------------------------


def answer(facts_of: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The child's whole program: what facts_of finds out about the command line's spec, or raises, goes beside it."""
    spec_file = Path(sys.argv[1])
    spec = json.loads(spec_file.read_text())
    try:
        facts = facts_of(spec)
    except Exception as error:
        facts = {"error": f"{type(error).__name__}: {error}", "kind": type(error).__name__}
    (spec_file.parent / "facts.json").write_text(json.dumps(facts))


@contextmanager
def program(spec: Mapping[str, Any], devices: Sequence[Any], alone: AbstractMesh) -> Iterator[tuple[Any, Any]]:
    """The spec's function, jitted, and its arguments, while jax traces for the spec's mesh of devices.

    Without a mesh the arguments lie on the first device, and jax traces for `alone`, which tells Pallas, and dispatch
    by platform, what machine that is.
    """
    if spec["mesh"]:
        names, counts = zip(*spec["mesh"].items(), strict=True)
        axis_type = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[spec["mesh_axes"]]
        chosen = np.array(devices[: math.prod(counts)]).reshape(counts)
        mesh = Mesh(chosen, names, axis_types=(axis_type,) * len(names))
        context, options = jax.set_mesh(mesh), {"mesh": mesh}
    else:
        context, options = jax.sharding.use_abstract_mesh(alone), {}

    def place(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(devices[0]))

    module, _, name = spec["target"].partition(":")
    with context:
        function, arguments = getattr(importlib.import_module(module), name)(**spec["kwargs"], **options)
        arguments = arguments if spec["mesh"] else jax.tree.map(place, arguments)
        yield function if hasattr(function, "trace") else jax.jit(function), arguments


def sizes(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """The facts that every compiler tells: bytes of one device's memory, and what moves between devices."""
    memory = compiled.memory_analysis()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "collectives": collectives(compiled.as_text()),
    }


_COLLECTIVES = (
    "all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast"
)


def collectives(text: str) -> dict[str, int]:
    """Kind of collective -> bytes of the results of all of that kind on one device. Loop bodies count once.

    XLA turns some gathers into loops of collective-permute: look at all kinds.
    """
    found: Counter[str] = Counter()
    for result, kind, start in re.findall(rf"^\s*(?:ROOT )?%?\S+ = (.*?) ({_COLLECTIVES})(-start)?\(", text, re.M):
        results = [_bytes(dtype, dims) for dtype, dims in re.findall(r"\b(pred|bf16|[a-z]+\d+\w*)\[([\d,]*)\]", result)]
        found[kind] += max(results) if start else sum(results)  # a start's tuple also names the operands
    return dict(found)


def _bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
    return math.prod(int(n) for n in dims.split(",") if n) * bits // 8
