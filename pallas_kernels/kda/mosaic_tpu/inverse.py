"""(I + L)^-1 of strictly lower triangular 64 x 64 matrices, two heads to a register, many pairs at once.

Tiles of 16 x 16 on the diagonal are inverted by substitution on the vector unit: the eight tiles of a pair lie side by
side in [16, 128], so that one row step serves them all, in float32 and without a matmul. Two nested merges on the MXU,
T - T (off-diagonal block) T, make blocks of 32 and 64. No power of L is formed. All pairs advance together, because
each step waits for the one before and the compiler does not interleave independent work by itself; for the same reason
the caller's other work is done between the steps.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from .products import iota, pair_thrice

__all__ = ["unit_lower_inverses"]

TILE = 16


def unit_lower_inverses(pairs: list[jax.Array], exact: bool, meanwhile: Iterator[None]) -> list[jax.Array]:
    """The inverses of I + L for pairs of L, float32 [64, 128] each (two matrices side by side).

    meanwhile does a piece of independent work whenever it is advanced, and is exhausted on return.
    """
    inverses = _place_tiles(_invert_tiles([_diagonal_tiles(x) for x in pairs], meanwhile))
    for size in (16, 32):  # blocks of this size become blocks of twice it
        below = [_right_rows(jnp.where(_left_half(size), x, 0.0), size) for x in pairs]
        right = [_right_rows(t, size) for t in inverses]
        products = [pair_thrice(t, _among_rows(x, size), exact) for t, x in zip(right, below, strict=True)]
        next(meanwhile, None)
        products = [pair_thrice(x, t, exact) for x, t in zip(products, inverses, strict=True)]
        next(meanwhile, None)
        inverses = [t - _among_rows(x, size) for t, x in zip(inverses, products, strict=True)]
    for _ in meanwhile:
        pass
    return inverses


def _left_half(size):
    """Columns in the left half beside the right half of this size that a row lies in."""
    return iota((64, 128), 1) % 64 // size == iota((64, 128), 0) // size - 1


def _right_rows(x, size):
    return jnp.concatenate([x[i : i + size] for i in range(size, 64, 2 * size)], axis=0)


def _among_rows(x, size):
    """The opposite of `_right_rows`, with zeros between."""
    zero = jnp.zeros((size, x.shape[1]), x.dtype)
    return jnp.concatenate([y for i in range(0, x.shape[0], size) for y in (zero, x[i : i + size])], axis=0)


def _diagonal_tiles(pair):
    """[64, 128] to its tiles [16, 128], each in the lanes where it stood."""
    tile = (iota((TILE, 128), 1) // TILE) % 4
    tiles = pair[:TILE]
    for n in range(1, 4):
        tiles = jnp.where(tile == n, pair[TILE * n : TILE * (n + 1)], tiles)
    return tiles


def _invert_tiles(tiles, meanwhile):
    """Substitution, one column at a time: T -= L[:, c] T[c, :] for the rows below c."""
    i, j = iota((TILE, 128), 0), iota((TILE, 128), 1)
    inverses = [(i == j % TILE).astype(jnp.float32)] * len(tiles)
    for c in range(TILE - 1):
        lane = (j // TILE) * TILE + c  # column c of the tile that this lane belongs to
        columns = [jnp.take_along_axis(x, lane, axis=1, mode="promise_in_bounds") for x in tiles]
        rows = [jnp.broadcast_to(t[c : c + 1], t.shape) for t in inverses]
        # L is strictly lower, but what lies on and above its diagonal may be anything.
        inverses = [jnp.where(i > c, t - x * y, t) for t, x, y in zip(inverses, columns, rows, strict=True)]
        next(meanwhile, None)
    return inverses


def _place_tiles(tiles):
    """[16, 128] back to block-diagonal [64, 128]."""
    i, j = iota((64, 128), 0), iota((64, 128), 1) % 64
    return [jnp.where(i // TILE == j // TILE, jnp.concatenate([t] * 4, axis=0), 0.0) for t in tiles]
