"""Muon on stacks of matrices: momentum, orthogonalised by five Newton-Schulz steps (Jordan et al. 2024).

optax.contrib.muon is not used whole: it bias-corrects the Nesterov momentum and takes every 2-D array for a matrix. Its
Newton-Schulz part is.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

ADJUSTMENTS = ("match_rms_adamw", "original")
_MATRIX = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)  # stored [in, out]; axes in front are a stack


def scale_by_momentum_and_shape(
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    adjust: str = "match_rms_adamw",
    heads: Mapping[str, int] | None = None,
) -> optax.GradientTransformation:
    """The direction of Muon, of unit learning rate, for leaves [..., in, out]; negate and scale it after.

    Args:
      momentum: of the running sum of gradients, buf = momentum * buf + grad.
      nesterov: orthogonalise grad + momentum * buf instead of buf.
      adjust: "match_rms_adamw" multiplies by 0.2 sqrt(max(in, out)), which makes a learning rate of AdamW fit (Liu et
        al. 2025); "original" by sqrt(max(1, out / in)).
      heads: for the leaves named here (by their path, "blocks.0.attention.q") the number of equal column blocks that
        are orthogonalised, and sized, one by one: Per-Head Muon (K3).

    Raises:
      ValueError: an unknown adjust, a leaf with fewer than two axes, heads that do not divide a leaf's columns.
    """
    if adjust not in ADJUSTMENTS:
        raise ValueError(f"adjust={adjust!r} is unknown; allowed: {', '.join(ADJUSTMENTS)}")
    heads = dict(heads or {})

    def matrices(path, update):
        """Those of a leaf."""
        name = leaf_name(path)
        if update.ndim < 2:
            raise ValueError(f"Muon takes matrices [..., in, out]; {name} has shape {update.shape}")
        blocks = heads.get(name, 1)
        if update.shape[-1] % blocks:
            raise ValueError(f"heads={blocks} does not divide the {update.shape[-1]} columns of {name}")
        by_head = update.reshape(*update.shape[:-1], blocks, update.shape[-1] // blocks)
        return jnp.moveaxis(by_head, -2, -3)  # [..., blocks, in, out / blocks]

    def as_leaf(found, update):
        fan_in, fan_out = found.shape[-2:]
        factor = 0.2 * max(fan_in, fan_out) ** 0.5 if adjust == "match_rms_adamw" else max(1, fan_out / fan_in) ** 0.5
        return jnp.moveaxis(found * factor, -3, -2).reshape(update.shape)

    def directions(updates, params):
        leaves = jax.tree_util.tree_map_with_path(matrices, updates)
        return jax.tree.map(as_leaf, _orthogonalize_all(leaves), updates)

    return optax.chain(
        optax.trace(momentum, nesterov=nesterov),
        optax.stateless(directions),
    )


def leaf_name(path) -> str:
    """A leaf's path in dots, without the "value" that flax ends it with."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def _orthogonalize_all(tree: Any) -> Any:
    """Each of the matrices [..., in, out] in a tree, those of one size at once: a model's layers would else have
    hundreds of small products to compile and to launch. On a mesh leaf by leaf, since each is laid out in its own way.
    """
    if jax.sharding.get_abstract_mesh().size > 1:
        return jax.tree.map(_orthogonalize, tree)
    leaves, structure = jax.tree.flatten(tree)
    sizes = [leaf.shape[-2:] for leaf in leaves]
    found: list[Any] = [None] * len(leaves)
    for size in dict.fromkeys(sizes):
        own = [i for i in range(len(leaves)) if sizes[i] == size]
        stacks = [leaves[i].reshape(-1, *size) for i in own]
        ends = np.cumsum([len(stack) for stack in stacks])
        for i, stack in zip(own, jnp.split(_orthogonalize(jnp.concatenate(stacks)), ends[:-1]), strict=True):
            found[i] = stack.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, found)


def _orthogonalize(matrices: jax.Array) -> jax.Array:
    # With beta=0 the transformation has nothing to remember, so its state, a copy of the gradients, is not kept.
    newton_schulz = scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=_MATRIX)
    return newton_schulz.update(matrices, newton_schulz.init(matrices))[0]
