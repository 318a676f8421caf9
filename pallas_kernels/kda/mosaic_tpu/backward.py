"""The backward kernel: the chunks of a row from last to first, with the cotangents of several heads' states in VMEM.

It reads the inputs, dO and the state before each chunk, which the forward saved, and rebuilds the rest. With E the
cotangent of the state after the chunk and the names of forward.py:

    dV' = A^T dO + k_out E,   P = T^T dV',   dR = beta P                          (dv = dR)
    dA = tril(dO V'^T),   dL = -stril(P V'^T),   dAk = beta dL
    dq_in = dO S^T,   dk_in = -dR S^T,   dk_out = V' E^T
    dbeta = sum_v P R + sum_j dL Ak,   de^{Gn} = sum_v S E
    E- = e^{Gn} E + q_in^T dO - k_in^T dR

dA and dAk go back through the levels of the tree of halves, each with the factors that formed it, and leave at every
level a cotangent of that level's exponents, q dq + k dk. The sums of gates behind the exponents are a 0/1 matrix, so
that dg is one product with its transpose: nothing large is added to be taken away again.

Stages as in the forward: what needs no state, the inverses, the state and its cotangent, and the way back to the raw
inputs. Precision for bfloat16 inputs, found as in the forward: the chain from E through dV' and P to E- and dv takes
two terms of both operands (dO has but one), the inverse and A two; all else one.
"""

from functools import partial
from itertools import chain
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .activations import Options, gate_vjp, normalise_vjp
from .chunk import (
    VALID,
    beside,
    column,
    gate_inputs,
    load,
    prepare,
    right_blocks,
    right_halves,
    store,
    values_of,
    width_of,
    without_states,
)
from .factors import SCRATCH, TILES, exponent_map, level_mask, levels_of, read_ends, read_level
from .grid import (
    ZERO,
    Arrays,
    beta_spec,
    call,
    chunk_states,
    load_states,
    slot_edges,
    state_spec,
    store_states,
    take_tokens,
    token_specs,
    tokens,
)
from .inverse import unit_lower_inverses
from .order import alongside, halves, run
from .products import (
    CHUNK,
    LANES,
    NT,
    TN,
    beside_terms,
    float_terms,
    half_of_pair,
    heads_of,
    iota,
    of_pair,
    once,
    pair_rows,
    thrice,
    times_terms,
    transposed_terms,
)

__all__ = ["backward"]


class Scratch(NamedTuple):
    """What lies in VMEM, float32. [heads, ...] each but for pairs of matrices [pairs, rows, LANES] and columns."""

    dstate: jax.Array  # [K, V], E
    factors: jax.Array  # of factors.py
    columns: jax.Array  # [C, LANES], of chunk.py
    A: jax.Array
    Ak: jax.Array
    L: jax.Array  # then T
    q: jax.Array  # [C, K], without scale
    k: jax.Array
    total: jax.Array  # [1, K], e^{Gn}, then its cotangent times itself
    dpairs: jax.Array  # dA above dAk
    dread_by: jax.Array  # [2 C, K], dq_in above dk_in
    dk_out: jax.Array  # [C, K]
    diagonal: jax.Array  # [C, 1], of dA


def backward(x: Arrays, dout: jax.Array, saved: jax.Array, dstate: jax.Array, o: Options) -> list[jax.Array]:
    """Cotangents dq, dk, dv, dg, dbeta, dstate and, for an activated gate, sums for A_log and dt_bias [B, 1, HV * K].

    x.state is not read: saved holds the state before each chunk. Where several programs share a q/k head, dq and dk are
    float32 with one part per program.
    """
    (B, T), blocks = x.q.shape[:2], x.beta.shape[1]
    chunks, HV, ratio = pl.cdiv(T, CHUNK), blocks * o.heads, o.heads // o.group
    at = lambda c: np.int32(chunks - 1) - c  # noqa: E731
    x = x._replace(state=None)
    operands = [a for a in (*x[:8], dout, saved, dstate) if a is not None]
    states = state_spec(o, at)
    in_specs = [*token_specs(x, o, at), tokens(o.heads * o.V, at), chunk_states(o, at), states]
    shared = x.q.shape[2] // o.K != blocks * ratio
    like = lambda a, width, dtype=None: jax.ShapeDtypeStruct((B, T, width), dtype or a.dtype)  # noqa: E731
    qk = [like(a, blocks * ratio * o.K, jnp.float32 if shared else a.dtype) for a in (x.q, x.k)]
    out_shape = [
        *qk, like(x.v, HV * o.V), like(x.g, HV * o.K), jax.ShapeDtypeStruct(x.beta.shape, jnp.float32),
        jax.ShapeDtypeStruct(dstate.shape, jnp.float32),
    ]  # fmt: skip
    widths = (ratio * o.K, ratio * o.K, o.heads * o.V, o.heads * o.K)
    out_specs = [*(tokens(w, at) for w in widths), beta_spec(o, at), states]
    if o.gate != "log":
        out_shape += [jax.ShapeDtypeStruct((B, 1, HV * o.K), jnp.float32)] * 2
        out_specs += [pl.BlockSpec((None, 1, o.heads * o.K), lambda b, h, c, *_: (b, ZERO, h))] * 2
    K, V, pairs = width_of(o.K), width_of(o.V), len(heads_of(o.heads))
    per_head = lambda *shape: pltpu.VMEM((o.heads, *shape), jnp.float32)  # noqa: E731
    pair = lambda rows: pltpu.VMEM((pairs, rows, LANES), jnp.float32)  # noqa: E731
    scratch = Scratch(
        dstate=per_head(K, V), factors=per_head(K // LANES, SCRATCH, CHUNK, LANES),
        columns=pltpu.VMEM((CHUNK, LANES), jnp.float32), A=pair(CHUNK), Ak=pair(CHUNK), L=pair(CHUNK),
        q=per_head(CHUNK, K), k=per_head(CHUNK, K), total=per_head(1, K), dpairs=pair(2 * CHUNK),
        dread_by=per_head(2 * CHUNK, K), dk_out=per_head(CHUNK, K), diagonal=per_head(CHUNK, 1),
    )  # fmt: skip
    present = [a is not None for a in x]
    return call(
        partial(_kernel, o, present), "kda_backward", x, o, (B, blocks, chunks), operands, in_specs, out_specs,
        out_shape, list(scratch), aliases={} if o.slots is None else {len(operands): 5},
    )  # fmt: skip


def _kernel(o: Options, present: list[bool], *refs):
    slot_ref, refs = (refs[0], refs[1:]) if o.slots is not None else (None, refs)
    inputs, (dout, saved, dfinal, dq, dk, dv, dg, dbeta, dinitial, *refs) = take_tokens(refs, present)
    sums, refs = ((), refs) if o.gate == "log" else (refs[:2], refs[2:])
    s = Scratch(*refs)
    first, last = slot_edges(slot_ref, reverse=True)

    @pl.when(first)
    def _():
        load_states(s.dstate, dfinal, o)

    @pl.when(pl.program_id(2) == 0)
    def _():
        for x in sums:
            x[...] = jnp.zeros_like(x)

    stage = partial(without_states, inputs, s.columns, s.factors, s.q, s.k, s.A, s.Ak, s.L, o=o)
    heads = {}
    read = partial(_read_states, inputs, dout, saved, s, heads, o=o)
    through = partial(_through_states, inputs, dv, dbeta, s, heads, o=o)
    back = partial(_to_inputs, inputs, (dq, dk, dg, sums), s, [None], exponent_map(o.tiled), o=o)
    one, other = halves(heads_of(o.heads))
    prepare(inputs, s.columns, s.factors, o)
    run(stage(pairs=one))
    alongside(unit_lower_inverses(s.L, one, o.exact), chain(stage(pairs=other), read(pairs=one)))
    alongside(unit_lower_inverses(s.L, other, o.exact), chain(read(pairs=other), through(pairs=one)))
    run(through(pairs=other))
    run(back(pairs=one))
    run(back(pairs=other))

    @pl.when(last)
    def _():
        store_states(dinitial, s.dstate, o)


class _Head(NamedTuple):
    """What the state gives one head before its inverse is known."""

    beta: jax.Array  # [C, 1]
    state: jax.Array  # [K, V], before the chunk
    do: jax.Array  # [C, V]
    read_by: jax.Array  # [2 C, K], q_in above k_in
    residual: jax.Array  # [C, V], v - k_in S
    dwritten: jax.Array  # [C, V], the cotangent of V'


def _read_states(inputs, dout, saved, s, heads, *, pairs, o):
    """Adds to heads {h: _Head} those of some pairs."""
    for p in pairs:
        At = transposed_terms(s.A[p], o.exact)
        for i, h in enumerate(heads_of(o.heads)[p]):
            into, out, s.total[h] = read_ends(s.factors.at[h])
            state, do = _widen(saved[h], o), load(dout, h, o.V)
            if o.flagged:
                do = jnp.where(inputs.flags[...] > 0, do, 0.0)
            read_by = jnp.concatenate([s.q[h] * (o.scale * into), s.k[h] * into], axis=0)
            residual = values_of(inputs, h, o) - once(read_by[CHUNK:], state, o.exact)
            yield
            dwritten = times_terms(At[i], do, o.exact, both=False) + thrice(s.k[h] * out, s.dstate[h], o.exact)
            heads[h] = _Head(column(s.columns, "beta", h, o), state, do, read_by, residual, dwritten)
            yield


def _through_states(inputs, dv, dbeta, s, heads, *, pairs, o):
    """Third stage: dv, dbeta, the new dstate, and the cotangents of A, Ak, q_in, k_in, k_out and e^{Gn}."""
    members = [[(h, heads[h]) for h in heads_of(o.heads)[p]] for p in pairs]
    written, P = {}, {}
    for p, pair in zip(pairs, members, strict=True):
        T, Tt = beside_terms(s.L[p], o.exact), transposed_terms(s.L[p], o.exact)
        for i, (h, x) in enumerate(pair):
            written[h] = times_terms(T[i], x.beta * x.residual, o.exact, both=False)
            P[h] = times_terms(Tt[i], x.dwritten, o.exact, both=True)
            yield
    below = iota((CHUNK, LANES), 0) > iota((CHUNK, LANES), 1) % CHUNK
    for p, pair in zip(pairs, members, strict=True):
        d = pair_rows([jnp.concatenate([x.do, P[h]], axis=0) for h, x in pair], [written[h] for h, _ in pair], o.exact)
        dL = jnp.where(below, -d[CHUNK:], 0.0)
        dA, dAk = jnp.where(below, o.scale * d[:CHUNK], 0.0), beside([x.beta for _, x in pair]) * dL
        s.dpairs[p] = jnp.concatenate([dA, dAk], axis=0)
        by_beta = dL * s.Ak[p]
        yield
        for h, x in pair:
            db = jnp.sum(P[h] * x.residual, axis=1, keepdims=True)
            db = db + jnp.sum(of_pair(by_beta, h), axis=1, keepdims=True)
            if o.beta_sigmoid:
                db = db * x.beta * (1 - x.beta)
            dbeta[:, h : h + 1] = db if not o.flagged else jnp.where(inputs.flags[...] > 0, db, 0.0)
            dr = x.beta * P[h]
            store(dv, h, o.V, dr)
            down = jnp.concatenate([x.do, -dr], axis=0)
            s.dread_by[h] = once(down, x.state, o.exact, NT)
            yield
            s.dk_out[h] = once(written[h], s.dstate[h], o.exact, NT)
            s.diagonal[h] = o.scale * jnp.sum(x.do * written[h], axis=1, keepdims=True)
            decay = s.total[h]
            s.total[h] = jnp.sum(x.state * s.dstate[h], axis=1, keepdims=True).reshape(1, -1) * decay
            s.dstate[h] = s.dstate[h] * decay.reshape(-1, 1) + thrice(x.read_by, down, o.exact, TN)
            yield


def _through_the_levels(q, k, factors, d, o):
    """What a pair's dA above dAk (d [128, 128]) give each head: dq, dk [C, K], and the levels' cotangents [C, K].

    Mirrors `pair_matrices`: from halves of 8 on, only right halves are rows of a product and only left ones columns.
    """
    heads, of = range(len(q)), lambda x, i: x[i : i + 8]
    dq, dk, cotangents = [[0.0] * 8 for _ in heads], [[0.0] * 8 for _ in heads], [[] for _ in heads]
    for n in levels_of(o.tiled):
        masked = jnp.where(level_mask(n, d.shape), d, 0.0)
        masked = jnp.concatenate([*right_halves(masked[:CHUNK], n), *right_halves(masked[CHUNK:], n)], axis=0)
        if not o.exact:
            masked = masked.astype(jnp.bfloat16)
        turned = masked.T
        half = masked.shape[0] // 2
        at = {b: 8 * i for i, b in enumerate(right_blocks(n))}  # where a block's rows are in the product
        for h in heads:
            by_row, by_column = read_level(factors[h], n)
            columns = k[h][...] * by_column
            keys = columns if by_row is by_column else k[h][...] * by_row
            rows = jnp.concatenate([*right_halves(q[h][...] * by_row, n), *right_halves(keys, n)], axis=0)
            drows = once(masked, half_of_pair(columns, h, o.exact), o.exact)
            dcolumns = once(turned[CHUNK * h : CHUNK * (h + 1)], rows, o.exact)
            exponents = []
            for b in range(8):
                exponent = 0.0
                if b in at:
                    row = of(by_row, 8 * b)
                    dqb, dkb = of(drows, at[b]) * row, of(drows, half + at[b]) * row
                    dq[h][b] += dqb
                    dk[h][b] += dkb
                    exponent = of(q[h][...], 8 * b) * dqb + of(k[h][...], 8 * b) * dkb
                if n < 3 or b not in at:
                    dkb = of(dcolumns, 8 * b) * of(by_column, 8 * b)
                    dk[h][b] += dkb
                    dkb = of(k[h][...], 8 * b) * dkb
                    exponent = exponent - dkb if n == TILES else exponent + dkb  # there it is minus the row's
                exponents.append(exponent)
            exponents = jnp.concatenate(exponents, axis=0)
            # Within a tile these cancel over the rows that a gate precedes, and need two terms.
            cotangents[h] += float_terms(exponents) if n == TILES else [exponents]
            yield
    return [(jnp.concatenate(dq[h], axis=0), jnp.concatenate(dk[h], axis=0), cotangents[h]) for h in heads]


def _through_the_ends(q, k, factors, dq, dk, dread_by, dk_out, diagonal, scale):
    """dq and dk with what comes by way of states and A's diagonal; the cotangents of into's and out's exponents."""
    into, out, _ = read_ends(factors)
    by_q, by_k, by_out = dread_by[:CHUNK] * (scale * into), dread_by[CHUNK:] * into, dk_out * out
    ends = q * by_q + k * by_k, k * by_out
    return dq + by_q + diagonal * k, dk + by_k + by_out + diagonal * q, ends


def _to_inputs(inputs, outputs, s, carried, to_gates, *, pairs, o):
    """Last stage: dq, dk and dg. carried holds dq and dk of a q/k head that later value heads add to."""
    dq, dk, dg, sums = outputs
    for p in pairs:
        pair = heads_of(o.heads)[p]
        of = lambda ref: [ref.at[h] for h in pair]  # noqa: B023, E731
        levels = yield from _through_the_levels(of(s.q), of(s.k), of(s.factors), s.dpairs[p], o)
        for h, (dq_h, dk_h, cotangents) in zip(pair, levels, strict=True):
            q, k = s.q[h], s.k[h]
            dq_h, dk_h, ends = _through_the_ends(
                q, k, s.factors.at[h], dq_h, dk_h, s.dread_by[h], s.dk_out[h], s.diagonal[h], o.scale
            )
            dlog = once(to_gates, jnp.concatenate([*cotangents, *ends], axis=0), o.exact) + s.total[h]
            yield
            if o.flagged:
                dlog = jnp.where(inputs.flags[...] == VALID, dlog, 0.0)
            draw, dA = gate_vjp(*gate_inputs(inputs, h, o), dlog, o)
            store(dg, h, o.K, draw)
            for ref, d in zip(sums, (dA, draw), strict=True) if sums else ():
                ref[:, h * o.K : (h + 1) * o.K] += jnp.sum(d, axis=0, keepdims=True)[:, : o.K]
            if o.qk_l2norm:
                dq_h = normalise_vjp(q, column(s.columns, "q", h, o), dq_h)
                dk_h = normalise_vjp(k, column(s.columns, "k", h, o), dk_h)
            if carried[0] is not None:
                dq_h, dk_h = dq_h + carried[0][0], dk_h + carried[0][1]
            carried[0] = (dq_h, dk_h)
            if (h + 1) % o.group == 0:
                store(dq, h // o.group, o.K, dq_h)
                store(dk, h // o.group, o.K, dk_h)
                carried[0] = None
            yield


def _widen(state, o):
    """[K, V] with zeros up to whole registers."""
    K, V = width_of(o.K), width_of(o.V)
    if V != o.V:
        state = jnp.concatenate([state, jnp.zeros((o.K, V - o.V), state.dtype)], axis=1)
    return state if K == o.K else jnp.concatenate([state, jnp.zeros((K - o.K, V), state.dtype)], axis=0)
