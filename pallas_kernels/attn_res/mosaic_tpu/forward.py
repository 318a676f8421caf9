"""The forward kernel: one step takes a block of tokens, of which every source is in VMEM, from sources to mixture.

    measure  sum v_i^2 and sum v_i u over channels, register by register, per source and token
    weigh    the sums across lanes, then rstd, logits, softmax and log-sum-exp of all sources at once
    mix      h = sum_i a_i v_i, and with output_scale its norm

Each stage goes through all tokens of the block before the next begins: what is slow to arrive (sums across lanes, exp)
is then awaited once a block and not once a tile. For the backward, a row of `saved` keeps the logits in lanes 0 to 63
and the rstds in lanes 64 to 127.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..kernels import MAX_SOURCES, Static
from .plan import Plan, call, make_plan, read_count, source_operands, tokens, whole
from .tiles import LANES, columns, groups, lane, over_lanes, over_rows, wide

__all__ = ["forward", "mix_rows", "over_batches", "softmax", "table_of"]

AT_A_TIME = 9  # sources that share a read of u: two sums each, of one or two registers, of which there are 64
TILES = 512  # 128 channels of a source each, without a loop: every turn of one costs its latency
TOGETHER = 6  # tiles of the mixture that share a read of a weight
BATCH = 64  # tokens whose tables are made together


def forward(static: Static, sources, gain, output_scale, count):
    """Mixture [M, D], lse [M], saved [M, 128]; arguments as in kernels.py."""
    p = make_plan(sources, output_scale is not None, count is not None, backward=False)
    step = lambda t, *_: t  # noqa: E731
    operands, in_specs = source_operands(p, sources, step)
    vectors = [gain] if output_scale is None else [gain, output_scale]
    operands += [x.reshape(1, p.dim) for x in vectors]
    in_specs += [whole(1, p.dim)] * len(vectors)
    shapes = [((p.tokens, p.dim), p.dtype), ((p.tokens, 1), jnp.float32), ((p.tokens, LANES), jnp.float32)]
    scratch = [pltpu.VMEM((p.sources, p.block, LANES), jnp.float32)] * 2 + [pltpu.VMEM((p.block, LANES), jnp.float32)]
    if p.scaled:
        scratch += [pltpu.VMEM((p.block, p.dim), jnp.float32), pltpu.VMEM((p.block, LANES), jnp.float32)]
    mixture, lse, saved = call(
        partial(_kernel, p, static.eps), "attn_res_forward", p, (p.steps,), ("parallel",), count, operands, in_specs,
        [jax.ShapeDtypeStruct(*s) for s in shapes], [tokens(p, s[0][1], step) for s in shapes], scratch,
    )  # fmt: skip
    return mixture, lse.reshape(p.tokens), saved


def _kernel(p: Plan, eps: float, *refs):
    count, refs = read_count(p, refs)
    sources, (gain, *refs) = refs[: p.sources], refs[p.sources :]
    scale, refs = (refs[0], refs[1:]) if p.scaled else (None, refs)
    out, lse, saved, squares, products, weights, *mixed = refs
    over_tiles = partial(p.over_tiles, pl.program_id(0))

    over_tiles(partial(_measure, p, sources, gain, squares, products))
    _weigh(p, eps, count, squares, products, weights, lse, saved)
    if not p.scaled:

        def put(rows, lanes, h, carry):
            out[rows, lanes] = h.astype(out.dtype)
            return carry

        over_tiles(lambda rows: mix_rows(p, sources, weights, count, rows, put, 0))
        return
    h_ref, norm = mixed

    def keep(rows, lanes, h, total):
        h_ref[rows, lanes] = h
        return total + wide(h * h)

    def mix(rows):
        norm[rows, :] = mix_rows(p, sources, weights, count, rows, keep, jnp.zeros((p.rows, LANES), jnp.float32))

    over_tiles(mix)
    mean = jnp.sum(norm[...], axis=1, keepdims=True) * np.float32(1 / p.dim)
    norm[...] = jnp.broadcast_to(lax.rsqrt(mean + np.float32(eps)), norm.shape)

    def finish(rows):
        rstd = norm[rows, :]

        def turn(slices, carry):
            for lanes in slices:
                out[rows, lanes] = (h_ref[rows, lanes] * rstd[:, : lanes.size] * scale[:, lanes]).astype(out.dtype)
            return carry

        over_lanes(p.dim, TILES // 4, turn, np.int32(0))

    over_tiles(finish)


def _measure(p: Plan, sources, gain, squares, products, rows):
    """Of some rows: sum v^2 and sum v u, over all but the last 128 channels, into [N, block, 128]."""
    for group in groups(p.sources, AT_A_TIME):

        def turn(slices, sums, group=group):
            for lanes in slices:
                u, new = gain[:, lanes], []
                for i, (square, product) in zip(group, sums, strict=True):
                    v = sources[i][rows, lanes].astype(jnp.float32)
                    new.append((square + wide(v * v), product + wide(v * u)))
                sums = new
            return sums

        zero = jnp.zeros((p.rows, LANES), jnp.float32)
        sums = over_lanes(p.dim, TILES // len(group), turn, [(zero, zero)] * len(group))
        for i, (square, product) in zip(group, sums, strict=True):
            squares[i, rows, :], products[i, rows, :] = square, product


def _weigh(p: Plan, eps, count, squares, products, weights, lse, saved):
    """Tables of logits, rstds and weights, and the log-sum-exp, from the sums."""

    def body(rows):
        square, product = table_of(squares, rows), table_of(products, rows)
        rstd = lax.rsqrt(square * np.float32(1 / p.dim) + np.float32(eps))
        mine = lane(rstd.shape)
        live = mine < (np.int32(p.sources) if count is None else jnp.minimum(count, np.int32(p.sources)))
        logit = jnp.where(live, product * rstd, -jnp.inf)
        weights[rows, :], lse[rows, :] = softmax(logit)
        saved[rows, :] = jnp.where(mine < MAX_SOURCES, logit, pltpu.roll(rstd, np.int32(MAX_SOURCES), 1))

    over_batches(p, body)


def over_batches(p: Plan, body):
    """body(rows) for rows of tables, so many at a time as hide each other's latency and are not too much code."""
    batch = p.rows
    while 2 * batch <= min(BATCH, p.block) and 2 * batch * p.sources <= 2048:
        batch *= 2
    over_rows(batch, p.block // batch, body)


def table_of(sums, rows) -> jax.Array:
    """[rows, 128] with the sum across lanes of sums [N, block, 128] in lane i."""
    mine, table = lane((rows.size, LANES)), jnp.zeros((rows.size, LANES), jnp.float32)
    for i in range(sums.shape[0]):
        table = jnp.where(mine == i, jnp.sum(sums[i, rows, :], axis=1, keepdims=True), table)
    return table


def softmax(logit) -> tuple[jax.Array, jax.Array]:
    """Weights [rows, 128] and log-sum-exp [rows, 1]; of one live source exactly 1 and its logit."""
    top = jnp.max(logit, axis=1, keepdims=True)
    weight = jnp.exp(logit - top)
    total = jnp.sum(weight, axis=1, keepdims=True)
    # Of one source the total is 1, and a machine's reciprocal need not be exact.
    return jnp.where(total == 1, weight, weight / total), top + jnp.log(total)


def mix_rows(p: Plan, sources, weights, count, rows, put, carry):
    """carry = put(rows, lanes, sum_i a_i v_i, carry) for all channels of some rows."""
    shares = columns(weights, rows, range(p.sources))

    def turn(slices, carry):
        for some in groups(len(slices), TOGETHER):
            lanes = [slices[k] for k in some]
            totals = [None] * len(lanes)
            for i, share in enumerate(shares):
                for k, at in enumerate(lanes):
                    term = share[:, : at.size] * sources[i][rows, at].astype(jnp.float32)
                    if count is not None and i > 0:  # the first row's weight is NaN where no row is live
                        term = jnp.where(np.int32(i) < count, term, 0)
                    totals[k] = term if i == 0 else totals[k] + term  # not from 0: a lone -0.0 stays what it is
            for at, total in zip(lanes, totals, strict=True):
                carry = put(rows, at, total, carry)
        return carry

    return over_lanes(p.dim, max(TOGETHER, TILES // p.sources), turn, carry)
