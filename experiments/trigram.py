"""A byte trigram: the bar that any network has to clear. Interpolated modified Kneser-Ney, counted exactly."""

from typing import NamedTuple

import numpy as np

_CHUNK = 1 << 24  # bytes counted at a time; bounds the memory on large corpora


class Trigram(NamedTuple):
    """Counts of byte triples in a training stream, and what smoothing needs of them."""

    counts: np.ndarray  # [256, 256, 256] int64: how often c followed a, b

    @classmethod
    def fit(cls, stream: np.ndarray) -> "Trigram":
        """stream uint8 [N]: the documents, each ended by a NUL, which is a byte like any other here."""
        counts = np.zeros(1 << 24, np.int64)
        for start in range(0, max(len(stream) - 2, 0), _CHUNK):
            piece = np.asarray(stream[start : start + _CHUNK + 2], np.uint32)
            counts += np.bincount(piece[:-2] << 16 | piece[1:-1] << 8 | piece[2:], minlength=1 << 24)
        return cls(counts.reshape(256, 256, 256))

    def probabilities(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """p(c | a, b), float64, for uint8 arrays of one shape.

        Chen & Goodman 1999, section 3: each order takes a discount that depends on the count (once, twice, more), and
        hands what it took to the next lower order. The lower orders count in how many contexts a byte was seen, not how
        often.
        """
        followers_bc = np.count_nonzero(self.counts, axis=0)  # [256, 256]: distinct a before b, c
        followers_c = np.count_nonzero(followers_bc, axis=0)  # [256]: distinct b before c
        p_c = _interpolate(followers_c, np.full(256, 1 / 256))
        p_bc = _interpolate(followers_bc, p_c)
        a, b, c = (np.asarray(x, np.int64) for x in (a, b, c))
        d_abc, kept_ab, total_ab = _discounts(self.counts)
        count = self.counts[a, b, c]
        total = total_ab[a, b]
        seen = (count - d_abc[np.minimum(count, 3)]) / np.maximum(total, 1)
        lower = np.where(total > 0, kept_ab[a, b] / np.maximum(total, 1), 1.0)
        return seen + lower * p_bc[b, c]

    def bits(self, stream: np.ndarray) -> np.ndarray:
        """Bits for each byte of a stream [N] given the two before it; before the stream stand NULs."""
        x = np.concatenate([np.zeros(2, np.uint8), np.asarray(stream, np.uint8)])
        return -np.log2(self.probabilities(x[:-2], x[1:-1], x[2:]))

    def bits_per_byte(self, stream: np.ndarray) -> float:
        """Their mean, leaving out the first byte of each document.

        A network that starts each document afresh does not predict that byte either.
        """
        starts_document = np.concatenate([[True], np.asarray(stream[:-1]) == 0])
        return float(self.bits(stream)[~starts_document].mean())


def _discounts(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Discount for a count of 0, 1, 2, more [4]; mass taken per context [...]; total per context [...]."""
    n1, n2, n3, n4 = (max(int(np.count_nonzero(counts == n)), 1) for n in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2)
    estimates = np.array([0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
    # A tiny corpus can push an estimate out of its range; a discount must leave probabilities positive.
    discounts = np.clip(estimates, [0, 0.05, 0.05, 0.05], [0, 0.95, 1.95, 2.95])
    taken = sum(discounts[n] * np.count_nonzero(counts == n, axis=-1) for n in (1, 2))
    taken = taken + discounts[3] * np.count_nonzero(counts >= 3, axis=-1)
    return discounts, taken, counts.sum(axis=-1)


def _interpolate(counts: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Smoothed distribution over the last axis of counts, backing off to `lower` [256]."""
    discounts, taken, total = _discounts(counts)
    total = np.maximum(total[..., None], 1)
    share = np.where(counts.sum(axis=-1, keepdims=True) > 0, taken[..., None] / total, 1.0)
    return (counts - discounts[np.minimum(counts, 3)]) / total + share * lower
