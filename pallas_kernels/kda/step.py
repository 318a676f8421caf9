"""One token of KDA against a stored state: what decoding runs, in plain XLA."""

import jax
import jax.numpy as jnp

from .mesh import repeat_heads, row_sharding
from .reference import beta_of, compute_dtype, gate_of, normalise

__all__ = ["step_token"]


def step_token(q, k, v, g, beta, state, *, scale, slots, activations):
    """Output `[B,HV,V]` and the new state or pool in the dtype it came in; arguments as in `pallas_kernels.kda_step`.

    The arithmetic is float32 (or float64) whatever the state is stored in. Each state is read once and written once;
    under jit with the state donated, XLA updates it in place.
    """
    gate, A_log, dt_bias, lower_bound, qk_l2norm, beta_sigmoid = activations
    v_dtype, dtype = v.dtype, compute_dtype(q, k, v, g, beta, state)
    rows, group = q.shape[0], v.shape[1] // q.shape[1]
    if slots is None:
        live, read = jnp.ones((rows,), bool), state
    else:  # an index of -1 would wrap to the last slot, so padding is pointed past the end, where scatters drop
        live = (slots >= 0) & (slots < state.shape[0])
        slots = jnp.where(live, slots, state.shape[0])
        read = state.at[slots].get(mode="fill", fill_value=0, out_sharding=row_sharding(slots, state))

    def clean(x):  # a padded row may hold anything
        return jnp.where(live.reshape(rows, *[1] * (x.ndim - 1)), x, 0).astype(dtype)

    q, k, v, g, beta = map(clean, (q, k, v, g, beta))
    if qk_l2norm:
        q, k = normalise(q), normalise(k)
    g = gate_of(g, gate, A_log, dt_bias, lower_bound)
    beta = beta_of(beta, beta_sigmoid)
    q, k = (repeat_heads(x, group, axis=1) for x in (q, k))

    new = read.astype(dtype) * jnp.exp(g)[..., None]
    residual = v - jnp.einsum("bhkv,bhk->bhv", new, k, precision="highest")
    new = new + (beta[..., None] * k)[..., None] * residual[:, :, None, :]
    out = jnp.einsum("bhkv,bhk->bhv", new, scale * q, precision="highest")
    out = jnp.where(live[:, None, None], out, 0)
    new = new.astype(state.dtype)
    if slots is None:
        return out.astype(v_dtype), new
    sharding = None if row_sharding(slots, state) is None else jax.typeof(state).sharding
    return out.astype(v_dtype), state.at[slots].set(new, mode="drop", out_sharding=sharding)
