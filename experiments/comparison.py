"""Whether two sets of runs differ: means over seeds, and a paired test."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats  # comes with jax

MANY = 0.05  # a difference that chance brings so often, or more, is called not resolved


@dataclass(frozen=True)
class Difference:
    """Of runs that are alike in all but one thing, over the seeds that both have."""

    mean: float
    std: float | None  # of single differences; None with one pair
    pairs: int
    p_value: float | None  # of Student's paired test, two-sided; None where all differences are the same, or just one

    def direction(self, tie: float) -> int | None:
        """1 or -1, the sign of the mean; 0 for one within tie; None where chance may have made it."""
        if abs(self.mean) <= tie:
            return 0
        if self.pairs > 1 and self.p_value is not None and self.p_value >= MANY:
            return None
        return 1 if self.mean > 0 else -1

    def certainty(self) -> str:
        """How sure it is, in words."""
        if self.pairs == 1:
            return "one seed: no test"
        if self.p_value is None:
            return f"the same in all {self.pairs} pairs"
        return f"p = {self.p_value:.2g}, {self.pairs} pairs"


def difference(ours: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """ours - baseline, by seed; None if no seed is in both."""
    seeds = sorted(ours.keys() & baseline.keys())
    if not seeds:
        return None
    each = [ours[seed] - baseline[seed] for seed in seeds]
    mean, std = mean_and_std(each)
    p_value = None
    if std:
        p_value = float(stats.ttest_rel([ours[s] for s in seeds], [baseline[s] for s in seeds]).pvalue)
    return Difference(mean, std, len(seeds), p_value)


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and the standard deviation of a sample (n - 1), None for one value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
