"""The two-phase schedule of Block AttnRes (AttnRes, section 4): sources that many sites share are mixed ahead.

    phase 1   once, for the queries of all sites that will read them: the mixture of the sources and its log-sum-exp
    phase 2   at a site: what one more source adds, by its score s

        p = sigmoid(s - lse);  h = mixture + p (source - mixture)

That is the softmax over all sources, exact to rounding: the mixture of phase 1 is a mean, so that its rounding to the
sources' dtype costs no more than that of any source; the log-sum-exp stays in float32.

Public names: `attn_res_ahead`, `attn_res_merge`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from . import attn_res
from .inputs import check_inputs

__all__ = ["attn_res_ahead", "attn_res_merge"]


def attn_res_ahead(
    sources, queries: Sequence[jax.Array], key_scales: Sequence[jax.Array | None], *, count=None, eps: float = 1e-6,
    backend: str = "auto",
) -> tuple[list[tuple[jax.Array, jax.Array]], tuple[jax.Array, ...] | jax.Array]:  # fmt: skip
    """Phase 1: ([(mixture [..., D], log-sum-exp [...]) for each query], the sources to go on from).

    Arguments are those of `attn_res`, with a query `[D]` and a key_scale `[D]` or None for each site. The sources are
    handed on as by `return_sources`. Each query reads all sources anew: until a kernel serves several queries at once,
    this schedule saves no traffic.

    Raises ValueError as `attn_res` does, and where there are not as many key_scales as queries.
    """
    if len(queries) != len(key_scales):
        raise ValueError(f"there are {len(queries)} queries and {len(key_scales)} key_scales; each query needs one")
    ahead = []
    for query, key_scale in zip(queries, key_scales, strict=True):
        mixture, lse, sources = attn_res(
            sources, query, key_scale, count=count, eps=eps, return_lse=True, return_sources=True, backend=backend
        )
        ahead.append((mixture, lse))
    return ahead, sources


def attn_res_merge(
    mixture: jax.Array,
    lse: jax.Array,
    source: jax.Array,
    query: jax.Array,
    key_scale: jax.Array | None = None,
    *,
    output_scale: jax.Array | None = None,
    eps: float = 1e-6,
) -> jax.Array:
    """Phase 2: the mixture [..., D] of what `mixture` and `lse` stand for and of one more source, as by `attn_res`.

    Args:
      mixture: `[..., D]` in the source's dtype, made with the same query and without output_scale.
      lse: `[...]`, its log-sum-exp (natural log).
      source: `[..., D]`.
      query, key_scale, output_scale, eps: as in `attn_res`.

    Raises ValueError for shapes or dtypes that do not fit. Plain jnp, which jax differentiates; under a mesh nothing
    crosses between tokens.
    """
    inputs = check_inputs((mixture, source), query, key_scale, output_scale=output_scale, eps=eps)
    if lse.shape != source.shape[:-1]:
        raise ValueError(
            f"lse has shape {lse.shape}; the sources have {source.shape}, so it must be {source.shape[:-1]}"
        )
    return _merge(*inputs.sources, lse, inputs.query, inputs.key_scale, inputs.output_scale, inputs.eps)


def _merge(mixture, source, lse, query, key_scale, output_scale, eps):
    dtype = jnp.result_type(jnp.float32, source.dtype, query.dtype, lse.dtype)
    a, b, gain = mixture.astype(dtype), source.astype(dtype), query.astype(dtype)
    if key_scale is not None:
        gain = gain * key_scale.astype(dtype)
    score = jnp.sum(b * gain, axis=-1) * jax.lax.rsqrt(jnp.mean(b * b, axis=-1) + eps)
    h = a + jax.nn.sigmoid(score - lse)[..., None] * (b - a)
    if output_scale is not None:
        h = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps) * output_scale.astype(dtype)
    return h.astype(source.dtype)


_merge = jax.checkpoint(_merge, static_argnums=(6,))  # the backward keeps the arguments, and no float32 copy of them
