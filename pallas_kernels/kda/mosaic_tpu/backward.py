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

import jax
import jax.numpy as jnp
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
from .factors import LEVELS, SCRATCH, exponent_map, level_mask, read_ends, read_level
from .grid import (
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
from .products import (
    CHUNK,
    LANES,
    NT,
    TN,
    beside_terms,
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


def backward(x: Arrays, dout: jax.Array, saved: jax.Array, dstate: jax.Array, o: Options) -> list[jax.Array]:
    """Cotangents dq, dk, dv, dg, dbeta, dstate and, for an activated gate, sums for A_log and dt_bias [B, 1, HV * K].

    x.state is not read: saved holds the state before each chunk. Where several programs share a q/k head, dq and dk are
    float32 with one part per program.
    """
    (B, T), blocks = x.q.shape[:2], x.beta.shape[1]
    chunks, HV, ratio = pl.cdiv(T, CHUNK), blocks * o.heads, o.heads // o.group
    at = lambda c: chunks - 1 - c  # noqa: E731
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
        out_specs += [pl.BlockSpec((None, 1, o.heads * o.K), lambda b, h, c, *_: (b, 0, h))] * 2
    K, V, pairs = width_of(o.K), width_of(o.V), len(heads_of(o.heads))
    per_head = lambda *shape, dtype=jnp.float32: pltpu.VMEM((o.heads, *shape), dtype)  # noqa: E731
    scratch = [
        per_head(K, V),  # E
        per_head(K // LANES, SCRATCH, CHUNK, LANES),
        pltpu.VMEM((CHUNK, LANES), jnp.float32),  # columns
        pltpu.VMEM((pairs, CHUNK, LANES), jnp.float32),  # A
        pltpu.VMEM((pairs, CHUNK, LANES), jnp.float32),  # Ak
        pltpu.VMEM((pairs, CHUNK, LANES), jnp.float32),  # L
        per_head(CHUNK, K),  # q
        per_head(CHUNK, K),  # k
        per_head(1, K),  # e^{Gn}, then its cotangent times itself
        pltpu.VMEM((pairs, 2 * CHUNK, LANES), jnp.float32),  # dA above dAk
        per_head(2 * CHUNK, K),  # dq_in above dk_in
        per_head(CHUNK, K),  # dk_out
        per_head(CHUNK, 1),  # the diagonal of dA
    ]
    return call(
        partial(_kernel, o, x), "kda_backward", x, o, (B, blocks, chunks), operands, in_specs, out_specs, out_shape,
        scratch, aliases={} if o.slots is None else {len(operands): 5},
    )  # fmt: skip


def _kernel(o: Options, present: Arrays, *refs):
    slot_ref, refs = (refs[0], refs[1:]) if o.slots is not None else (None, refs)
    token_refs, (dout, saved, dfinal, dq, dk, dv, dg, dbeta, dinitial, *refs) = take_tokens(refs, present)
    sums, refs = ((), refs) if o.gate == "log" else (refs[:2], refs[2:])
    dstate, factors, columns, A, Ak, L, q, k, total, dpairs, dread_by, dk_out, diagonal = refs
    first, last = slot_edges(slot_ref, reverse=True)

    @pl.when(first)
    def _():
        load_states(dstate, dfinal, o)

    @pl.when(pl.program_id(2) == 0)
    def _():
        for s in sums:
            s[...] = jnp.zeros_like(s)

    prepare(token_refs, columns, factors, o)
    without_states(token_refs, columns, factors, q, k, A, Ak, L, o)
    _through_the_state(token_refs, columns, dout, saved, dv, dbeta, dstate, factors, A, Ak, L, q, k, total, dpairs,
                       dread_by, dk_out, diagonal, o)  # fmt: skip
    to_gates = exponent_map()
    dqk = None
    for p, pair in enumerate(heads_of(o.heads)):
        of = lambda ref: [ref.at[h] for h in pair]  # noqa: B023, E731
        levels = _through_the_levels(of(q), of(k), of(factors), dpairs[p], o.exact)
        for h, (dq_h, dk_h, cotangents) in zip(pair, levels, strict=True):
            dq_h, dk_h, ends = _through_the_ends(
                q[h], k[h], factors.at[h], dq_h, dk_h, dread_by[h], dk_out[h], diagonal[h], o.scale
            )
            dlog = once(to_gates, jnp.concatenate([*cotangents, *ends], axis=0), o.exact) + total[h]
            dqk = _to_inputs(token_refs, columns, h, q[h], k[h], dq_h, dk_h, dlog, dqk, dq, dk, dg, sums, o)

    @pl.when(last)
    def _():
        store_states(dinitial, dstate, o)


def _through_the_state(refs, columns, dout, saved, dv, dbeta, dstate, factors, A, Ak, L, q, k, total, dpairs, dread_by,
                       dk_out, diagonal, o):  # fmt: skip
    """Second and third stage: dv, dbeta, the new dstate, and the cotangents of A, Ak, q_in, k_in, k_out and e^{Gn}."""
    heads, pairs = range(o.heads), range(A.shape[0])
    beta = [column(columns, "beta", h, o) for h in heads]
    states, dos, read_by, residuals, dwritten = [], [], [], [], []
    At = [x for p in pairs for x in transposed_terms(A[p], o.exact)]

    def read_the_states():
        for h in heads:
            into, out, total[h] = read_ends(factors.at[h])
            states.append(_widen(saved[h], o))
            do = load(dout, h, o.V)
            dos.append(do if not o.flagged else jnp.where(refs.flags[...] > 0, do, 0.0))
            read_by.append(jnp.concatenate([q[h] * (o.scale * into), k[h] * into], axis=0))
            residuals.append(values_of(refs, h, o) - once(read_by[h][CHUNK:], states[h], o.exact))
            yield
            by_out = thrice(k[h] * out, dstate[h], o.exact)
            dwritten.append(times_terms(At[h], dos[h], o.exact, both=False) + by_out)
            yield

    inverses = unit_lower_inverses([L[p] for p in pairs], o.exact, read_the_states())
    T = [x for t in inverses for x in beside_terms(t, o.exact)]
    Tt = [x for t in inverses for x in transposed_terms(t, o.exact)]
    written = [times_terms(T[h], beta[h] * residuals[h], o.exact, both=False) for h in heads]
    P = [times_terms(Tt[h], dwritten[h], o.exact, both=True) for h in heads]
    for p, pair in enumerate(heads_of(o.heads)):
        d = pair_rows([jnp.concatenate([dos[h], P[h]], axis=0) for h in pair], [written[h] for h in pair], o.exact)
        i, j = iota((CHUNK, LANES), 0), iota((CHUNK, LANES), 1) % CHUNK
        dL = jnp.where(i > j, -d[CHUNK:], 0.0)
        dpairs[p] = jnp.concatenate(
            [jnp.where(i > j, o.scale * d[:CHUNK], 0.0), beside([beta[h] for h in pair]) * dL], axis=0
        )
        by_beta = dL * Ak[p]
        for h in pair:
            db = jnp.sum(P[h] * residuals[h], axis=1, keepdims=True)
            db = db + jnp.sum(of_pair(by_beta, h), axis=1, keepdims=True)
            if o.beta_sigmoid:
                db = db * beta[h] * (1 - beta[h])
            dbeta[:, h : h + 1] = db if not o.flagged else jnp.where(refs.flags[...] > 0, db, 0.0)
    for h in heads:
        dr = beta[h] * P[h]
        store(dv, h, o.V, dr)
        down = jnp.concatenate([dos[h], -dr], axis=0)
        dread_by[h] = once(down, states[h], o.exact, NT)
        dk_out[h] = once(written[h], dstate[h], o.exact, NT)
        diagonal[h] = o.scale * jnp.sum(dos[h] * written[h], axis=1, keepdims=True)
        decay = total[h]
        total[h] = jnp.sum(states[h] * dstate[h], axis=1, keepdims=True).reshape(1, -1) * decay
        dstate[h] = dstate[h] * decay.reshape(-1, 1) + thrice(read_by[h], down, o.exact, TN)


def _through_the_levels(q, k, factors, d, exact):
    """What a pair's dA above dAk (d [128, 128]) give each head: dq, dk [C, K], and each level's exponents [C, K].

    Mirrors `pair_matrices`: from halves of 8 on, only right halves are rows of a product and only left ones columns.
    """
    heads = range(len(q))
    dq, dk, cotangents = [[0.0] * 8 for _ in heads], [[0.0] * 8 for _ in heads], [[] for _ in heads]
    for n in range(LEVELS):
        masked = jnp.where(level_mask(n, d.shape), d, 0.0)
        masked = jnp.concatenate([*right_halves(masked[:CHUNK], n), *right_halves(masked[CHUNK:], n)], axis=0)
        if not exact:
            masked = masked.astype(jnp.bfloat16)
        turned = masked.T
        half = masked.shape[0] // 2
        for h in heads:
            level = read_level(factors[h], n)
            columns = k[h][...] * level
            rows = jnp.concatenate([*right_halves(q[h][...] * level, n), *right_halves(columns, n)], axis=0)
            drows = once(masked, half_of_pair(columns, h, exact), exact)
            dcolumns = once(turned[CHUNK * h : CHUNK * (h + 1)], rows, exact)
            at = {b: 8 * i for i, b in enumerate(right_blocks(n))}
            blocks = []
            for b in range(8):
                of = lambda x, i: x[i : i + 8]  # noqa: E731
                dkb = 0.0 if n > 2 and b in at else of(dcolumns, 8 * b)
                if b in at:
                    dkb = dkb + of(drows, half + at[b])
                    dqb = of(drows, at[b]) * of(level, 8 * b)
                    dq[h][b] += dqb
                dkb = dkb * of(level, 8 * b)
                dk[h][b] += dkb
                block = of(k[h][...], 8 * b) * dkb
                blocks.append(block + of(q[h][...], 8 * b) * dqb if b in at else block)
            cotangents[h].append(jnp.concatenate(blocks, axis=0))
    return [(jnp.concatenate(dq[h], axis=0), jnp.concatenate(dk[h], axis=0), cotangents[h]) for h in heads]


def _through_the_ends(q, k, factors, dq, dk, dread_by, dk_out, diagonal, scale):
    """dq and dk with what comes by way of states and A's diagonal; the cotangents of into's and out's exponents."""
    into, out, _ = read_ends(factors)
    by_q, by_k, by_out = dread_by[:CHUNK] * (scale * into), dread_by[CHUNK:] * into, dk_out * out
    ends = q * by_q + k * by_k, k * by_out
    return dq + by_q + diagonal * k, dk + by_k + by_out + diagonal * q, ends


def _to_inputs(refs, columns, h, q, k, dq_h, dk_h, dlog, before, dq, dk, dg, sums, o):
    """Writes the raw inputs' cotangents of head h; returns dq and dk of a q/k head that later heads add to."""
    if o.flagged:
        dlog = jnp.where(refs.flags[...] == VALID, dlog, 0.0)
    draw, dA = gate_vjp(*gate_inputs(refs, h, o), dlog, o)
    store(dg, h, o.K, draw)
    for s, d in zip(sums, (dA, draw), strict=True) if sums else ():
        s[:, h * o.K : (h + 1) * o.K] += jnp.sum(d, axis=0, keepdims=True)[:, : o.K]
    if o.qk_l2norm:
        dq_h = normalise_vjp(q, column(columns, "q", h, o), dq_h)
        dk_h = normalise_vjp(k, column(columns, "k", h, o), dk_h)
    if before is not None:
        dq_h, dk_h = dq_h + before[0], dk_h + before[1]
    if (h + 1) % o.group:
        return dq_h, dk_h
    store(dq, h // o.group, o.K, dq_h)
    store(dk, h // o.group, o.K, dk_h)
    return None


def _widen(state, o):
    """[K, V] with zeros up to whole registers."""
    K, V = width_of(o.K), width_of(o.V)
    if V != o.V:
        state = jnp.concatenate([state, jnp.zeros((o.K, V - o.V), state.dtype)], axis=1)
    return state if K == o.K else jnp.concatenate([state, jnp.zeros((K - o.K, V), state.dtype)], axis=0)
