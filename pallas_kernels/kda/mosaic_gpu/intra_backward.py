"""Cotangents through everything of a chunk that does not depend on the state: one warpgroup per 64 channels.

The backward of intra.py from the cotangents of its decayed products and of the decayed q and k, with the same tree of
halves (decay.py). At the level of half-size m, with D = f_i f_j the decay between a row i of a right half and a row j
of the left half beside it, the cotangents are, channel by channel,

    of row i:  f_i sum_j dA_ij (f_j k_j)        of row j:  f_j sum_i dA_ij (f_i q_i)

and likewise for the products of k with itself. All of it is a warp's own matter (warp_products.py): nothing but the
operands is shared between warps.

The cotangent of a gate is that of every pair that spans it, got as running sums over the tokens: what a row i adds, a
row j takes away. Where the decay is strong, few pairs span a gate and many must cancel, so the two must be equal to
float32 and not to bf16: the decays are rounded to bf16 once and for both, and their products with q and k enter the
matmuls exactly, as two bf16 terms.
"""

from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .intra import BF16, F32, Options, by_block, fixed, log2_gate, tile_indices
from .registers import (
    CHUNK,
    SMEM_TILE,
    SMEM_TILE_F32,
    WALK,
    WGMMA,
    blocks,
    over_tokens,
    per_token,
    running_sums,
    sync,
    walk,
    widen,
)  # fmt: skip
from .warp_products import add_inner_level, add_outer_level, diagonal_blocks

__all__ = ["intra_backward"]


def intra_backward(q, k, g, beta, rate, bias, dA, M, dq_in, PS, dk_out, dtotal, o: Options):
    """(dq, dk, dg, dbeta) of a chunk's terms (intra.py), of one value head each.

    q, k [B,T,H K] bf16, as the products took them and q not scaled; g [B,T,HV K] the raw gate; beta [B,HV,T],
    rate [HV], bias [HV,K] float32; 64 divides T. Cotangents, bf16: dA [B,HV,T,64] of A, dq_in and dk_out [B,HV,T,K]
    of q~ and k^; M [B,HV,T,64] and PS [B,HV,T,K] of the products of k and of k e^G, once times -beta (theirs) and
    once times -1 (that of beta, whose row's sum they are); dtotal [B,HV,N K] float32 of the chunk's sum of gates.

    dq, dk, dg (of the natural-log gate) [B,T,HV K] and dbeta [B,HV,T], float32.
    """
    B, T, width = g.shape
    HV, H, N = width // o.K, q.shape[2] // o.K, T // CHUNK
    nk = o.K // 64
    tile = lambda dtype=BF16, n=1: plgpu.SMEM(  # noqa: E731
        (n, CHUNK, 64), dtype, transforms=SMEM_TILE if dtype == BF16 else SMEM_TILE_F32
    )
    dq, dk, dg, dbeta = plgpu.kernel(
        partial(_kernel, o=o, group=HV // H),
        out_type=(
            *[jax.ShapeDtypeStruct((B, T, HV * o.K), F32)] * 3,
            jax.ShapeDtypeStruct((nk, B, HV, T), F32),
        ),
        scratch_types=dict(
            q=tile(), k=tile(), x=tile(), p=tile(), z=tile(), a=tile(),
            m=plgpu.RefUnion(tile(), plgpu.SMEM((2, 4, 64), F32)),
            bk=plgpu.RefUnion(tile(), plgpu.SMEM((4, 64), F32)),
            wide=plgpu.RefUnion(tile(n=6), tile(g.dtype), tile(F32, 3)),
            arrived=plgpu.Barrier(num_arrivals=1, num_barriers=8),
        ),
        grid=(N, HV, B * nk),  # the last varies fastest: programs side by side share dA and M
        grid_names=("chunk", "head", "part"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
        kernel_name="kda_intra_backward",
    )(q, k, g, beta, rate, bias, dA, M, dq_in, PS, dk_out, dtotal)  # fmt: skip
    return dq, dk, dg, dbeta[0] if nk == 1 else dbeta.sum(0)


def _kernel(q_hbm, k_hbm, g_hbm, beta_hbm, rate_hbm, bias_hbm, a_hbm, m_hbm, x_hbm, p_hbm, z_hbm, dtotal_hbm,
            dq_hbm, dk_hbm, dg_hbm, dbeta_hbm, *, o, group, q, k, x, p, z, a, m, bk, wide, arrived):  # fmt: skip
    n, h, part = (jax.lax.axis_index(i) for i in ("chunk", "head", "part"))
    b, half = (part, 0) if o.K == 64 else (part >> 1, part & 1)
    rows = pl.ds(n * CHUNK, CHUNK)
    channels = pl.ds(half * 64, 64)
    gates = pl.ds(h * o.K + half * 64, 64)
    of_chunk = pl.ds(n * o.K + half * 64, 64)
    (m, ends), (bk, totals), (factors, g, out) = m, bk, wide
    q, k, x, p, z, a, m, bk, g = (r.at[0] for r in (q, k, x, p, z, a, m, bk, g))

    qk = pl.ds((h // group) * o.K + half * 64, 64)
    sources = (
        (g_hbm.at[b, rows, gates], g), (k_hbm.at[b, rows, qk], k), (q_hbm.at[b, rows, qk], q),
        *((r.at[b, h, rows, channels], s) for r, s in ((x_hbm, x), (p_hbm, p), (z_hbm, z))),
        (a_hbm.at[b, h, rows], a), (m_hbm.at[b, h, rows], m),
    )  # fmt: skip
    for i, (source, target) in enumerate(sources):
        plgpu.copy_gmem_to_smem(source, target, arrived.at[i])

    # Decays; what they make of the operands and of the cotangents of q e^G, k e^G and k e^{Gn-G}, in place.
    row_warp, _ = blocks(WALK)
    rate = bias = None
    if o.gate != "log":
        rate = rate_hbm[h]
        bias = plgpu.load(bias_hbm.at[h, channels], layout=WALK.reduce(0), optimized=False)
    beta = fixed(per_token(plgpu.load(beta_hbm.at[b, h, rows], layout=WALK.reduce(1), optimized=False), WALK), WALK)
    plgpu.barrier_wait(arrived.at[0])
    decay = fixed(jnp.exp2(log2_gate(_float32(g, WALK), rate, bias, o)), WALK)
    *levels, down, up, total = walk(decay)
    totals[...] = total
    sync()
    t = [over_tokens(plgpu.load(totals.at[i], layout=WALK.reduce(0)), WALK) for i in range(4)]
    at = lambda values: by_block(row_warp, values)  # noqa: E731
    for i, f in enumerate(levels):
        factors[i] = f.astype(BF16)
    factors[4] = jnp.where((row_warp & 1) == 1, down, up).astype(BF16)
    factors[5] = (jnp.where(row_warp >= 2, down, up) * at([t[1], None, None, t[2]])).astype(BF16)
    down = fixed((down * at([None, t[0], t[0] * t[1], t[0] * t[1] * t[2]])).astype(BF16), WALK)
    up = fixed((up * at([t[1] * t[2] * t[3], t[2] * t[3], t[3], None])).astype(BF16), WALK)
    for i, r, factor in ((3, x, down), (4, p, down), (5, z, up)):
        plgpu.barrier_wait(arrived.at[i])
        r[...] = plgpu.load(r, layout=WALK) * factor
    sync()  # the totals have been read, whose place bk takes
    plgpu.barrier_wait(arrived.at[1])
    bk[...] = (_float32(k, WALK) * (beta * (-1.0 / o.scale))).astype(BF16)

    # The tree. dx, dp: cotangents of scale q and of -beta k as rows; dy: that of k as their partner, over scale.
    dx, dp = (_float32(r, WGMMA) for r in (x, p))
    dy = fixed(jnp.zeros((CHUNK, 64), F32))
    for i in (2, 6, 7):
        plgpu.barrier_wait(arrived.at[i])
    for i in range(4):
        dx, dp, dy = add_inner_level((dx, dp, dy), factors.at[i], (k, q, bk), (a, m), half=1 << i)
    sync()
    for i in (4, 5):
        dx, dp, dy = add_outer_level((dx, dp, dy), factors.at[i], (k, q, bk), (a, m), half=1 << i)

    # A1: what a row's cotangents say about the gates up to it, less what it lost as a partner.
    i, j = tile_indices()
    diagonal = jnp.sum(jnp.where(i == j, diagonal_blocks(a).astype(F32), 0.0), axis=1)
    ks, qs, bks = (_float32(r, WGMMA) for r in (k, q, bk))
    sync()
    out[0] = fixed((qs * dx + bks * dp - ks * dy) * o.scale)
    dbeta = -jnp.sum(ks * dp, axis=1)
    dbeta_hbm[half, b, h, rows] = plgpu.layout_cast(dbeta, WGMMA.reduce(1))
    diagonal = per_token(diagonal, WGMMA)
    beta = per_token(plgpu.load(beta_hbm.at[b, h, rows], layout=WGMMA.reduce(1), optimized=False), WGMMA)
    out[1] = fixed((dx + diagonal * ks) * o.scale)
    out[2] = fixed((dy + diagonal * qs) * o.scale + (_float32(z, WGMMA) - beta * dp))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out.at[1], dq_hbm.at[b, rows, gates])
    plgpu.copy_smem_to_gmem(out.at[2], dk_hbm.at[b, rows, gates])

    # Running sums, up over A1 and down over k_out dk_out.
    leaving = fixed(_float32(k, WALK) * _float32(z, WALK), WALK)
    dg, *sums = running_sums(fixed(plgpu.load(out.at[0], layout=WALK), WALK), leaving)
    for i in range(2):
        ends[i] = sums[i]
    sync()
    above, below = ([plgpu.load(ends.at[i, j], layout=WALK.reduce(0)) for j in range(4)] for i in range(2))
    total = plgpu.load(dtotal_hbm.at[b, h, of_chunk], layout=WALK.reduce(0), optimized=False)
    rest = [total + sum(above[j + 1 :], 0.0) + sum(below[:j], 0.0) for j in range(4)]
    out[0] = fixed(dg + at([over_tokens(r, WALK) for r in rest]), WALK)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out.at[0], dg_hbm.at[b, rows, gates])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _float32(tile, layout):
    x = plgpu.load(tile, layout=layout)
    return widen(x, layout) if x.dtype == BF16 else x
