"""How the arguments of one call lie on a mesh, made alike, so that all work after is local to a device.

Auto axes are the compiler's business. On Explicit axes the layout is part of an array's type: operands laid out
differently are refused, and a hand-written backward must return every cotangent laid out as its input. Inside
shard_map the type says over which axes an array varies, with the same two consequences.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..varying import same_axes, vary, varying

__all__ = [
    "laid_as",
    "over_shards",
    "place_alike",
    "repeat_heads",
    "row_sharding",
    "rows_are_cut",
    "same_axes",
    "split",
    "vary",
    "varying",
]


def place_alike(arrays: tuple, axes: tuple[str, ...]) -> tuple:
    """arrays (q, k, v, ...; None is passed by), sharded over batch and heads as the first of them that is.

    axes names the axes of each, such as "BTHK". Outside shard_map only arrays on Explicit axes are touched. Every axis
    but B, H and P (the slots of a pool) is gathered. q and k with too few heads to be split like v's are repeated to
    one per value head.
    """
    arrays = same_axes(arrays)
    shardings = [None if x is None else jax.typeof(x).sharding for x in arrays]
    specs = [{} if s is None else dict(zip(n, s.spec, strict=True)) for s, n in zip(shardings, axes, strict=True)]
    mesh = _explicit_mesh(shardings)
    if mesh is None:
        return arrays
    rows, heads = (next((s[axis] for s in specs if s.get(axis) is not None), None) for axis in "BH")

    def place(x, names, spec, heads):
        layout = {"B": rows, "H": heads, "P": spec.get("P")}
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*(layout.get(axis) for axis in names))))

    parts = math.prod(mesh.shape[a] for a in (heads if isinstance(heads, tuple) else (heads,)) if a is not None)
    q, k, v = arrays[:3]
    if q.shape[-2] % parts:
        group = v.shape[-2] // q.shape[-2]
        # Indexing into the layout at once: its transpose sums on each device first, where a repetition is gathered.
        index = (*[slice(None)] * (q.ndim - 2), jax.lax.iota("int32", v.shape[-2]) // group)
        spread = NamedSharding(mesh, PartitionSpec(*({"B": rows, "H": heads}.get(axis) for axis in axes[0])))
        q, k = (place(x, axes[0], {}, None).at[index].get(out_sharding=spread) for x in (q, k))
    arrays = (q, k, *arrays[2:])
    return tuple(None if x is None else place(x, n, s, heads) for x, n, s in zip(arrays, axes, specs, strict=True))


def over_shards(run: Callable, arrays: tuple, axes: tuple[str, ...], out_axes: tuple[str, ...]) -> tuple:
    """run(*arrays), each device on its own rows and heads where the arrays (out of `place_alike`) lie on Explicit axes.

    For a run that XLA cannot split: a kernel.
    """
    shardings = [None if x is None else jax.typeof(x).sharding for x in arrays]
    mesh = _explicit_mesh(shardings)
    if mesh is None:
        return run(*arrays)
    placed = [dict(zip(n, s.spec, strict=True)) for s, n in zip(shardings, axes, strict=True) if s is not None]
    layout = {axis: next((s[axis] for s in placed if s.get(axis) is not None), None) for axis in "BH"}
    return split(run, arrays, axes, out_axes, layout)


def split(
    run: Callable,
    arrays: tuple,
    axes: tuple[str, ...],
    out_axes: tuple[str, ...],
    layout: dict[str, object],
    mesh: jax.sharding.Mesh | None = None,
) -> tuple:
    """run(*arrays) in a shard_map that cuts the axes named in layout, such as {"B": "data", "H": "tensor"}."""
    spec = lambda names: PartitionSpec(*(layout.get(axis) for axis in names))  # noqa: E731
    present = [x is not None for x in arrays]
    specs = tuple(spec(n) for n, there in zip(axes, present, strict=True) if there)

    def local(*parts):
        parts = iter(same_axes(parts))
        return run(*(next(parts) if there else None for there in present))

    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=tuple(map(spec, out_axes)))(
        *(x for x in arrays if x is not None)
    )


def rows_are_cut(x) -> bool:
    """Whether the first axis of x lies over several devices by an Explicit axis; False for a shape without a layout."""
    sharding = getattr(jax.typeof(x) if isinstance(x, jax.Array) else x, "sharding", None)
    spec = getattr(sharding, "spec", None)
    return bool(spec) and spec[0] is not None and AxisType.Explicit in sharding.mesh.axis_types


def row_sharding(rows, pool):
    """For reads of pool [P, ...] by rows [B]: the layout of [B, ...] on Explicit axes, else None."""
    sharding = jax.typeof(pool).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return sharding.update(spec=PartitionSpec(*jax.typeof(rows).sharding.spec, *sharding.spec[1:]))


def repeat_heads(x: jax.Array, times: int, axis: int) -> jax.Array:
    """Every head `times` times in a row along axis: value head j reads q/k head j // times.

    jnp.repeat, written so that a head axis sharded over an Explicit mesh stays sharded.
    """
    if times == 1:
        return x
    shape = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
    heads = x.shape[axis] * times
    return jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape).reshape(*x.shape[:axis], heads, *x.shape[axis + 1 :])


def laid_as(cotangent, primal):
    """Summed over the shard_map axes that the cotangent alone varies over; on Explicit axes, placed as primal is."""
    sharding, summed = jax.typeof(primal).sharding, varying(cotangent) - varying(primal)
    if summed:
        cotangent = jax.lax.psum(cotangent, tuple(summed))
    return jax.sharding.reshard(cotangent, sharding) if AxisType.Explicit in sharding.mesh.axis_types else cotangent


def _explicit_mesh(shardings):
    return next((s.mesh for s in shardings if s is not None and AxisType.Explicit in s.mesh.axis_types), None)
