"""The synthetic tasks of Kimi Linear (Figure 4) by five models: palindrome, associative recall, stack.

    python -m experiments.synthetic                         all of it, or what is missing of it
    python -m experiments.synthetic --limit_minutes=3       a part: the same command goes on where this one stopped
    python -m experiments.synthetic --plan                  what is finished and what is left; nothing is run
    CUDA_VISIBLE_DEVICES=1 python -m experiments.synthetic  meanwhile on a second device: they share the runs
    python -m experiments.report                            the table and the figure

Accuracy by step at one length for a grid of learning rates, then by length at each model's best rate. A finished run is
read from results/synthetic.json and never repeated; one that was stopped or killed goes on from its checkpoint under
runs/. The tasks are in synthetic_tasks.py, the models in synthetic_models.py, one run in
synthetic_training.py, the order of all of them in synthetic_study.py.
"""

import contextlib
import dataclasses
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from absl import app, flags, logging
from tqdm import tqdm

from experiments.run_store import Entry, RunStore, keep_programs
from experiments.stopping import StopRequest
from experiments.synthetic_models import MIXERS
from experiments.synthetic_study import SOURCES, Study, peak
from experiments.synthetic_tasks import TASKS, VOCABULARY
from experiments.synthetic_training import Programs, Run, train_run

AHEAD = 2  # programs that are compiled side by side: that of the next run, and the one after it
GUESS = {"mamba2": 3e6}  # tokens per second of an H200 where nothing has been measured
GUESS_OTHERS = 8e6


def run_study(study: Study, store: RunStore, *, stop: Callable[[], bool] = lambda: False) -> bool:
    """Do what is missing; True if nothing is left, False if stop() ended it before or a run failed.

    A run that fails is written down with its reason, and the others go on; a later call tries it again. Several
    processes, one per device, share the work: each takes the next run that nobody is making.
    """
    programs, failed = Programs(), set()
    try:
        while runs := [run for run in study.pending(store) if run not in failed]:
            if stop():
                return False
            with _next(runs, store) as run:
                if run is None:  # what comes after depends on runs that other processes are making
                    time.sleep(1)
                    continue
                programs.prepare(_first_of_each(runs[runs.index(run) :]))
                entry = _go(run, len(runs), programs, store, stop)
            if entry is None:
                return False
            if entry.error is not None:
                failed.add(run)
        return not failed
    finally:
        programs.close()


def plan(study: Study, store: RunStore) -> str:
    """What is finished and what is left, and on a second line how long that may take."""
    runs, waiting = study.pending(store), study.waiting(store)
    left, total = runs + waiting, study.size()
    said = f"{total} runs: {total - len(left)} finished, {len(runs)} can be run now, {len(waiting)} wait for them"
    if not left:
        return said
    speeds = _speeds(store)
    seconds = [run.steps * run.batch * run.length / _speed(run, speeds) for run in left]
    return (
        f"{said}\nat most {sum(seconds) / 60:.0f} minutes if no run ends early, {min(seconds):.0f} to "
        f"{max(seconds):.0f} s each, without compilation ({'measured' if speeds else 'guessed for an H200'}): "
        f"{sum(map(flops, left)) / 1e15:.1f} PFLOP, forward and backward"
    )


def flops(run: Run) -> float:
    """Of all steps of a run, forward and backward: matrices, and the memory by the paper's count (equation 13)."""
    H, d = run.num_heads, run.head_dim
    D = H * d
    per_layer = 4 * D * D + 2 * (D * d + d * D) + 3 * D * 2 * D  # mixer with two low-rank gates, feed-forward
    matrices = 2 * (run.num_layers * per_layer + D * VOCABULARY)
    memory = H * (2 * run.length * d if run.model == "softmax" else 6 * d * d + 3 * 64 * d + 64 * 64)
    return 3.0 * run.steps * run.batch * run.length * (matrices + run.num_layers * memory)


@contextlib.contextmanager
def _next(runs: Sequence[Run], store: RunStore) -> Iterator[Run | None]:
    """The first of these runs that no other process is making, kept from the others meanwhile; None: they have all."""
    for run in runs:
        with store.claim(run.config()) as mine:
            if mine:
                yield run
                return
    yield None


def _go(run: Run, left: int, programs: Programs, store: RunStore, stop: Callable[[], bool]) -> Entry | None:
    """One run, with a line of progress; None if it was stopped."""
    name = f"{run.task} {run.model} length {run.length} rate {run.learning_rate:g} seed {run.seed}"
    bar = tqdm(total=run.steps, unit="step", desc=f"[{left} left] {name}", dynamic_ncols=True, leave=False,
               mininterval=0.2 if sys.stderr.isatty() else 10)  # fmt: skip

    def report(step: int, accuracy: float, loss: float) -> None:
        bar.set_postfix_str(f"accuracy {100 * accuracy:.1f}%, loss {loss:.3f}", refresh=False)
        bar.update(step - bar.n)

    config = run.config()
    with bar:
        entry = store.attempt(
            config, lambda: train_run(run, programs, store.directory(config), stop=stop, report=report)
        )
    if entry is not None:
        said = f"failed, {entry.error}" if entry.error is not None else _says(entry.result)
        print(f"{name}: {said}, {entry.seconds:.0f} s", flush=True)
    return entry


def _says(result: dict[str, Any]) -> str:
    best = f"{100 * peak(result):.1f}%"
    return f"{best}, {result['ended'] if result['ended'] != 'steps' else 'all'} after {result['steps']} steps"


def _first_of_each(runs: Sequence[Run]) -> list[Run]:
    """The next runs that need different programs."""
    found = {}
    for run in runs:
        found.setdefault((run.model, run.length), run)
    return list(found.values())[:AHEAD]


def _speeds(store: RunStore) -> dict[tuple[str, int], float]:
    """Measured tokens per second by model and length."""
    done = [entry for entry in store.entries() if entry.result and entry.result["tokens_per_second"]]
    return {(e.config["model"], e.config["length"]): e.result["tokens_per_second"] for e in done}


def _speed(run: Run, speeds: dict[tuple[str, int], float]) -> float:
    same_model = [speed for (model, _), speed in speeds.items() if model == run.model]
    guess = min(same_model) if same_model else GUESS.get(run.model, GUESS_OTHERS)
    return speeds.get((run.model, run.length), guess)


def main(argv: list[str]) -> None:
    values = flags.FLAGS
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    try:
        study = study_from_flags(values)
        command = shlex.join(["python", "-m", "experiments.synthetic", *_settings(values)])
        store = RunStore(values.out, sources=SOURCES, command=command, runs=values.runs)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(plan(study, store), flush=True)
    if values.plan:
        return
    keep_programs(values.runs)
    with StopRequest(values.limit_minutes) as request:
        done = run_study(study, store, stop=lambda: request.requested)
    print(
        f"{plan(study, store).splitlines()[0]}; they are in {values.out}"
        + ("" if done else ". To go on: the same command")
    )


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    defaults = Study()
    text = lambda numbers: ",".join(f"{n:g}" for n in numbers)  # noqa: E731
    flags.DEFINE_list("tasks", ",".join(TASKS), f"Of {', '.join(TASKS)}.", flag_values=values)
    flags.DEFINE_list("models", ",".join(MIXERS), f"Of {', '.join(MIXERS)}.", flag_values=values)
    flags.DEFINE_list("lengths", text(defaults.lengths), "Lengths of rows, in tokens.", flag_values=values)
    flags.DEFINE_integer("grid_length", defaults.grid_length, "Where learning rates are tried.", flag_values=values)
    flags.DEFINE_list("learning_rates", text(defaults.learning_rates), "The grid.", flag_values=values)
    flags.DEFINE_integer("seeds", defaults.seeds, "Runs of each model at the grid's length.", flag_values=values)
    flags.DEFINE_integer("length_seeds", defaults.length_seeds, "Runs at each other length.", flag_values=values)
    flags.DEFINE_integer("steps", defaults.steps, "At most; a run that has learned its task ends.", flag_values=values)
    flags.DEFINE_integer("batch", defaults.batch, "Rows per step.", flag_values=values)
    flags.DEFINE_integer("head_dim", defaults.head_dim, "Of two heads; the width is twice that.", flag_values=values)
    flags.DEFINE_integer("window", defaults.window, "Steps that an accuracy is taken over.", flag_values=values)
    flags.DEFINE_integer("warmup", defaults.warmup, "Steps over which the rate rises.", flag_values=values)
    flags.DEFINE_enum(
        "dtype", None, ["float32", "bfloat16"], "Of the computation. Default: float32 on a CPU, else bfloat16.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_float("limit_minutes", float("inf"), "Stop then; the same command goes on.", flag_values=values)
    flags.DEFINE_bool("plan", False, "Only say what is finished and what is left.", flag_values=values)
    flags.DEFINE_string("out", "results/synthetic.json", "Where results are kept.", flag_values=values)
    flags.DEFINE_string("runs", "runs", "Where unfinished runs and compiled programs are kept.", flag_values=values)


def study_from_flags(values: flags.FlagValues = flags.FLAGS) -> Study:
    """The study that was asked for. ValueError names a flag that is not allowed."""

    def numbers(name, kind):
        try:
            return tuple(kind(text) for text in values[name].value)
        except ValueError:
            raise ValueError(f"{name}={','.join(values[name].value)} is not allowed: numbers with commas") from None

    integers = ("grid_length", "seeds", "length_seeds", "steps", "batch", "window", "warmup", "head_dim")
    return Study(
        tasks=tuple(values.tasks),
        models=tuple(values.models),
        lengths=numbers("lengths", int),
        learning_rates=numbers("learning_rates", float),
        dtype=values.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"),
        **{name: values[name].value for name in integers},
    )


def _settings(values: flags.FlagValues) -> list[str]:
    """The flags that were given and say what is run, as one types them; not how long, or whether at all."""
    given = [values[field.name] for field in dataclasses.fields(Study) if values[field.name].present]
    return [f"--{flag.name}={','.join(flag.value) if isinstance(flag.value, list) else flag.value}" for flag in given]


if __name__ == "__main__":
    define_flags()
    flags.FLAGS.verbosity = logging.WARNING
    app.run(main)
