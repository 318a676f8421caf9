"""From the public arrays [B, T, H, K] to the kernels' and back, with the backward attached.

The kernels take whole chunks of raw tokens. A length that 64 does not divide, padding and packed segments are made fit
here: padded tokens become neutral (no gate, nothing written), a segment that begins inside a chunk forgets everything
by a gate of -inf, and segments with states of their own are moved to chunk boundaries (layout.py). In those cases the
gate is activated here too, as it is if its input is not bfloat16; it is fused otherwise.

For the backward the inputs are kept and the state before each group of chunks (pieces.py); it computes the terms and
states of all chunks again.

Each kernel stands in a jit of its own: it takes seconds to lower, which is then done once for all layers of a model.
"""

import inspect
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..chunked import Inputs
from ..gates import activate_gate
from ..kernels import Settings
from ..layout import fetch, plan, put_back
from ..mesh import vary, varying
from .chunk_backward import chunk_backward
from .gate import LEAST, LOG2E
from .intra import Options, intra
from .intra_backward import intra_backward
from .pieces import choose_groups, choose_pieces, first_cotangents, first_states
from .registers import CHUNK
from .state import pass_state, piece_maps, piece_transitions, recompute_states
from .state_backward import pass_state_backward

__all__ = ["sequence"]


def _once(kernel):
    static = [
        name for name in inspect.signature(kernel).parameters if name in ("o", "pieces", "groups", "skip", "keep")
    ]
    return jax.jit(kernel, static_argnames=static)


intra, intra_backward, chunk_backward = map(_once, (intra, intra_backward, chunk_backward))
pass_state, pass_state_backward, recompute_states = map(_once, (pass_state, pass_state_backward, recompute_states))
piece_maps, piece_transitions = map(_once, (piece_maps, piece_transitions))


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
    if options.gate != "log" and (layout is not None or g.dtype != jnp.bfloat16):
        g = activate_gate(g, A_log[:, None], dt_bias, settings.lower_bound)
        options, A_log, dt_bias = options._replace(gate="log"), None, None
    if layout is not None:
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
    return _forward(o, x, groups=0)[0]


def _forward(o, x, groups):
    """(output, final S^T), and S^T before each group."""
    as_x = _varying_as(x)
    q, k, v, *rest = _flat(o, x)
    terms = as_x(intra(q, k, *rest, o))
    pieces, first = _pieces(o, x), x.state
    if pieces > 1:
        first = first_states(*as_x(piece_maps(terms, v, x.beta, o, pieces)), x.state)
    elif x.slot is None and x.state is not None:
        first = x.state[:, :, None]
    out, after, starts = as_x(pass_state(terms, v, x.beta, first, x.slot, o, pieces, groups))
    return (out.reshape(x.v.shape), after if x.slot is not None else after[:, :, -1]), starts


def _pieces(o, x):
    B, HV, T = x.beta.shape
    return 1 if x.slot is not None else choose_pieces(B * HV * (o.V // 64), T // CHUNK)


def _groups(x):
    return 1 if x.slot is not None else choose_groups(x.beta.shape[2] // CHUNK)


def _core_fwd(o, x):
    groups = _groups(x)
    results, starts = _forward(o, x, groups if groups > 1 else 0)
    return results, (x, starts)


def _core_bwd(o, saved, cotangents):
    x, starts = saved
    dout, dfinal = cotangents
    dout = dout.reshape(*dout.shape[:2], -1)
    q, k, v, g, beta, rate, bias = _flat(o, x)
    as_x = _varying_as(x)
    terms = as_x(intra(q, k, g, beta, rate, bias, o))
    if starts is None:
        starts = x.state if x.state is None or x.slot is not None else x.state[:, :, None]
    starts, residuals = as_x(recompute_states(terms, v, beta, starts, x.slot, o, _groups(x)))
    pieces = _pieces(o, x)
    if pieces > 1:
        transitions = as_x(piece_transitions(terms, beta, o, pieces, skip=1))
        *_, dends = as_x(pass_state_backward(terms, beta, dout, None, None, o, pieces, keep=False))
        dafter = first_cotangents(transitions, dends, dfinal)
    else:
        dafter = dfinal if x.slot is not None else dfinal[:, :, None]
    ends, p, dfirst = as_x(pass_state_backward(terms, beta, dout, dafter, x.slot, o, pieces))
    c = as_x(chunk_backward(v, beta, terms.decay, starts, residuals, ends, p, dout, o))
    cotangents = intra_backward(q, k, g, beta, rate, bias, c.da, c.m, c.dq_in, c.ps, c.dk_out, c.dtotal, o)
    dq, dk, dg, dbeta, dbias, drate = as_x(cotangents)
    dq, dk = (_to_heads(d, y) for d, y in ((dq, x.q), (dk, x.k)))
    if o.gate == "log":  # of a gate that lets nothing through dg is 0, whatever activation it came out of
        dg = jnp.where(g * LOG2E < LEAST, 0, dg)
    else:
        dbias, drate = dbias.sum(axis=(0, 2)).astype(x.dt_bias.dtype), drate.sum(axis=(0, 2, 3)).astype(x.A_log.dtype)
    dstate = None if x.state is None else dfirst if x.slot is not None else dfirst[:, :, 0]
    dv, dg = c.dv.reshape(x.v.shape), dg.reshape(x.g.shape)
    return (Arrays(dq, dk, dv, dg, dbeta + c.dbeta.sum(axis=0), drate, dbias, dstate, None),)


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


def _to_heads(d, x):
    """Cotangent [B, T, HV K] to that of x [B, T, H, K]: summed over the value heads of a group."""
    B, T, H, K = x.shape
    return d.reshape(B, T, H, -1, K).sum(axis=3).astype(x.dtype)
