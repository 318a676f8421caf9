"""Decay factors of a chunk of 64 tokens, formed by products alone: what `decay.py` does with sums, for a TPU.

The tree of halves (see `decay.py`) wants, for every half-size m = 1, 2, 4 .. 32, the decay from the boundary between
two halves to each token of the right half, and from each token of the left half to that boundary. Every such number is
a product of the per-token factors e^g in [0, 1]. Multiplying them instead of summing g needs one exp per token, cannot
overflow, takes g = -inf as it comes, and rounds once per level of the tree.

Layout: the product over 8 neighbours would mean rotations inside the registers of 8 rows. So the chunk is stored to
scratch and read back with a stride of 8: register r then holds token 8s + r in row s, neighbours are different
registers, and all 8 blocks advance in one multiplication. The result goes back the same way. From blocks of 8 on,
halves are whole registers again.

A gate with a bound of at least -5 has a faster way: over a tile of 16 tokens it sums to no less than -80, and e^80 is
finite in float32 and bfloat16. Rows then take the decay from the tile's start and columns its reciprocal, which is one
product where the tree has four; the anchor is the tile's start, so no later token touches an earlier row. Chosen by
lower_bound alone, for bfloat16 inputs, and not where a segment may begin inside a chunk (its factor is 0).
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .activations import reciprocal
from .products import CHUNK, LANES, iota

__all__ = [
    "SCRATCH",
    "TILES",
    "exponent_map",
    "form_factors",
    "level_mask",
    "levels_of",
    "read_ends",
    "read_level",
]

SCRATCH = 5  # [CHUNK, LANES] float32 arrays of scratch that `form_factors` needs
TILES = -1  # the level that stands for half-sizes 1 to 8 of a bounded gate


def levels_of(tiled: bool) -> tuple[int, ...]:
    """The levels n of a chunk: half-sizes 2^n from 1 to 32, or tiles of 16 and the half-sizes 16 and 32."""
    return (TILES, 4, 5) if tiled else (0, 1, 2, 3, 4, 5)


def form_factors(decay: jax.Array, scratch) -> None:
    """Prepares scratch, a float32 ref [K/128, SCRATCH, 64, 128], for decay = e^g [64, K], K a multiple of 128."""
    for i in range(0, decay.shape[1], LANES):
        _form_slab(decay[:, i : i + LANES], scratch.at[i // LANES])


def read_level(scratch, n: int) -> tuple[jax.Array, jax.Array]:
    """Factors of rows and of columns, [64, K] each, at level n.

    For a half-size they are one array: from the boundary to a right row, from a left row to it. For TILES they are the
    decay from the tile's start to the row, inclusive, and its reciprocal.
    """
    factors = _side_by_side([_level(scratch.at[i], n) for i in range(scratch.shape[0])])
    return (factors, reciprocal(factors, exact=False)) if n == TILES else (factors, factors)


def read_ends(scratch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """e^G [64, K] from the chunk's start to a row inclusive, e^{Gn - G} from after it to the end, and e^{Gn} [1, K]."""
    slabs = [_ends(scratch.at[i]) for i in range(scratch.shape[0])]
    return tuple(_side_by_side(x) for x in zip(*slabs, strict=True))


def _side_by_side(slabs):
    return slabs[0] if len(slabs) == 1 else jnp.concatenate(slabs, axis=1)


def level_mask(n: int, shape: tuple[int, int], period: int = CHUNK) -> jax.Array:
    """Rows in right halves of size 2^n against columns in the left half beside them; indices count modulo period.

    For TILES, rows against earlier columns of their tile.
    """
    i, j = iota(shape, 0) % period, iota(shape, 1) % period
    if n == TILES:
        return (i >> 4 == j >> 4) & (j < i)
    return ((i >> (n + 1)) == (j >> (n + 1))) & (((i >> n) & 1) == 1) & (((j >> n) & 1) == 0)


def exponent_map(tiled: bool) -> jax.Array:
    """0/1 matrix [64, n*64] from cotangents of the exponents to that of g: the levels', then into's, then out's.

    g_j is part of the exponent of row i at level n if i lies in a right half and j in the same half at or before i,
    or i in a left half and j in the same half after it; of TILES (there twice, for two terms of a cotangent) if j is in
    the same tile at or before i; of into if j <= i, and of out if j > i.
    """
    j, i = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
    parts = []
    for n in levels_of(tiled):
        if n == TILES:
            parts += [(i >> 4 == j >> 4) & (j <= i)] * 2
        else:
            right = ((i >> n) & 1) == 1
            parts.append(((i >> n) == (j >> n)) & ((right & (j <= i)) | (~right & (j > i))))
    return jnp.concatenate([x.astype(jnp.float32) for x in (*parts, j <= i, j > i)], axis=1)


def _form_slab(decay, scratch) -> None:
    """128 channels. P are products up to the row (inclusive), S from after it, in blocks of a size."""
    scratch[0] = decay
    e = [scratch.at[0][pl.ds(r, 8, stride=8), :] for r in range(8)]
    one = jnp.ones_like(e[0])
    P2 = [x for r in (0, 2, 4, 6) for x in (e[r], e[r] * e[r + 1])]
    S2 = [x for r in (1, 3, 5, 7) for x in (e[r], one)]
    P4 = [x for r in (0, 4) for x in (P2[r], P2[r + 1], P2[r + 2] * P2[r + 1], P2[r + 3] * P2[r + 1])]
    S4 = [x for r in (0, 4) for x in (S2[r] * P2[r + 3], P2[r + 3], S2[r + 2], one)]
    P8 = P4[:4] + [x * P4[3] for x in P4[4:]]
    S8 = [x * P4[7] for x in S4[:3]] + [P4[7]] + S4[4:]
    halves_of_2 = [x for r in (0, 4) for x in (S2[r], S2[r + 1], P2[r + 2], P2[r + 3])]
    halves_of_4 = S4[:4] + P4[4:]
    for i, registers in enumerate((halves_of_2, halves_of_4, P8, S8), 1):
        for r, x in enumerate(registers):
            scratch.at[i][pl.ds(r, 8, stride=8), :] = x


def _level(scratch, n):
    if n == 0:
        return jnp.where(iota((CHUNK, LANES), 0) % 2 == 1, scratch[0], 1.0)
    if n in (1, 2):
        return scratch[n]
    P, S, t = _blocks(scratch)
    if n == TILES:
        return _rows(P[s] * t[s - 1] if s % 2 else P[s] for s in range(8))
    if n == 3:
        return _rows((P if s % 2 else S)[s] for s in range(8))
    if n == 4:
        return _rows([S[0] * t[1], S[1], P[2], P[3] * t[2], S[4] * t[5], S[5], P[6], P[7] * t[6]])
    t23, t45 = t[2] * t[3], t[4] * t[5]
    return _rows(
        [S[0] * (t[1] * t23), S[1] * t23, S[2] * t[3], S[3], P[4], P[5] * t[4], P[6] * t45, P[7] * (t45 * t[6])]
    )


def _ends(scratch):
    P, S, t = _blocks(scratch)
    to_block, from_block = [None], [None]  # products of the blocks before, and after
    for x in t:
        to_block.append(x if to_block[-1] is None else to_block[-1] * x)
    for x in reversed(t[1:]):
        from_block.append(x if from_block[-1] is None else from_block[-1] * x)
    times = lambda x, y: x if y is None else x * y  # noqa: E731
    into = [times(x, y) for x, y in zip(P, to_block[:8], strict=True)]
    out = [times(x, y) for x, y in zip(S, from_block[::-1], strict=True)]
    return _rows(into), _rows(out), to_block[8]


def _blocks(scratch):
    """Blocks of 8 tokens in order: products up to each row, from after it, and of the whole block [1, LANES]."""
    P, S = ([scratch[i, 8 * s : 8 * s + 8, :] for s in range(8)] for i in (3, 4))
    return P, S, [x[7:] for x in P]


def _rows(registers):
    return jnp.concatenate(list(registers), axis=0)
