"""The backward kernel: one step takes a block of tokens from sources and cotangent to the gradients of both.

    again    with output_scale: h mixed again, its norm, and G, the cotangent behind that norm
    dot      c_i = G . v_i, register by register
    weigh    sums across lanes, then for all sources at once, with e the cotangent of the log-sum-exp,
             a_i = softmax(s)_i,  p_i = a_i (c_i - sum_j a_j c_j + e) r_i,  k_i = p_i r_i s_i / D
    spread   dv_i = a_i G + p_i u - k_i v_i  and, summed over tokens and sources, du = sum p_i v_i

Steps run in order on each core, and what is summed over tokens stays in VMEM from one to the next: the gradients of
the gain and of output_scale leave once per core, and are always added up in the same order.

Cotangents that the sources have from elsewhere (`others`) lie where the gradients go: spread adds to them in float32
and the sum is written in their place.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..kernels import MAX_SOURCES, Static
from .forward import TILES, mix_rows, over_batches, softmax, table_of
from .plan import ZERO, Plan, call, make_plan, read_count, source_operands, tokens, whole
from .tiles import LANES, columns, fold, groups, lane, over_lanes, wide

__all__ = ["backward"]

DOTS = 16  # sources that share a read of the cotangent, with one sum of two registers each
SPREAD = 4  # and with three columns of two registers each
CORES = 2  # parts of the tokens: a chip's two cores take one each, a single core one after the other


def backward(static: Static, sources, gain, output_scale, count, saved, mixture_bar, lse_bar, others=None):
    """Gradients of sources, gain [D] and output_scale [D] or None; arguments as in kernels.py."""
    adds = others is not None
    p = make_plan(sources, output_scale is not None, count is not None, backward=True, adds=adds)
    # Too wide to hold the others beside the rest; or, of a last block that is not full, the interpreter gives in-place
    # results of another shape, and what is not tested is not used.
    if p is None or (adds and p.tokens % p.block):
        own, *vectors = backward(static, sources, gain, output_scale, count, saved, mixture_bar, lse_bar)
        return jax.tree.map(jnp.add, own, others), *vectors
    parts = min(CORES, p.steps)
    turns = -(-p.steps // parts)

    def step(part, turn, *_):
        return jnp.minimum(part * np.int32(turns) + turn, np.int32(p.steps - 1))

    operands, in_specs = source_operands(p, sources, step)
    vectors = [gain] if output_scale is None else [gain, output_scale]
    operands += [mixture_bar, lse_bar.reshape(p.tokens, 1), saved, *(x.reshape(1, p.dim) for x in vectors)]
    in_specs += [tokens(p, width, step) for width in (p.dim, 1, LANES)] + [whole(1, p.dim)] * len(vectors)
    if isinstance(sources, tuple):
        out_shape = [jax.ShapeDtypeStruct((p.tokens, p.dim), p.dtype)] * p.sources
        out_specs = [_adding(p, i, step) if adds else tokens(p, p.dim, step) for i in range(p.sources)]
    else:
        out_shape = [jax.ShapeDtypeStruct(sources.shape, p.dtype)]
        out_specs = [pl.BlockSpec((p.sources, p.block, p.dim), lambda *at: (ZERO, step(*at), ZERO))]
    aliases = {}
    if adds:
        aliases = {len(operands) + p.counted + i: i for i in range(len(out_specs))}  # the count is an operand too
        operands += jax.tree.leaves(others)
        in_specs += out_specs
    summed = 8  # rows, to be added up outside
    out_shape += [jax.ShapeDtypeStruct((parts, summed, p.dim), jnp.float32)] * len(vectors)
    out_specs += [pl.BlockSpec((None, summed, p.dim), lambda part, *_: (part, ZERO, ZERO))] * len(vectors)
    table = pltpu.VMEM((p.block, LANES), jnp.float32)
    scratch = [pltpu.VMEM((p.sources, p.block, LANES), jnp.float32), table, table, table]
    if p.scaled:
        scratch += [pltpu.VMEM((p.block, p.dim), jnp.float32)] * 2 + [table, table]
    results = call(
        partial(_kernel, p, static.eps, turns, not isinstance(sources, tuple), adds), "attn_res_backward", p,
        (parts, turns), ("parallel", "arbitrary"), count, operands, in_specs, out_shape, out_specs, scratch, aliases,
    )  # fmt: skip
    sums = [jnp.sum(x, axis=(0, 1)) for x in results[len(results) - len(vectors) :]]
    sources_bar = tuple(results[: p.sources]) if isinstance(sources, tuple) else results[0]
    return sources_bar, sums[0], (sums[1] if p.scaled else None)


def _adding(p: Plan, i: int, step) -> pl.BlockSpec:
    """Windows of the others of row i, and of their sum with its gradient.

    Those of a dead row stay at the first tokens of a core's part, which no other core touches: what is read once is
    written back once.
    """

    def at(part, turn, *count):
        if p.counted:
            turn = jnp.where(np.int32(i) < count[0][0], turn, ZERO)
        return step(part, turn), ZERO

    return pl.BlockSpec((p.block, p.dim), at)


def _kernel(p: Plan, eps: float, turns: int, buffer: bool, adds: bool, *refs):
    count, refs = read_count(p, refs)
    sources, (mixture_bar, lse_bar, saved, gain, *refs) = refs[: p.sources], refs[p.sources :]
    scale, refs = (refs[0], refs[1:]) if p.scaled else (None, refs)

    def rows_of(refs):
        if buffer:
            return [refs[0].at[np.int32(i)] for i in range(p.sources)], refs[1:]
        return refs[: p.sources], refs[p.sources :]

    others, refs = rows_of(refs) if adds else (None, refs)
    sources_bar, refs = rows_of(refs)
    gain_bar, refs = refs[0], refs[1:]
    scale_bar, refs = (refs[0], refs[1:]) if p.scaled else (None, refs)
    dots, weights, slopes, shrinks, *again = refs
    part, turn = pl.program_id(0), pl.program_id(1)
    step = part * np.int32(turns) + turn
    over_tiles = partial(p.over_tiles, step)

    @pl.when(turn == 0)
    def _():
        for ref in (gain_bar, scale_bar)[: 1 + p.scaled]:
            ref[...] = jnp.zeros_like(ref)

    @pl.when(step < p.steps)  # of an odd number of steps over two cores the last one is none
    def _():
        _tables(p, saved, weights)
        g = mixture_bar
        if p.scaled:
            g = again[1]
            again_by = partial(mix_rows, p, sources, weights, count)
            _behind_norm(p, eps, again_by, mixture_bar, scale, scale_bar, step, *again)
        over_tiles(partial(_dot, p, sources, g, dots))
        _weigh(p, count, dots, saved, lse_bar, weights, slopes, shrinks)
        tables = weights, slopes, shrinks
        over_tiles(partial(_spread, p, sources, others, sources_bar, g, gain, gain_bar, tables, count, step))


def _tables(p: Plan, saved, weights):
    """The weights again."""

    def body(rows):
        weights[rows, :], _ = softmax(_logits(saved[rows, :]))

    over_batches(p, body)


def _logits(saved):
    return jnp.where(lane(saved.shape) < MAX_SOURCES, saved, -jnp.inf)


def _behind_norm(p: Plan, eps, mix_into, mixture_bar, scale, scale_bar, step, h_ref, g_ref, rstds, means):
    """The cotangent of h, from that of h * rstd * scale, into g_ref, and the gradient of scale."""

    def keep(rows, lanes, h, sums):
        square, product = sums
        g = mixture_bar[rows, lanes].astype(jnp.float32) * scale[:, lanes]
        h_ref[rows, lanes], g_ref[rows, lanes] = h, g
        return square + wide(h * h), product + wide(g * h)

    def mix(rows):
        zero = jnp.zeros((p.rows, LANES), jnp.float32)
        rstds[rows, :], means[rows, :] = mix_into(rows, keep, (zero, zero))

    p.over_tiles(step, mix)
    across = lambda ref: jnp.sum(ref[...], axis=1, keepdims=True) * np.float32(1 / p.dim)  # noqa: E731
    rstd = lax.rsqrt(across(rstds) + np.float32(eps))
    means[...] = jnp.broadcast_to(across(means) * rstd, means.shape)
    rstds[...] = jnp.broadcast_to(rstd, rstds.shape)

    def finish(rows):
        rstd, mean = rstds[rows, :], means[rows, :]

        def turn(slices, carry):
            for lanes in slices:
                h = h_ref[rows, lanes] * rstd[:, : lanes.size]
                g = mixture_bar[rows, lanes].astype(jnp.float32)
                scale_bar[:, lanes] += fold(_real(p, rows, step, g * h))
                g_ref[rows, lanes] = rstd[:, : lanes.size] * (g_ref[rows, lanes] - h * mean[:, : lanes.size])
            return carry

        over_lanes(p.dim, TILES // 4, turn, np.int32(0))

    p.over_tiles(step, finish)


def _dot(p: Plan, sources, g, dots, rows):
    """Of some rows: sum G v_i, over all but the last 128 channels, into [N, block, 128]."""
    for group in groups(p.sources, DOTS):

        def turn(slices, sums, group=group):
            for lanes in slices:
                bar = g[rows, lanes].astype(jnp.float32)
                terms = [bar * sources[i][rows, lanes].astype(jnp.float32) for i in group]
                sums = [total + wide(term) for total, term in zip(sums, terms, strict=True)]
            return sums

        sums = [jnp.zeros((p.rows, LANES), jnp.float32)] * len(group)
        for i, total in zip(group, over_lanes(p.dim, TILES // len(group), turn, sums), strict=True):
            dots[i, rows, :] = total


def _weigh(p: Plan, count, dots, saved, lse_bar, weights, slopes, shrinks):
    """Tables of p_i and k_i: what u and v_i are multiplied with in the gradient of v_i."""

    def body(rows):
        mine = lane((rows.size, LANES))
        dot = table_of(dots, rows)
        live = mine < (np.int32(p.sources) if count is None else jnp.minimum(count, np.int32(p.sources)))
        kept, weight = saved[rows, :], weights[rows, :]
        logit = jnp.where(live, kept, 0)
        rstd = jnp.where(live, pltpu.roll(kept, np.int32(MAX_SOURCES), 1), 0)
        dot = jnp.where(live, dot, 0)
        # Of a lone source exactly 0: its weight is 1, and nothing but zeros is added to its own dot.
        slope = dot - jnp.sum(jnp.where(live, weight * dot, 0), axis=1, keepdims=True)
        slope = jnp.where(live, weight * (slope + lse_bar[rows, :]) * rstd, 0)
        slopes[rows, :], shrinks[rows, :] = slope, slope * rstd * logit * np.float32(1 / p.dim)

    over_batches(p, body)


def _spread(p: Plan, sources, others, sources_bar, g, gain, gain_bar, tables, count, step, rows):
    """Of some rows: the gradients of the sources, and their part of the gain's."""
    for group in groups(p.sources, SPREAD):
        shares, slopes, shrinks = (columns(table, rows, group) for table in tables)

        def turn(slices, carry, group=group, of=(shares, slopes, shrinks)):
            for lanes in slices:
                bar, u, total = g[rows, lanes].astype(jnp.float32), gain[:, lanes], None
                for i, *column in zip(group, *of, strict=True):
                    share, slope, shrink = (x[:, : lanes.size] for x in column)
                    v = sources[i][rows, lanes].astype(jnp.float32)
                    term, v_bar = slope * v, share * bar + slope * u - shrink * v
                    if count is not None:
                        term, v_bar = (jnp.where(np.int32(i) < count, x, 0) for x in (term, v_bar))
                    if others is not None:  # a dead row's may be anything, and stay what they are
                        v_bar = v_bar + others[i][rows, lanes].astype(jnp.float32)
                    sources_bar[i][rows, lanes] = v_bar.astype(p.dtype)
                    total = term if total is None else total + term
                gain_bar[:, lanes] += fold(_real(p, rows, step, total))
            return carry

        over_lanes(p.dim, TILES // 2 // len(group), turn, np.int32(0))


def _real(p: Plan, rows, step, x):
    """x with 0 in the rows past the last token."""
    if not p.ragged:
        return x
    first = step * np.int32(p.block) + rows.start
    return jnp.where(first + lax.broadcasted_iota(jnp.int32, x.shape, 0) < np.int32(p.tokens), x, 0)
