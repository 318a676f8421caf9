"""The forward kernel: one program takes several heads through the chunks of a row, with their states in VMEM.

The algebra is chunked.py's with W left out: the residuals come from the state directly,

    R = v - k_in S,   V' = T (beta R),   O = q_in S + A V',   S+ = e^{Gn} S + k_out^T V',

which keeps everything between the inputs and the output on chip. Three stages: what needs no state (pair by pair), the
inverses, the state. Many heads advance together, so that one head's matmuls run while another's are awaited, and the
stages of two halves of them are written down in turns (order.py). What a later stage reads lies in scratch and not in
registers, of which there are 64.

Precision for bfloat16 inputs, found with nearly parallel keys (KN04), where V' alternates in sign and its sums cancel:
V' and what multiplies it, A and k_out, need two terms each, the inverse two while it is built and when it is applied;
one term does for the decayed keys and queries, the state and R.
"""

from functools import partial
from itertools import chain

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .activations import Options
from .chunk import column, prepare, store, values_of, width_of, without_states
from .factors import SCRATCH, read_ends
from .grid import (
    Arrays,
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
from .products import CHUNK, LANES, TN, beside_terms, heads_of, once, thrice, times_terms

__all__ = ["forward"]


def forward(x: Arrays, o: Options, *, save: bool) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Output [B, T, HV * V], final state, and with save the state before each chunk [B, NT, HV, K, V]."""
    B, T, HV, NT = x.q.shape[0], x.q.shape[1], x.beta.shape[1] * x.beta.shape[3], pl.cdiv(x.q.shape[1], CHUNK)
    states = state_spec(o, lambda c: c)
    state_shape = (B, *(() if o.slots is None else (o.slots,)), HV, o.K, o.V)
    operands = [a for a in (*x[:8], x.state) if a is not None]
    in_specs = token_specs(x, o, lambda c: c) + ([] if x.state is None else [states])
    out_shape = [jax.ShapeDtypeStruct((B, T, HV * o.V), x.v.dtype), jax.ShapeDtypeStruct(state_shape, jnp.float32)]
    out_specs = [tokens(o.heads * o.V, lambda c: c), states]
    if save:
        out_shape.append(jax.ShapeDtypeStruct((B, NT, HV, o.K, o.V), jnp.float32))
        out_specs.append(chunk_states(o, lambda c: c))
    K, V, pairs = width_of(o.K), width_of(o.V), len(heads_of(o.heads))
    scratch = [
        pltpu.VMEM((o.heads, K, V), jnp.float32),  # the states
        pltpu.VMEM((o.heads, K // LANES, SCRATCH, CHUNK, LANES), jnp.float32),
        pltpu.VMEM((CHUNK, LANES), jnp.float32),  # columns
        pltpu.VMEM((pairs, CHUNK, LANES), jnp.float32),  # A
        pltpu.VMEM((pairs, CHUNK, LANES), jnp.float32),  # L
        pltpu.VMEM((o.heads, CHUNK, K), jnp.float32),  # q
        pltpu.VMEM((o.heads, CHUNK, K), jnp.float32),  # k, then k_out
        pltpu.VMEM((o.heads, 1, K), jnp.float32),  # e^{Gn}
    ]
    present = [a is not None for a in x]
    results = call(
        partial(_kernel, o, present, save), "kda_forward", x, o, (B, HV // o.heads, NT), operands, in_specs, out_specs,
        out_shape, scratch,
        aliases={} if o.slots is None else {len(operands): 1},  # a segment without a token keeps its state
    )  # fmt: skip
    return (*results, *([] if save else [None]))


def _kernel(o: Options, present: list[bool], save: bool, *refs):
    slot_ref, refs = (refs[0], refs[1:]) if o.slots is not None else (None, refs)
    token_refs, refs = take_tokens(refs, present)
    initial, refs = (refs[0], refs[1:]) if present[-1] else (None, refs)
    out, final, *refs = refs
    saved, refs = (refs[0], refs[1:]) if save else (None, refs)
    state, factors, columns, A, L, q, k, total = refs
    first, last = slot_edges(slot_ref, reverse=False)

    @pl.when(first)
    def _():
        load_states(state, initial, o)

    if save:
        store_states(saved, state, o)

    heads_of_pairs = heads_of(o.heads)
    read, residuals = [None] * o.heads, [None] * o.heads

    def read_states(pairs):
        for h in (h for p in pairs for h in heads_of_pairs[p]):
            into, out_of, total[h] = read_ends(factors.at[h])
            read[h] = once(jnp.concatenate([q[h] * (o.scale * into), k[h] * into], axis=0), state[h], o.exact)
            k[h] *= out_of
            yield
            beta = column(columns, "beta", h, o)
            residuals[h] = beta * (values_of(token_refs, h, o) - read[h][CHUNK:])
            yield

    def write_states(pairs):
        heads = [(h, p, i) for p in pairs for i, h in enumerate(heads_of_pairs[p])]
        T, rows = ({p: beside_terms(ref[p], o.exact) for p in pairs} for ref in (L, A))
        yield
        written = []
        for h, p, i in heads:
            written.append(times_terms(T[p][i], residuals[h], o.exact, both=False))
            yield
        for (h, p, i), new in zip(heads, written, strict=True):
            store(out, h, o.V, read[h][:CHUNK] + times_terms(rows[p][i], new, o.exact, both=True))
            yield
            state[h] = state[h] * total[h].reshape(-1, 1) + thrice(k[h], new, o.exact, TN)
            yield

    stage = partial(without_states, token_refs, columns, factors, q, k, A, None, L, o=o)
    one, other = halves(heads_of_pairs)
    prepare(token_refs, columns, factors, o)
    run(stage(pairs=one))
    alongside(unit_lower_inverses(L, one, o.exact), chain(stage(pairs=other), read_states(one)))
    alongside(unit_lower_inverses(L, other, o.exact), chain(read_states(other), write_states(one)))
    run(write_states(other))

    @pl.when(last)
    def _():
        store_states(final, state, o)
