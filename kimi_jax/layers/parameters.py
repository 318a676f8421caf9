"""How layers make their parameters: a normal draw with logical axes attached, for `kimi_jax.sharding` to place."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from kimi_jax.sharding import RULES

INIT_STD = 0.02


def weight(
    rngs: nnx.Rngs, shape: Sequence[int], axes: Sequence[str | None], dtype: jnp.dtype, std: float = INIT_STD
) -> nnx.Param:
    """A parameter drawn from N(0, std^2), stored [in, out], with one logical axis name (or None) per dimension."""
    return nnx.Param((std * jax.random.normal(rngs.params(), shape)).astype(dtype), axes=tuple(axes))


def ones(dim: int, dtype: jnp.dtype) -> nnx.Param:
    """The weight of a norm: ones, replicated."""
    return nnx.Param(jnp.ones(dim, dtype), axes=(None,))


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of norms, gates and sums over inputs of this dtype: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def check_heads(**counts: int) -> None:
    """ValueError, naming count and mesh axes, if tensor parallelism on the mesh in force would have to cut a head.

    A flattened width may divide where the number of heads does not, so it is the numbers that are checked.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = [axis for axis in RULES.heads if axis in mesh.axis_names]
    shards = math.prod(mesh.shape[axis] for axis in axes)
    for name, count in counts.items():
        if count % shards:
            raise ValueError(f"{name}={count} cannot be split over {'*'.join(axes)}={shards}: heads are cut whole")
