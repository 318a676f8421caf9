"""The oracle: KDA token by token, as the paper writes it (KDA, section 3; facts of the order in `scan_tokens`).

Slow on purpose: one `lax.scan` step per token, float32 or, when the inputs are, float64. Every faster path is
tested against it. Gradients are autodiff's.
"""

import jax
import jax.numpy as jnp

from .gates import activate_gate
from .mesh import repeat_heads

__all__ = ["beta_of", "compute_dtype", "gate_of", "normalise", "scan_tokens", "unpack_segments"]


def compute_dtype(*arrays) -> jnp.dtype:
    """float32, or float64 as soon as one of the arrays is."""
    return jnp.dtype(jnp.result_type(jnp.float32, *[x.dtype for x in arrays if x is not None]))


def normalise(x: jax.Array) -> jax.Array:
    """x * rsqrt(sum x^2 + 1e-6) over the last axis: the eps is inside the root and on the sum, so 0 stays 0."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def gate_of(g, gate, A_log, dt_bias, lower_bound) -> jax.Array:
    """Log-decay from what the caller passed as g: itself, or one of the two activations of raw logits."""
    if gate == "log":
        return g
    return activate_gate(g, A_log[:, None], dt_bias, lower_bound if gate == "bounded" else None)


def beta_of(beta, beta_sigmoid) -> jax.Array:
    return jax.nn.sigmoid(beta) if beta_sigmoid else beta


def unpack_segments(segment_ids, num_segments):
    """(valid [B,T], starts [B,T]) of packed ids: a negative id, or one >= num_segments, is padding.

    `starts` marks the first valid token of every segment but each row's first one: there the state begins anew.
    Padding may stand anywhere, also between two tokens of one segment, so a token is compared with the last
    valid id before it; valid ids do not decrease, hence that is their running maximum.
    """
    valid = segment_ids >= 0
    if num_segments is not None:
        valid &= segment_ids < num_segments
    seen = jax.lax.cummax(jnp.where(valid, segment_ids, -1), axis=1)
    before = jnp.pad(seen[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return valid, valid & (before >= 0) & (before != segment_ids)


def scan_tokens(q, k, v, g, beta, *, scale, initial_state, segment_ids, num_segments, activations, erase):
    """Output `[B,T,HV,V]` and final state, by the four steps of the recurrence per token and value head:

        S <- diag(exp g_t) S                      decay first
        r  = v_t - S^T k_t                        residual against the decayed state (v_t itself without erase)
        S <- S + beta_t k_t r^T                   write
        o_t = scale * S^T q_t                     read from the updated state

    Shapes as in `pallas_kernels.kda`. `activations` is (gate, A_log, dt_bias, lower_bound, qk_l2norm, beta_sigmoid).
    """
    gate, A_log, dt_bias, lower_bound, qk_l2norm, beta_sigmoid = activations
    out_dtype, dtype = v.dtype, compute_dtype(q, k, v, g, beta, initial_state)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if segment_ids is None:
        valid, starts = jnp.ones((B, T), bool), jnp.zeros((B, T), bool)
    else:
        valid, starts = unpack_segments(segment_ids, num_segments)

    def clean(x):  # padded inputs may be NaN: selected away before any arithmetic
        return jnp.where(valid.reshape(B, T, *[1] * (x.ndim - 2)), x, 0).astype(dtype)

    q, k, v, g, beta = map(clean, (q, k, v, g, beta))
    if qk_l2norm:
        q, k = normalise(q), normalise(k)
    g = gate_of(g, gate, A_log, dt_bias, lower_bound)
    beta = beta_of(beta, beta_sigmoid)
    q, k = (repeat_heads(x, HV // H, axis=2) for x in (q, k))

    S = num_segments or 1
    if initial_state is None:  # zeros like an outer product, so that they lie on a mesh as g and v do
        states = jnp.zeros_like(g[:, 0, :, :, None] * v[:, 0, :, None, :], dtype)
        states = jnp.broadcast_to(states[:, None], (B, S, HV, K, V))
    else:
        states = initial_state.reshape(B, S, HV, K, V).astype(dtype)
    slot = jnp.zeros((B, T), jnp.int32) if num_segments is None else jnp.where(valid, segment_ids, 0)

    def step(states, token):
        q, k, v, g, beta, valid, start, slot = token
        if num_segments is None:
            before = states[:, 0]
            state = jnp.where(start[:, None, None, None], 0, before)
        else:
            before = jax.vmap(lambda s, i: jax.lax.dynamic_index_in_dim(s, i, keepdims=False))(states, slot)
            state = before
        state = state * jnp.exp(g)[..., None]
        residual = v - jnp.einsum("bhkv,bhk->bhv", state, k, precision="highest") if erase else v
        state = state + (beta[..., None] * k)[..., None] * residual[:, :, None, :]
        out = jnp.einsum("bhkv,bhk->bhv", state, scale * q, precision="highest")
        state = jnp.where(valid[:, None, None, None], state, before)
        if num_segments is None:
            states = state[:, None]
        else:
            states = jax.vmap(lambda s, i, x: jax.lax.dynamic_update_index_in_dim(s, x, i, 0))(states, slot, state)
        return states, jnp.where(valid[:, None, None], out, 0)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, g, beta, valid, starts, slot))
    states, out = jax.lax.scan(step, states, tokens)
    return jnp.moveaxis(out, 0, 1).astype(out_dtype), states if num_segments else states[:, 0]
