"""Cotangents through everything of a chunk that does not depend on the state, down to the raw q, k and gate.

One program per chunk and value head, one warpgroup per 64 channels of it.

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

The L2 norm and its backward, dx = r (dy - y (y . dy)) for y = r x, need sums over all channels of a row: the one thing
that warpgroups tell each other. Shared memory is short, so that raw q, k and gate are fetched a second time for it.
"""

from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .gate import gate_cotangents, log2_gate
from .intra import BF16, F32, Options
from .registers import (
    CHUNK,
    SMEM_TILE,
    SMEM_TILE_F32,
    WALK,
    WGMMA,
    blocks,
    by_block,
    fixed,
    over_tokens,
    per_token,
    running_sums,
    sync,
    sync_program,
    tile_indices,
    walk,
    warp_sums,
    warp_sync,
    widen,
)  # fmt: skip
from .warp_products import add_inner_level, add_outer_level, diagonal_blocks

__all__ = ["intra_backward"]


def intra_backward(q, k, g, beta, rate, bias, dA, M, dq_in, PS, dk_out, dtotal, o: Options):
    """(dq, dk, dg, dbeta, dbias, drate) of a chunk's terms (intra.py), of one value head each.

    q, k [B,T,H K] bf16 and g [B,T,HV K], all raw, g bf16 unless it is the gate itself; beta [B,HV,T], rate [HV],
    bias [HV,K] float32; 64 divides T. Cotangents, bf16: dA [B,HV,T,64] of A, dq_in and dk_out [B,HV,T,K]
    of q~ and k^; M [B,HV,T,64] and PS [B,HV,T,K] of the products of k and of k e^G, once times -beta (theirs) and
    once times -1 (that of beta, whose row's sum they are); dtotal [B,HV,4 N,K] float32 of the chunk's sum of gates,
    in four summands.

    dq, dk [B,T,HV K] in bf16, or in float32 to be summed if value heads share them; dg [B,T,HV K] in g's dtype; dbeta
    [B,HV,T] float32. Of a gate with parameters dbias and drate [B,HV,4 N,K] float32, to be summed over chunks: the
    cotangents of bias and, still apart for each channel, of log(rate); None otherwise.
    """
    B, T, width = g.shape
    HV, H, N = width // o.K, q.shape[2] // o.K, T // CHUNK
    nk, group, fused = o.K // 64, HV // H, o.gate != "log"
    tiles = lambda dtype=BF16, n=1: plgpu.SMEM(  # noqa: E731
        (n * nk, CHUNK, 64), dtype, transforms=SMEM_TILE if dtype == BF16 else SMEM_TILE_F32
    )
    parts = [jax.ShapeDtypeStruct((B, HV, 4 * N, o.K), F32)] * 2 * fused
    # Gates come a second time to where a factor lay, unless float32 results need the place.
    extra = dict(g_again=tiles()) if fused and group > 1 else {}
    if nk > 1:
        extra["rows_of"] = plgpu.SMEM((4, nk, CHUNK), F32)
    dq, dk, dg, dbeta, *parts = plgpu.kernel(
        partial(_kernel, o=o, group=group),
        out_type=(
            *[jax.ShapeDtypeStruct((B, T, HV * o.K), BF16 if group == 1 else F32)] * 2,
            jax.ShapeDtypeStruct((B, T, HV * o.K), g.dtype),
            jax.ShapeDtypeStruct((nk, B, HV, T), F32),
            *parts,
        ),
        scratch_types=dict(
            q=tiles(), k=tiles(), x=tiles(), p=tiles(), z=tiles(),
            a=plgpu.SMEM((2, CHUNK, 64), BF16, transforms=SMEM_TILE),
            bk=plgpu.RefUnion(tiles(), plgpu.SMEM((8 * nk, 4, 64), F32)),
            wide=plgpu.RefUnion(tiles(n=6), tiles(F32, 3)),
            arrived=plgpu.Barrier(num_arrivals=1, num_barriers=9 * nk),
            shared=plgpu.Barrier(num_arrivals=2),
            **extra,
        ),
        grid=(N, HV, B),
        grid_names=("chunk", "head", "row"),
        num_threads=nk,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
        kernel_name="kda_intra_backward",
    )(q, k, g, beta, rate, bias, dA, M, dq_in, PS, dk_out, dtotal)  # fmt: skip
    return dq, dk, dg, dbeta.sum(0), *(parts or (None, None))


def _kernel(q_hbm, k_hbm, g_hbm, beta_hbm, rate_hbm, bias_hbm, a_hbm, m_hbm, x_hbm, p_hbm, z_hbm, dtotal_hbm,
            dq_hbm, dk_hbm, dg_hbm, dbeta_hbm, *parts, o, group, q, k, x, p, z, a, bk, wide, arrived, shared,
            g_again=None, rows_of=None):  # fmt: skip
    n, h, b, wg = (jax.lax.axis_index(i) for i in ("chunk", "head", "row", "wg"))
    nk, fused = o.K // 64, o.gate != "log"
    rows, quarters = pl.ds(n * CHUNK, CHUNK), pl.ds(4 * n, 4)
    channels, gates = pl.ds(wg * 64, 64), pl.ds(h * o.K + wg * 64, 64)
    qk = pl.ds((h // group) * o.K + wg * 64, 64)
    bk, sums = bk
    totals, ends = sums.at[8 * wg], [sums.at[8 * wg + i] for i in range(2)]
    factors, out = ([r.at[n * wg + i] for i in range(n)] for r, n in zip(wide, (6, 3), strict=True))
    g = factors[0] if g_hbm.dtype == BF16 else out[0]
    g_again = factors[4] if g_again is None else g_again.at[wg]
    q, k, x, p, z, bk = (r.at[wg] for r in (q, k, x, p, z, bk))
    a, m = a.at[0], a.at[1]

    wait = lambda i: plgpu.barrier_wait(arrived.at[9 * wg + i])  # noqa: E731

    def fetch(i, source, target):
        plgpu.copy_gmem_to_smem(source, target, arrived.at[9 * wg + i])

    def over_channels(places, xs):
        """Sums over all channels of numbers [64] that are sums over this warpgroup's; places are used but once."""
        if nk == 1:
            return xs
        for i, y in zip(places, xs, strict=True):
            rows_of[i, wg] = y
        sync_program()
        return [sum(plgpu.load(rows_of.at[i, j], layout=WGMMA.reduce(1)) for j in range(nk)) for i in places]

    fetch(0, k_hbm.at[b, rows, qk], k)
    fetch(1, q_hbm.at[b, rows, qk], q)
    fetch(2, g_hbm.at[b, rows, gates], g)
    for i, source, target in ((3, x_hbm, x), (4, p_hbm, p), (5, z_hbm, z)):
        fetch(i, source.at[b, h, rows, channels], target)

    @pl.when(wg == 0)
    def _():
        plgpu.copy_gmem_to_smem(a_hbm.at[b, h, rows], a, shared)
        plgpu.copy_gmem_to_smem(m_hbm.at[b, h, rows], m, shared)

    # q and k as the products took them.
    wait(0)
    wait(1)
    norms = None
    if o.qk_l2norm:
        qs, ks = (_float32(r, WGMMA) for r in (q, k))
        squares = over_channels((0, 1), [jnp.sum(y * y, axis=1) for y in (qs, ks)])
        norms = [jax.lax.rsqrt(s + 1e-6) for s in squares]
        warp_sync()
        for r, y, norm in zip((q, k), (qs, ks), norms, strict=True):
            r[...] = fixed((y * per_token(norm, WGMMA)).astype(BF16))

    # Decays; what they make of the operands and of the cotangents of q e^G, k e^G and k e^{Gn-G}, in place.
    row_warp, _ = blocks(WALK)
    rate = bias = None
    if fused:
        rate = rate_hbm[h]
        bias = plgpu.load(bias_hbm.at[h, channels], layout=WALK.reduce(0), optimized=False)
    beta = fixed(per_token(plgpu.load(beta_hbm.at[b, h, rows], layout=WALK.reduce(1), optimized=False), WALK), WALK)
    wait(2)
    decay = fixed(jnp.exp2(log2_gate(_float32(g, WALK), rate, bias, o)), WALK)
    *levels, down, up, total = walk(decay)
    totals[...] = total
    sync()
    t = [over_tokens(plgpu.load(totals.at[i], layout=WALK.reduce(0)), WALK) for i in range(4)]
    at = lambda values: by_block(row_warp, values)  # noqa: E731
    for f, level in zip(factors, levels, strict=False):
        f[...] = level.astype(BF16)
    factors[4][...] = jnp.where((row_warp & 1) == 1, down, up).astype(BF16)
    factors[5][...] = (jnp.where(row_warp >= 2, down, up) * at([t[1], None, None, t[2]])).astype(BF16)
    down = fixed((down * at([None, t[0], t[0] * t[1], t[0] * t[1] * t[2]])).astype(BF16), WALK)
    up = fixed((up * at([t[1] * t[2] * t[3], t[2] * t[3], t[3], None])).astype(BF16), WALK)
    for i, r, factor in ((3, x, down), (4, p, down), (5, z, up)):
        wait(i)
        r[...] = plgpu.load(r, layout=WALK) * factor
    sync()  # the totals have been read, whose place bk takes
    bk[...] = (_float32(k, WALK) * (beta * (-1.0 / o.scale))).astype(BF16)

    # The tree. dx, dp: cotangents of scale q and of -beta k as rows; dy: that of k as their partner, over scale.
    dx, dp = (_float32(r, WGMMA) for r in (x, p))
    dy = fixed(jnp.zeros((CHUNK, 64), F32))
    plgpu.barrier_wait(shared)
    for i in range(4):
        dx, dp, dy = add_inner_level((dx, dp, dy), factors[i], (k, q, bk), (a, m), half=1 << i)
    sync()
    if o.qk_l2norm:
        fetch(6, q_hbm.at[b, rows, qk], x)
        fetch(7, k_hbm.at[b, rows, qk], p)
    for i in (4, 5):
        dx, dp, dy = add_outer_level((dx, dp, dy), factors[i], (k, q, bk), (a, m), half=1 << i)

    # A1: what a row's cotangents say about the gates up to it, less what it lost as a partner.
    i, j = tile_indices()
    diagonal = jnp.sum(jnp.where(i == j, diagonal_blocks(a).astype(F32), 0.0), axis=1)
    ks, qs, bks = (_float32(r, WGMMA) for r in (k, q, bk))
    sync()
    if fused:
        fetch(8, g_hbm.at[b, rows, gates], g_again)
    out[0][...] = fixed((qs * dx + bks * dp - ks * dy) * o.scale)
    dbeta_hbm[wg, b, h, rows] = plgpu.layout_cast(-jnp.sum(ks * dp, axis=1), WGMMA.reduce(1))
    diagonal = per_token(diagonal, WGMMA)
    beta = per_token(plgpu.load(beta_hbm.at[b, h, rows], layout=WGMMA.reduce(1), optimized=False), WGMMA)
    dq = fixed((dx + diagonal * ks) * o.scale)
    dk = fixed((dy + diagonal * qs) * o.scale + (_float32(z, WGMMA) - beta * dp))
    if o.qk_l2norm:
        wait(6)
        wait(7)
        r = [fixed(per_token(norm, WGMMA)) for norm in norms]
        y = [fixed(_float32(raw, WGMMA) * s) for raw, s in zip((x, p), r, strict=True)]
        dots = over_channels((2, 3), [jnp.sum(u * v, axis=1) for u, v in zip((dq, dk), y, strict=True)])
        dq, dk = (fixed(s * (d - u * per_token(dot, WGMMA))) for s, d, u, dot in zip(r, (dq, dk), y, dots, strict=True))
    results = factors[2:4] if dq_hbm.dtype == BF16 else out[1:]
    for tile, d in zip(results, (dq, dk), strict=True):
        tile[...] = fixed(d.astype(tile.dtype))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(results[0], dq_hbm.at[b, rows, gates])
    plgpu.copy_smem_to_gmem(results[1], dk_hbm.at[b, rows, gates])

    # Running sums, up over A1 and down over k_out dk_out.
    leaving = fixed(_float32(k, WALK) * _float32(z, WALK), WALK)
    dg, *of_warps = running_sums(fixed(plgpu.load(out[0], layout=WALK), WALK), leaving)
    for i in range(2):
        ends[i][...] = of_warps[i]
    sync()
    above, below = ([plgpu.load(ends[i].at[j], layout=WALK.reduce(0)) for j in range(4)] for i in range(2))
    total = sum(
        plgpu.load(dtotal_hbm.at[b, h, 4 * n + j, channels], layout=WALK.reduce(0), optimized=False) for j in range(4)
    )
    rest = [total + sum(above[j + 1 :], 0.0) + sum(below[:j], 0.0) for j in range(4)]
    dg = fixed(dg + at([over_tokens(r, WALK) for r in rest]), WALK)
    if fused:
        wait(8)
        dg, drate = (fixed(d, WALK) for d in gate_cotangents(_float32(g_again, WALK), rate, bias, o, dg))
        for target, d in zip(parts, (dg, drate), strict=True):
            target[b, h, quarters, channels] = warp_sums(d)
    result = out[0] if dg_hbm.dtype == F32 else factors[0]
    result[...] = fixed(dg.astype(dg_hbm.dtype), WALK)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(result, dg_hbm.at[b, rows, gates])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _float32(tile, layout):
    x = plgpu.load(tile, layout=layout)
    return widen(x, layout) if x.dtype == BF16 else x
