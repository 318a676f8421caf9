"""The backward kernel: sources and the mixture's cotangent come from memory once, the sources' cotangents go there.

Programs and their rings are those of the forward; a token's cotangent G and its row of saved numbers are fetched two
tokens ahead. With a_i = softmax(s)_i from what is saved, e the cotangent of the log-sum-exp, and r = 1/rms:

    norm     where it is fused, h is mixed anew and G becomes the cotangent behind it:
             with n = rsqrt(mean h^2 + eps), G <- n (G o - h n^2 mean(G o h)), o being output_scale
    pass 1   c_i = G . v_i, then p_i = a_i (c_i - sum_j a_j c_j + e) r_i, the cotangent of v_i . u
    pass 2   dv_i = a_i G + p_i u - (p_i r_i s_i / D) v_i, and du grows by p_i v_i

Given others, the sources' cotangents from elsewhere, dv_i is added to those where they lie. A row of them is loaded
while the one before is worked on.

A program adds up du (and do = sum of G h n) over its tokens in registers; the sums of programs are added by XLA, so
that no addition depends on who comes first.
"""

from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ...varying import varying
from .forward import like, saved_numbers
from .plan import NARROW, Plan, make_plan
from .ring import IN_BOUNDS, Ring, call, four, in_rows, table_shape, vectors_in_rows
from .rows import EVERYWHERE, WARPS, apart

__all__ = ["backward"]

F32 = jnp.float32
AHEAD = 2  # tokens


def backward(static, sources, gain, output_scale, count, saved, mixture_bar, lse_bar, others=None, *, clears=True):
    """(sources_bar as sources, gain_bar [D], output_scale_bar [D] or None): see kernels.py.

    clears: the cotangents of dead sources are zero, and not left to be anything.
    """
    (M, D), N, dtype = mixture_bar.shape, len(sources), mixture_bar.dtype
    norm = output_scale is not None
    plan, N4, S = _plan(M, D, N, dtype, norm), four(N), saved_numbers(N)
    leaves = jax.tree.leaves(in_rows(plan, sources))
    own_tokens, width = plan.tokens, plan.tokens * D
    vectors = vectors_in_rows(plan, [x for x in (gain, output_scale) if x is not None])
    counts = [] if count is None else [count.reshape(1)]
    rows = plan.rows
    # jax's references are what a kernel may write to in place; inside a shard_map they cannot be.
    in_place = others is not None and not varying(leaves)
    onto = [jax.new_ref(x) for x in jax.tree.leaves(in_rows(plan, others))] if in_place else []

    def kernel(*given, ring, arrived, cotangents, numbers, beside, sums, squares, weights):
        source_refs, given = given[: len(leaves)], given[len(leaves) :]
        vector_refs, given = given[: len(vectors)], given[len(vectors) :]
        *count_ref, saved_ref, bar_ref, lse_bar_ref = given[: len(counts) + 3]
        given = given[len(counts) + 3 :]
        bars, totals = given[: len(leaves)], given[len(leaves) :]  # in place or not: operands come before results
        live, passes = count_ref[0] if count_ref else None, 1 + len(vectors)
        own = Ring(plan, source_refs, live, ring, arrived, N=N, D=width, passes=passes, loops=bool(counts))
        keep_apart = apart if plan.one_by_one else lambda: None
        vector = own.vectors(vector_refs)
        live = own.are_live()

        def fetch(t):
            m, place = own.token(t), t % AHEAD

            @pl.when(own.leads & (m < own.M))
            def _():
                channels = pl.ds(0, width)
                copy = lambda a, b: plgpu.copy_gmem_to_smem(a, b, beside.at[place], oob_mode=IN_BOUNDS)  # noqa: E731
                copy(bar_ref.at[m, channels], cotangents.at[place, channels])
                copy(saved_ref.at[m], numbers.at[place])

        def token(t, m, sums_of_tokens):
            place, lse_bar = t % AHEAD, lse_bar_ref[own.number(m)]
            plgpu.barrier_wait(beside.at[place])
            g = rows.load(cotangents.at[place, own.channels])
            saved_at = lambda n: numbers.at[place, pl.ds(own.place * S + n, N4)]  # noqa: E731
            lse = numbers[place, own.place * S + 2 * N4]
            weights[0, own.place] = jnp.where(live, jnp.exp(_all(saved_at(0)) - lse), 0.0)
            own.meet(of_a_group=True)
            gain_bar, *scale_bar = sums_of_tokens

            if norm:
                scale = vector(1)

                def add(piece, i, h):
                    keep_apart()
                    return h + weights[0, own.place, i] * piece.row(i)

                h = own.each_piece(t, 0, lambda piece, h: piece.each(partial(add, piece), h), rows.zeros())
                for j, x in enumerate(rows.sum_of_products((h, h), (g * scale, h))):
                    own.put_total(squares.at[j], x)
                own.meet()
                n = jax.lax.rsqrt(own.total_of(squares.at[0]) * (1 / D) + static.eps)
                scale_bar = [rows.now(scale_bar[0] + g * h * n)]
                g = n * (g * scale - h * (n * n * (1 / D) * own.total_of(squares.at[1])))

            def dots(piece, _):
                def dot(i, _):
                    keep_apart()
                    [c] = rows.sum_of_products((g, piece.row(i)))
                    own.put(sums, i, c)

                piece.each(dot)

            own.each_piece(t, int(norm), dots, None)
            own.meet()
            # Numbers for all sources are many registers: read anew where they are needed.
            logit, rstd = (jnp.where(live, _all(saved_at(n)), 0.0) for n in (0, N4))
            weight, c = _all(weights.at[0, own.place]), jnp.where(live, own.table(sums, N4), 0.0)
            logit_bar = c - jnp.sum(weight * c)
            # A lone source keeps weight 1 whatever its logit: exactly 0, however the two sums round.
            if N == 1:
                logit_bar = jnp.zeros_like(c)
            elif own.live is not None:
                logit_bar = logit_bar * jnp.where(own.live == 1, 0.0, 1.0)
            product_bar = weight * (logit_bar + lse_bar) * rstd
            weights[1, own.place] = product_bar
            weights[2, own.place] = product_bar * rstd * logit * (1 / D)

            own.meet(of_a_group=True)
            u = vector(0)

            def give(piece, carry):
                def add(i, carry):
                    keep_apart()
                    gain_bar, *old = carry
                    ahead = [other(piece, i + 1)] if old else []
                    v, p = piece.row(i), weights[1, own.place, i]
                    v_bar = weights[0, own.place, i] * g + p * u - weights[2, own.place, i] * v
                    if old:
                        v_bar = v_bar + rows.wide(old[0])
                    write(i, v_bar)
                    return rows.now(gain_bar + p * v), *ahead

                def clear(i, carry):
                    if clears and not in_place:
                        write(i, rows.zeros())
                    return carry

                old = [other(piece, piece.first)] if in_place else []
                return piece.all(add, clear, (carry, *old))[0]

            def other(piece, i):
                """What lies in the place of source i's cotangent, or of the last one's beyond the end."""
                last = piece.end - 1
                i = min(i, last) if isinstance(i, int) else jnp.minimum(i, last)
                return own.at_place_of(bars, i, m, lambda ref: rows.load_part(ref, own.first_channel, width))

            def write(i, x):
                own.at_place_of(bars, i, m, lambda ref: rows.store(ref, x, own.first_channel, width))

            gain_bar = own.each_piece(t, 1 + norm, give, gain_bar)
            own.leave_token(t)
            fetch(t + AHEAD)
            return gain_bar, *scale_bar

        own.begin(cotangents)
        for t in range(AHEAD):
            fetch(t)
        found = own.each_token(token, tuple(rows.zeros() for _ in vectors))
        for total, x in zip(totals, found, strict=True):
            rows.store(total.at[own.program], x, own.first_channel, plan.padded)

    outs = (
        *(like(x, x.shape, dtype) for x in leaves if not in_place),
        *(like(leaves[0], (plan.programs, plan.padded), F32) for _ in vectors),
    )
    scratch = dict(
        ring=plgpu.SMEM((plan.slots * plan.together, plan.padded), dtype),
        arrived=plgpu.Barrier(num_barriers=plan.slots, num_arrivals=plan.together),
        cotangents=plgpu.SMEM((AHEAD, plan.padded), dtype),
        numbers=plgpu.SMEM((AHEAD, own_tokens * S), F32),
        beside=plgpu.Barrier(num_barriers=AHEAD, num_arrivals=2),
        sums=plgpu.SMEM(table_shape(plan, N4), F32),
        squares=plgpu.SMEM((2, WARPS * plan.groups), F32),
        weights=plgpu.SMEM((3, own_tokens, N4), F32),
    )
    operands = (*leaves, *vectors, *counts, *in_rows(plan, (saved, mixture_bar)), lse_bar, *onto)
    results = call(kernel, "attn_res_backward", operands, outs, scratch, plan)
    bars, totals = results[: -len(vectors)], results[-len(vectors) :]
    totals = [jnp.sum(x.reshape(plan.programs * own_tokens, -1), axis=0)[:D] for x in totals]
    if in_place:
        bars = [jax.freeze(ref) for ref in onto]
    bars = [x.reshape(*x.shape[:-2], M, D) for x in bars]
    if others is not None and not in_place:
        bars = map(jnp.add, bars, jax.tree.leaves(others))
    return jax.tree.unflatten(jax.tree.structure(sources), bars), *totals, *([None] * (2 - len(totals)))


def _all(ref):
    return plgpu.load(ref, layout=EVERYWHERE, optimized=False)


def _plan(M, D, N, dtype, norm) -> Plan:
    tokens = WARPS if D <= NARROW else 1
    bytes_beside = 4 * (AHEAD * tokens * saved_numbers(N) + (8 + 3 * tokens) * four(N)) + 12288
    return make_plan(
        M,
        D,
        N,
        dtype,
        registers_per_channel=8 + norm,
        registers_per_source=17,
        rows_beside=AHEAD,
        bytes_beside=bytes_beside,
        online=False,
    )
