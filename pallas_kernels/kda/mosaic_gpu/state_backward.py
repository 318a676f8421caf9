"""The sequential half, backward: state.py from the last chunk to the first.

With dS the cotangent of the state after a chunk, names as in chunked.py and everything transposed as in state.py:

    dV'^T = dO^T A + dS^T k^^T        P^T = dV'^T T        dS^T <- dS^T e^{Gn} + dO^T q~ - (beta P^T) k_in

P is all that passes through the inverse. The rest is

    dv = beta P      dk_in = -beta P S^T      dAk = -beta P V'^T      dbeta = P V - k_in P S^T - Ak P V'^T  (row sums)
    dq_in = dO S^T   dk_out = V' dS^T         dA = dO V'^T            dGn = e^{Gn} sum_v S dS

and is done for all chunks at once by chunk_backward.py.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .intra import BF16, F32, Options, Terms
from .registers import CHUNK, SMEM_TILE, fixed, product
from .state import Run, across, block, call, scaled, two_terms, warpgroups

__all__ = ["pass_state_backward"]


def pass_state_backward(x: Terms, beta, dout, dstate, slot, o: Options, pieces: int = 1, *, keep: bool = True):
    """dS^T after each chunk [B, HV, N V, K] and P [B, T, HV V], bf16, and dS^T before each piece.

    beta [B, HV, T] float32; dout [B, T, HV V] bf16; dstate [B, HV, pieces, V, K] float32, the cotangent of S^T after
    each piece; None is zeros. With slot [B, N] both states are [B, S, HV, V, K], and a slot without chunks keeps its
    dstate. Without keep only the last result is computed, for all pieces but the first; the others are None.
    """
    B, HV, T = beta.shape
    N, skip = T // CHUNK, 0 if keep else 1
    outs = (
        jax.ShapeDtypeStruct((B, HV, N * o.V, o.K), BF16),
        jax.ShapeDtypeStruct((B, T, HV * o.V), BF16),
    ) * keep + (jax.ShapeDtypeStruct((B, HV, pieces - skip, o.V, o.K) if slot is None else dstate.shape, F32),)
    given = [y for y in (dstate, slot) if y is not None]
    wgs = warpgroups(B * HV * (pieces - skip), o.V)

    def kernel(k_in, q_in, k_out, a, inverse, beta, decay, dout, *rest, end=None, p=None):
        *saved, dfirst = rest[len(given) :]
        run = Run(wgs, N // pieces, *rest[: len(given)], skip=skip)
        last_first = lambda n: run.length - 1 - n  # noqa: E731

        def chunk(at, k_in, q_in, k_out, a, high, low, beta, decay, do, ds):
            n = run.start + last_first(at[0])
            ds = run.enter(ds, n, reverse=True)
            rows = pl.ds(n * o.V + run.first_value, 64)
            ds16 = fixed(ds.astype(BF16))
            if keep:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                end[run.wg] = ds16
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(end.at[run.wg], saved[0].at[run.b, run.h, rows])
            do_t = run.own_columns(do).transpose((1, 0))
            dv_high, dv_low = two_terms(product((do_t, a), (ds16, k_out.transpose((1, 0)))))

            def write(ds_t):
                """What dO adds is under way while P is computed."""
                ds_t[...] = fixed(scaled(ds, decay))
                p_t = product(
                    (dv_high, high), (dv_low, high), (dv_high, low),
                    meanwhile=lambda: plgpu.wgmma(ds_t, do_t, q_in),
                )  # fmt: skip
                for left in two_terms(fixed(p_t * -across(beta, 64))):
                    plgpu.wgmma(ds_t, left, k_in)
                if keep:
                    p.at[run.wg].transpose((1, 0))[...] = fixed(p_t.astype(BF16))
                    plgpu.commit_smem()
                    rows, columns = pl.ds(n * CHUNK, CHUNK), pl.ds(run.h * o.V + run.first_value, 64)
                    plgpu.copy_smem_to_gmem(p.at[run.wg], saved[1].at[run.b, rows, columns])
                return ds_t[...]

            ds = pl.run_scoped(write, plgpu.ACC((64, o.K), F32))
            run.leave(ds, n, dfirst, reverse=True)
            return ds

        def compute(pipeline):
            ds = pipeline(run.first(o))
            if slot is None:
                dfirst[run.b, run.h, run.piece - skip, run.values] = ds
            plgpu.wait_smem_to_gmem(0)

        tokens = lambda width: block(CHUNK, width, at=last_first)  # noqa: E731
        numbers = lambda count: plgpu.BlockSpec((count,), lambda n: (last_first(n),))  # noqa: E731
        plgpu.emit_pipeline_warp_specialized(
            chunk,
            grid=(run.length,),
            memory_registers=40,
            in_specs=[*[tokens(o.K)] * 3, *[tokens(CHUNK)] * 3, numbers(CHUNK), numbers(o.K), tokens(64 * wgs)],
            wg_axis="wg",
            num_compute_wgs=wgs,
            compute_context=compute,
        )(
            *(run.own(r, CHUNK) for r in (k_in, q_in, k_out, a, inverse.at[0], inverse.at[1])), run.own(beta, CHUNK),
            run.own(decay, o.K), run.own_values(dout, o),
        )  # fmt: skip

    tiles = {
        name: plgpu.SMEM((wgs, 64, width), BF16, transforms=SMEM_TILE) for name, width in (("end", o.K), ("p", CHUNK))
    }
    operands = (x.k_in, x.q_in, x.k_out, x.a, x.inverse, beta, x.decay, dout, *given)
    grid = (HV, B, pieces - skip, o.V // 64 // wgs)
    *saved, dfirst = call(kernel, "kda_state_backward", operands, outs, tiles if keep else {}, wgs, grid)
    if slot is not None:
        present = jnp.any(slot[:, None] == jnp.arange(dstate.shape[1])[:, None], axis=-1)
        dfirst = jnp.where(present[..., None, None, None], dfirst, dstate)
    return *(saved if keep else (None, None)), dfirst
