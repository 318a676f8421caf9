"""(I + L)^-1 of strictly lower triangular 64 x 64 matrices, two heads to a register, many pairs at once.

Tiles of 16 x 16 on the diagonal are inverted by substitution on the vector unit: the eight tiles of a pair lie side by
side in [16, 128], so that one row step serves them all, in float32 and without a matmul. Two nested merges on the MXU,
T - T (off-diagonal block) T, make blocks of 32 and 64. No power of L is formed. All pairs advance together, since each
step waits for the one before, and the caller has other work done between the steps (order.py).
"""

from collections.abc import Iterator

import jax.numpy as jnp

from .products import iota, pair_thrice

__all__ = ["unit_lower_inverses"]

TILE = 16


def unit_lower_inverses(L, pairs: list[int], exact: bool) -> Iterator[None]:
    """Replaces L[p] by the inverse of I + L[p] for these pairs p of a float32 ref [pairs, 64, 128], step by step."""
    lower = [L[p] for p in pairs]
    tiles = [_diagonal_tiles(x) for x in lower]
    inverses = [(iota((TILE, 128), 0) == iota((TILE, 128), 1) % TILE).astype(jnp.float32)] * len(pairs)
    for c in range(TILE - 1):
        inverses = [_substitute(t, x, c) for t, x in zip(inverses, tiles, strict=True)]
        yield
    inverses = [_place_tiles(t) for t in inverses]
    for size in (16, 32):  # blocks of this size become blocks of twice it
        below = [_right_rows(jnp.where(_left_half(size), x, 0.0), size) for x in lower]
        right = [_right_rows(t, size) for t in inverses]
        products = [pair_thrice(t, _among_rows(x, size), exact) for t, x in zip(right, below, strict=True)]
        yield
        products = [pair_thrice(x, t, exact) for x, t in zip(products, inverses, strict=True)]
        yield
        inverses = [t - _among_rows(x, size) for t, x in zip(inverses, products, strict=True)]
    for p, x in zip(pairs, inverses, strict=True):
        L[p] = x


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


def _substitute(inverse, lower, c):
    """Column c of every tile: T -= L[:, c] T[c, :] for the rows below c."""
    i, j = iota((TILE, 128), 0), iota((TILE, 128), 1)
    lane = (j // TILE) * TILE + c  # column c of the tile that this lane belongs to
    column = jnp.take_along_axis(lower, lane, axis=1, mode="promise_in_bounds")
    # L is strictly lower, but what lies on and above its diagonal may be anything.
    return jnp.where(i > c, inverse - column * jnp.broadcast_to(inverse[c : c + 1], inverse.shape), inverse)


def _place_tiles(tiles):
    """[16, 128] back to block-diagonal [64, 128]."""
    i, j = iota((64, 128), 0), iota((64, 128), 1) % 64
    return jnp.where(i // TILE == j // TILE, jnp.concatenate([tiles] * 4, axis=0), 0.0)
