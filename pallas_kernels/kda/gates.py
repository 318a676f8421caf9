"""The two decay gates of KDA: raw logits in, log-decay g <= 0 out (natural logarithm).

    softplus   g = -exp(A_log) * softplus(x + dt_bias)               in (-inf, 0)   Kimi Linear (KDA, section 4)
    bounded    g = lower_bound * sigmoid(exp(A_log) * (x + dt_bias)) in (lb, 0)     K3, section 2

They are different families of models, not two speeds of one: a bounded gate is not a clamped softplus.
Both are differentiated by hand, because autodiff of either multiplies 0 by inf at logits that training reaches.
"""

from functools import partial

import jax
import jax.numpy as jnp

from .mesh import laid_as

__all__ = [
    "activate_gate",
    "activate_gate_vjp",
    "bounded_gate",
    "check_lower_bound",
    "gate_parameters",
    "softplus_gate",
]


def softplus_gate(x: jax.Array, A_log: jax.Array | None = None, dt_bias: jax.Array | None = None) -> jax.Array:
    """Unbounded log-decay, g = -exp(A_log) * softplus(x + dt_bias).

    Args:
        x: raw logits `[..., HV, K]`, any float dtype.
        A_log: `[HV]`, logarithm of the rate of each value head; None is 0.
        dt_bias: `[HV, K]` or `[HV*K]`; None is 0.

    Returns:
        g `[..., HV, K]` in nats, float32 (float64 if x is). softplus(y) is y above 20, as in the released models.

    Raises:
        ValueError: if A_log or dt_bias does not fit the last two axes of x.
    """
    A_log, dt_bias = gate_parameters(x, A_log, dt_bias)
    return activate_gate(x, A_log[:, None], dt_bias, None)


def bounded_gate(
    x: jax.Array, A_log: jax.Array | None = None, dt_bias: jax.Array | None = None, lower_bound: float = -5.0
) -> jax.Array:
    """Bounded log-decay, g = lower_bound * sigmoid(exp(A_log) * (x + dt_bias)).

    Args:
        x: raw logits `[..., HV, K]`, any float dtype.
        A_log: `[HV]`, logarithm of the slope of each value head; None is 0.
        dt_bias: `[HV, K]` or `[HV*K]`; None is 0.
        lower_bound: the most negative log-decay per step, in nats; a finite number below 0.

    Returns:
        g `[..., HV, K]` in nats, float32 (float64 if x is).

    Raises:
        ValueError: for a lower_bound that is not a finite negative number, or parameters that do not fit x.
    """
    check_lower_bound(lower_bound)
    A_log, dt_bias = gate_parameters(x, A_log, dt_bias)
    return activate_gate(x, A_log[:, None], dt_bias, float(lower_bound))


def check_lower_bound(lower_bound) -> None:
    """ValueError unless lower_bound is a finite number below 0."""
    if not isinstance(lower_bound, (int, float)) or not -float("inf") < lower_bound < 0:
        raise ValueError(f"lower_bound: got {lower_bound!r}; allowed is a finite number of nats below 0, such as -5.0")


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def activate_gate(x, A_log, dt_bias, lower_bound: float | None) -> jax.Array:
    """g of raw logits x, with A_log and dt_bias of any shapes that broadcast; lower_bound None is the softplus gate."""
    y, a, _ = _scaled_logits(x, A_log, dt_bias)
    if lower_bound is None:
        return -a * _softplus(y)
    return lower_bound * jax.nn.sigmoid(a * y)


def activate_gate_vjp(x, A_log, dt_bias, lower_bound: float | None, dg) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cotangents of x, A_log and dt_bias of `activate_gate` for a cotangent dg, all in the compute dtype.

    A total forgetting (g = -inf, or a rate that overflows) comes with dg = 0 and must give 0, not 0 * inf:
    the rate is kept finite, and products with the unbounded y or g are selected by the factor that vanishes.
    """
    y, a, dtype = _scaled_logits(x, A_log, dt_bias)
    dg = dg.astype(dtype)
    if lower_bound is None:
        dx = dg * (-a * jax.nn.sigmoid(y))
        dA = jnp.where(dg == 0, 0.0, dg * (-a * _softplus(y)))
    else:
        z = a * y
        slope = lower_bound * jax.nn.sigmoid(z) * jax.nn.sigmoid(-z)
        dx = dg * (slope * a)
        dA = jnp.where(slope == 0, 0.0, dg * slope * z)
    return dx, _sum_to(dA, A_log.shape), _sum_to(dx, dt_bias.shape)


def _gate_fwd(x, A_log, dt_bias, lower_bound):
    return activate_gate(x, A_log, dt_bias, lower_bound), (x, A_log, dt_bias)


def _gate_bwd(lower_bound, saved, dg):
    x, A_log, dt_bias = saved
    dx, dA, db = activate_gate_vjp(x, A_log, dt_bias, lower_bound, dg)
    return tuple(laid_as(d.astype(p.dtype), p) for d, p in ((dx, x), (dA, A_log), (db, dt_bias)))


activate_gate.defvjp(_gate_fwd, _gate_bwd)


def gate_parameters(x, A_log, dt_bias):
    """A_log [HV] and dt_bias [HV, K], zeros where None, refused where they do not fit x."""
    if x.ndim < 2:
        raise ValueError(f"x: got shape {x.shape}; allowed is [..., HV, K]")
    HV, K = x.shape[-2:]
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    if A_log is None:
        A_log = jnp.zeros((HV,), dtype)
    elif A_log.shape != (HV,):
        raise ValueError(f"A_log: got shape {A_log.shape}; allowed is [HV] = ({HV},)")
    if dt_bias is None:
        dt_bias = jnp.zeros((HV, K), dtype)
    elif dt_bias.shape not in ((HV, K), (HV * K,)):
        raise ValueError(
            f"dt_bias: got shape {dt_bias.shape}; allowed is [HV, K] = ({HV}, {K}) or [HV*K] = ({HV * K},)"
        )
    return A_log, dt_bias.reshape(HV, K)


def _scaled_logits(x, A_log, dt_bias):
    """y = x + dt_bias and the finite rate exp(A_log), in float32 or float64."""
    dtype = jnp.promote_types(jnp.promote_types(x.dtype, A_log.dtype), jnp.float32)
    y = x.astype(dtype) + dt_bias.astype(dtype)
    a = jnp.minimum(jnp.exp(A_log.astype(dtype)), 1e-6 * jnp.finfo(dtype).max)  # finite, also times a cotangent
    return y, a, dtype


def _sum_to(x, shape):
    """x summed over the axes along which an array of this shape was broadcast."""
    full = (1,) * (x.ndim - len(shape)) + shape
    return jnp.sum(x, axis=[i for i, n in enumerate(full) if n == 1 and x.shape[i] > 1], keepdims=True).reshape(shape)


def _softplus(y):
    return jnp.where(y > 20, y, jnp.log1p(jnp.exp(jnp.minimum(y, 20))))
