"""RMSNorm, and the gated one that closes a KDA layer.

Both normalise in float32 (float64 for float64 inputs). They differ in what happens next, as the released models do:
RMSNorm rounds to the layer's dtype before its weight, the gated norm stays in float32 through weight and gate.
Their backward passes recompute the normalised values instead of keeping float32 copies of the activations.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from .parameters import at_least_float32, ones

OUTPUT_GATES = ("sigmoid", "swish", None)


class RMSNorm(nnx.Module):
    """x * rsqrt(mean x^2 + eps), rounded to the layer's dtype, times a weight (not 1 + weight)."""

    def __init__(self, dim: int, *, eps: float, rngs: nnx.Rngs, dtype=jnp.float32, param_dtype=jnp.float32):
        self.eps, self.dtype = eps, dtype
        self.weight = ones(dim, param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., dim] -> the same shape in the layer's dtype."""
        return rms_norm(x, self.weight[...], self.eps, self.dtype)


class GatedRMSNorm(nnx.Module):
    """RMSNorm per head, times one weight [head_dim] that all heads share, times activation(gate).

    (KDA, section 4: norm first, then the gate.) activation: "sigmoid" (the paper's), "swish" (gate * sigmoid(gate),
    its ablation) or None (no gate). The weight is never below float32, as the released models keep it.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        eps: float,
        activation: str | None = "sigmoid",
        rngs: nnx.Rngs,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    ):
        if activation not in OUTPUT_GATES:
            raise ValueError(f"output gate {activation!r} is unknown; allowed: {OUTPUT_GATES}")
        self.eps, self.activation, self.dtype = eps, activation, dtype
        self.weight = ones(head_dim, at_least_float32(param_dtype))

    def __call__(self, x: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        """x, gate (raw logits) [..., head_dim] -> the same shape in the layer's dtype."""
        if (gate is None) != (self.activation is None):
            raise ValueError(f"gate is {'missing' if gate is None else 'given'}, the norm has {self.activation=}")
        return gated_rms_norm(x, self.weight[...], gate, self.eps, self.activation, self.dtype)


@functools.partial(jax.checkpoint, static_argnums=(2, 3))
def rms_norm(x: jax.Array, weight: jax.Array, eps: float, dtype: jnp.dtype) -> jax.Array:
    """The function of `RMSNorm`."""
    return _normalise(x, eps).astype(dtype) * weight.astype(dtype)


@functools.partial(jax.checkpoint, static_argnums=(3, 4, 5))
def gated_rms_norm(
    x: jax.Array, weight: jax.Array, gate: jax.Array | None, eps: float, activation: str | None, dtype: jnp.dtype
) -> jax.Array:
    """The function of `GatedRMSNorm`."""
    y = _normalise(x, eps)
    y = y * weight.astype(y.dtype)
    if gate is not None:
        gate = gate.astype(y.dtype)
        y = y * (jax.nn.sigmoid(gate) if activation == "sigmoid" else jax.nn.silu(gate))
    return y.astype(dtype)


def _normalise(x, eps):
    x = jnp.asarray(x)
    x = x.astype(at_least_float32(x.dtype))
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
