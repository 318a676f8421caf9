"""What happens to one head's raw inputs before and after the chunk's algebra, on [64, K] float32 values.

The same formulas as gates.py and reference.py, spelled for one head: parameters are rows [1, K] and never broadcast in
memory. Padding may hold NaN, so that it is selected away before anything is computed from it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

__all__ = ["Options", "gate_vjp", "log_decay", "normalise_vjp", "reciprocal", "sigmoid"]


class Options(NamedTuple):
    """What is static about a call; K and V are 64, 128 or 256."""

    scale: float
    gate: str
    lower_bound: float | None
    qk_l2norm: bool
    beta_sigmoid: bool
    exact: bool  # q, k and v are float32: float32-grade products
    tiled: bool  # the gate is bounded so that tiles of 16 tokens may be anchored at their start
    K: int
    V: int
    heads: int  # value heads of a program
    group: int  # value heads that read one q/k head, within the program
    flagged: bool  # there are flags: padding, or segments that begin inside a chunk
    slots: int | None  # states per row; None is one, without an axis of its own


def log_decay(x: jax.Array, rate: jax.Array, bias: jax.Array, options: Options) -> jax.Array:
    """g [64, K] in nats of what the caller passed as g. rate = e^A_log and bias are [1, K], unused for gate "log"."""
    if options.gate == "log":
        return x
    y = x + bias
    if options.gate == "softplus":
        return -rate * _softplus(y)
    return options.lower_bound * sigmoid(rate * y, options.exact)


def gate_vjp(x, rate, bias, dg, options: Options) -> tuple[jax.Array, jax.Array | None]:
    """Cotangent of the raw x [64, K], and the terms whose sum is A_log's (None for gate "log").

    Where the unbounded g or its slope is 0 or infinite, so that dg = 0, the products are selected and not multiplied.
    """
    if options.gate == "log":
        return dg, None
    y = x + bias
    if options.gate == "softplus":
        dx = dg * (-rate * sigmoid(y, options.exact))
        return dx, jnp.where(dg == 0, 0.0, dg * (-rate * _softplus(y)))
    z = rate * y
    rise, fall = _sigmoids(z, options.exact)
    slope = jnp.where(z < -80, 0.0, options.lower_bound * rise * fall)  # `_sigmoids` stops falling there
    return dg * (slope * rate), jnp.where(slope == 0, 0.0, dg * slope * z)


def normalise_vjp(y: jax.Array, r: jax.Array, dy: jax.Array) -> jax.Array:
    """Cotangent of x [C, K] for y = r x with r = (sum x^2 + 1e-6)^-1/2 [C, 1]."""
    return r * (dy - y * jnp.sum(y * dy, axis=1, keepdims=True))


def sigmoid(x: jax.Array, exact: bool) -> jax.Array:
    return _sigmoids(x, exact)[0]


def reciprocal(x: jax.Array, exact: bool) -> jax.Array:
    """1 / x for x > 0 whose reciprocal is finite and normal.

    A division spends twice as many instructions, half of them on the values that are excluded here. Its own way is the
    same estimate with the same Newton step, which an interpreter starts from 9 bits: hence the division if exact.
    """
    if exact:
        return 1.0 / x
    y = pl.reciprocal(x, approx=True)
    return y * (2.0 - x * y)


def _sigmoids(x, exact):
    """sigmoid(x) and sigmoid(-x), neither by subtraction from 1."""
    e = jnp.exp(jnp.minimum(-x, 80.0))
    rise = reciprocal(1.0 + e, exact)
    return rise, e * rise


def _softplus(y):
    return jnp.where(y > 20, y, jnp.log1p(jnp.exp(jnp.minimum(y, 20.0))))
