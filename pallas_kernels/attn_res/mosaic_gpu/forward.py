"""The forward kernel: a token's sources come from memory once, and are read twice where they then lie.

    pass 1   per source the sums of v^2 and of v u, which give 1/rms r and logit s = r (v . u)
    pass 2   h = sum of softmax(s)_i v_i, and with the norm fused in h * rsqrt(mean h^2 + eps) * output_scale

Where the sources come in pieces, both passes are made over each, and h and the sum of weights so far are scaled down as
a larger logit is found (online softmax).

Saved for the backward is a row of float32 per token: N' logits, N' times 1/rms (N' is N made a multiple of 4), the
log-sum-exp, and three numbers of no meaning.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .plan import Plan, make_plan
from .ring import Ring, call, four, in_rows, table_shape, vectors_in_rows
from .rows import WARPS, apart

__all__ = ["forward", "like", "saved_numbers"]

F32 = jnp.float32


def forward(static, sources, gain, output_scale, count):
    """(mixture [M, D], lse [M], saved [M, `saved_numbers`]): see kernels.py."""
    first = jax.tree.leaves(sources)[0]
    (M, D), N = first.shape[-2:], len(sources)
    norm = output_scale is not None
    plan, N4 = _plan(M, D, N, first.dtype, norm + (count is not None)), four(N)
    rows, own_tokens, width = plan.rows, plan.tokens, plan.tokens * D
    refs = tuple(in_rows(plan, sources)) if isinstance(sources, tuple) else (in_rows(plan, sources),)
    vectors = vectors_in_rows(plan, [x for x in (gain, output_scale) if x is not None])
    counts = [] if count is None else [count.reshape(1)]

    def kernel(*given, ring, arrived, sums, weights, squares):
        source_refs, given = given[: len(refs)], given[len(refs) :]
        vector_refs, given = given[: len(vectors)], given[len(vectors) :]
        *count_ref, out, lses, saved = given
        own = Ring(plan, source_refs, count_ref[0] if count_ref else None, ring, arrived, N=N, D=width, passes=1)
        keep_apart = apart if plan.one_by_one else lambda: None
        vector = own.vectors(vector_refs)
        own.begin()

        def token(t, m, _):
            def mix(piece, so_far):
                u = vector(0)

                def measure(i, _):
                    keep_apart()
                    v = piece.row(i)
                    for j, x in enumerate(rows.sum_of_products((v, v), (v, u))):
                        own.put(sums.at[j], i - piece.first, x)

                piece.each(measure)
                own.meet()
                P4 = four(piece.size)
                rstd = jax.lax.rsqrt(own.table(sums.at[0], P4) * (1 / D) + static.eps)
                logit = own.table(sums.at[1], P4) * rstd
                logit = jnp.where(own.are_live(piece.first, piece.size), logit, -jnp.inf)
                top = jnp.max(logit) if so_far is None else jnp.maximum(so_far[1], jnp.max(logit))
                weight = jnp.exp(logit - top)
                weights[own.place, pl.ds(0, P4)] = weight
                total = jnp.sum(weight)
                own.meet(of_a_group=True)

                if so_far is None:  # not from 0 on, which would turn a lone -0.0 into 0.0
                    h, after = weights[own.place, 0] * piece.row(piece.first), 1
                else:
                    shrink, after = jnp.exp(so_far[1] - top), 0
                    h, total = so_far[0] * shrink, so_far[2] * shrink + total

                def add(i, h):
                    keep_apart()
                    return h + weights[own.place, i - piece.first] * piece.row(i)

                h = piece.each(add, h, after)

                @pl.when(own.leads)
                def _():
                    saved[own.number(m), pl.ds(piece.first, P4)] = logit
                    saved[own.number(m), pl.ds(N4 + piece.first, P4)] = rstd

                return h, top, total

            h, top, total = own.each_piece(t, 0, mix, None)
            h = h * (1 / total)
            if norm:
                [square] = rows.sum_of_products((h, h))
                own.put_total(squares, square)
                own.meet()
                h = h * jax.lax.rsqrt(own.total_of(squares) * (1 / D) + static.eps) * vector(1)
            rows.store(out.at[m], h, own.first_channel, width)

            @pl.when(own.leads)
            def _():
                lse = top + jnp.log(total)
                lses[own.number(m)] = lse
                saved[own.number(m), 2 * N4] = lse

            own.leave_token(t)

        own.each_token(token, None)

    outs = (
        like(first, (M // own_tokens, width), first.dtype),
        like(first, (M,), F32),
        like(first, (M, saved_numbers(N)), F32),
    )
    P4, wide = four(plan.piece), WARPS * plan.groups
    scratch = dict(
        ring=plgpu.SMEM((plan.slots * plan.together, plan.padded), first.dtype),
        arrived=plgpu.Barrier(num_barriers=plan.slots, num_arrivals=plan.together),
        sums=plgpu.SMEM((2, *table_shape(plan, P4)), F32),
        weights=plgpu.SMEM((own_tokens, P4), F32),
        squares=plgpu.SMEM((wide,), F32),
    )
    mixture, lse, saved = call(kernel, "attn_res", (*refs, *vectors, *counts), outs, scratch, plan)
    return mixture.reshape(M, D), lse, saved


def saved_numbers(N: int) -> int:
    return 2 * four(N) + 4


def like(x, shape, dtype):
    """The type of a result that varies over a mesh as x does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def _plan(M, D, N, dtype, extras: int) -> Plan:
    return make_plan(
        M, D, N, dtype, registers_per_channel=6 + 2 * extras, rows_beside=0, bytes_beside=96 * four(N) + 10240,
        online=True,
    )  # fmt: skip
