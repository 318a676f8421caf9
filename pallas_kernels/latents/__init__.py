"""Attention over the cached latents of latent attention (MLA), few queries at a time, as a kernel for NVIDIA Hopper.

Public names: `attend_latents`, `latent_backend`. There is no portable path here: `kimi_jax.layers.latents` is one.
"""

import jax
import jax.numpy as jnp

from ..machine import Target, choose, hopper_limits

__all__ = ["attend_latents", "latent_backend"]

CHANNELS, MOST_CHANNELS = 64, 512  # of a latent: a multiple of these, and as many as the kernel's registers hold
LEAST_SLOTS, ROWS = 64, 8  # of a cache: a tile, and a multiple of these, which the copy engine wants


def attend_latents(
    q_BTNC: jax.Array,
    q_rope_BTNR: jax.Array,
    latent: jax.Array,
    k_rope: jax.Array,
    length_B: jax.Array,
    position_BT: jax.Array,
    *,
    scale: float,
    group: jax.Array | None = None,
) -> jax.Array:
    """For each query and head the mean of the row's latents, weighted by softmax(scale (q . latent + q_rope . k_rope)).

    Slots beyond the query's position, or not below the row's length, take no part; none of the latter are read but for
    the rest of a tile. A query that sees no slot gets zeros. The softmax is in float32, the weights are multiplied in
    bfloat16, the sums are float32.

    Args:
      q_BTNC, q_rope_BTNR: bfloat16 queries of N heads, folded into the latents' space, and their slice for k_rope.
      latent, k_rope: bfloat16 `[B, L, C]` and `[B, L, R]`, or of all layers `[groups, B, L, ...]` with a group. Read in
        place.
      length_B, position_BT: int32.
      scale: a Python number.
      group: int32 scalar, the layer.

    Returns `[B, T, N, C]` in bfloat16. It has no gradient.

    Raises:
      ValueError: shapes that do not go together, lengths or positions that are not int32.
      NotImplementedError: saying why, for what the kernel cannot serve: ask `latent_backend` before.
    """
    _check(q_BTNC, q_rope_BTNR, latent, k_rope, length_B, position_BT, group)
    if limit := _limits((q_BTNC, q_rope_BTNR, latent, k_rope), Target("gpu")) or _cut():
        raise NotImplementedError(f"attend_latents: {limit}")
    from .decode import decode

    B, T, N, C = q_BTNC.shape
    if group is None:
        latent, k_rope, group = latent[None], k_rope[None], jnp.int32(0)
    queries = (x.reshape(B, T * N, x.shape[-1]) for x in (q_BTNC, q_rope_BTNR))
    last_BQ = jnp.repeat(jnp.minimum(position_BT, length_B[:, None] - 1), N, axis=1)
    o = decode(*queries, latent, k_rope, group, length_B, last_BQ, scale)
    return o.reshape(B, T, N, C)


def latent_backend(q_BTNC, q_rope_BTNR, latent, k_rope) -> str:
    """What serves these arrays (or `jax.ShapeDtypeStruct`) on the device in force: "mosaic_gpu" where
    `attend_latents` serves them, on a mesh of several devices under `jax.shard_map`; else "xla"."""
    arrays = q_BTNC, q_rope_BTNR, latent, k_rope
    return choose("attention over cached latents", "auto", lambda kernels, machine: _served(arrays, kernels, machine))


def _check(q, q_rope, latent, k_rope, length, position, group) -> None:
    if q.ndim != 4 or latent.ndim != (3 if group is None else 4) or not k_rope.ndim:
        wanted = "[B, L, C]" if group is None else "[groups, B, L, C], with a group"
        raise ValueError(f"q, latent: shapes are {q.shape}, {latent.shape}; allowed are [B, T, N, C] and {wanted}")
    (B, T, N, C), R, stack = q.shape, k_rope.shape[-1], latent.shape[:-3]
    L = latent.shape[-2]
    expected = {
        "q_rope": (q_rope, (B, T, N, R)), "latent": (latent, (*stack, B, L, C)), "k_rope": (k_rope, (*stack, B, L, R)),
        "length": (length, (B,)), "position": (position, (B, T)),
    }  # fmt: skip
    for name, (x, shape) in expected.items():
        if x.shape != shape:
            raise ValueError(f"{name}: got shape {x.shape}; allowed is {shape}")
    for name, x in (("length", length), ("position", position)):
        if x.dtype != jnp.int32:
            raise ValueError(f"{name}: got {x.dtype}; allowed is int32")


def _served(arrays, kernels: str, machine: Target) -> str | None:
    return "there is no kernel for TPUs" if kernels == "mosaic_tpu" else _limits(arrays, machine)


def _limits(arrays, machine: Target) -> str | None:
    """Why the kernel cannot serve these arrays there, in a clause; None if it can."""
    others = [x.dtype for x in arrays if x.dtype != jnp.bfloat16]
    if others:
        return f"an argument is {others[0]} and the kernel multiplies in 16 bits, bfloat16"
    C, (L, R) = arrays[0].shape[-1], arrays[3].shape[-2:]
    if C % CHANNELS or not 0 < C <= MOST_CHANNELS or R != CHANNELS:
        wanted = f"C is a multiple of {CHANNELS}, at most {MOST_CHANNELS}, and R is {CHANNELS}"
        return f"latents have C = {C} and R = {R} channels and the kernel's {wanted}"
    if L < LEAST_SLOTS or L % ROWS:
        return f"the cache has {L} slots and the kernel's have a multiple of {ROWS}, at least {LEAST_SLOTS}"
    return hopper_limits(machine)


def _cut() -> str | None:
    mesh = jax.sharding.get_abstract_mesh()
    axes = [n for n in mesh.axis_names if n not in mesh.manual_axes and mesh.shape[n] > 1]
    return (
        f"mesh axes {axes} may cut the arrays; call it under jax.shard_map, with rows and heads cut" if axes else None
    )
