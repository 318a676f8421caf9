"""How tokens become groups of chunks, packed or not.

A chunk belongs to one state slot and a group of chunks is worked on at once. There are two layouts:

* in place: token t stays at t, and every row has a single slot. Padding is made neutral and the first token of a
  later segment forgets everything, which is all that packing without `num_segments` asks for;
* moved: with num_segments=S every segment starts on a chunk boundary and has its own slot, so chunks never hold two
  segments. There are at most (T + S(C-1)) // C chunks, whatever the ids: cost follows tokens, and no recompile.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .reference import unpack_segments

__all__ = ["Layout", "fetch", "plan", "put_back"]


class Layout(NamedTuple):
    """source, valid, starts: [B, groups * tokens per group]; slot: [B, chunks]; place: [B, T].

    source and place are None in place. source is the token that stands at a position, place where a token stands;
    both point past the end where there is none.
    """

    valid: jax.Array
    starts: jax.Array
    slot: jax.Array | None
    source: jax.Array | None
    place: jax.Array | None


def plan(
    segment_ids, B: int, T: int, num_segments: int | None, chunk: int, chunks_per_group: int
) -> tuple[Layout, int]:
    """The layout and the number of groups."""
    slots = num_segments or 1
    chunks = count_chunks(T, num_segments, chunk)
    groups = -(-chunks // chunks_per_group)
    chunks = groups * chunks_per_group
    total = chunks * chunk
    if segment_ids is None:
        valid = jnp.broadcast_to(jnp.arange(total) < T, (B, total))
        return Layout(valid, jnp.zeros((B, total), bool), None, None, None), groups
    valid, starts = unpack_segments(segment_ids, num_segments)
    if num_segments is None:
        pad = ((0, 0), (0, total - T))
        return Layout(jnp.pad(valid, pad), jnp.pad(starts, pad), None, None, None), groups

    # Everything is per row, so that it partitions over rows on any mesh; the one scatter, for source, is a vmap.
    mine = (segment_ids[:, None, :] == jnp.arange(slots)[:, None]) & valid[:, None, :]  # [B, S, T]
    length = jnp.sum(mine, axis=-1, dtype=jnp.int32)
    used = -(-length // chunk)
    last_chunk = jnp.cumsum(used, axis=1)  # exclusive end of each segment, in chunks
    offset = chunk * (last_chunk - used) - (jnp.cumsum(length, axis=1) - length)
    rank = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
    safe = jnp.where(valid, segment_ids, 0)
    place = jnp.where(valid, rank + jnp.take_along_axis(offset, safe, axis=1), total).astype(jnp.int32)
    slot = jnp.sum(last_chunk[:, None, :] <= jnp.arange(chunks)[:, None], axis=-1, dtype=jnp.int32)
    slot = jnp.minimum(slot, slots - 1)  # chunks past the last segment are neutral; any slot will do
    source = jax.vmap(
        lambda p: jnp.full((total,), T, jnp.int32).at[p].set(jnp.arange(T, dtype=jnp.int32), mode="drop")
    )(place)
    return Layout(source < T, jnp.zeros((B, total), bool), slot, source, place), groups


def count_chunks(T: int, num_segments: int | None, chunk: int) -> int:
    """Chunks that hold T tokens however they are split into segments."""
    return -(-T // chunk) if num_segments is None else (T + num_segments * (chunk - 1)) // chunk


def fetch(x, layout: Layout, start, size: int):
    """Positions [start, start + size) of x [B, T, ...], 0 where no valid token stands (NaN padding included)."""
    valid = jax.lax.dynamic_slice_in_dim(layout.valid, start, size, axis=1)
    if layout.source is None:
        short = layout.valid.shape[1] - x.shape[1]
        if short:
            x = jnp.pad(x, ((0, 0), (0, short)) + ((0, 0),) * (x.ndim - 2))
        x = jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)
    else:
        source = jax.lax.dynamic_slice_in_dim(layout.source, start, size, axis=1)
        x = _take(x, source)
    return jnp.where(_like(valid, x), x, 0)


def put_back(x, layout: Layout, T: int):
    """x [B, positions, ...] to [B, T, ...], exactly 0 where the token is padding."""
    if layout.source is None:
        return jnp.where(_like(layout.valid[:, :T], x), x[:, :T], 0)
    return _take(x, layout.place)


def _take(x, index):
    """x[b, index[b, t]] with zeros for an index past the end."""
    return jax.vmap(lambda row, i: jnp.take(row, i, axis=0, mode="fill", fill_value=0))(x, index)


def _like(mask, x):
    return mask.reshape(*mask.shape, *[1] * (x.ndim - 2))
