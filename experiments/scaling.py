"""Scaling laws of four models at our scale: all MLA, the hybrid with KDA, and that with Block or Full AttnRes.

    python -m experiments.scaling --data='corpus/train.*.txt' --validation_data='corpus/val.*.txt'
    python -m experiments.scaling --plan ...                    what is finished and what is left; nothing is run
    python -m experiments.scaling --limit_minutes=8 ...         a part: the same command goes on where this one stopped
    python -m experiments.report                                the table, the fits, the figure

Sizes, tokens and learning rates are in scaling_study.py, the count of operations in flops.py, the fit in
scaling_fit.py. A finished run is read from results/scaling.json and never repeated; one that was stopped or killed goes
on from its directory under runs/. All runs are of one corpus: another one is refused.
"""

import math
import shlex
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import app, flags, logging

from experiments.benchmark_suites import card
from experiments.configs import SOURCES
from experiments.run_store import RunStore, keep_programs
from experiments.scaling_study import MODELS, SIZES, Study, flops_of, guessed_seconds, tokens_of
from experiments.stopping import StopRequest
from experiments.training_runs import CorpusFacts, make_runs, read_corpus, require_same_corpus

# Settings of TrainConfig that are flags here; the learning rate is one by itself.
FIELDS = ("data", "validation_data", "tokenizer", "batch_size", "sequence_length", "dtype")


def run_study(
    study: Study, corpus: CorpusFacts, store: RunStore, stop: StopRequest, *, take_turns: bool = False
) -> bool:
    """`make_runs` for the study: True if nothing is left, False if it was stopped before or a run failed.

    Raises ValueError for a corpus that is not the one of the runs in the file.
    """
    return make_runs(study.runs(), corpus, store, stop, take_turns=take_turns)


def plan(study: Study, corpus: CorpusFacts, store: RunStore) -> str:
    """What is finished and what is left; then how long that may take, and how often the text is read."""
    require_same_corpus(corpus, store)
    configs = [run.config(corpus) for run in study.runs()]
    left = [config for config in configs if store.finished(config) is None]
    said = f"{len(configs)} runs: {len(configs) - len(left)} finished, {len(left)} left"
    if not left:
        return said
    pace, origin = _pace(store)
    seconds = [guessed_seconds(config) * pace for config in left]
    each, most = f"{min(seconds):.0f} to {max(seconds):.0f} s each", max(map(tokens_of, left))
    programs = len({(config["model"], config["size"]) for config in left})
    return (
        f"{said}\n{sum(seconds) / 60:.0f} minutes, {each}, besides compiling {programs} programs ({origin}): "
        f"{sum(map(flops_of, left)) / 1e15:.4g} PFLOP, forward and backward\n"
        f"the longest run reads {most / 1e6:.4g}M tokens, the training text {most / corpus.training_tokens:.2g} times"
    )


def _pace(store: RunStore) -> tuple[float, str]:
    """By what our guesses are multiplied, from the runs that this card has made, and where that comes from."""
    done = [e for e in store.entries() if e.result and e.result.get("tokens_per_second") and e.card == card()]
    if not done:
        return 1.0, "guessed for an H200"
    found = [tokens_of(e.config) / e.result["tokens_per_second"] / guessed_seconds(e.config) for e in done]
    return statistics.median(found), f"at the pace of {len(done)} finished on {card()}"


def main(argv: Sequence[str]) -> None:
    values = flags.FLAGS
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {list(argv[1:])}; quote a glob, or the shell expands it")
    try:
        study = study_from_flags(values)
        command = shlex.join(["python", "-m", "experiments.scaling", *_settings(values)])
        store = RunStore(values.out, sources=SOURCES, command=command, runs=values.runs)
        corpus = read_corpus(study.runs()[0].settings)
        print(plan(study, corpus, store), flush=True)
        if values.plan:
            return
        keep_programs(values.runs)
        with StopRequest(values.limit_minutes) as stop:
            done = run_study(study, corpus, store, stop, take_turns=values.take_turns)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"{'all' if done else 'not all'} of the runs asked for are in {store.path}")


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    defaults = Study()
    flags.DEFINE_list("models", ",".join(defaults.models), f"Of {', '.join(MODELS)}.", flag_values=values)
    flags.DEFINE_list("sizes", ",".join(defaults.sizes), f"Of {', '.join(SIZES)}.", flag_values=values)
    flags.DEFINE_integer("seeds", defaults.seeds, "Runs of each model at each size.", flag_values=values)
    flags.DEFINE_float("tokens_per_parameter", defaults.tokens_per_parameter, "Length of the runs.", flag_values=values)
    flags.DEFINE_float(
        "learning_rate", defaults.learning_rate, "At 256 channels; falls as one over the width.", flag_values=values
    )
    flags.DEFINE_string("data", None, "Training text, as of experiments.train.", flag_values=values)
    flags.DEFINE_string("validation_data", None, "Validation text, as of experiments.train.", flag_values=values)
    flags.DEFINE_string("tokenizer", None, "As of experiments.train.", flag_values=values)
    flags.DEFINE_integer("batch_size", None, "Rows per step (default: 64).", flag_values=values)
    flags.DEFINE_integer("sequence_length", None, "Tokens per row (default: 1024).", flag_values=values)
    flags.DEFINE_enum(
        "dtype", None, ["float32", "bfloat16"], "Default: float32 on a CPU, else bfloat16.", flag_values=values
    )
    flags.DEFINE_bool(
        "take_turns",
        False,
        "Compile beside other processes on this device, train in turn; no speeds.",
        flag_values=values,
    )
    flags.DEFINE_float("limit_minutes", math.inf, "Stop then; the same command goes on.", flag_values=values)
    flags.DEFINE_bool("plan", False, "Only say what is finished and what is left.", flag_values=values)
    flags.DEFINE_string("out", "results/scaling.json", "Where results are kept.", flag_values=values)
    flags.DEFINE_string("runs", "runs", "Where unfinished runs and compiled programs are kept.", flag_values=values)


def study_from_flags(values: flags.FlagValues = flags.FLAGS) -> Study:
    """The study that was asked for. ValueError names a flag that is not allowed."""
    fields: dict[str, Any] = {name: values[name].value for name in FIELDS if values[name].value is not None}
    fields.setdefault("dtype", "float32" if jax.default_backend() == "cpu" else "bfloat16")
    return Study(
        models=tuple(values.models),
        sizes=tuple(values.sizes),
        fields=fields,
        **{name: values[name].value for name in ("seeds", "tokens_per_parameter", "learning_rate")},
    )


def _settings(values: flags.FlagValues) -> list[str]:
    """The flags that were given and say what is run, as one types them; not how long, or whether at all."""
    names = ("models", "sizes", "seeds", "tokens_per_parameter", "learning_rate", *FIELDS)
    given = [values[name] for name in names if values[name].present]
    return [f"--{flag.name}={','.join(flag.value) if isinstance(flag.value, list) else flag.value}" for flag in given]


if __name__ == "__main__":
    define_flags()
    flags.FLAGS.verbosity = logging.WARNING
    app.run(main)
