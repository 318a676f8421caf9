"""Softmax attention over given keys and values: by cuDNN where it serves, else by XLA."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType


def attention(
    q_BTNH: jax.Array,
    k_BSNH: jax.Array,
    v_BSNV: jax.Array,
    mask_BTS: jax.Array | None,
    *,
    scale: float,
    causal: bool = False,
) -> jax.Array:
    """Softmax attention where mask (bool [B or 1, T, S]) is True -> [B, T, N, V]; the softmax is at least float32.

    causal: only to positions up to the query's own, with T = S. On an NVIDIA GPU such calls go to cuDNN, in bfloat16
    and with an even T, and write no [T, S] scores; all others to XLA.
    """
    mask_BNTS = None if mask_BTS is None else mask_BTS[:, None]
    if q_BTNH.dtype == jnp.float64:  # jax.nn.dot_product_attention would take its softmax in float32
        logits = scale * jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH)
        for mask in (mask_BNTS, jnp.tril(jnp.ones(logits.shape[-2:], bool)) if causal else None):
            logits = logits if mask is None else jnp.where(mask, logits, -1e300)
        return jnp.einsum("BNTS,BSNV->BTNV", jax.nn.softmax(logits, axis=-1), v_BSNV)
    # It wants keys and values of one size; zeros in the last columns change neither scores nor the values kept.
    size, v_size = q_BTNH.shape[-1], v_BSNV.shape[-1]
    q, k, v = (_pad_last(x, max(size, v_size)) for x in (q_BTNH, k_BSNH, v_BSNV))
    precision = None if q.dtype == jnp.bfloat16 else "highest"
    with jax.default_matmul_precision(precision):
        o = jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=mask_BNTS,
            scale=scale,
            is_causal=causal,
            implementation="cudnn" if _by_cudnn(q, causal) else None,
        )
    return o[..., :v_size]


def _by_cudnn(q_BTNH, causal: bool) -> bool:
    _, T, _, H = q_BTNH.shape
    mesh = jax.sharding.get_abstract_mesh()
    explicit = any(kind == AxisType.Explicit for kind in mesh.axis_types)  # its partitioning knows Auto axes alone
    serves = causal and q_BTNH.dtype == jnp.bfloat16 and T % 2 == 0 and H % 8 == 0 and not explicit
    return serves and cudnn_head_size() >= H


@functools.cache
def cudnn_head_size() -> int:
    """The largest that cuDNN's attention takes here; 0 where jax computes on something else."""
    device = jax.devices()[0]
    if device.platform != "gpu" or "NVIDIA" not in device.device_kind:
        return 0
    capability = float(device.compute_capability)
    return 256 if capability >= 9 else 128 if capability >= 8 else 0


def _pad_last(x, size):
    return x if x.shape[-1] == size else jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, size - x.shape[-1]),))
