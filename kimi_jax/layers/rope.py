"""Rotary positions (RoPE, arXiv 2104.09864), which the released models do without: for comparisons with them.

A vector's channels i and i + R/2 are turned as a plane by position * theta^(-2i / R) radians. The product of two turned
vectors then depends on the difference of their positions alone.
"""

import jax
import jax.numpy as jnp
import numpy as np

from .parameters import at_least_float32


def rotate(x: jax.Array, position_BT: jax.Array, theta: float, channels: int) -> jax.Array:
    """x [B, T, ..., D] with the last `channels` (R above, even) turned, in its dtype; angles are at least float32."""
    rest, half = x.shape[-1] - channels, channels // 2
    dtype = at_least_float32(x.dtype)
    frequency = jnp.asarray(theta ** (-np.arange(half) / half), dtype)
    angle = position_BT.reshape(position_BT.shape + (1,) * (x.ndim - 2)).astype(dtype) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = (part.astype(dtype) for part in (x[..., rest : rest + half], x[..., rest + half :]))
    turned = (a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)
    return jnp.concatenate([x[..., :rest], *turned], axis=-1)


def document_positions(x_BTD: jax.Array, ids: jax.Array | None) -> jax.Array:
    """int32 [B, T] or [1, T]: the valid tokens before each one in its own document, as a cache counts them.

    ids: int32 [B, T], as of `padding.merge_ids`; what is said of padding means nothing.
    """
    if ids is None:
        return jnp.arange(x_BTD.shape[1])[None]
    valid = ids >= 0
    before = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
    newest = jax.lax.cummax(jnp.where(valid, ids, -1), axis=1)
    first = newest > jnp.pad(newest, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    return before - jax.lax.cummax(jnp.where(first, before, 0), axis=1)
