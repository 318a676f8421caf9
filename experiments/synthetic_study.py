"""The protocol of the synthetic study: which runs it consists of, which come next, what they say together.

For each task and model: the learning rates at the grid's length with the first seed; then the other seeds there at the
best rate; then the other lengths at that rate, one seed after the other.

The best rate is that of the highest accuracy ever reached (to a thousandth, as the paper's figure takes the peak), and
among equals the one that reached it with the highest mean over all steps.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.run_store import Entry, RunStore
from experiments.synthetic_models import MIXERS
from experiments.synthetic_tasks import TASKS
from experiments.synthetic_training import Run

# Whatever decides the numbers of a run: the programs here, the layers and kernels that they use, and what those use.
SOURCES = (
    "experiments/synthetic_tasks.py",
    "experiments/synthetic_models.py",
    "experiments/synthetic_training.py",
    "experiments/optim.py",
    "experiments/schedules.py",
    "kimi_jax/sharding.py",
    "kimi_jax/layers/feed_forward.py",
    "kimi_jax/layers/norms.py",
    "kimi_jax/layers/padding.py",
    "kimi_jax/layers/parameters.py",
    "kimi_jax/layers/short_conv.py",
    "pallas_kernels/machine.py",
    "pallas_kernels/kda/*.py",
    "pallas_kernels/kda/mosaic_gpu/*.py",
)


@dataclasses.dataclass(frozen=True)
class Study:
    """What is asked for. The paper fixes tasks, lengths, layers, heads and head size; its rates go up to 1e-3."""

    tasks: tuple[str, ...] = tuple(TASKS)
    models: tuple[str, ...] = MIXERS
    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    grid_length: int = 1024
    learning_rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3)
    seeds: int = 3
    steps: int = 4000
    batch: int = 32
    dtype: str = "bfloat16"
    window: int = 100
    warmup: int = 100
    head_dim: int = 128

    def __post_init__(self):
        for name in ("tasks", "models", "lengths", "learning_rates"):
            values = getattr(self, name)
            if not values or len({*values}) != len(values):
                raise ValueError(f"{name}={list(values)} is not allowed: at least one, each once")
        if self.seeds < 1:
            raise ValueError(f"seeds={self.seeds} is not allowed: at least 1")
        for task in self.tasks:  # all that is wrong with any run is said before the first begins
            for model in self.models:
                for length in (self.grid_length, *self.lengths):
                    for rate in self.learning_rates:
                        self.run(task, model, length, rate, 0)

    def run(self, task: str, model: str, length: int, learning_rate: float, seed: int) -> Run:
        """One run of the study. ValueError for what is not allowed."""
        shared = {name: getattr(self, name) for name in ("steps", "batch", "dtype", "window", "warmup", "head_dim")}
        return Run(task=task, model=model, length=length, learning_rate=learning_rate, seed=seed, **shared)

    def pairs(self) -> list[tuple[str, str]]:
        return [(task, model) for model in self.models for task in self.tasks]

    def grid(self, task: str, model: str) -> list[Run]:
        """The learning rates at the grid's length, highest first."""
        rates = sorted(self.learning_rates, reverse=True)
        return [self.run(task, model, self.grid_length, rate, 0) for rate in rates]

    def pending(self, store: RunStore) -> list[Run]:
        """The runs without a result, in order, as far as they are known: later ones need the grid's best rate."""
        return [run for run in self._runs(store) if store.finished(run.config()) is None]

    def _runs(self, store: RunStore) -> Iterator[Run]:
        for task, model in self.pairs():
            yield from self.grid(task, model)
        at_best = {pair: rate for pair in self.pairs() if (rate := self.best_rate(store, *pair)) is not None}
        other = [length for length in self.lengths if length != self.grid_length]
        for seed in range(1, self.seeds):
            for (task, model), rate in at_best.items():
                yield self.run(task, model, self.grid_length, rate, seed)
        for seed in range(self.seeds):
            for length in other:
                for (task, model), rate in at_best.items():
                    yield self.run(task, model, length, rate, seed)

    def best_rate(self, store: RunStore, task: str, model: str) -> float | None:
        """The rate that all longer comparisons use, or None while a run of the grid has no result."""
        entries = [store.finished(run.config()) for run in self.grid(task, model)]
        if None in entries:
            return None
        return best_entry(entries).config["learning_rate"]


def best_entry(entries: Sequence[Entry]) -> Entry:
    """Of runs that differ in the learning rate, the one whose rate is taken."""
    return max(entries, key=_merit)


def peak(result: dict[str, Any]) -> float:
    """The highest accuracy of any window, as a fraction; 0 for a run that diverged in its first."""
    return max(result["accuracy"], default=0.0)


def steps_to(result: dict[str, Any], accuracy: float, window: int) -> int | None:
    """After how many steps a window was at least so accurate, or None."""
    return next((window * (i + 1) for i, found in enumerate(result["accuracy"]) if found >= accuracy), None)


def _merit(entry: Entry) -> tuple[float, float]:
    """Peak, then the mean over all steps allowed; a run that ended early stays where it was."""
    curve = entry.result["accuracy"] or [0.0]
    windows = entry.config["steps"] // entry.config["window"]
    last = curve[-1] if entry.result["ended"] != "diverged" else 0.0
    return round(peak(entry.result), 3), (sum(curve) + last * (windows - len(entry.result["accuracy"]))) / windows
