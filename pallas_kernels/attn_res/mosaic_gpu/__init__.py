"""attn_res as Pallas Mosaic GPU kernels for NVIDIA Hopper (H100, H200, H20, GH200), forward and backward.

forward.py and backward.py hold the two kernels, each with its algorithm at its top; ring.py brings the sources into
shared memory, rows.py is what threads do in their registers, plan.py lays a call over the GPU. They are imported when
first called, since a jax may come without Mosaic GPU.

A kernel takes seconds to lower. So many sources are made up to one of a few numbers, by naming the first of them again
behind a count that leaves it out: in a model whose every site has one source more, sites share kernels.
"""

from functools import partial

import jax
import jax.numpy as jnp

from ..inputs import Inputs
from ..kernels import Machine, common_limits

__all__ = ["MACHINE", "gpu_limits"]

MOST_CHANNELS = 8192
EXACT = 9  # sources, up to which every number has kernels of its own: those are quick to lower, and common


def _forward(static, sources, gain, output_scale, count):
    if count is None and (more := _more(sources)) is not None:
        sources, count = sources + sources[:1] * more, jnp.int32(len(sources))
    return _lower_forward(static, sources, gain, output_scale, count)


def _backward(static, sources, gain, output_scale, count, saved, mixture_bar, lse_bar, others):
    N, more = len(sources), _more(sources) if count is None else None
    if more is not None:
        sources, count = sources + sources[:1] * more, jnp.int32(N)
        if others is not None:  # one array may not be written to in two places
            others += tuple(jnp.empty_like(others[0]) for _ in range(more))
    rest = sources, gain, output_scale, count, saved, mixture_bar, lse_bar, others
    bars, *vectors = _lower_backward(static, *rest, clears=more is None)
    return bars if more is None else bars[:N], *vectors


def _more(sources) -> int | None:
    """How many to name again, or None: these have a kernel without a count."""
    N = len(sources)
    if N <= EXACT or not isinstance(sources, tuple):
        return None
    return -N % (4 if N <= 16 else 8)


# Under a jit of its own a kernel is lowered once for all sites of a model that are alike.
@partial(jax.jit, static_argnums=0)
def _lower_forward(*arguments):
    from .forward import forward

    return forward(*arguments)


@partial(jax.jit, static_argnums=0, static_argnames="clears")
def _lower_backward(*arguments, clears):
    from .backward import backward

    return backward(*arguments, clears=clears)


MACHINE = Machine(_forward, _backward)


def gpu_limits(inputs: Inputs) -> str | None:
    """Why these kernels cannot serve a call, in a clause; None if they can."""
    if limit := common_limits(inputs, "GPU"):
        return limit
    first = inputs.sources if inputs.is_buffer else inputs.sources[0]
    D, numbers = first.shape[-1], 16 // first.dtype.itemsize
    if D % numbers:
        return f"D = {D} and rows are copied 16 bytes at a time, multiples of {numbers} channels of {first.dtype}"
    if D > MOST_CHANNELS:
        return f"D = {D} and the kernel's registers hold rows of {MOST_CHANNELS} channels"
    return None
