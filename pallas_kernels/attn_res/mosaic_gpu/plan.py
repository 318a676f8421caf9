"""How a call is laid over the GPU: its programs, their warpgroups, and what of a token lies in shared memory.

A token's sources are visited in pieces. One piece that holds all of them is read as often as is needed; of several each
is fetched anew for each pass, mostly from the second-level cache.
"""

from typing import NamedTuple

import jax.numpy as jnp

from .rows import THREADS, WARPS, Rows

__all__ = ["Plan", "make_plan"]

MULTIPROCESSORS = 132  # of an H100 or H200
SHARED = 227 << 10  # bytes of shared memory that one program may have
SHARED_SM = 228 << 10  # of all on a multiprocessor, each of which takes 1 KiB more than it asked for
WIDE = 3072  # channels, above which a token has two warpgroups: their registers hold several rows
NARROW = 1024  # channels, up to which a token has but one warp, and a row is four tokens long
MOST_SLOTS = 32  # a thread keeps the phases of its barriers in one word
MOST_ITEMS = 12  # of a piece
FEW = 64  # numbers of a piece in a thread
AHEAD = 4  # items on their way while a piece is worked on, at least


class Plan(NamedTuple):
    rows: Rows
    groups: int  # warpgroups of a program, each with its part of a token's channels
    piece: int  # sources
    together: int  # sources that are fetched as one item
    slots: int  # items in shared memory
    programs: int

    @property
    def tokens(self) -> int:
        """That make up a row."""
        return self.rows.tokens

    @property
    def one_by_one(self) -> bool:
        """Whether a thread's part of a piece is too much for its registers, so that sources are read one by one."""
        return self.piece * self.rows.channels > FEW * THREADS

    @property
    def padded(self) -> int:
        """Channels of a row in shared memory."""
        return self.groups * self.rows.channels


def make_plan(
    M, D, N, dtype, *, registers_per_channel: int, registers_per_source: int = 0, rows_beside: int, bytes_beside: int,
    online: bool,
) -> Plan:  # fmt: skip
    """For M tokens of N sources. Four tokens make a row where they have few channels, all of them whole words.

    registers_per_channel, registers_per_source: of a thread, for each of the channels that it has, besides 50 or what
        its sources' numbers need. As many programs are made as then fit: of more, some would wait for others to end.
    rows_beside, bytes_beside: what a program keeps in shared memory besides sources, in rows and in bytes.
    online: there is one pass, so that pieces cost nothing and small programs, many at a time, are worth having. Pieces
        are then multiples of 4, which is what a token's numbers are stored in.
    """
    item = jnp.dtype(dtype).itemsize
    groups = 2 if D > WIDE else 1
    vector, tokens = _vector(D, groups, item), 1
    if D <= NARROW and M % WARPS == 0 and (own := _whole_words(D, item)):
        M, D, vector, tokens = M // WARPS, D * WARPS, own, WARPS
    channels = -(-D // (groups * THREADS * vector)) * THREADS * vector
    row = groups * channels * item
    registers = registers_per_channel * channels // THREADS + max(50, registers_per_source * N)
    registers = min(255, registers)  # and no thread has more
    most = max(1, min(4, 65536 // (groups * THREADS * registers)))
    granule = 4 if online else 1
    splits = [N] + [n for n in range(N - N % granule, 0, -granule) if n < N]
    if online:
        choices = [(p, n) for p in range(most, 0, -1) for n in splits if n <= MOST_ITEMS or p == 1]
    else:
        choices = [(p, n) for n in splits for p in range(most, 0, -1)]
    for ahead in (AHEAD // min(tokens, 2), 1):
        for programs, piece in choices:
            together = -(-piece // MOST_ITEMS)
            items = -(-piece // together)
            room = min(SHARED, SHARED_SM // programs - 1024) - bytes_beside - rows_beside * row
            slots = min(room // (together * row), MOST_SLOTS, 3 * items)
            if slots >= items + min(items, ahead):
                rows = Rows(channels, vector, jnp.dtype(dtype), tokens)
                return Plan(rows, groups, piece, together, slots, min(M, programs * MULTIPROCESSORS))
    raise AssertionError(f"no plan for D = {D}, N = {N}")


def _whole_words(D, item):
    """Channels of a word such that a warp's words are a token, or None: of 16 bytes, or at least of 8."""
    return next((v for v in (16 // item, 8 // item) if D % (32 * v) == 0), None)


def _vector(D, groups, item):
    """Channels of a word: as many as 16 bytes hold, unless too much of a row would be padding."""
    best = 16 // item
    size = lambda vector: -(-D // (groups * THREADS * vector)) * vector  # noqa: E731
    return next(v for v in (best, best // 2, 2) if size(v) <= 1.1 * size(2))
