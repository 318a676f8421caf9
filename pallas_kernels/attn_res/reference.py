"""The oracle of attn_res: the equations of AttnRes section 3, in the order in which the paper writes them."""

import jax
import jax.numpy as jnp

from .inputs import Inputs, check_inputs


def attn_res_reference(
    sources,
    query,
    key_scale=None,
    *,
    count=None,
    output_scale=None,
    eps: float = 1e-6,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`attn_res` (see there for arguments, results and errors), plain and slow.

    Computes in the widest input dtype, at least float32. Stacks the sources and leaves every gradient to jax, so
    it keeps several float32 copies of them: for checking, not for training.
    """
    inputs = check_inputs(sources, query, key_scale, count=count, output_scale=output_scale, eps=eps)
    return mix_plainly(inputs, return_lse)


def mix_plainly(inputs: Inputs, return_lse: bool) -> jax.Array | tuple[jax.Array, jax.Array]:
    dtype, eps = inputs.compute_dtype, inputs.eps
    v = inputs.sources if inputs.is_buffer else jnp.stack(inputs.sources)  # [N, ..., D]
    v = v.astype(dtype)
    w = inputs.query.astype(dtype)
    if inputs.key_scale is not None:
        w = w * inputs.key_scale.astype(dtype)

    live = jnp.ones(v.shape[0], bool) if inputs.count is None else jnp.arange(v.shape[0]) < inputs.count
    live = live.reshape(-1, *[1] * (v.ndim - 1))
    # Dead rows may hold anything. They are replaced before they are used, so that no gradient passes through them;
    # ones rather than zeros, whose norm has no gradient when eps is 0.
    v = jnp.where(live, v, 1)

    key = v * jax.lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + eps)
    score = jnp.where(live[..., 0], jnp.sum(key * w, axis=-1), -jnp.inf)  # [N, ...]
    weight = jax.nn.softmax(score, axis=0)
    mixture = jnp.sum(weight[..., None] * v, axis=0)
    if inputs.output_scale is not None:
        mixture *= jax.lax.rsqrt(jnp.mean(mixture * mixture, axis=-1, keepdims=True) + eps)
        mixture *= inputs.output_scale.astype(dtype)
    mixture = mixture.astype(inputs.source_dtype)
    if return_lse:
        return mixture, jax.nn.logsumexp(score, axis=0)
    return mixture
