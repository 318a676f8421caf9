"""What the suites on a GPU share: programs timed in turns, also beside PyTorch's."""

import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Run", "fla_is_here", "in_turns", "merge", "numbers", "over", "repeated"]

REPEAT_S = 0.03  # of one measurement, which is as many calls


@dataclass(frozen=True)
class Run:
    call: Callable[[int], None]  # makes so many calls, and returns when the device has finished them
    steps: int = 1  # of a call


def fla_is_here() -> bool:
    """fla with a PyTorch that has a GPU."""
    if importlib.util.find_spec("fla") is None or importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def merge(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    order: Sequence[str],
    ratios: Callable[[Mapping[str, Mapping[str, Any]]], dict[str, Any]],
) -> dict[str, Any]:
    """old with what new has measured in place of what it had; every time then says where and when it was taken.

    order: the names of cases, which names of times begin with. ratios: of all times.
    """
    about = {key: new[key] for key in ("started", "date", "command", "card", "versions")}
    ms = {**old.get("ms", {}), **{name: {**entry, **about} for name, entry in new["ms"].items()}}
    differences = {**old.get("worst_difference", {}), **new["worst_difference"]}
    by_case = lambda name: next((i for i, case in enumerate(order) if name.split()[0] == case), len(order))  # noqa: E731
    return {
        "suite": new["suite"],
        "case": new["case"],
        "ms": {name: ms[name] for name in sorted(ms, key=by_case)},
        "worst_difference": {name: differences[name] for name in sorted(differences, key=by_case)},
        "ratios": ratios(ms),
    }


def over(ms: Mapping[str, Mapping[str, Any]], base: str, number: str = "median") -> dict[str, dict[str, Any]]:
    """{name: its number over that of the implementation `base`} for all others of "CASE PART: IMPLEMENTATION"."""
    found = {}
    for name, entry in ms.items():
        what, _, implementation = name.rpartition(": ")
        theirs = ms.get(f"{what}: {base}")
        if implementation != base and theirs is not None:
            same = entry["started"] == theirs["started"]
            found[name] = {"value": round(entry[number] / theirs[number], 4), "same_run": same}
    return found


def repeated(implementation: Any, function: Callable, arrays: tuple) -> Run:
    def call(calls: int) -> None:
        # Calls queue up on the device, so that the host's part is hidden as it is in training.
        for _ in range(calls):
            results = function(*arrays)
        implementation.wait(results)

    return Run(call)


def numbers(results: Any) -> Any:
    """Nested tuples of arrays, jax's or torch's, as float32 of numpy."""
    if isinstance(results, tuple):
        return tuple(map(numbers, results))
    if hasattr(results, "detach"):
        results = results.detach().float().cpu().numpy()
    return np.asarray(results).astype(np.float32)


def in_turns(runs: Mapping[str, Run], repeats: int) -> dict[str, dict[str, Any]]:
    """Milliseconds a step: for each run the median over repeats, and all of them; runs take turns."""
    calls = {}
    for name, run in runs.items():
        run.call(1)
        calls[name] = max(1, min(50, int(REPEAT_S / min(_seconds(run, 1) for _ in range(3)))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(1e3 * _seconds(run, calls[name]) / calls[name] / run.steps)
    return {
        name: {
            "median": round(statistics.median(found), 5), "all": [round(x, 5) for x in found],
            "calls_per_repeat": calls[name] * runs[name].steps,
        }
        for name, found in times.items()
    }  # fmt: skip


def _seconds(run: Run, calls: int) -> float:
    started = time.perf_counter()
    run.call(calls)
    return time.perf_counter() - started
