"""Walks over the registers of a block of tokens: rows of one register tile, lanes 128 at a time.

A register holds 8 x 128 float32, so a tile of bfloat16 (16 rows share the register's words) is two registers wide. What
is summed over channels is summed register by register and kept as [rows, 128]: the one sum across lanes, which is slow,
comes at the end and for many tokens together. What belongs to a token is a lane of a "table" [tokens, 128], lane i for
source i, so that the softmax over sources is one operation for all of them.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

__all__ = ["LANES", "columns", "fold", "groups", "lane", "over_lanes", "over_rows", "wide"]

LANES = 128


def over_rows(rows: int, count, body: Callable) -> None:
    """body(pl.ds of `rows` rows) for the first `count` of them, a python int or a traced number."""

    def turn(r, _):
        body(pl.ds(pl.multiple_of(r * np.int32(rows), rows), rows))
        return np.int32(0)

    lax.fori_loop(np.int32(0), jnp.int32(count), turn, np.int32(0))


def over_lanes(dim: int, most: int, body: Callable, carry):
    """carry = body(pl.ds of lanes, carry) over all channels, 128 at a time, the last less; `most` times per turn."""
    whole, rest = divmod(dim, LANES)
    step = max((n for n in range(1, most + 1) if whole % n == 0), default=1)
    step = step if 2 * step > most or whole <= most else min(most, whole)
    turns = whole // step if whole else 0

    def tile(start, carry):
        return body(pl.ds(start, LANES), carry)

    def turn(c, carry):
        for k in range(step):
            carry = tile(pl.multiple_of(c * np.int32(step * LANES) + np.int32(k * LANES), LANES), carry)
        return carry

    if turns > 1:
        carry = lax.fori_loop(np.int32(0), np.int32(turns), turn, carry)
    start = turns * step if turns > 1 else 0
    for k in range(start, whole):
        carry = tile(k * LANES, carry)
    return body(pl.ds(whole * LANES, rest), carry) if rest else carry


def groups(n: int, most: int) -> list[range]:
    """range(n) in as few parts of at most `most` as there can be, of nearly equal size."""
    parts = -(-n // most)
    edges = [n * k // parts for k in range(parts + 1)]
    return [range(a, b) for a, b in zip(edges, edges[1:], strict=False)]


def wide(x: jax.Array) -> jax.Array:
    """[rows, w <= 128] with lanes of 0 added, to be summed with whole registers."""
    rows, width = x.shape
    return x if width == LANES else jnp.concatenate([x, jnp.zeros((rows, LANES - width), x.dtype)], axis=1)


def fold(x: jax.Array) -> jax.Array:
    """[8 or 16, w] summed over registers of rows, [8, w]."""
    return x if x.shape[0] == 8 else x[:8] + x[8:]


def columns(table, rows, sources: Sequence[int]) -> list[jax.Array]:
    """Lanes `sources` of a table's rows, each spread over a register, [rows, 128]."""
    tile = table[rows, :]
    return [jnp.broadcast_to(tile[:, i : i + 1], tile.shape) for i in sources]


def lane(shape: tuple[int, int]) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, shape, 1)
