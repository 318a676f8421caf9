"""What a table is made of."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from experiments.train_config import TrainConfig

# Whatever decides the numbers of a run.
SOURCES = (
    "experiments/depth_profile.py",
    "experiments/evaluate.py",
    "experiments/input_pipeline.py",
    "experiments/loop.py",
    "experiments/muon.py",
    "experiments/optim.py",
    "experiments/schedules.py",
    "experiments/text.py",
    "experiments/tokenization.py",
    "experiments/train_state.py",
    "kimi_jax/configs.py",
    "kimi_jax/model.py",
    "kimi_jax/sharding.py",
    "kimi_jax/layers/*.py",
    "pallas_kernels/*.py",
    "pallas_kernels/kda/*.py",
    "pallas_kernels/kda/mosaic_gpu/*.py",
    "pallas_kernels/attn_res/*.py",
    "pallas_kernels/attn_res/mosaic_gpu/*.py",
)


@dataclasses.dataclass(frozen=True)
class Table:
    """Models that differ in one thing each, all trained alike.

    Raises ValueError for rows that the models do not have, a baseline that is no row, numbers of unknown rows or
    without the baseline's.
    """

    name: str
    source: str  # of the paper's numbers
    measure: str  # of the paper's; lower is better, if any are given here
    rows: Mapping[str, Mapping[str, Any]]  # fields of ModelConfig by the row's label
    baseline: str  # the row that the others are compared with
    paper: Mapping[str, float]  # of rows, the baseline's among them; none where the paper's do not compare
    training: Mapping[str, Any]  # fields of TrainConfig; its "overrides" are of every row

    def __post_init__(self):
        if self.baseline not in self.rows:
            raise ValueError(f"baseline={self.baseline!r} is no row of {self.name}; rows: {', '.join(self.rows)}")
        if unknown := self.paper.keys() - self.rows.keys():
            raise ValueError(f"paper: {sorted(unknown)} are no rows of {self.name}; rows: {', '.join(self.rows)}")
        if self.paper and self.baseline not in self.paper:
            raise ValueError(f"paper: lacks baseline={self.baseline!r}, which the other rows are compared with")
        for row in self.rows:
            self.train_config(row, 0)

    def train_config(self, row: str, seed: int, **fields: Any) -> TrainConfig:
        """The settings of one run; fields replace others of them. ValueError for an unknown row."""
        if row not in self.rows:
            raise ValueError(f"row={row!r} is unknown; allowed in {self.name}: {', '.join(self.rows)}")
        overrides = {**self.training.get("overrides", {}), **self.rows[row]}
        return TrainConfig(**{**self.training, "seed": seed, "overrides": overrides, **fields})
