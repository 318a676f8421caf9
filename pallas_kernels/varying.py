"""Over which axes of a shard_map arrays vary: part of their types, which operands and cotangents have to agree in."""

import jax

__all__ = ["same_axes", "vary", "varying"]


def varying(arrays) -> frozenset:
    """The axes over which any array of a pytree varies."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(arrays)))


def vary(x: jax.Array, axes: frozenset) -> jax.Array:
    """x, marked as varying over axes too."""
    missing = tuple(axes - varying(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def same_axes(arrays):
    """Every array of a pytree varying over the axes that any of them varies over.

    The transpose of this cast is the sum over the mesh that a replicated parameter or initial state needs, and a
    backward written by hand then returns cotangents that vary as its inputs do.
    """
    axes = varying(arrays)
    return jax.tree.map(lambda x: vary(x, axes), arrays)
