"""attn_res in plain XLA operations, with a hand-written reverse pass. Runs on every device.

The operation is bound by memory traffic (about six flops per source element), so the algorithm is a traffic plan:

forward    pass 1 reads every source once: rstd r_i = rsqrt(mean v_i^2 + eps) and logit s_i = r_i (v_i . u),
           where u = query * key_scale. Both are one scalar per source and token.
           pass 2 reads every source once: h = sum_i a_i v_i with a = softmax(s).
reverse    keeps the inputs themselves, s and r: neither h nor a wider copy of a source survives the forward pass.
           With a = softmax(s) again, G the cotangent of h and e that of the log-sum-exp,
           pass 1: c_i = G . v_i, and from it ds_i = a_i (c_i - sum_j a_j c_j + e)
           pass 2: du   = sum over tokens and sources of ds_i r_i v_i
           pass 3: dv_i = a_i G + ds_i r_i (u - v_i r_i s_i / D)
           With the following RMSNorm fused in, h is mixed once more and G is the cotangent behind that norm.

Sources are never stacked, a buffer is read row by row. Products with u are elementwise with a sum, so that no
machine rounds them to a narrower matmul format.
"""

from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from ..varying import same_axes
from .inputs import Inputs


def mix_xla(inputs: Inputs, return_lse: bool) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The mix of `inputs`, and with `return_lse` its log-sum-exp."""
    sources, count = inputs.sources, inputs.count
    if not inputs.is_buffer and len(sources) == 1 and inputs.output_scale is None and not return_lse:
        return sources[0]  # the softmax over one source is 1, whatever the query

    dtype = inputs.compute_dtype
    gain = inputs.query.astype(dtype)
    if inputs.key_scale is not None:
        gain = gain * inputs.key_scale.astype(dtype)
    output_scale = None if inputs.output_scale is None else inputs.output_scale.astype(dtype)

    rows = len(sources)
    if isinstance(count, int):
        rows, count = count, None
    sources, gain, output_scale, count = same_axes((sources, gain, output_scale, count))
    mixture, lse = _mix(_Static(inputs.eps, dtype, rows), sources, gain, output_scale, count)
    return (mixture, lse) if return_lse else mixture


class _Static(NamedTuple):
    eps: float
    dtype: jnp.dtype  # of all arithmetic
    rows: int  # sources to read: all, or the live ones where their number is known while tracing


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(static, sources, gain, output_scale, count):
    return _mix_forward(static, sources, gain, output_scale, count)[0]


def _mix_forward(static, sources, gain, output_scale, count):
    products, rstds = [], []
    for i in range(static.rows):
        v = _read(static, sources, count, i, after=(products[-1:], rstds[-1:]))
        products.append(jnp.sum(v * gain, axis=-1))
        rstds.append(jax.lax.rsqrt(jnp.mean(v * v, axis=-1) + static.eps))
    logits = [_only_live(x * r, count, i, -jnp.inf) for i, (x, r) in enumerate(zip(products, rstds, strict=True))]
    weights, lse = _softmax(logits)
    mixture = _weighted_sum(static, sources, weights, count)
    if output_scale is not None:
        mixture = mixture * _rstd(static, mixture) * output_scale
    residuals = sources, gain, output_scale, count, logits, rstds
    return (mixture.astype(_dtype(sources)), lse), residuals


def _mix_backward(static, residuals, cotangents):
    sources, gain, output_scale, count, logits, rstds = residuals
    mixture_bar, lse_bar = cotangents
    g = mixture_bar.astype(static.dtype)  # [..., D]
    weights, _ = _softmax(logits)
    token_axes = tuple(range(g.ndim - 1))

    output_scale_bar = None
    if output_scale is not None:
        h = _weighted_sum(static, sources, weights, count)
        rstd = _rstd(static, h)
        h = h * rstd
        output_scale_bar = _typed_like(jnp.sum(g * h, axis=token_axes), output_scale)
        g = g * output_scale
        g = rstd * (g - h * jnp.mean(g * h, axis=-1, keepdims=True))

    dots = []
    for i in range(static.rows):
        dots.append(jnp.sum(_read(static, sources, count, i, after=dots[-1:]) * g, axis=-1))
    mean_dot = sum(a * c for a, c in zip(weights, dots, strict=True))

    # Cotangents of the products v . u. A lone source keeps weight 1 whatever its logit: exactly 0 through the
    # mixture, however the two sums round.
    products_bar = []
    for i in range(static.rows):
        logit_bar = dots[i] - mean_dot
        if static.rows == 1:
            logit_bar = jnp.zeros_like(logit_bar)
        elif count is not None:
            logit_bar = jnp.where(count == 1, 0, logit_bar)
        products_bar.append(_only_live(weights[i] * (logit_bar + lse_bar) * rstds[i], count, i, otherwise=0))

    # Summed over sources before tokens: one reduction over the tokens and not N.
    gain_bar = jax.lax.optimization_barrier(_weighted_sum(static, sources, products_bar, count))
    gain_bar = _typed_like(jnp.sum(gain_bar, axis=token_axes), gain)

    sources_bar = [] if isinstance(sources, tuple) else jnp.zeros_like(sources)
    for i in range(static.rows):
        v = _read(static, sources, count, i, after=mean_dot)
        shrink = products_bar[i] * rstds[i] * logits[i] / gain.shape[0]
        v_bar = weights[i][..., None] * g + products_bar[i][..., None] * gain - shrink[..., None] * v
        v_bar = _only_live(v_bar, count, i, otherwise=0).astype(_dtype(sources))
        if isinstance(sources, tuple):
            sources_bar.append(v_bar)
        else:
            sources_bar = sources_bar.at[i].set(_typed_like(v_bar, sources[i]))
    sources_bar = tuple(sources_bar) if isinstance(sources, tuple) else sources_bar
    return jax.tree.map(_typed_like, sources_bar, sources), gain_bar, output_scale_bar, None


_mix.defvjp(_mix_forward, _mix_backward)


def _read(static: _Static, sources, count, i: int, after):
    """Source i in the dtype of the arithmetic, [..., D], not before the values in `after` are known.

    Called at every use. The wide array is meant to live inside the consumer's fusion; where the compiler does
    write it out, `after` makes it do so for one source at a time, and the barrier keeps one pass from holding on
    to it for the next.
    """
    sources, _ = jax.lax.optimization_barrier((sources, after))
    return _only_live(sources[i].astype(static.dtype), count, i, otherwise=0)


def _only_live(x, count, i: int, otherwise):
    """x, if source i is live. Dead rows may hold NaN, so they are replaced and not multiplied by 0."""
    return x if count is None else jnp.where(i < count, x, otherwise)


def _softmax(logits):
    """Weights (list of [...]) and log-sum-exp. Exactly 1 and the logit itself where one source is live."""
    top = reduce(jnp.maximum, logits)
    weights = [jnp.exp(s - top) for s in logits]
    total = sum(weights)
    return [a / total for a in weights], top + jnp.log(total)


def _weighted_sum(static: _Static, sources, weights, count):
    terms = (a[..., None] * _read(static, sources, count, i, after=weights) for i, a in enumerate(weights))
    return reduce(jnp.add, terms)  # not sum(), which starts from 0 and would turn a lone -0.0 into 0.0


def _rstd(static: _Static, h):
    return jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + static.eps)


def _dtype(sources):
    return (sources[0] if isinstance(sources, tuple) else sources).dtype


def _typed_like(x, primal):
    """On a mesh with explicit axes the sharding is part of the type, and a cotangent has the type of its input."""
    sharding = jax.typeof(primal).sharding
    if AxisType.Explicit in sharding.mesh.axis_types and jax.typeof(x).sharding != sharding:
        return jax.sharding.reshard(x, sharding)
    return x
