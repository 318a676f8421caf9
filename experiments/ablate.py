"""One table of a paper at our scale: models that differ in one thing each, trained alike, over seeds.

    python -m experiments.ablate --table=kda_table1 --data='corpus/train.*.txt' --validation_data='corpus/val.*.txt'
    python -m experiments.ablate --table=kda_table1 --rows='3:1,0:1 (all MLA)' --seeds=1 --limit_minutes=3 ...
    python -m experiments.report

The tables are in configs/, one file each. A finished run is read from results/TABLE.json and never repeated; one that
was stopped goes on from its directory under runs/. All runs of a table are of one corpus: another one is refused. The
same command on another device (CUDA_VISIBLE_DEVICES=1), started meanwhile, shares the runs that are left. Several times
on one device, with --take_turns each, they compile beside one another and train one at a time; speeds are not kept
then, since XLA times kernels on the device for those that compile. Rows come one after the other with all their seeds,
which compile once: --seeds=1 first, then more, gives a whole table early.
"""

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import app, flags, logging

from experiments.configs import SOURCES, TABLES, Table
from experiments.run_store import RunStore, keep_programs
from experiments.stopping import StopRequest
from experiments.training_runs import TrainingRun, make_runs, read_corpus, training_fields

# Settings of TrainConfig that are flags here.
FIELDS = ("data", "validation_data", "tokenizer", "steps", "batch_size", "sequence_length", "learning_rate", "dtype")


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

    def runs(self) -> list[TrainingRun]:
        """All seeds of one row after the other, since they share its compiled programs."""
        return [self.run(row, seed) for row in self.rows for seed in range(self.seeds)]

    def run(self, row: str, seed: int) -> TrainingRun:
        """One run of the table."""
        settings = self.table.train_config(row, seed, **self.fields)
        overrides = dict(self.table.training.get("overrides", {}))
        training = training_fields(settings) | {"overrides": overrides}
        what = {"table": self.table.name, "row": row, "seed": seed, "model": dict(self.table.rows[row])}
        return TrainingRun(f"{row}, seed {seed}", {**what, "training": training}, settings)


def run_table(ablation: Ablation, store: RunStore, stop: StopRequest, *, take_turns: bool = False) -> bool:
    """`make_runs` for a table: True if nothing is left, False if it was stopped before or a run failed.

    Raises ValueError for a corpus that is not the one of the runs in the file.
    """
    runs = ablation.runs()
    return make_runs(runs, read_corpus(runs[0].settings), store, stop, take_turns=take_turns)


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
        keep_programs(values.runs)
        with StopRequest(values.limit_minutes) as stop:
            done = run_table(ablation, store, stop, take_turns=values.take_turns)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"{'all' if done else 'not all'} of the runs asked for are in {store.path}")


if __name__ == "__main__":
    flags.DEFINE_enum("table", None, [*TABLES], "Which table.", required=True)
    flags.DEFINE_list("rows", None, "Rows of it (default: all); one with a comma stands in double quotes.")
    flags.DEFINE_integer("seeds", 3, "Runs of each row.")
    flags.DEFINE_string("data", None, "Training text, as of experiments.train.")
    flags.DEFINE_string("validation_data", None, "Validation text, as of experiments.train.")
    flags.DEFINE_string("tokenizer", None, "As of experiments.train.")
    for name in ("steps", "batch_size", "sequence_length"):
        flags.DEFINE_integer(name, None, "In place of the table's.")
    flags.DEFINE_float("learning_rate", None, "In place of the table's.")
    flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "Default: float32 on a CPU, else bfloat16.")
    flags.DEFINE_bool("take_turns", False, "Compile beside other processes on this device, train in turn; no speeds.")
    flags.DEFINE_float("limit_minutes", float("inf"), "Stop then; the same command goes on.")
    flags.DEFINE_string("out", None, "Where results are kept (default: results/TABLE.json).")
    flags.DEFINE_string("runs", "runs", "Where unfinished runs are kept.")
    flags.FLAGS.verbosity = logging.WARNING
    app.run(main)
