"""The sequential half, backward: state.py from the last chunk to the first.

With dS the cotangent of the state after a chunk, names as in chunked.py and everything transposed as in state.py:

    dV'^T = dO^T A + dS^T k^^T        dS^T <- dS^T e^{Gn} + dO^T q~ - dV'^T W

W is T beta k_in, so that with P = T^T dV' (which is all that passes through the inverse) the rest is

    dv = beta P      dk_in = -beta P S^T      dAk = -beta P V'^T      dbeta = P V - k_in P S^T - Ak P V'^T  (row sums)
    dq_in = dO S^T   dk_out = V' dS^T         dA = dO V'^T            dGn = e^{Gn} sum_v S dS

and no product with T beyond P is needed; chunk_backward.py does that for all chunks at once.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .intra import BF16, F32, Options, Terms, fixed
from .registers import CHUNK, SMEM_TILE
from .state import Run, block, call, decayed, product, two_terms

__all__ = ["pass_state_backward"]


def pass_state_backward(x: Terms, dout, dstate, slot, o: Options, pieces: int = 1, *, keep: bool = True):
    """dS^T after each chunk and dV'^T, [B, HV, N V, K] and [B, HV, N V, 64] bf16, and dS^T before each piece.

    dout [B, T, HV V] bf16; dstate [B, HV, pieces, V, K] float32, the cotangent of S^T after each piece; None is zeros.
    With slot [B, N] both states are [B, S, HV, V, K], and a slot without chunks keeps its dstate. Without keep only
    the last result is computed, the others are None.
    """
    B, HV, T, _ = x.w.shape
    N = T // CHUNK
    outs = (
        jax.ShapeDtypeStruct((B, HV, N * o.V, o.K), BF16),
        jax.ShapeDtypeStruct((B, HV, N * o.V, CHUNK), BF16),
    ) * keep + (jax.ShapeDtypeStruct((B, HV, pieces, o.V, o.K) if slot is None else dstate.shape, F32),)
    given = [y for y in (dstate, slot) if y is not None]

    def kernel(w, q_in, k_out, a, decay, dout, *rest, end=None, dresidual=None):
        *saved, dfirst = rest[len(given) :]
        run = Run(N // pieces, *rest[: len(given)])
        last_first = lambda n: run.length - 1 - n  # noqa: E731

        def chunk(at, w, q_in, k_out, a, decay, do, ds):
            n = run.start + last_first(at[0])
            ds = run.enter(ds, n, reverse=True)
            rows = pl.ds(n * o.V + run.wg * 64, 64)
            ds16 = fixed(ds.astype(BF16))
            if keep:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                end[run.wg] = ds16
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(end.at[run.wg], saved[0].at[run.b, run.h, rows])
            do_t = do.at[:, run.values].transpose((1, 0))
            dv = product((do_t, a), (ds16, k_out.transpose((1, 0))), shape=(64, CHUNK))
            high, low = two_terms(-dv)
            if keep:
                dresidual[run.wg] = -high
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(dresidual.at[run.wg], saved[1].at[run.b, run.h, rows])
            ds = decayed(ds, decay, o, (do_t, q_in), (high, w), (low, w))
            run.leave(ds, n, dfirst, reverse=True)
            return ds

        def compute(pipeline):
            ds = pipeline(run.first(o))
            if slot is None:
                dfirst[run.b, run.h, run.piece, run.values] = ds
            plgpu.wait_smem_to_gmem(0)

        values = pl.ds(run.h * o.V, o.V)
        plgpu.emit_pipeline_warp_specialized(
            chunk,
            grid=(run.length,),
            memory_registers=40,
            in_specs=[
                block(CHUNK, o.K, at=last_first), block(CHUNK, o.K, at=last_first), block(CHUNK, o.K, at=last_first),
                block(CHUNK, CHUNK, at=last_first), plgpu.BlockSpec((o.K,), lambda n: (last_first(n),)),
                block(CHUNK, o.V, at=last_first),
            ],
            wg_axis="wg",
            num_compute_wgs=o.V // 64,
            compute_context=compute,
        )(
            *(run.own(r, CHUNK) for r in (w, q_in, k_out, a)), run.own(decay, o.K),
            dout.at[run.b, pl.ds(run.start * CHUNK, run.length * CHUNK), values],
        )  # fmt: skip

    tiles = {
        name: plgpu.SMEM((o.V // 64, 64, width), BF16, transforms=SMEM_TILE)
        for name, width in (("end", o.K), ("dresidual", CHUNK))
    }
    operands = (x.w, x.q_in, x.k_out, x.a, x.decay, dout, *given)
    *saved, dfirst = call(
        kernel, "kda_state_backward", operands, outs, tiles if keep else {}, o.V // 64, (HV, B, pieces)
    )
    if slot is not None:
        present = jnp.any(slot[:, None] == jnp.arange(dstate.shape[1])[:, None], axis=-1)
        dfirst = jnp.where(present[..., None, None, None], dfirst, dstate)
    return *(saved if keep else (None, None)), dfirst
