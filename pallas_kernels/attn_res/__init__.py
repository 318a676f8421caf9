"""Attention Residuals: softmax attention along the depth of a network (AttnRes, arXiv 2603.15031).

Public names: `attn_res`, `attn_res_reference`, `backend_of`.
"""

from functools import partial
from typing import Any

from ..machine import BACKENDS, PLATFORMS, Target, choose, hopper_limits, tpu_limits
from . import mosaic_gpu, mosaic_tpu
from .inputs import Inputs, check_inputs
from .kernels import mix_by
from .reference import attn_res_reference, mix_plainly
from .xla import mix_xla

__all__ = ["attn_res", "attn_res_reference", "backend_of"]


def _passing(mix):
    """With the sources passed on: jax adds their cotangents up."""

    def run(inputs, return_lse, return_sources):
        results = mix(inputs, return_lse)
        if not return_sources:
            return results
        return *(results if return_lse else (results,)), inputs.sources

    return run


_MIXES = {
    "reference": _passing(mix_plainly),
    "xla": _passing(mix_xla),
    "mosaic_tpu": partial(mix_by, mosaic_tpu.MACHINE),
    "mosaic_gpu": partial(mix_by, mosaic_gpu.MACHINE),
}


def attn_res(
    sources,
    query,
    key_scale=None,
    *,
    count=None,
    output_scale=None,
    eps: float = 1e-6,
    return_lse: bool = False,
    return_sources: bool = False,
    backend: str = "auto",
) -> Any:
    """Mix the outputs of earlier sub-layers by attention over depth (AttnRes, section 3).

    For every token on its own, with `N` sources `v_i`:

        score_i  = query . (key_scale * v_i * rsqrt(mean(v_i^2) + eps))
        mixture  = sum_i softmax(score)_i v_i

    The keys are normalised, the values are the raw sources, and there is no 1/sqrt(D): fold another scale into the
    query. A zero query gives the plain mean. All arithmetic is in the widest input dtype, at least float32; the
    mixture is rounded once.

    Args:
      sources: a sequence of N arrays `[..., D]` of one shape and dtype, or one buffer `[N, ..., D]`. Neither is
        copied or stacked.
      query: `[D]`.
      key_scale: `[D]`, the gain of the keys' RMSNorm; None is a gain of 1.
      count: the first `count` sources are live, the others take no part, get exactly zero gradient and may hold
        anything, NaN included. A python int, or a traced integer scalar from 1 to N (outside of that range a traced
        count is not detected: below 1 the mixture is NaN, above N all are live). Changing a traced count never
        recompiles. With it, a bank of fixed size can be carried through a scan: as one buffer, or as a tuple of rows,
        whose cotangents are then rows as well.
      output_scale: `[D]`, the gain of an RMSNorm to apply to the mixture before it is rounded, with the same eps
        (a sub-layer's PreNorm, fused); None applies no norm.
      eps: a Python number >= 0, added to the mean square.
      return_lse: also return the log-sum-exp of the scores.
      return_sources: also return the sources, as they were given. Whoever uses those from then on, in place of the ones
        given, has the cotangents of all uses added up as they are made, by the kernels in place: a source that many
        sites read (a bank) else gets an array from each of them, to be added later.
      backend: "auto", "reference", "xla", "mosaic_tpu" or "mosaic_gpu" (its kernels for TPU and for NVIDIA Hopper,
        which "auto" takes there where they serve the call). The results agree to rounding.

    Returns:
      The mixture `[..., D]` in the sources' dtype; with `return_lse`, `return_sources` or both a tuple (mixture, lse,
      sources) of what was asked for: lse `[...]` in float32 (float64 if any input is), natural log; sources a tuple or
      the buffer. Two mixtures of disjoint sources, made with the same query
      and without output_scale, merge exactly:

          p = sigmoid(lse_b - lse_a);  mixture = mixture_a + p * (mixture_b - mixture_a)

    Gradients reach sources, query, key_scale and output_scale, also through lse. The reverse pass keeps the inputs
    and two scalars per source and token. One source is returned exactly, and gives the query exactly no gradient
    through the mixture. Reverse mode only: forward mode raises jax's own error.

    Raises:
      ValueError: before anything is traced: no sources, sources that differ in shape or dtype, a vector that is not
        `[D]`, a count with a sequence or outside of the buffer, a negative eps, an unknown backend.
      NotImplementedError: a named kernel that cannot serve the call, saying why.
    """
    inputs = check_inputs(sources, query, key_scale, count=count, output_scale=output_scale, eps=eps)
    results = _MIXES[_choose(backend, inputs)](inputs, return_lse, return_sources)
    if return_sources and not inputs.is_buffer:  # rows that are known not to be live took no part
        *others, passed = results
        return *others, (*passed, *sources[len(passed) :])
    return results


def backend_of(
    sources,
    query,
    key_scale=None,
    *,
    count=None,
    output_scale=None,
    eps: float = 1e-6,
    return_lse: bool = False,
    return_sources: bool = False,
    backend: str = "auto",
    platform: str | None = None,
) -> str:
    """The backend that `attn_res` would run for these arguments (arrays or `jax.ShapeDtypeStruct`), without running it.

    platform names another machine ("cpu", "gpu", "tpu", of a kind that the kernels are built for); None is the abstract
    mesh's device, else this machine's. Raises what `attn_res` would raise, and ValueError for an unknown platform.
    """
    del return_lse, return_sources
    if platform not in PLATFORMS:
        raise ValueError(f"platform={platform!r}; allowed are {', '.join(map(repr, PLATFORMS))}")
    inputs = check_inputs(sources, query, key_scale, count=count, output_scale=output_scale, eps=eps)
    return _choose(backend, inputs, platform)


def _choose(backend: str, inputs: Inputs, platform: str | None = None) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}; allowed are {', '.join(map(repr, BACKENDS))}")
    return choose("attn_res", backend, partial(_limits, inputs), platform)


def _limits(inputs: Inputs, kernels: str, machine: Target) -> str | None:
    if kernels == "mosaic_tpu":
        return tpu_limits(machine) or mosaic_tpu.tpu_limits(inputs)
    return hopper_limits(machine) or mosaic_gpu.gpu_limits(inputs)
