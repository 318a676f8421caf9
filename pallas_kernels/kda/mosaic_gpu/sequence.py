"""From the public arrays [B, T, H, K] to the kernels' and back, with the backward attached.

The kernels take whole chunks of raw tokens. A length that 64 does not divide, padding and packed segments are made fit
here: padded tokens become neutral (no gate, nothing written), a segment that begins inside a chunk forgets everything
by a gate of -inf, and segments with states of their own are moved to chunk boundaries (layout.py). In those cases the
gate is activated here too; it is fused otherwise.

Nothing but the inputs is kept for the backward, which computes the terms and states of all chunks again.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..chunked import Inputs
from ..gates import activate_gate, activate_gate_vjp
from ..kernels import Settings
from ..layout import fetch, plan, put_back
from ..mesh import vary, varying
from ..reference import normalise
from .chunk_backward import chunk_backward
from .intra import Options, intra
from .intra_backward import intra_backward
from .pieces import choose_pieces, first_cotangents, first_states
from .registers import CHUNK
from .state import pass_state, piece_ends, recompute_states
from .state_backward import pass_state_backward

__all__ = ["sequence"]


class Arrays(NamedTuple):
    """What the kernels read; N chunks of 64 tokens, T = 64 N."""

    q: jax.Array  # [B, T, H, K] bf16
    k: jax.Array
    v: jax.Array  # [B, T, HV, V] bf16
    g: jax.Array  # [B, T, HV, K] raw logits, or natural-log gates
    beta: jax.Array  # [B, HV, T] float32
    A_log: jax.Array | None
    dt_bias: jax.Array | None
    state: jax.Array | None  # S^T before the first token: [B, HV, V, K] float32, with slots [B, S, HV, V, K]
    slot: jax.Array | None  # [B, N] int32, the state of each chunk


def sequence(settings: Settings, inputs: Inputs, segment_ids: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, HV, V] in bf16 and the final state in float32; states have an axis of segments or none."""
    q, k, v, g, beta, A_log, dt_bias, state = inputs
    (B, T, _, K), (HV, V), S = q.shape, v.shape[2:], settings.num_segments
    options = Options(settings.scale, settings.gate, settings.lower_bound, settings.qk_l2norm, K, V)
    layout = slot = None
    if segment_ids is not None or T % CHUNK:
        layout, _ = plan(segment_ids, B, T, S, CHUNK, 1)
        q, k, v, g, beta = (fetch(x, layout, 0, layout.valid.shape[1]) for x in (q, k, v, g, beta))
        if options.gate != "log":
            g = activate_gate(g, A_log[:, None], dt_bias, settings.lower_bound)
            options, A_log, dt_bias = options._replace(gate="log"), None, None
        valid, starts = (m[..., None, None] for m in (layout.valid, layout.starts))
        g = jnp.where(starts, -jnp.inf, jnp.where(valid, g, 0))
        slot = layout.slot
    beta = beta.astype(jnp.float32)
    if settings.beta_sigmoid:
        beta = jax.nn.sigmoid(beta)
    if layout is not None:
        beta = jnp.where(layout.valid[..., None], beta, 0)
    if state is None and S:
        state = jnp.zeros((B, S, HV, K, V), jnp.float32)
    first = None if state is None else state.astype(jnp.float32).swapaxes(-1, -2)
    out, final = _core(options, Arrays(q, k, v, g, beta.swapaxes(1, 2), A_log, dt_bias, first, slot))
    final = final.swapaxes(-1, -2)
    if S:  # no chunk has written the state of a segment without tokens
        present = jnp.any(segment_ids[:, None] == jnp.arange(S)[:, None], axis=-1)
        final = jnp.where(present[..., None, None, None], final, state)
    return (out if layout is None else put_back(out, layout, T)), final


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _core(o: Options, x: Arrays):
    as_x = _varying_as(x)
    terms = as_x(intra(*_flat(o, x), o, save=False))
    pieces, first, _ = _first_states(o, x, terms)
    out, after = as_x(pass_state(terms, first, x.slot, o, pieces))
    return out.reshape(x.v.shape), after if x.slot is not None else after[:, :, -1]


def _first_states(o, x, terms):
    """How many pieces each row is cut into, S^T before each and their transitions (None unless there are several)."""
    if x.slot is not None:
        return 1, x.state, None
    B, HV, T = x.beta.shape
    pieces = choose_pieces(B * HV, T // CHUNK)
    if pieces == 1:
        return 1, None if x.state is None else x.state[:, :, None], None
    transitions, ends = _varying_as(x)([piece_ends(terms, o, pieces, transition=t) for t in (True, False)])
    return pieces, first_states(transitions, ends, x.state), transitions


def _core_fwd(o, x):
    return _core(o, x), x


def _core_bwd(o, x, cotangents):
    dout, dfinal = cotangents
    dout = dout.reshape(*dout.shape[:2], -1)
    q, k, v, g, beta, rate, bias = _flat(o, x)
    as_x = _varying_as(x)
    terms = as_x(intra(q, k, v, g, beta, rate, bias, o, save=True))
    pieces, first, transitions = _first_states(o, x, terms)
    starts, residuals = as_x(recompute_states(terms, first, x.slot, o, pieces))
    if transitions is not None:
        *_, dends = as_x(pass_state_backward(terms, dout, None, None, o, pieces, keep=False))
        dafter = first_cotangents(transitions, dends, dfinal)
    else:
        dafter = dfinal if x.slot is not None else dfinal[:, :, None]
    ends, dresiduals, dfirst = as_x(pass_state_backward(terms, dout, dafter, x.slot, o, pieces))
    c = as_x(chunk_backward(v, beta, terms.inverse, terms.decay, starts, residuals, ends, dresiduals, dout, o))
    if o.qk_l2norm:
        q, k = (normalise(y.astype(jnp.float32)).astype(jnp.bfloat16) for y in (x.q, x.k))
        q, k = (y.reshape(*y.shape[:2], -1) for y in (q, k))
    cotangents = intra_backward(q, k, g, beta, rate, bias, c.da, c.m, c.dq_in, c.ps, c.dk_out, c.dtotal, o)
    dq, dk, dg, dbeta = as_x(cotangents)
    dq, dk = (_to_heads(d, y, o.qk_l2norm) for d, y in ((dq, x.q), (dk, x.k)))
    dg = dg.reshape(x.g.shape)
    dA = db = None
    if o.gate != "log":
        dg, dA, db = activate_gate_vjp(x.g, x.A_log[:, None], x.dt_bias, o.lower_bound, dg)
        dA, db = dA.reshape(x.A_log.shape).astype(x.A_log.dtype), db.astype(x.dt_bias.dtype)
    dv = c.dv.reshape(x.v.shape)
    dstate = None if x.state is None else dfirst if x.slot is not None else dfirst[:, :, 0]
    return (Arrays(dq, dk, dv, dg.astype(x.g.dtype), dbeta + c.dbeta.sum(axis=0), dA, db, dstate, None),)


_core.defvjp(_core_fwd, _core_bwd)


def _varying_as(x):
    """What a kernel returns, said to vary over the axes of a shard_map that x varies over: jax does not say it."""
    axes = frozenset().union(*(varying(a) for a in jax.tree.leaves(x)))
    return partial(jax.tree.map, lambda y: vary(y, axes))


def _flat(o, x: Arrays):
    """Operands of intra: heads and channels in one axis, and the gate's parameters (numbers nobody reads without)."""
    flat = [y.reshape(*y.shape[:2], -1) for y in (x.q, x.k, x.v, x.g)]
    HV, K = x.g.shape[2:]
    if o.gate == "log":
        return *flat, x.beta, jnp.ones((HV,), jnp.float32), jnp.zeros((HV, K), jnp.float32)
    # As in gates.py the rate stays finite.
    rate = jnp.minimum(jnp.exp(x.A_log.astype(jnp.float32)), 1e-6 * jnp.finfo(jnp.float32).max)
    return *flat, x.beta, rate, x.dt_bias.astype(jnp.float32)


def _to_heads(d, x, normalised):
    """Cotangent [B, T, HV K] of normalised q or k to that of x [B, T, H, K], summed over the value heads of a group."""
    B, T, H, K = x.shape
    d = d.reshape(B, T, H, -1, K).sum(axis=3)
    if normalised:
        _, vjp = jax.vjp(normalise, x.astype(jnp.float32))
        (d,) = vjp(d)
    return d.astype(x.dtype)
