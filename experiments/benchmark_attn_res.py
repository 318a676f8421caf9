"""The suite attn_res: mixing over the depth by our kernels and our XLA path, beside fla's kernel where it is installed.

Each case is one site of a model: N sources of T tokens, forward, and forward with the gradient of every input. Speed is
also given in bytes: of N sources read and a mixture written, and in the backward of N sources and a cotangent read and
N cotangents written; the same number of bytes copied by XLA stands beside it. Before anything is timed, all results are
compared with the float32 reference on the first tokens.

On a CPU there is one small case in float32, which the plain reference can be compared on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import gpu_timing
from experiments.benchmark_suites import check_difference, with_gradient, worst_difference
from experiments.gpu_timing import Run, fla_is_here, in_turns, numbers, repeated
from experiments.turns import alone
from pallas_kernels import attn_res, attn_res_reference, which_backend

__all__ = ["CASES", "IMPLEMENTATIONS", "Case", "attn_res_suite", "merge"]

IMPLEMENTATIONS = ("mosaic_gpu", "mosaic_tpu", "xla", "reference", "fla", "copy")
FORWARD, BOTH = "forward", "forward and gradient"
CHECKED = 256  # tokens
TOLERANCE = {"bfloat16": {FORWARD: 1e-2, BOTH: 2e-2}, "float32": {FORWARD: 2e-5, BOTH: 2e-4}}  # relL2
KERNELS = ("mosaic_gpu", "mosaic_tpu")


@dataclass(frozen=True)
class Case:
    """N sources [T, D]. Milliseconds are of an H200."""

    name: str
    N: int
    D: int
    T: int = 8192
    dtype: str = "bfloat16"
    at_most: Mapping[str, float] = field(default_factory=dict)  # of the kernels, by part
    recorded: Mapping[str, float] = field(default_factory=dict)  # of fla 0.6.0, by part
    reference: bool = False  # time the plain reference too


CASES: tuple[Case, ...] = (
    Case("k3", 9, 7168, at_most={FORWARD: 0.355, BOTH: 1.3}, recorded={FORWARD: 0.355, BOTH: 2.146}),
    Case("kimi_linear", 8, 2304, at_most={FORWARD: 0.146}, recorded={FORWARD: 0.146, BOTH: 1.306}),
    Case("full_27", 27, 2304, at_most={FORWARD: 0.389}, recorded={FORWARD: 0.389, BOTH: 2.120}),
    Case("small_cpu", 10, 2304, 2048, "float32", reference=True),
)


def attn_res_suite(
    repeats: int = 20, cases: Sequence[Case] = CASES, implementations: Sequence[str] | None = None
) -> dict[str, Any]:
    """Milliseconds of each case, part and implementation ("CASE PART: IMPLEMENTATION"), and ratios between them.

    implementations: of IMPLEMENTATIONS; None is all that this machine has. ArithmeticError if a result is wrong.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    ms, differences = {}, {}
    for case in cases:
        runs = {}
        arguments = inputs(case)
        expected = _expected(case, arguments)
        for name in _present(case, arguments, implementations):
            implementation = _Fla() if name == "fla" else _Jax(name)
            if name == "copy":
                runs |= _copies(case)
                continue
            arrays = implementation.arrays(arguments)
            parts = {FORWARD: implementation.forward, BOTH: implementation.both}
            for part, function in parts.items():
                found = numbers(function(*implementation.arrays(_first(arguments, CHECKED))))
                difference = worst_difference(found, expected[part])
                differences[f"{case.name} {part}: {name}"] = check_difference(
                    difference, TOLERANCE[case.dtype][part], f"{case.name} {part}: {name}"
                )
                runs[f"{part}: {name}"] = repeated(implementation, function, arrays)
        with alone():
            found = in_turns(runs, repeats)
        for name, times in found.items():
            part, _, implementation = name.partition(": ")
            aim = {"at_most": case.at_most[part]} if implementation in KERNELS and part in case.at_most else {}
            speed = round(_bytes(case, part) / times["median"] / 1e6, 1)
            ms[f"{case.name} {name}"] = {**times, "GB_per_s": speed, **aim}
    sizes = {case.name: f"N={case.N} T={case.T} D={case.D} {case.dtype}" for case in cases}
    ratios = _ratios({name: {**entry, "started": started} for name, entry in ms.items()})
    return {"started": started, "case": sizes, "ms": ms, "worst_difference": differences, "ratios": ratios}


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`gpu_timing.merge` of two results of this suite."""
    merged = gpu_timing.merge(old, new, [case.name for case in CASES], _ratios)
    return {**merged, "case": {**old.get("case", {}), **new["case"]}}


def inputs(case: Case) -> tuple[Any, ...]:
    """sources, query, key_scale; the vectors in float32."""
    keys = jax.random.split(jax.random.key(0), case.N + 2)
    sources = tuple(jax.random.normal(key, (case.T, case.D)).astype(case.dtype) for key in keys[2:])
    query = jax.random.normal(keys[0], (case.D,)) * case.D**-0.5
    return sources, query, 1 + 0.1 * jax.random.normal(keys[1], (case.D,))


def _first(arguments, tokens):
    sources, *vectors = arguments
    return tuple(x[:tokens] for x in sources), *vectors


def _expected(case, arguments):
    sources, *vectors = _first(arguments, CHECKED)
    wide = tuple(x.astype(jnp.float32) for x in sources)
    rounded = lambda *inputs: attn_res_reference(*inputs).astype(case.dtype).astype(jnp.float32)  # noqa: E731
    return {
        FORWARD: numbers(jax.jit(attn_res_reference)(wide, *vectors)),
        BOTH: numbers(jax.jit(with_gradient(rounded))(wide, *vectors)),
    }


def _present(case: Case, arguments, asked: Sequence[str] | None) -> list[str]:
    chosen = which_backend("attn_res", *arguments)
    present = [chosen, "xla"] if chosen in KERNELS else ["xla"]
    present += ["reference"] if case.reference else []
    present += (["fla"] if fla_is_here() else []) + ["copy"]
    if missing := [name for name in asked or () if name not in present]:
        raise ValueError(f"implementations: got {missing}; {case.name} can be run here by {present}")
    return [name for name in present if asked is None or name in asked]


class _Jax:
    def __init__(self, backend: str):
        def call(sources, query, key_scale):
            return attn_res(sources, query, key_scale, backend=backend)

        self.forward, self.both = jax.jit(call), jax.jit(with_gradient(call))

    def arrays(self, arguments):
        return arguments

    def wait(self, results):
        jax.block_until_ready(results)


class _Fla:
    """fla's Triton kernels; arrays are torch's."""

    def __init__(self):
        import torch
        from fla.ops.attnres import fused_attnres

        self.torch, self.fused = torch, fused_attnres

    def arrays(self, arguments):
        def tensor(x):
            t = self.torch.from_numpy(np.array(x, np.float32)).cuda()
            return (t.bfloat16() if x.dtype == jnp.bfloat16 else t).requires_grad_()

        return jax.tree.map(tensor, arguments)

    def _call(self, sources, query, key_scale):
        return self.fused(query, sources, key_scale, rms_eps=1e-6)

    def forward(self, *arguments):
        with self.torch.no_grad():
            return self._call(*arguments)

    def both(self, sources, query, key_scale):
        mixture = self._call(sources, query, key_scale)
        *bars, query_bar, key_bar = self.torch.autograd.grad(mixture, (*sources, query, key_scale), mixture.detach())
        return mixture, (tuple(bars), query_bar, key_bar)

    def wait(self, results):
        self.torch.cuda.synchronize()


def _copies(case: Case) -> dict[str, Run]:
    """As many bytes as a part moves, half of them read and half of them written."""
    copy = jax.jit(lambda x: x + jnp.ones((), x.dtype))
    runs = {}
    for part in (FORWARD, BOTH):
        x = jnp.zeros(_bytes(case, part) // 2 // 4, jnp.int32)
        runs[f"{part}: copy"] = repeated(_Jax("xla"), copy, (x,))
    return runs


def _bytes(case: Case, part: str) -> int:
    row = case.T * case.D * jnp.dtype(case.dtype).itemsize
    return row * ((case.N + 1) + (2 * case.N + 1 if part == BOTH else 0))


def _ratios(ms: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Our time over another's: measured here, in the same run or not, and recorded on an H200."""
    found, recorded = {}, {case.name: case.recorded for case in CASES}
    for name, entry in ms.items():
        what, _, implementation = name.rpartition(": ")
        if implementation not in (*KERNELS, "xla"):
            continue
        for other in ("fla", "reference", "copy"):
            if there := ms.get(f"{what}: {other}"):
                same = entry["started"] == there["started"]
                value = round(entry["median"] / there["median"], 3)
                found[f"{name} to {other}"] = {"value": value, "same_run": same}
        case, _, part = what.partition(" ")
        if ms_of_fla := recorded.get(case, {}).get(part):
            value = round(entry["median"] / ms_of_fla, 3)
            found[f"{name} to the {ms_of_fla:g} ms of fla 0.6.0 on an H200"] = {"value": value}
    return found
