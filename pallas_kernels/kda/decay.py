"""Decayed products inside a chunk, with every exponent a sum of gates and none a difference.

A chunk needs, for every pair of rows i > j,

    sum_d x_id k_jd exp(g_{j+1,d} + ... + g_{i,d}),        x = q or k,

and the sum of gates differs per channel, so it cannot be taken out of the matmul. Writing it as G_i - G_j with a
running sum G loses it to cancellation after a strong gate, and exp(-G_j) overflows. Here the chunk is halved again
and again instead. At the level of half-size m, rows i of a right half meet columns j of the left half beside it,
and the boundary between the halves splits the exponent in two sums of non-positive numbers:

    row factor     exp(g_{start of right half} + ... + g_i)     inclusive prefix sum of the right half
    column factor  exp(g_{j+1} + ... + g_{end of left half})    exclusive suffix sum of the left half

Every pair meets at exactly one level, each level costs one exp per token and channel, and each is one plain matmul.
Nothing can overflow, nothing cancels, an underflow is a true one, and the anchor (the boundary) never lies after
the first row that it feeds, so that no later token touches an earlier row even by rounding.

Halves of 16 rows and more are separate matmuls; below that a tile of 16 x 16 is multiplied whole and masked.
Arrays are [..., C, K] with C a power of two >= 16; precision is the caller's, per dot.
"""

import jax
import jax.numpy as jnp

__all__ = [
    "TILE",
    "decay_exponents",
    "decay_exponents_vjp",
    "matmul",
    "pair_products",
    "pair_products_vjp",
    "unit_lower_inverse",
]

TILE = 16


def matmul(a, b, precision, *, ta=False, tb=False):
    """Batched a @ b over all leading axes, with either matrix transposed by its dimension numbers and not by a copy."""
    batch = tuple(range(a.ndim - 2))
    contract = ((a.ndim - 2 if ta else a.ndim - 1,), (b.ndim - 1 if tb else b.ndim - 2,))
    return jax.lax.dot_general(a, b, (contract, (batch, batch)), precision=precision)


def decay_exponents(g):
    """(levels, prefix, suffix) of g [..., C, K], all of g's shape and <= 0.

    levels[n] belongs to half-size 2^n: prefix sums in right halves, suffix sums in left ones. prefix is the
    inclusive sum from the chunk's first row, suffix the exclusive sum to its last.
    """
    levels, prefix, suffix = [], g, jnp.zeros_like(g)
    half = 1
    while half < g.shape[-2]:
        p, s = _halves(prefix, half), _halves(suffix, half)
        levels.append(_join_halves(s[..., 0, :, :], p[..., 1, :, :], g.shape))
        # Each half's sums grow by the whole sum of the half beside it.
        prefix = _join_halves(p[..., 0, :, :], p[..., 1, :, :] + p[..., 0, -1:, :], g.shape)
        suffix = _join_halves(s[..., 0, :, :] + p[..., 1, -1:, :], s[..., 1, :, :], g.shape)
        half *= 2
    return levels, prefix, suffix


def decay_exponents_vjp(dlevels, dprefix, dsuffix, dtotal):
    """Cotangent of g. dtotal [..., 1, K] is that of the sum over the chunk.

    The pairs of a level reach only the gates between them, so that nothing large is added here to be taken away
    again, as a reverse running sum over the chunk would do.
    """
    shape, half = dprefix.shape, dprefix.shape[-2] // 2
    dtotal = dtotal[..., None, :, :]  # [..., blocks, 1, K]
    for dlevel in reversed(dlevels):
        p, s, level = (_halves(x, half) for x in (dprefix, dsuffix, dlevel))
        dleft = dtotal + jnp.sum(
            p[..., 1, :, :], axis=-2, keepdims=True
        )  # a left half's sum is in its sibling's prefixes
        dright = dtotal + jnp.sum(s[..., 0, :, :], axis=-2, keepdims=True)
        dtotal = jnp.concatenate([dleft, dright], axis=-2).reshape(*shape[:-2], -1, 1, shape[-1])
        dprefix = _join_halves(p[..., 0, :, :], p[..., 1, :, :] + level[..., 1, :, :], shape)
        dsuffix = _join_halves(s[..., 0, :, :] + level[..., 0, :, :], s[..., 1, :, :], shape)
        half //= 2
    return dprefix + dtotal.reshape(shape)


def pair_products(rows, k, factors, precision):
    """For each x in rows, the strictly lower [..., C, C] matrix of sums over d of x_id k_jd exp(gates between).

    factors are the exponentials of `decay_exponents`' levels.
    """
    tiles = [_tiles(x, TILE) for x in (*rows, k)]
    blocks = [0.0] * len(rows)
    for n in range(4):
        f = _tiles(factors[n], TILE)
        product = matmul(_stack([x * f for x in tiles[:-1]]), tiles[-1] * f, precision, tb=True)
        mask = _level_mask(1 << n)
        blocks = [a + jnp.where(mask, p, 0) for a, p in zip(blocks, _unstack(product, len(rows)), strict=True)]
    for n in range(4, len(factors)):
        half = 1 << n
        f = _halves(factors[n], half)
        right = _stack([_halves(x, half)[..., 1, :, :] * f[..., 1, :, :] for x in rows])
        off = matmul(right, _halves(k, half)[..., 0, :, :] * f[..., 0, :, :], precision, tb=True)
        blocks = [_merge(a, o) for a, o in zip(blocks, _unstack(off, len(rows)), strict=True)]
    return [a.reshape(*k.shape[:-2], k.shape[-2], k.shape[-2]) for a in blocks]


def pair_products_vjp(rows, k, factors, dproducts, precision, dtype):
    """(drows, dk, dlevels) for cotangents dproducts [..., C, C]; what they hold on or above the diagonal is ignored.

    Operands and products are rounded to dtype: bf16 for bf16 inputs, since half of the backward's traffic is here
    and, unlike the forward products, these are not inverted afterwards.
    """
    drows, dk, dlevels = [0.0] * len(rows), 0.0, []
    for n, factor in enumerate(factors):
        half = 1 << n
        if half < TILE:  # whole tiles, masked
            d = [jnp.where(_level_mask(half), _diagonal_blocks(d, TILE), 0) for d in dproducts]
            x = [_tiles(r * factor, TILE) for r in rows]
            y = _tiles(k * factor, TILE)
        else:  # right halves of the rows against left halves of k
            d = [_diagonal_blocks(d, 2 * half)[..., half:, :half] for d in dproducts]
            x = [_halves(r * factor, half)[..., 1, :, :] for r in rows]
            y = _halves(k * factor, half)[..., 0, :, :]
        d, x, y = _stack(d).astype(dtype), _stack(x).astype(dtype), y.astype(dtype)
        dx = _unstack(matmul(d, y, precision), len(rows))
        dy = matmul(d, x, precision, ta=True)
        if half < TILE:
            dx, dy = [d.reshape(k.shape) for d in dx], dy.reshape(k.shape)
        else:
            dx = [_join_halves(jnp.zeros_like(d), d, k.shape) for d in dx]
            dy = _join_halves(dy, jnp.zeros_like(dy), k.shape)
        dx, dy = [d.astype(k.dtype) * factor for d in dx], dy.astype(k.dtype) * factor
        drows = [a + d for a, d in zip(drows, dx, strict=True)]
        dk = dk + dy
        dlevels.append(sum(r * d for r, d in zip(rows, dx, strict=True)) + k * dy)
    return drows, dk, dlevels


def unit_lower_inverse(lower, precision):
    """(I + lower)^-1 of strictly lower [..., C, C], by nested merges of blocks that are themselves inverses.

    With T the inverse of the two diagonal blocks, the block below them is -T_right lower_off T_left. Inside a tile
    of 16 the same merge is done on the whole tile: T - T (lower * mask of this level) T. No power of `lower` is
    ever formed: on repeated keys those grow without bound and cancel.
    """
    C = lower.shape[-1]
    tiles = _diagonal_blocks(lower, TILE)
    inverse = jnp.eye(TILE, dtype=lower.dtype) - jnp.where(_level_mask(1), tiles, 0)
    for half in (2, 4, 8):
        off = jnp.where(_level_mask(half), tiles, 0)
        inverse = inverse - matmul(matmul(inverse, off, precision), inverse, precision)
    half = TILE
    while half < C:
        off = _diagonal_blocks(lower, 2 * half)[..., half:, :half]
        pairs = inverse.reshape(*inverse.shape[:-3], -1, 2, half, half)
        below = matmul(matmul(pairs[..., 1, :, :], off, precision), pairs[..., 0, :, :], precision)
        inverse = _merge(inverse, -below)
        half *= 2
    return inverse.reshape(lower.shape)


def _halves(x, half):
    """[..., C, K] as [..., pairs, 2, half, K]."""
    *lead, C, K = x.shape
    return x.reshape(*lead, C // (2 * half), 2, half, K)


def _tiles(x, size):
    *lead, C, K = x.shape
    return x.reshape(*lead, C // size, size, K)


def _join_halves(left, right, shape):
    """Left and right halves [..., pairs, half, K] to [..., C, K]."""
    return jnp.concatenate([left, right], axis=-2).reshape(shape)


def _level_mask(half):
    """Rows in right halves against columns in the left half beside them, in a tile of 16 x 16."""
    i = jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), 0)
    j = jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), 1)
    return (i // (2 * half) == j // (2 * half)) & (i % (2 * half) >= half) & (j % (2 * half) < half)


def _diagonal_blocks(a, size):
    """[..., C, C] to its [..., C/size, size, size] diagonal blocks."""
    n = a.shape[-1] // size
    return jnp.stack([a[..., i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(n)], axis=-3)


def _merge(diagonal, off):
    """[..., 2n, m, m] diagonal blocks and [..., n, m, m] blocks below each pair to [..., n, 2m, 2m]."""
    *lead, n, m, _ = diagonal.shape
    pairs = diagonal.reshape(*lead, n // 2, 2, m, m)
    top = jnp.concatenate([pairs[..., 0, :, :], jnp.zeros_like(off)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([off, pairs[..., 1, :, :]], axis=-1)], axis=-2)


def _stack(arrays):
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=-2)


def _unstack(array, n):
    return [array] if n == 1 else jnp.split(array, n, axis=-2)
