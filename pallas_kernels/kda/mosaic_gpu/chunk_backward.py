"""What a chunk's states and residuals give, for all chunks at once (formulas in state_backward.py).

One warpgroup per 64 channels of K; they share what the copy engine brings.
"""

from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .intra import BF16, F32, Options
from .registers import CHUNK, SMEM_TILE, WALK, WGMMA, fixed, over_tokens, per_token, product, warp_sums, warp_sync

__all__ = ["ChunkGradients", "chunk_backward"]


class ChunkGradients(NamedTuple):
    dv: jax.Array  # [B, T, HV V] bf16
    dq_in: jax.Array  # [B, HV, T, K] bf16
    ps: jax.Array  # [B, HV, T, K] bf16: P S^T, of which dk_in is -beta times
    dk_out: jax.Array  # [B, HV, T, K] bf16
    da: jax.Array  # [B, HV, T, 64] bf16, of which the lower triangle counts
    m: jax.Array  # [B, HV, T, 64] bf16: P V'^T, likewise
    dtotal: jax.Array  # [B, HV, 4 N, K] float32: cotangent of the chunk's whole log-decay, in four summands
    dbeta: jax.Array  # [V / 64, B, HV, T] float32: sum over 64 values of P v


def chunk_backward(v, beta, decay, starts, residuals, ends, p, dout, o: Options) -> ChunkGradients:
    """v, dout [B,T,HV V] bf16; beta [B,HV,T] float32; decay as in Terms; the rest from the other kernels."""
    B, HV, T = beta.shape
    N, nk, nv = T // CHUNK, o.K // 64, o.V // 64
    token = lambda w: jax.ShapeDtypeStruct((B, HV, T, w), BF16)  # noqa: E731
    out = ChunkGradients(
        jax.ShapeDtypeStruct((B, T, HV * o.V), BF16), token(o.K), token(o.K), token(o.K), token(CHUNK), token(CHUNK),
        jax.ShapeDtypeStruct((B, HV, 4 * N, o.K), F32), jax.ShapeDtypeStruct((nv, B, HV, T), F32),
    )  # fmt: skip
    tiles = lambda *lead: plgpu.SMEM((*lead, CHUNK, 64), BF16, transforms=SMEM_TILE)  # noqa: E731

    def kernel(v_hbm, beta_hbm, decay_hbm, s_hbm, r_hbm, ds_hbm, p_hbm, do_hbm, *outs,
               s, ds, r, p, do, v, result, square, arrived):  # fmt: skip
        dv_hbm, dq_hbm, ps_hbm, dk_hbm, da_hbm, m_hbm, dtotal_hbm, dbeta_hbm = outs
        n, h, b, wg = (jax.lax.axis_index(i) for i in ("chunk", "head", "row", "wg"))
        rows, k_columns = pl.ds(n * CHUNK, CHUNK), pl.ds(wg * 64, 64)

        @pl.when(wg == 0)
        def _():
            for j in range(nv):
                values, columns = pl.ds(n * o.V + 64 * j, 64), pl.ds(h * o.V + 64 * j, 64)
                plgpu.copy_gmem_to_smem(p_hbm.at[b, rows, columns], p.at[j], arrived[0])
                plgpu.copy_gmem_to_smem(v_hbm.at[b, rows, columns], v.at[j], arrived[0])
                plgpu.copy_gmem_to_smem(r_hbm.at[b, h, values], r.at[j], arrived[1])
                plgpu.copy_gmem_to_smem(do_hbm.at[b, rows, columns], do.at[j], arrived[1])
                for i in range(nk):
                    columns = pl.ds(64 * i, 64)
                    plgpu.copy_gmem_to_smem(s_hbm.at[b, h, values, columns], s.at[j, i], arrived[2])
                    plgpu.copy_gmem_to_smem(ds_hbm.at[b, h, values, columns], ds.at[j, i], arrived[3])

        plgpu.barrier_wait(arrived[0])
        for j in range(nv):

            @pl.when(wg == j % nk)
            def _(j=j):
                value, own = (plgpu.load(x.at[j], layout=WGMMA).astype(F32) for x in (v, p))
                dbeta_hbm[j, b, h, rows] = jnp.sum(value * own, axis=1)
                down_beta = per_token(
                    plgpu.load(beta_hbm.at[b, h, rows], layout=WGMMA.reduce(1), optimized=False), WGMMA
                )
                warp_sync()  # a warp writes where it has read
                v[j] = fixed((down_beta * own).astype(BF16))
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(v.at[j], dv_hbm.at[b, rows, pl.ds(h * o.V + 64 * j, 64)])

        for i in (1, 2, 3):
            plgpu.barrier_wait(arrived[i])

        def give(tile, x, target):
            tile[...] = fixed(x.astype(BF16))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, target)

        result_ = lambda j: result.at[wg, j]  # noqa: E731
        give(result_(0), product(*((do.at[j], s.at[j, wg]) for j in range(nv))), dq_hbm.at[b, h, rows, k_columns])
        give(result_(1), product(*((p.at[j], s.at[j, wg]) for j in range(nv))), ps_hbm.at[b, h, rows, k_columns])
        give(
            result_(2),
            product(*((r.at[j].transpose((1, 0)), ds.at[j, wg]) for j in range(nv))),
            dk_hbm.at[b, h, rows, k_columns],
        )

        @pl.when(wg == 0)
        def _():
            give(square.at[0], product(*((do.at[j], r.at[j]) for j in range(nv))), da_hbm.at[b, h, rows])

        @pl.when(wg == nk - 1)
        def _():
            give(square.at[1], product(*((p.at[j], r.at[j]) for j in range(nv))), m_hbm.at[b, h, rows])

        total = 0.0
        for j in range(nv):
            x, y = (plgpu.load(z.at[j, wg], layout=WALK).astype(F32) for z in (s, ds))
            total = total + x * y
        scale = plgpu.load(decay_hbm.at[b, h, pl.ds(n * o.K + wg * 64, 64)], layout=WALK.reduce(0), optimized=False)
        dtotal_hbm[b, h, pl.ds(4 * n, 4), k_columns] = warp_sums(fixed(total * over_tokens(scale, WALK), WALK))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    outputs, tree = jax.tree.flatten(out)
    results = plgpu.kernel(
        kernel,
        out_type=outputs,
        scratch_types=dict(
            s=tiles(nv, nk), ds=tiles(nv, nk), r=tiles(nv), p=tiles(nv), do=tiles(nv), v=tiles(nv), result=tiles(nk, 3),
            square=tiles(2), arrived=[plgpu.Barrier(num_arrivals=c) for c in (2 * nv, 2 * nv, nv * nk, nv * nk)],
        ),
        grid=(N, HV, B),
        grid_names=("chunk", "head", "row"),
        num_threads=nk,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="kda_chunk_backward",
    )(v, beta, decay, starts, residuals, ends, p, dout)  # fmt: skip
    return jax.tree.unflatten(tree, results)
