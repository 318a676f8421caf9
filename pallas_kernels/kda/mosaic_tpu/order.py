"""The order in which independent work is written down.

The compiler schedules a kernel roughly in the order of its text and does not bring distant, independent work together.
An inverse is a chain of short steps, each of which waits for the one before: alone it leaves the units idle. So a
kernel's stages are generators that yield between steps, heads are dealt to two halves, and the inverses of one half are
written down in turns with what the other half can do in the meantime.
"""

from collections.abc import Iterable, Iterator

__all__ = ["alongside", "halves", "run"]


def run(work: Iterable[None]) -> None:
    """All steps of work."""
    for _ in work:
        pass


def alongside(work: Iterable[None], other: Iterator[None]) -> None:
    """All steps of both in turns, and the rest of other at the end."""
    for _ in work:
        next(other, None)
    run(other)


def halves(pairs: list[tuple[int, ...]]) -> tuple[list[int], list[int]]:
    """The indices of the pairs in two parts, the second empty if there is but one pair."""
    middle = -(-len(pairs) // 2)
    return list(range(middle)), list(range(middle, len(pairs)))
