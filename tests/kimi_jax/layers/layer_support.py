"""What the tests of layers share: jitted calls, random inputs, parameters large enough to matter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def call(layer, *args, **kwargs):
    """layer(*args, **kwargs), compiled: far quicker than op by op, and traced as in a model."""
    return _call(*nnx.split(layer), args, kwargs)


@functools.partial(jax.jit, static_argnums=0)
def _call(graphdef, state, args, kwargs):
    return nnx.merge(graphdef, state)(*args, **kwargs)


def inputs(*shape, seed=1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def randomise(layer: nnx.Module, seed=0) -> nnx.Module:
    """Matrices of unit gain and uneven norm weights, in place; vectors of other kinds keep their initial values."""
    rng = np.random.default_rng(seed)
    for path, parameter in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
        shape = parameter.shape
        if len(shape) > 1:
            value = rng.normal(size=shape) / np.sqrt(shape[-2] if "conv" not in str(path) else 1)
        elif "norm" in str(path):
            value = rng.uniform(0.5, 1.5, size=shape)
        else:
            continue
        nnx.update(layer, nnx.from_flat_state([(path, parameter.replace(jnp.asarray(value, parameter.dtype)))]))
    return layer
