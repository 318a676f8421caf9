"""The gated feed-forward network, with SwiGLU (KDA) or SiTU (K3, its smoothly bounded successor)."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from kimi_jax.sharding import project

from .parameters import at_least_float32, weight

ACTIVATIONS = ("swiglu", "situ")


@dataclasses.dataclass(frozen=True)
class Activation:
    """The function (gate, up) -> activation(gate) * up by name; ValueError for a name not in ACTIVATIONS."""

    name: str = "swiglu"
    situ_beta: float = 4.0
    situ_linear_beta: float | None = 25.0

    def __post_init__(self):
        if self.name not in ACTIVATIONS:
            raise ValueError(f"activation {self.name!r} is unknown; allowed: {ACTIVATIONS}")

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        if self.name == "swiglu":
            return swiglu(gate, up)
        return situ(gate, up, self.situ_beta, self.situ_linear_beta)


class FeedForward(nnx.Module):
    """down(glu(gate(x), up(x))): hidden -> width -> hidden, no biases."""

    def __init__(
        self,
        hidden: int,
        width: int,
        *,
        activation: str = "swiglu",
        situ_beta: float = 4.0,
        situ_linear_beta: float | None = 25.0,
        rngs: nnx.Rngs,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    ):
        self.dtype = dtype
        self.activation = Activation(activation, situ_beta, situ_linear_beta)
        self.gate = weight(rngs, (hidden, width), ("embed", "ffn"), param_dtype)
        self.up = weight(rngs, (hidden, width), ("embed", "ffn"), param_dtype)
        self.down = weight(rngs, (width, hidden), ("ffn", "embed"), param_dtype)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """x [B, T, hidden] -> [B, T, hidden]."""
        x_BTD = x_BTD.astype(self.dtype)
        inner = ("batch", None, "ffn")
        h_BTF = self.activation(project(x_BTD, self.gate, inner), project(x_BTD, self.up, inner))
        return project(h_BTF, self.down, ("batch", None, None))


@jax.checkpoint
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """SiLU(gate) * up."""
    return jax.nn.silu(gate) * up


def situ(gate: jax.Array, up: jax.Array, beta: float = 4.0, linear_beta: float | None = 25.0) -> jax.Array:
    """[beta tanh(gate / beta) sigmoid(gate)] * [linear_beta tanh(up / linear_beta)] in float32 (K3).

    Near zero this is SwiGLU; it never exceeds beta * linear_beta. linear_beta=None leaves `up` unbounded.
    """

    @jax.checkpoint
    def bounded(gate, up):
        wide = at_least_float32(gate.dtype)
        g, u = gate.astype(wide), up.astype(wide)
        if linear_beta is not None:
            u = linear_beta * jnp.tanh(u / linear_beta)
        return (beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g) * u).astype(gate.dtype)

    return bounded(gate, up)
