"""What every backend of attn_res agrees on before it runs: the checked inputs."""

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Inputs(NamedTuple):
    """Checked inputs of one mix. Made by `check_inputs`, read by the backends."""

    sources: tuple[jax.Array, ...] | jax.Array  # N arrays [..., D], or one buffer [N, ..., D]
    query: jax.Array  # [D]
    key_scale: jax.Array | None  # [D]
    count: int | jax.Array | None  # live sources: a python int where known, else a traced scalar
    output_scale: jax.Array | None  # [D]
    eps: float

    @property
    def is_buffer(self) -> bool:
        return not isinstance(self.sources, tuple)

    @property
    def source_dtype(self) -> jnp.dtype:
        return self.sources.dtype if self.is_buffer else self.sources[0].dtype

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The widest dtype among the inputs, at least float32."""
        vectors = [x.dtype for x in (self.query, self.key_scale, self.output_scale) if x is not None]
        return jnp.result_type(jnp.float32, self.source_dtype, *vectors)


def check_inputs(sources, query, key_scale=None, *, count=None, output_scale=None, eps=1e-6) -> Inputs:
    """Check everything that can be known without running. Raises ValueError; traces no computation.

    Arrays may also be `jax.ShapeDtypeStruct`, for asking about a call without making it.
    """
    if isinstance(sources, Sequence):
        sources = tuple(_array(f"sources[{i}]", source) for i, source in enumerate(sources))
        if not sources:
            raise ValueError("sources is empty; at least one array [..., D] is needed")
        first = sources[0]
        for i, source in enumerate(sources):
            if source.shape != first.shape or source.dtype != first.dtype:
                raise ValueError(
                    f"sources[{i}] is {_describe(source)} but sources[0] is {_describe(first)}; "
                    "all sources must have one shape [..., D] and one dtype"
                )
        if first.ndim < 1:
            raise ValueError("sources are scalars; each must have shape [..., D]")
        count = _check_count(count, len(sources))
        if isinstance(count, int):
            sources, count = sources[:count], None
        dim = first.shape[-1]
    else:
        sources = _array("sources", sources)
        if sources.ndim < 2 or sources.shape[0] < 1:
            raise ValueError(
                f"sources is a buffer of shape {sources.shape}; allowed are [N, ..., D] with N >= 1, "
                "or a sequence of arrays [..., D]"
            )
        count = _check_count(count, sources.shape[0])
        dim = sources.shape[-1]
    if dim < 1:
        raise ValueError("sources have D=0 channels; at least one is needed")
    query = _check_vector("query", query, dim)
    key_scale = None if key_scale is None else _check_vector("key_scale", key_scale, dim)
    output_scale = None if output_scale is None else _check_vector("output_scale", output_scale, dim)
    return Inputs(sources, query, key_scale, count, output_scale, _check_eps(eps))


def _array(name: str, x) -> jax.Array | jax.ShapeDtypeStruct:
    x = x if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} has dtype {x.dtype}; allowed are real floating-point dtypes")
    return x


def _check_vector(name: str, x, dim: int) -> jax.Array:
    x = _array(name, x)
    if x.shape != (dim,):
        raise ValueError(f"{name} has shape {x.shape}; the sources have D={dim} channels, so it must be ({dim},)")
    return x


def _check_count(count, rows: int) -> int | jax.Array | None:
    if count is None:
        return None
    if isinstance(count, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        if count.shape != () or not jnp.issubdtype(count.dtype, jnp.integer):
            raise ValueError(f"count is {_describe(count)}; it must be a python int or an integer scalar")
        return count
    try:
        known = operator.index(count)
    except TypeError:
        raise ValueError(f"count={count!r}; it must be a python int or an integer scalar") from None
    if not 1 <= known <= rows:
        raise ValueError(f"count={known}; the sources have {rows} rows, so it must be from 1 to {rows}")
    return known


def _check_eps(eps) -> float:
    try:
        value = float(eps)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"eps={eps!r}; it must be a concrete finite number >= 0")
    return value


def _describe(x) -> str:
    return f"{x.dtype}{list(x.shape)}"
