"""The gate inside the kernels: log-decays of raw inputs, and back. Tiles are [64 tokens, 64 channels], WALK layout."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .registers import WALK, over_tokens

__all__ = ["LEAST", "LOG2E", "gate_cotangents", "log2_gate", "read_bias"]

LOG2E = 1.4426950408889634
LEAST = -126.0  # log2 of the smallest decay


def read_bias(bias_hbm, h, i, o):
    """The gate's bias for 64 channels of head h; None if it has none."""
    if o.gate == "log":
        return None
    return plgpu.load(bias_hbm.at[h, pl.ds(64 * i, 64)], layout=WALK.reduce(0), optimized=False)


def log2_gate(x, rate, bias, o):
    """Log-decay per token in base 2 of gate input x; rate a number, bias [64]."""
    if o.gate == "log":
        return x * LOG2E
    z = x + over_tokens(bias, WALK)
    if o.gate == "bounded":  # lower_bound * sigmoid(rate z); 1 / y as rsqrt(y)^2, since a division is long
        r = jax.lax.rsqrt(1.0 + jnp.exp2(z * (-LOG2E * rate)))
        return r * r * (o.lower_bound * LOG2E)
    z = z * LOG2E  # -rate * softplus(z)
    return -rate * (jnp.maximum(z, 0.0) + jnp.log2(1.0 + jnp.exp2(-jnp.abs(z))))


def gate_cotangents(x, rate, bias, o, dg):
    """Of gate input x and of log(rate), as gates.activate_gate_vjp: 0, and not 0 * inf, where nothing is left.

    Nothing is where the decay underflows: dg is then rounding of sums that cancel, and the gate may be -inf.
    """
    gate = log2_gate(x, rate, bias, o)
    dg = jnp.where(gate < LEAST, 0.0, dg)
    y = x + over_tokens(bias, WALK)
    sigmoid = lambda z: (lambda r: r * r)(jax.lax.rsqrt(1.0 + jnp.exp2(z * -LOG2E)))  # noqa: E731
    if o.gate == "bounded":
        z = y * rate
        slope = sigmoid(z) * sigmoid(-z) * o.lower_bound
        return dg * (slope * rate), jnp.where(slope == 0, 0.0, dg * slope * z)
    return dg * (sigmoid(y) * -rate), jnp.where(dg == 0, 0.0, dg * (gate * (1.0 / LOG2E)))
