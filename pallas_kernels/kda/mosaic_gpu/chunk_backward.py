"""What a chunk's states and residuals give, for all chunks at once (formulas in state_backward.py).

One warpgroup per 64 channels of K; they share what the copy engine brings.
"""

from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .intra import BF16, F32, Options, fixed, matmul
from .registers import CHUNK, SMEM_TILE, WALK, WGMMA, per_token, warp_sync

__all__ = ["ChunkGradients", "chunk_backward"]


class ChunkGradients(NamedTuple):
    dv: jax.Array  # [B, T, HV V] bf16
    dq_in: jax.Array  # [B, HV, T, K] bf16
    ps: jax.Array  # [B, HV, T, K] bf16: P S^T, of which dk_in is -beta times
    dk_out: jax.Array  # [B, HV, T, K] bf16
    da: jax.Array  # [B, HV, T, 64] bf16, of which the lower triangle counts
    m: jax.Array  # [B, HV, T, 64] bf16: P V'^T, likewise
    dtotal: jax.Array  # [B, HV, N K] float32: cotangent of the chunk's whole log-decay
    dbeta: jax.Array  # [V / 64, B, HV, T] float32: sum over 64 values of P v


def chunk_backward(v, beta, inverse, decay, starts, residuals, ends, dresiduals, dout, o: Options) -> ChunkGradients:
    """v, dout [B,T,HV V] bf16; beta [B,HV,T] float32; inverse, decay as in Terms; the rest from the other kernels."""
    B, HV, T = beta.shape
    N, nk, nv = T // CHUNK, o.K // 64, o.V // 64
    token = lambda w: jax.ShapeDtypeStruct((B, HV, T, w), BF16)  # noqa: E731
    out = ChunkGradients(
        jax.ShapeDtypeStruct((B, T, HV * o.V), BF16), token(o.K), token(o.K), token(o.K), token(CHUNK), token(CHUNK),
        jax.ShapeDtypeStruct((B, HV, N * o.K), F32), jax.ShapeDtypeStruct((nv, B, HV, T), F32),
    )  # fmt: skip
    tiles = lambda *lead: plgpu.SMEM((*lead, CHUNK, 64), BF16, transforms=SMEM_TILE)  # noqa: E731

    def kernel(v_hbm, beta_hbm, t_hbm, decay_hbm, s_hbm, r_hbm, ds_hbm, dr_hbm, do_hbm, *outs,
               s, ds, r, dr, do, v, t, result, square, arrived):  # fmt: skip
        dv_hbm, dq_hbm, ps_hbm, dk_hbm, da_hbm, m_hbm, dtotal_hbm, dbeta_hbm = outs
        n, h, b, wg = (jax.lax.axis_index(i) for i in ("chunk", "head", "row", "wg"))
        rows, k_columns = pl.ds(n * CHUNK, CHUNK), pl.ds(wg * 64, 64)

        @pl.when(wg == 0)
        def _():
            for j in range(nv):
                values, columns = pl.ds(n * o.V + 64 * j, 64), pl.ds(h * o.V + 64 * j, 64)
                plgpu.copy_gmem_to_smem(dr_hbm.at[b, h, values], dr.at[j], arrived[0])
                plgpu.copy_gmem_to_smem(v_hbm.at[b, rows, columns], v.at[j], arrived[1])
                plgpu.copy_gmem_to_smem(r_hbm.at[b, h, values], r.at[j], arrived[2])
                plgpu.copy_gmem_to_smem(do_hbm.at[b, rows, columns], do.at[j], arrived[2])
                for i in range(nk):
                    columns = pl.ds(64 * i, 64)
                    plgpu.copy_gmem_to_smem(s_hbm.at[b, h, values, columns], s.at[j, i], arrived[3])
                    plgpu.copy_gmem_to_smem(ds_hbm.at[b, h, values, columns], ds.at[j, i], arrived[4])
            for j in range(2):
                plgpu.copy_gmem_to_smem(t_hbm.at[j, b, h, rows], t.at[j], arrived[5])

        for i in (0, 5):
            plgpu.barrier_wait(arrived[i])
        high, low = (t.at[j].transpose((1, 0)) for j in range(2))
        p = []
        for j in range(nv):
            d = dr.at[j].transpose((1, 0))
            p.append(fixed(matmul((high, d), (low, d))))
        plgpu.barrier_wait(arrived[1])
        for j in range(nv):

            @pl.when(wg == j % nk)
            def _(j=j):
                value = plgpu.load(v.at[j], layout=WGMMA).astype(F32)
                dbeta_hbm[j, b, h, rows] = jnp.sum(value * p[j], axis=1)
                down_beta = per_token(
                    plgpu.load(beta_hbm.at[b, h, rows], layout=WGMMA.reduce(1), optimized=False), WGMMA
                )
                warp_sync()  # a warp writes where it has read
                v[j] = fixed((down_beta * p[j]).astype(BF16))
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(v.at[j], dv_hbm.at[b, rows, pl.ds(h * o.V + 64 * j, 64)])

        p = [fixed(x.astype(BF16)) for x in p]
        for i in (2, 3, 4):
            plgpu.barrier_wait(arrived[i])

        def give(tile, x, target):
            tile[...] = fixed(x.astype(BF16))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, target)

        result_ = lambda j: result.at[wg, j]  # noqa: E731
        give(result_(0), matmul(*((do.at[j], s.at[j, wg]) for j in range(nv))), dq_hbm.at[b, h, rows, k_columns])
        give(result_(1), matmul(*((p[j], s.at[j, wg]) for j in range(nv))), ps_hbm.at[b, h, rows, k_columns])
        give(
            result_(2),
            matmul(*((r.at[j].transpose((1, 0)), ds.at[j, wg]) for j in range(nv))),
            dk_hbm.at[b, h, rows, k_columns],
        )

        @pl.when(wg == 0)
        def _():
            give(square.at[0], matmul(*((do.at[j], r.at[j]) for j in range(nv))), da_hbm.at[b, h, rows])

        @pl.when(wg == nk - 1)
        def _():
            give(square.at[1], matmul(*((p[j], r.at[j]) for j in range(nv))), m_hbm.at[b, h, rows])

        total = 0.0
        for j in range(nv):
            x, y = (plgpu.load(z.at[j, wg], layout=WALK).astype(F32) for z in (s, ds))
            total = total + x * y
        column = pl.ds(n * o.K + wg * 64, 64)
        scale = plgpu.load(decay_hbm.at[b, h, column], layout=WALK.reduce(0), optimized=False)
        dtotal_hbm[b, h, column] = scale * jnp.sum(total, axis=0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    outputs, tree = jax.tree.flatten(out)
    results = plgpu.kernel(
        kernel,
        out_type=outputs,
        scratch_types=dict(
            s=tiles(nv, nk), ds=tiles(nv, nk), r=tiles(nv), dr=tiles(nv), do=tiles(nv), v=tiles(nv), t=tiles(2),
            result=tiles(nk, 3), square=tiles(2),
            arrived=[plgpu.Barrier(num_arrivals=c) for c in (nv, nv, 2 * nv, nv * nk, nv * nk, 2)],
        ),
        grid=(N, HV, B),
        grid_names=("chunk", "head", "row"),
        num_threads=nk,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="kda_chunk_backward",
    )(v, beta, inverse, decay, starts, residuals, ends, dresiduals, dout)  # fmt: skip
    return jax.tree.unflatten(tree, results)
