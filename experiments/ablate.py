"""One table of a paper at our scale: models that differ in one thing each, trained alike, over seeds.

    python -m experiments.ablate --table=kda_table1 --data='corpus/train.*.txt' --validation_data='corpus/val.*.txt'
    python -m experiments.ablate --table=kda_table1 --rows='3:1,0:1 (all MLA)' --seeds=1 --limit_minutes=3 ...
    python -m experiments.report

The tables are in configs/, one file each. A finished run is read from results/TABLE.json and never repeated; one that
was stopped goes on from its directory under runs/. All runs of a table are of one corpus: another one is refused.
"""

import dataclasses
import functools
import hashlib
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

from experiments.configs import SOURCES, TABLES, Table
from experiments.loop import TrainingDiverged, train
from experiments.run_directory import CHECKPOINTS
from experiments.run_store import RunStore
from experiments.stopping import StopRequest
from experiments.text import load_corpus
from experiments.tokenization import get_tokenizer
from experiments.train_config import TrainConfig

# Settings of TrainConfig that are flags here.
FIELDS = ("data", "validation_data", "tokenizer", "steps", "batch_size", "sequence_length", "learning_rate", "dtype")
PLACES = ("data", "validation_data", "tokenizer")  # paths: what they hold is told by its hash


@dataclasses.dataclass(frozen=True)
class Ablation:
    """A table, or rows of it, on one corpus. fields replace others of the table's TrainConfig.

    Raises ValueError for an unknown row, no seed, or settings that TrainConfig refuses.
    """

    table: Table
    rows: tuple[str, ...]
    seeds: int
    fields: dict[str, Any]

    def __post_init__(self):
        if self.seeds < 1:
            raise ValueError(f"seeds={self.seeds} is not allowed: at least 1")
        for row in self.rows:
            self.table.train_config(row, 0, **self.fields)

    def runs(self) -> list[tuple[str, int, TrainConfig]]:
        """(row, seed, settings), the first seed of all rows first."""
        each = [(row, seed) for seed in range(self.seeds) for row in self.rows]
        return [(row, seed, self.table.train_config(row, seed, **self.fields)) for row, seed in each]

    def corpus(self) -> dict[str, str]:
        """The sha256 of the tokens that are trained and validated on, in an order that is no run's."""
        settings = self.table.train_config(self.rows[0], 0, **self.fields)
        tokenizer = get_tokenizer(settings.tokenizer)
        found = load_corpus(settings.data, tokenizer, validation_data=settings.validation_data, seed=0)
        return {name: hashlib.sha256(np.ascontiguousarray(x)).hexdigest() for name, x in found._asdict().items()}

    def config(self, row: str, seed: int, settings: TrainConfig, corpus: dict[str, str]) -> dict[str, Any]:
        """A run for `RunStore`."""
        training = {name: value for name, value in settings.binding().items() if name not in (*PLACES, "seed")}
        training |= {"overrides": dict(self.table.training.get("overrides", {})), "eval_tokens": settings.eval_tokens}
        what = {"table": self.table.name, "row": row, "seed": seed, "model": dict(self.table.rows[row])}
        return {**what, "training": training, "corpus": corpus}


def run_table(ablation: Ablation, store: RunStore, stop: StopRequest) -> bool:
    """Do what is missing; True if nothing is left, False if it was stopped before or a run failed.

    Raises ValueError for a corpus that is not the one of the runs in the file.
    """
    corpus, table = ablation.corpus(), ablation.table
    for entry in store.entries() + store.entries(present=False):
        for side, found in corpus.items():
            if (before := entry.config.get("corpus", {}).get(side)) != found:
                raise ValueError(
                    f"{side} corpus: its tokens have the sha256 {found}, those of the runs in {store.path} {before}; "
                    "give the same data, or another --out"
                )
    failed = False
    for row, seed, settings in ablation.runs():
        config = ablation.config(row, seed, settings, corpus)
        if store.finished(config) is not None:
            continue
        if stop.requested:
            return False
        print(f"{table.name}: {row}, seed {seed}", flush=True)
        directory = store.directory(config)
        entry = store.attempt(config, functools.partial(_train, settings, directory, stop))
        if entry is None:
            return False
        if entry.error is None:
            shutil.rmtree(directory / CHECKPOINTS, ignore_errors=True)  # the curves stay
        else:  # it goes on from there when it is tried again
            failed = True
            print(f"{row}, seed {seed}: failed, {entry.error}", flush=True)
    return not failed


def _train(settings: TrainConfig, directory: Path, stop: StopRequest) -> dict[str, Any] | None:
    settings = dataclasses.replace(settings, workdir=str(directory))
    try:
        result = train(settings, limit_minutes=stop.minutes_left())
    except TrainingDiverged as error:
        return {"ended": "diverged", "why": str(error)}
    if not result.finished:
        return None
    return {
        "ended": "steps",
        "bits_per_byte": result.validation_bits_per_byte,
        "trigram_bits_per_byte": result.trigram_bits_per_byte,
    }


def main(argv: Sequence[str]) -> None:
    values = flags.FLAGS
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {list(argv[1:])}; quote a glob, or the shell expands it")
    table = TABLES[values.table]
    rows = tuple(values.rows) if values.rows else tuple(table.rows)
    fields = {name: values[name].value for name in FIELDS if values[name].value is not None}
    fields.setdefault("dtype", "float32" if jax.default_backend() == "cpu" else "bfloat16")
    given = [f"--{name}={values[name].value}" for name in ("table", *FIELDS) if values[name].value is not None]
    command = shlex.join(["python", "-m", "experiments.ablate", *given])
    try:
        ablation = Ablation(table, rows, values.seeds, fields)
        store = RunStore(values.out or f"results/{table.name}.json", sources=SOURCES, command=command, runs=values.runs)
        with StopRequest(values.limit_minutes) as stop:
            done = run_table(ablation, store, stop)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"{'all' if done else 'not all'} of the runs asked for are in {store.path}")


if __name__ == "__main__":
    flags.DEFINE_enum("table", None, [*TABLES], "Which table.", required=True)
    flags.DEFINE_list("rows", None, "Rows of it (default: all).")
    flags.DEFINE_integer("seeds", 3, "Runs of each row.")
    flags.DEFINE_string("data", None, "Training text, as of experiments.train.")
    flags.DEFINE_string("validation_data", None, "Validation text, as of experiments.train.")
    flags.DEFINE_string("tokenizer", None, "As of experiments.train.")
    for name in ("steps", "batch_size", "sequence_length"):
        flags.DEFINE_integer(name, None, "In place of the table's.")
    flags.DEFINE_float("learning_rate", None, "In place of the table's.")
    flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "Default: float32 on a CPU, else bfloat16.")
    flags.DEFINE_float("limit_minutes", float("inf"), "Stop then; the same command goes on.")
    flags.DEFINE_string("out", None, "Where results are kept (default: results/TABLE.json).")
    flags.DEFINE_string("runs", "runs", "Where unfinished runs are kept.")
    flags.FLAGS.verbosity = logging.WARNING
    app.run(main)
