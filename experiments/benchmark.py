"""Times the kernels beside what they are compared with, prints a short table, and writes all of it to results/.

    python -m experiments.benchmark --suite=kda_cpu     # chunked XLA path against the token scan
    python -m experiments.benchmark --suite=kda_gpu     # our kernels and XLA path against fla (and its figures)
    python -m experiments.benchmark --suite=attn_res    # attn_res by kernel and XLA, against fla, and a plain copy
    python -m experiments.benchmark --suite=train_step  # a step of training by kind of residual, time and memory
    python -m experiments.benchmark --suite=decode      # time per token and bytes of caches at contexts from 4K to 1M
    python -m experiments.benchmark --suite=tpu_schedule    # the TPU kernels as their compiler sees them; needs no TPU
    python -m experiments.benchmark --suite=tpu_schedule_attn_res    # those of attn_res

All but the last two run on the default device, whatever it is, and say so in the file. kda_gpu, attn_res, train_step
and decode write after every case, and keep what the file has of others: --cases=B1-H32-T8192,decode-B1-H32
--implementations=mosaic_gpu measure parts.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from experiments import (
    benchmark_attn_res,
    benchmark_decode,
    benchmark_kda_gpu,
    benchmark_step,
    tpu_schedule,
    tpu_schedule_attn_res,
    turns,
)
from experiments.benchmark_suites import SUITES, card, versions
from experiments.files import replace_text

# Nothing runs, nothing is timed.
_SCHEDULES = {"tpu_schedule": tpu_schedule, "tpu_schedule_attn_res": tpu_schedule_attn_res}
_COMPILED = {name: module.measure for name, module in _SCHEDULES.items()}
_BY_CASE = {
    "kda_gpu": benchmark_kda_gpu,
    "attn_res": benchmark_attn_res,
    "train_step": benchmark_step,
    "decode": benchmark_decode,
}
_ALL = (
    SUITES
    | _COMPILED
    | {
        "kda_gpu": benchmark_kda_gpu.kda_gpu,
        "attn_res": benchmark_attn_res.attn_res_suite,
        "train_step": benchmark_step.train_step_suite,
        "decode": benchmark_decode.decode_suite,
    }
)
_PARTS = "; ".join(f"{suite}: {', '.join(c.name for c in module.CASES)}" for suite, module in _BY_CASE.items())
_WAYS = "; ".join(f"{suite}: {', '.join(module.IMPLEMENTATIONS)}" for suite, module in _BY_CASE.items())
_SUITE = flags.DEFINE_enum("suite", None, [*_ALL], "What to measure.", required=True)
_REPEATS = flags.DEFINE_integer(
    "repeats", None, "Measurements to take the median of (default: the suite's).", lower_bound=1
)
_CASES = flags.DEFINE_list("cases", None, f"Parts of a suite (default: all). {_PARTS}.")
_IMPLEMENTATIONS = flags.DEFINE_list("implementations", None, f"Default: all that are here. {_WAYS}.")
_OUT = flags.DEFINE_string("out", None, "JSON file to write (default: results/SUITE.json).")


def measure(suite: str, **options: Any) -> dict[str, Any]:
    """Runs a suite; returns its result with what one needs to repeat it: card, versions, date, command."""
    command = f"python -m experiments.benchmark --suite={suite}"
    if "repeats" in options:
        command += f" --repeats={options['repeats']}"
    if suite in _BY_CASE and "cases" in options:
        command += f" --cases={','.join(case.name for case in options['cases'])}"
    if "implementations" in options:
        command += f" --implementations={','.join(options['implementations'])}"
    return {
        "suite": suite,
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "card": card(),
        "versions": {"python": platform.python_version(), **versions()},
        **_ALL[suite](**options),
    }


def table(result: Mapping[str, Any]) -> str:
    """A few lines for a person: medians, ratios beside what they should be, compile time."""
    if result["suite"] in _COMPILED:
        return _SCHEDULES[result["suite"]].table(result)
    lines = [f"{result['suite']} on {result['card']}, {', '.join(f'{k}={v}' for k, v in result['case'].items())}"]
    lines += [f"  {name:36}{ms['median']:12.3f} ms{_speed(ms)}{_aim(ms)}" for name, ms in result["ms"].items()]
    lines += [f"  {name}: {ratio['value']:.2f}x{_aim(ratio)}" for name, ratio in result["ratios"].items()]
    if compiled := result.get("compile"):
        lines.append(f"  compile, forward and gradient, T={compiled['T']}: {compiled['seconds']} s{_aim(compiled)}")
    return "\n".join(lines)


def write(result: Mapping[str, Any], path: Path) -> None:
    """Writes the JSON file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(result, indent=1) + "\n")


def _speed(ms: Mapping[str, Any]) -> str:
    return f" {ms['GB_per_s']:9.1f} GB/s" if "GB_per_s" in ms else ""


def _aim(number: Mapping[str, float]) -> str:
    return "".join(f" ({key.replace('_', ' ')} {number[key]:g})" for key in ("at_least", "at_most") if key in number)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    if _REPEATS.value and _SUITE.value in _COMPILED:
        raise app.UsageError(f"--repeats: {_SUITE.value} measures nothing that varies")
    if (_CASES.value or _IMPLEMENTATIONS.value) and _SUITE.value not in _BY_CASE:
        raise app.UsageError(f"--cases, --implementations: {_SUITE.value} has no parts to choose from")
    module = _BY_CASE.get(_SUITE.value)
    names = [case.name for case in module.CASES] if module else []
    if unknown := {*(_CASES.value or ())} - {*names}:
        raise app.UsageError(f"--cases: got {', '.join(unknown)}; there are {', '.join(names)}")
    # PyTorch may share the card: jax takes what it needs, no more. Read when it first touches the device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax.config.update("jax_enable_compilation_cache", False)  # compile times are measured
    options = {"repeats": _REPEATS.value} if _REPEATS.value else {}
    path = Path(_OUT.value or f"results/{_SUITE.value}.json")
    if module is None:
        result = measure(_SUITE.value, **options)
        write(result, path)
        print(table(result))
        return
    if _IMPLEMENTATIONS.value:
        options["implementations"] = _IMPLEMENTATIONS.value
    for case in module.CASES:
        if _CASES.value and case.name not in _CASES.value:
            continue
        result = measure(_SUITE.value, cases=(case,), **options)
        with turns.alone():
            write(module.merge(json.loads(path.read_text()) if path.exists() else {}, result), path)
        print(table(result), flush=True)


if __name__ == "__main__":
    app.run(main)
