"""Rows of different lengths. Inside the layers a token is padding exactly where its segment id is negative.

Callers say which tokens count in two ways, which may be combined: `segment_ids` int32 [B, T] (a negative id is padding,
anywhere in the row; non-negative ids are non-decreasing and name the packed documents) and `lengths` int32 [B] (the
number of valid tokens per row, left-aligned; for calls with a cache).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


def merge_ids(x_BTD: jax.Array, segment_ids: jax.Array | None, lengths: jax.Array | None) -> jax.Array | None:
    """One int32 [B, T] from both ways of marking padding; None if every token is valid and of one document.

    Raises ValueError for a wrong rank or shape.
    """
    if x_BTD.ndim != 3:
        raise ValueError(f"x must be [B, T, D], got shape {x_BTD.shape}")
    B, T, _ = x_BTD.shape
    if segment_ids is not None and segment_ids.shape != (B, T):
        raise ValueError(f"segment_ids must be [B, T] = {(B, T)} for x {x_BTD.shape}, got {segment_ids.shape}")
    if lengths is None:
        return None if segment_ids is None else segment_ids.astype(jnp.int32)
    lengths = jnp.asarray(lengths)
    if lengths.shape != (B,):
        raise ValueError(f"lengths must be [B] = {(B,)} for x {x_BTD.shape}, got {lengths.shape}")
    ids = jnp.zeros((B, T), jnp.int32) if segment_ids is None else segment_ids.astype(jnp.int32)
    return jnp.where(jnp.arange(T) < lengths[:, None], ids, -1)


def zero_padding(x: jax.Array, ids: jax.Array | None) -> jax.Array:
    """x [B, T, ...] with exact zeros at padding. A select, so that not even NaN there reaches output or gradient."""
    if ids is None:
        return x
    return jnp.where((ids >= 0).reshape(ids.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))


def left_align(
    x_BTD: jax.Array, segment_ids: jax.Array | None, lengths: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, Callable[[jax.Array], jax.Array]]:
    """(x with the valid tokens of each row moved to its front, their number, a function that moves results back).

    Caches grow by contiguous tokens, whatever padding stood between them. Here all valid tokens of a row belong to the
    one sequence that the cache holds: concrete ids of several documents in a row are a ValueError.
    """
    ids = merge_ids(x_BTD, segment_ids, lengths)
    if segment_ids is None:
        return x_BTD, lengths, lambda y_BTD: y_BTD
    if (known := concrete_ids(x_BTD, segment_ids, lengths)) is not None:
        none = np.iinfo(np.int32).max
        first = np.where(known >= 0, known, none).min(axis=1, initial=none)
        last = known.max(axis=1, initial=-1)
        if (first < last).any():
            raise ValueError("with a cache segment_ids may only mark padding, got rows of several non-negative ids")
    order = jnp.argsort(ids < 0, axis=1, stable=True)
    back = jnp.argsort(order, axis=1)
    x_BTD = jnp.take_along_axis(x_BTD, order[..., None], axis=1)
    return x_BTD, (ids >= 0).sum(axis=1), lambda y_BTD: jnp.take_along_axis(y_BTD, back[..., None], axis=1)


def concrete_ids(x_BTD: jax.Array, segment_ids: jax.Array | None, lengths: jax.Array | None) -> np.ndarray | None:
    """What `merge_ids` says, [B, T] with zeros for None, where its values can be looked at; else None.

    In numpy, because inside jit even what is computed from concrete arrays alone is traced.
    """
    if not is_concrete(segment_ids, lengths):
        return None
    B, T, _ = x_BTD.shape
    ids = np.zeros((B, T), np.int32) if segment_ids is None else np.asarray(segment_ids)
    return ids if lengths is None else np.where(np.arange(T) < np.asarray(lengths)[:, None], ids, -1)


def is_concrete(*arrays: jax.Array | None) -> bool:
    """Whether the values can be looked at: not traced by jit, grad or vmap, and none of them on another host."""
    traced = any(isinstance(array, jax.core.Tracer) for array in arrays)
    return not traced and all(getattr(array, "is_fully_addressable", True) for array in arrays)
