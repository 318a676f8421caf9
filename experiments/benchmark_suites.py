"""What experiments.benchmark measures: each suite times a fast path beside what it is compared with.

Everything that is compared runs in turns (a, b, a, b ...), so that a machine that slows down slows all of them, and
the two results are compared first: a fast wrong answer is an error, not a time.
"""

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import kda, kda_reference

Run = Callable[[int], None]  # makes so many calls, and returns when the device has finished them


@dataclass(frozen=True)
class KDACase:
    B: int = 1
    T: int = 8192
    H: int = 4
    K: int = 128
    V: int = 128
    dtype: str = "float32"


def kda_cpu(repeats: int = 5, case: KDACase = KDACase(), compile_T: int = 2048) -> dict[str, Any]:
    """The chunked XLA path against the token scan, forward and with the gradient of every input, on this device.

    Also the compile time of the chunked forward and backward at [B, compile_T, H, K].
    The scan's gradient keeps a state for every token: 9 GB at the default case.
    """
    fast, scan = with_initial_state(partial(kda, backend="xla")), with_initial_state(kda_reference)
    # Before anything else is compiled: no part of it can come from a cache.
    short = jax.eval_shape(lambda: kda_inputs(KDACase(case.B, compile_T, case.H, case.K, case.V, case.dtype)))
    started = time.perf_counter()
    jax.jit(with_gradient(fast)).lower(*short).compile()
    compile_s = time.perf_counter() - started

    inputs = kda_inputs(case)
    pairs = {
        "forward": (jax.jit(fast), jax.jit(scan)),
        "forward and gradient": (jax.jit(with_gradient(fast)), jax.jit(with_gradient(scan))),
    }
    aims = {"forward": 2.0, "forward and gradient": 6.0}
    measured = _compare(pairs, inputs, repeats, tolerance=2e-3, names=("xla", "scan"))
    return {
        "case": asdict(case),
        **measured,
        "ratios": {
            part: {"value": _ratio(measured, f"scan {part}", f"xla {part}"), "at_least": aims[part]} for part in pairs
        },
        "compile": {"T": compile_T, "seconds": round(compile_s, 2), "at_most": 20.0},
    }


SUITES: dict[str, Callable[..., dict[str, Any]]] = {"kda_cpu": kda_cpu}


def kda_inputs(case: KDACase) -> tuple[jax.Array, ...]:
    """q, k (of unit length), v, g, beta and initial_state; log-decays from -0.002 to -20 a step, -1 in the middle."""
    keys = jax.random.split(jax.random.key(0), 6)
    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V
    q, k = (jax.random.normal(key, (B, T, H, K)) for key in keys[:2])
    q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6) for x in (q, k))
    v = jax.random.normal(keys[2], (B, T, H, V))
    g = -jnp.exp(jax.random.uniform(keys[3], (B, T, H, K), minval=-6.0, maxval=3.0))
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], (B, T, H)))
    state = 0.1 * jax.random.normal(keys[5], (B, H, K, V))
    return *(x.astype(case.dtype) for x in (q, k, v)), g, beta, state


def with_initial_state(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kda that takes initial_state as its sixth argument, so that all inputs are positional."""
    return lambda q, k, v, g, beta, state: function(q, k, v, g, beta, initial_state=state)


def with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the same inputs that returns the outputs and every input's gradient of half their squared norm."""

    def both(*inputs):
        outputs, pullback = jax.vjp(function, *inputs)
        return outputs, pullback(outputs)

    return both


def card() -> str:
    """The device that jax computes on: its model, or the processor's with the number of cores."""
    if jax.default_backend() != "cpu":
        return jax.devices()[0].device_kind
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    """Of what takes part in a measurement, as far as it is installed."""
    found = {}
    for name in ("jax", "jaxlib", "libtpu", "torch", "triton", "flash-linear-attention", "fla-core"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _compare(
    pairs: Mapping[str, tuple[Callable, Callable]],
    inputs: tuple,
    repeats: int,
    tolerance: float,
    names: tuple[str, str],
) -> dict[str, Any]:
    """Times of both functions of each pair, in turns, after their results have been compared."""
    differences, runs = {}, {}
    for part, functions in pairs.items():
        difference = worst_difference(*(function(*inputs) for function in functions))
        differences[part] = check_difference(difference, tolerance, part)
        runs |= {f"{name} {part}": _jax_run(f, inputs) for name, f in zip(names, functions, strict=True)}
    calls = 1 if jax.default_backend() == "cpu" else 10
    return {"calls_per_repeat": calls, "ms": _in_turns(runs, repeats, calls), "worst_difference": differences}


def _in_turns(runs: Mapping[str, Run], repeats: int, calls: int) -> dict[str, dict[str, Any]]:
    """Milliseconds a call: for each run the median over repeats, and all of them."""
    for run in runs.values():
        run(1)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            run(calls)
            times[name].append(1e3 * (time.perf_counter() - started) / calls)
    return {
        name: {"median": round(statistics.median(all_ms), 4), "all": [round(ms, 4) for ms in all_ms]}
        for name, all_ms in times.items()
    }


def _jax_run(function: Callable[..., Any], inputs: Sequence[Any]) -> Run:
    def run(calls: int) -> None:
        # Calls queue up on the device, so that the host's part is hidden as it is in training.
        for _ in range(calls):
            outputs = function(*inputs)
        jax.block_until_ready(outputs)

    return run


def worst_difference(results: Any, expected: Any) -> float:
    """The largest relL2 of any output or gradient; inf if one is not finite."""

    def difference(x, ref):
        x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
        if not np.isfinite(x).all():
            return float("inf")
        return float(np.linalg.norm(x - ref) / max(np.linalg.norm(ref), 1e-6 * np.sqrt(ref.size)))

    return max(jax.tree.leaves(jax.tree.map(difference, results, expected)))


def check_difference(difference: float, tolerance: float, part: str) -> float:
    """difference; ArithmeticError if it is over tolerance, or not a number."""
    if not difference <= tolerance:
        raise ArithmeticError(
            f"{part}: results differ by relL2 {difference:.2g}, over {tolerance:.2g}; nothing was timed"
        )
    return difference


def _ratio(measured: Mapping[str, Any], over: str, under: str) -> float:
    return round(measured["ms"][over]["median"] / measured["ms"][under]["median"], 3)
