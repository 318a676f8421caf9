"""The attn_res part of the suite tpu_schedule: shapes of real models' depth mixes, and programs to compile of them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attn_res import mosaic_tpu
from pallas_kernels.attn_res.inputs import check_inputs
from pallas_kernels.attn_res.kernels import mix_by

__all__ = ["MIXES", "Mix", "find_mix", "mix_forward", "mix_training"]


class Mix(NamedTuple):
    """One call: N sources `[M, D]`, or a buffer `[N, M, D]` with a traced count."""

    name: str
    N: int
    D: int
    M: int = 8192
    dtype: str = "bfloat16"
    output_scale: bool = False
    buffer: bool = False


MIXES = (
    Mix("kimi_k3-9", 9, 7168),
    Mix("kimi_k3-9-normed", 9, 7168, output_scale=True),
    Mix("kimi_linear_48b-8", 8, 2304),
    Mix("kimi_linear_48b-27", 27, 2304),
    Mix("attn_res_436m-17", 17, 1168),
    Mix("kimi_linear_48b-8-float32", 8, 2304, dtype="float32"),
)


def find_mix(name: str) -> Mix:
    return next(mix for mix in MIXES if mix.name == name)


def mix_forward(mix: Mapping[str, Any]) -> tuple[Callable, tuple]:
    """The mixture."""
    m = Mix(**mix)
    return (lambda *arguments: _mix(m, *arguments)), _arguments(m)


def mix_training(mix: Mapping[str, Any]) -> tuple[Callable, tuple]:
    """The mixture, and the gradient of every float input for a cotangent of it."""
    m = Mix(**mix)

    def step(cotangent, count, *arguments):
        mixture, pullback = jax.vjp(lambda *xs: _mix(m, count, *xs), *arguments)
        return mixture, pullback(cotangent)

    return step, (jax.ShapeDtypeStruct((m.M, m.D), m.dtype), *_arguments(m))


def _arguments(m: Mix) -> tuple:
    """count, sources, query, key_scale, output_scale."""
    tokens, vector = jax.ShapeDtypeStruct((m.M, m.D), m.dtype), jax.ShapeDtypeStruct((m.D,), jnp.float32)
    sources = jax.ShapeDtypeStruct((m.N, m.M, m.D), m.dtype) if m.buffer else (tokens,) * m.N
    count = jax.ShapeDtypeStruct((), jnp.int32) if m.buffer else None
    return count, sources, vector, vector, vector if m.output_scale else None


def _mix(m: Mix, count, sources, query, key_scale, output_scale):
    inputs = check_inputs(sources, query, key_scale, count=count, output_scale=output_scale)
    return mix_by(mosaic_tpu.MACHINE, inputs, return_lse=False)
