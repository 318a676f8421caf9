"""The protocol of the synthetic study: which runs it consists of, which come next, what they say together.

One model after the other, for each task: the learning rates at the grid's length with the first seed; then the other
seeds there at the best rate; then the other lengths at that rate.

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
    "kimi_jax/layers/attention.py",
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
    """What is asked for. From the paper: tasks, lengths, two layers of two heads of 128.

    Ours: half of its 20,000 steps, and so the upper two of its rates (5e-5, 1e-4, 5e-4, 1e-3).
    """

    tasks: tuple[str, ...] = tuple(TASKS)
    models: tuple[str, ...] = MIXERS
    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    grid_length: int = 1024
    learning_rates: tuple[float, ...] = (5e-4, 1e-3)
    seeds: int = 3  # at the grid's length
    length_seeds: int = 1  # at the others
    steps: int = 10000
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
        for name in ("seeds", "length_seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: at least 1")
        for task in self.tasks:  # all that is wrong with any run is said before the first begins
            for model in self.models:
                for length in (self.grid_length, *self.lengths):
                    for rate in self.learning_rates:
                        self.run(task, model, length, rate, 0)

    def run(self, task: str, model: str, length: int, learning_rate: float, seed: int) -> Run:
        """One run of the study. ValueError for what is not allowed."""
        shared = {name: getattr(self, name) for name in ("steps", "batch", "dtype", "window", "warmup", "head_dim")}
        return Run(task=task, model=model, length=length, learning_rate=learning_rate, seed=seed, **shared)

    def grid(self, task: str, model: str) -> list[Run]:
        """The learning rates at the grid's length, highest first."""
        rates = sorted(self.learning_rates, reverse=True)
        return [self.run(task, model, self.grid_length, rate, 0) for rate in rates]

    def at_rate(self, task: str, model: str, rate: float) -> list[Run]:
        """What follows the grid: its length with the other seeds, the other lengths."""
        cells = [(self.grid_length, seed) for seed in range(1, self.seeds)]
        others = [length for length in self.lengths if length != self.grid_length]
        cells += [(length, seed) for seed in range(self.length_seeds) for length in others]
        return [self.run(task, model, length, rate, seed) for length, seed in cells]

    def pending(self, store: RunStore) -> list[Run]:
        """The runs without a result, in order, as far as they are known: what follows a grid needs its best rate."""
        return [run for run in self._known(store) if store.finished(run.config()) is None]

    def waiting(self, store: RunStore) -> list[Run]:
        """The runs that wait for grids which are not finished, as if any rate were the best."""
        pairs = [(t, m) for m in self.models for t in self.tasks if self.best_rate(store, t, m) is None]
        return [run for task, model in pairs for run in self.at_rate(task, model, self.learning_rates[0])]

    def _known(self, store: RunStore) -> Iterator[Run]:
        for model in self.models:
            for task in self.tasks:
                yield from self.grid(task, model)
            for task in self.tasks:
                if (rate := self.best_rate(store, task, model)) is not None:
                    yield from self.at_rate(task, model, rate)

    def size(self) -> int:
        """The number of runs."""
        grid = len(self.learning_rates)
        return sum(grid + len(self.at_rate(t, m, self.learning_rates[0])) for m in self.models for t in self.tasks)

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


def _merit(entry: Entry) -> tuple[float, float, float]:
    """Peak, then the mean over all steps allowed (a run that ended early stays where it was), then the rate itself."""
    curve = entry.result["accuracy"] or [0.0]
    windows = entry.config["steps"] // entry.config["window"]
    last = curve[-1] if entry.result["ended"] != "diverged" else 0.0
    mean = (sum(curve) + last * (windows - len(entry.result["accuracy"]))) / windows
    return round(peak(entry.result), 3), mean, entry.config["learning_rate"]
