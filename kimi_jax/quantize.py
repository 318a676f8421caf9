"""int8 and int4 weights as far as numbers go: what a model computes when its weights have been rounded to few levels.

The parameters keep their dtype: this measures what quantisation would cost. Decay, writing strength and gates act on a
state that lives for the whole sequence and are a small part of the weights, so they are left alone by default, as are
norms, routers, short convolutions and the queries of AttnRes.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .hf_tensors import MATRIX, official_tensors
from .model import KimiLM

# Official names, by their ends.
SENSITIVE = (
    ".A_log",
    ".dt_bias",
    "_conv1d.weight",
    ".self_attn.b_proj.weight",
    ".f_a_proj.weight",
    ".f_b_proj.weight",
    ".g_proj.weight",
    ".g_a_proj.weight",
    ".g_b_proj.weight",
    "_res_proj.weight",
    "norm.weight",
    ".block_sparse_moe.gate.weight",
    ".e_score_correction_bias",
)


def round_weights(model: KimiLM, bits: int = 8, *, keep: Sequence[str] = SENSITIVE) -> None:
    """Round a model's weights, in place, to integers of so many bits; those whose official names end in one of `keep`
    stay.

    Every output channel of a matrix, row of the embedding and channel of a convolution has a scale of its own, its
    largest magnitude over the largest integer (127 of 8 bits, 7 of 4); a vector has one. keep=(): every weight.

    Raises:
      ValueError: bits that are not 2 to 8.
    """
    if bits not in range(2, 9):
        raise ValueError(f"bits={bits!r} is not allowed: 2 to 8")
    rounded = {}  # by variable: names of one variable, its experts', end alike
    for name, tensor in official_tensors(model).items():
        if not name.endswith(tuple(keep)):
            rounded[id(tensor.variable)] = tensor
    for variable, layout, *_ in rounded.values():
        channels = -2 if layout == MATRIX else -1
        variable[...] = _round(variable[...], channels, 2 ** (bits - 1) - 1)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _round(x: jax.Array, axis: int, largest: int) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=axis, keepdims=True) / largest
    return (jnp.round(wide / jnp.where(scale == 0, 1, scale)) * scale).astype(x.dtype)
