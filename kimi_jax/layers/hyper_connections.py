"""mHC: several residual streams that sub-layers read, write and mix, the mixing kept doubly stochastic.

The form that AttnRes compares with (its sections on I/O and structured matrices): m streams H [m, D] instead of one,

    read     x = sum_j read_j H_j                      what the sub-layer sees, after its own norm
    write    H_j <- sum_k carry_jk H_k + write_j f(x)

with, per token, read = sigmoid(.), write = 2 sigmoid(.) and carry = Sinkhorn(exp(.)) of one projection of the
RMS-normed streams [m D] -> m + m + m^2, plus a bias each. At the start all streams are the embedding, at the end their
mean is read.

Step 0 equals the plain residual: the projection and write's bias are zero, so every stream gets 2 sigmoid(0) = 1 times
the output; rows of carry sum to one, so equal streams stay equal; reading then gives h times a positive constant, which
the norm takes out. What may differ between streams without breaking this are the biases of read, which are therefore
drawn at random: with equal ones no gradient would ever tell two streams apart. While streams are still equal, how they
are read and carried makes no difference: at step 0, and only then, write alone has gradients, which differ by stream.

Chosen here, since the facts we hold leave it open: no gain in the norm and no scalar gates (the zero projection takes
their place), 20 Sinkhorn rounds, and a bias of 5 on carry's diagonal, by which four streams keep 98% of themselves.
"""

from functools import reduce

import jax
import jax.numpy as jnp
from flax import nnx

from kimi_jax.sharding import project

from .norms import rms_norm
from .parameters import at_least_float32

SINKHORN_ROUNDS = 20
KEPT = 5.0  # bias of carry's diagonal


class HyperConnection(nnx.Module):
    """The parameters of one sub-layer's reading and writing.

    Attributes:
        coefficients: [m D, m + m + m^2], from the normed streams to the arguments of read, write and carry.
        read_bias, write_bias: [m].
        carry_bias: [m, m], to (row) and from (column) which stream.
    """

    def __init__(self, dim: int, streams: int, *, eps: float, rngs: nnx.Rngs, param_dtype=jnp.float32):
        self.streams, self.eps = streams, eps
        count = streams * (2 + streams)
        self.coefficients = nnx.Param(jnp.zeros((streams * dim, count), param_dtype), axes=("embed", None))
        # Drawn from a copy, so that all other parameters have the values that they have with any other residual.
        key = jax.random.fold_in(nnx.clone(rngs).params(), 1)
        self.read_bias = nnx.Param(jax.random.normal(key, (streams,)).astype(param_dtype), axes=(None,))
        self.write_bias = nnx.Param(jnp.zeros(streams, param_dtype), axes=(None,))
        self.carry_bias = nnx.Param(KEPT * jnp.eye(streams, dtype=param_dtype), axes=(None, None))

    def read(self, streams: jax.Array) -> jax.Array:
        """What the sub-layer sees [..., D] of streams [..., m, D]."""
        return _weighed_sum(self._arguments(streams)[..., : self.streams], self.read_bias[...], streams)

    def write(self, streams: jax.Array, output: jax.Array) -> jax.Array:
        """The streams [..., m, D] after a sub-layer that read them as they are given here."""
        arguments = self._arguments(streams)[..., self.streams :]
        return _carried(arguments, self.write_bias[...], self.carry_bias[...], streams, output)

    def _arguments(self, streams):
        flat = streams.reshape(*streams.shape[:-2], -1)
        normed = rms_norm(flat, jnp.ones(flat.shape[-1], flat.dtype), self.eps, flat.dtype)
        return project(normed, self.coefficients, ("batch",) + (None,) * (flat.ndim - 1))


def split_streams(x: jax.Array, streams: int) -> jax.Array:
    """[..., D] -> [..., m, D], all equal."""
    return jnp.stack([x] * streams, axis=-2)


def merge_streams(streams: jax.Array) -> jax.Array:
    """[..., m, D] -> [..., D], their mean."""
    return jnp.mean(streams.astype(at_least_float32(streams.dtype)), axis=-2).astype(streams.dtype)


def sinkhorn(logits: jax.Array) -> jax.Array:
    """exp(logits [..., m, m]) with columns and rows brought to sum 1 in turn, rows last. In logarithms: no sum can
    underflow to zero, however far apart the logits are."""

    def balance(_, x):
        x = x - jax.nn.logsumexp(x, axis=-2, keepdims=True)
        return x - jax.nn.logsumexp(x, axis=-1, keepdims=True)

    return jnp.exp(jax.lax.fori_loop(0, SINKHORN_ROUNDS, balance, logits))


@jax.checkpoint
def _weighed_sum(arguments, bias, streams):
    dtype = at_least_float32(streams.dtype)
    read = jax.nn.sigmoid(arguments.astype(dtype) + bias.astype(dtype))
    return jnp.sum(read[..., None] * streams.astype(dtype), axis=-2).astype(streams.dtype)


@jax.checkpoint
def _carried(arguments, write_bias, carry_bias, streams, output):
    dtype, m = at_least_float32(streams.dtype), streams.shape[-2]
    arguments, exact = arguments.astype(dtype), streams.astype(dtype)
    write = 2 * jax.nn.sigmoid(arguments[..., :m] + write_bias.astype(dtype))
    carry = sinkhorn(arguments[..., m:].reshape(*arguments.shape[:-1], m, m) + carry_bias.astype(dtype))
    # Products of numbers rather than of matrices: they are tiny, and float32 stays float32 on every device.
    terms = [carry[..., :, k, None] * exact[..., None, k, :] for k in range(m)]
    terms.append(write[..., None] * output.astype(dtype)[..., None, :])
    return reduce(jnp.add, terms).astype(streams.dtype)
