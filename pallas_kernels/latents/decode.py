"""Attention of few queries over cached latents, on NVIDIA Hopper: one pass over the live slots.

All heads read the one latent of a slot as key and as value, so that a tile of slots is fetched once for both products.
A program is one warpgroup with a block of queries, a row, and a piece of the row's tiles; two programs share a
multiprocessor, and one fetches while the other computes. Everything is transposed, slots or channels by queries, with
the running softmax's maxima m:

    S^T = latent q^T + k_rope q_rope^T          [slots, queries]
    O^T <- O^T e^{m - m'} + latent^T P^T        [channels, queries]

The left operands are then the tile as it lies in memory. 32 queries cost the tensor cores what 32 should, where queries
as rows would be padded to 64; and the sums of all channels fit into one warpgroup's registers.

How many programs share a row is static. Which tiles are whose follows from the row's length: equally many for each, and
a program without any writes an empty softmax. The pieces are merged by XLA.
"""

import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ..varying import same_axes

__all__ = ["QUERIES", "SLOTS", "decode", "pieces_of"]

SLOTS, QUERIES = 64, 32  # of a tile, of a program
PROGRAMS = 2 * 132  # that an H100 or H200 runs at once
FIXED = 4  # what a program costs besides its tiles, in tiles: to begin, and to have its sums written and merged
LOWEST = -1e30  # below every score, and finite: the difference of two is no NaN

_WGMMA = plgpu.Layout.WGMMA
_SMEM_TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # what wgmma and the copy engine read
_F32, _BF16 = jnp.float32, jnp.bfloat16


def decode(
    q_BQC: jax.Array,
    q_rope_BQR: jax.Array,
    latent_GBLC: jax.Array,
    k_rope_GBLR: jax.Array,
    group: jax.Array,
    length_B: jax.Array,
    position_BQ: jax.Array,
    scale: float,
) -> jax.Array:
    """`attend_latents` with the queries of all heads in one axis, and layer `group` (int32) of stacked caches."""
    (B, Q, C), (_, _, L, R) = q_BQC.shape, k_rope_GBLR.shape
    blocks = -(-Q // QUERIES)
    pieces = pieces_of(B * blocks, L)
    padding = (0, 0), (0, blocks * QUERIES - Q)
    q, q_rope = (jnp.pad(x, (*padding, (0, 0))) for x in (q_BQC, q_rope_BQR))
    numbers = jnp.stack([group, jnp.zeros_like(group)]).astype(jnp.int32)
    operands = q, q_rope, latent_GBLC, k_rope_GBLR, numbers, length_B, jnp.pad(position_BQ, padding)
    operands = same_axes(operands)
    axes = jax.typeof(operands[0]).manual_axis_type

    def kernel(*refs, **scratch):
        _kernel(*refs, **scratch, pieces=pieces, factor=scale * math.log2(math.e))

    def out(dtype, *shape):
        return jax.ShapeDtypeStruct((B, blocks, pieces, QUERIES, *shape), dtype, manual_axis_type=axes)

    def tile(rows, columns):
        return plgpu.SMEM((1, rows, columns), _BF16, transforms=_SMEM_TILE)

    sums, weight, top = plgpu.kernel(
        kernel,
        out_type=(out(_BF16, C), out(_F32), out(_F32)),
        scratch_types=dict(
            q_tile=tile(QUERIES, C),
            q_rope_tile=tile(QUERIES, R),
            latent_or_out=plgpu.RefUnion(tile(SLOTS, C), tile(QUERIES, C)),
            rope_or_p=plgpu.RefUnion(tile(SLOTS, R), tile(QUERIES, SLOTS)),
            q_arrived=plgpu.Barrier(num_arrivals=2),
            arrived=plgpu.Barrier(num_arrivals=2),
        ),
        grid=(B, pieces, blocks),  # the last runs first: blocks of one piece find its tiles in the L2 cache
        grid_names=("row", "piece", "block"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=QUERIES * 4 * 8 * 4),
        kernel_name="latent_decode",
    )(*operands)
    return _merge(sums, weight, top).astype(_BF16).reshape(B, -1, C)[:, :Q]


def pieces_of(rows: int, L: int) -> int:
    """Programs for each of `rows` rows and blocks of queries, of up to L slots: the fewest of the fastest."""
    tiles = -(-L // SLOTS)

    def cost(pieces):
        return -(-rows * pieces // PROGRAMS) * (-(-tiles // pieces) + FIXED)

    return min(range(1, min(tiles, PROGRAMS) + 1), key=cost)


def _kernel(
    q, q_rope, latent, k_rope, numbers, length, position, sums_out, weight_out, top_out,
    *, q_tile, q_rope_tile, latent_or_out, rope_or_p, q_arrived, arrived, pieces, factor,
):  # fmt: skip
    row, piece, block = (jax.lax.axis_index(name) for name in ("row", "piece", "block"))
    C, L = latent.shape[-1], latent.shape[-2]
    latent_tile, out_tile = latent_or_out
    rope_tile, p_tile = rope_or_p  # the weights lie where the keys' slices were, once these are used
    tiles = (jnp.clip(length[row], 0, L) + SLOTS - 1) // SLOTS
    share = (tiles + pieces - 1) // pieces
    first = jnp.minimum(piece * share, tiles)
    end = jnp.minimum(first + share, tiles)
    own, group = pl.ds(block * QUERIES, QUERIES), numbers[0]

    def start_of(n):
        return jnp.minimum(n * SLOTS, L - SLOTS)  # the last tile overlaps the one before it

    def fetch(n):
        @pl.when(n < end)
        def _():
            slots = pl.ds(start_of(n), SLOTS)
            plgpu.copy_gmem_to_smem(latent.at[group, row, slots], latent_tile.at[0], arrived)
            plgpu.copy_gmem_to_smem(k_rope.at[group, row, slots], rope_tile.at[0], arrived)

    fetch(first)
    plgpu.copy_gmem_to_smem(q.at[row, own], q_tile.at[0], q_arrived)
    plgpu.copy_gmem_to_smem(q_rope.at[row, own], q_rope_tile.at[0], q_arrived)
    last_seen = _rows(plgpu.load(position.at[row, own], layout=_WGMMA.reduce(0), optimized=False), SLOTS)
    slot = plgpu.broadcasted_iota(jnp.int32, (SLOTS, QUERIES), 0, layout=_WGMMA)
    plgpu.barrier_wait(q_arrived)

    def one(n, carry):
        sums, weight, top = carry
        # Read anew for every tile. Did the compiler know that it is 0, it would compute the addresses of all operands
        # ahead of the loop, more of them than there are registers.
        zero = numbers[1]
        own_latent, own_rope, own_p = latent_tile.at[zero], rope_tile.at[zero], p_tile.at[zero].transpose((1, 0))
        plgpu.barrier_wait(arrived)

        def score(acc):
            plgpu.wgmma(acc, own_latent, q_tile.at[zero].transpose((1, 0)))
            plgpu.wgmma(acc, own_rope, q_rope_tile.at[zero].transpose((1, 0)))
            return acc[...]

        scores = pl.run_scoped(score, plgpu.ACC((SLOTS, QUERIES), _F32)) * factor
        at = slot + start_of(n)
        visible = (at >= n * SLOTS) & (at <= last_seen)
        scores = jnp.where(visible, scores, LOWEST)
        new = jnp.maximum(top, jnp.max(scores, axis=0))
        shrink = jnp.exp2(top - new)
        p = jnp.where(visible, jnp.exp2(scores - _rows(new, SLOTS)), 0.0)
        own_p[...] = plgpu.layout_cast(p.astype(_BF16), _WGMMA)
        plgpu.commit_smem()
        scaled = plgpu.ACC.init(sums * _rows(shrink, C))
        sums = pl.run_state(lambda acc: plgpu.wgmma(acc, own_latent.transpose((1, 0)), own_p))(scaled)
        fetch(n + 1)
        return sums, weight * _rows(shrink, SLOTS) + p, new

    nothing = (
        plgpu.layout_cast(jnp.zeros((C, QUERIES), _F32), _WGMMA),
        plgpu.layout_cast(jnp.zeros((SLOTS, QUERIES), _F32), _WGMMA),
        plgpu.layout_cast(jnp.full(QUERIES, LOWEST, _F32), _WGMMA.reduce(0)),
    )
    sums, weight, top = jax.lax.fori_loop(first, end, one, nothing)
    weight_out[row, block, piece] = jnp.sum(weight, axis=0)
    top_out[row, block, piece] = top
    out_tile.at[0].transpose((1, 0))[...] = plgpu.layout_cast(sums.astype(_BF16), _WGMMA)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_tile.at[0], sums_out.at[row, block, piece])
    plgpu.wait_smem_to_gmem(0)


def _merge(sums, weight, top):
    """The softmax's result [B, blocks, queries, C] from pieces [B, blocks, pieces, ...]; 0 where all are empty."""
    share = jnp.exp2(top - jnp.max(top, axis=2, keepdims=True))
    weight = jnp.sum(share * weight, axis=2)[..., None]
    return jnp.sum(share[..., None] * sums, axis=2) / jnp.where(weight > 0, weight, 1)


def _rows(vector, count):
    """One number per column, as `count` equal rows."""
    return jax.lax.broadcast_in_dim(vector, (count, *vector.shape), [1])
