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


def over_rows(rows: int, count, body: Callable, *, pairs: bool = False) -> None:
    """body(pl.ds of `rows` rows) for the first `count` of them, a python int or a traced number.

    pairs: two at a time, so that one's sums across lanes run beside the other's arithmetic.
    """

    step = 2 if pairs and isinstance(count, int) and count % 2 == 0 else 1
    turns = count // step if isinstance(count, int) else count

    def turn(r, _):
        for k in range(step):
            body(pl.ds(pl.multiple_of((r * np.int32(step) + np.int32(k)) * np.int32(rows), rows), rows))

    # Bounds that jax takes for traced: with static ones the index would be an int64 under enable_x64.
    lax.fori_loop(jnp.int32(0), jnp.int32(turns), turn, None)


def over_lanes(dim: int, most: int, body: Callable, carry):
    """carry = body(slices, carry) over all channels: at most `most` slices of 128 at a time, the last with the rest."""
    full, rest = divmod(dim, LANES)
    step = max(n for n in range(1, most + 1) if n == 1 or full % n == 0)
    step = step if 2 * step > most else most
    turns = full // step
    if turns > 1:

        def turn(c, carry):
            starts = (pl.multiple_of((c * np.int32(step) + np.int32(k)) * np.int32(LANES), LANES) for k in range(step))
            return body([pl.ds(start, LANES) for start in starts], carry)

        carry = lax.fori_loop(jnp.int32(0), jnp.int32(turns), turn, carry)
    left = range(turns * step if turns > 1 else 0, full)
    slices = [pl.ds(k * LANES, LANES) for k in left] + ([pl.ds(full * LANES, rest)] if rest else [])
    return body(slices, carry) if slices else carry


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
