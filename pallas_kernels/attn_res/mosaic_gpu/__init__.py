"""attn_res as Pallas Mosaic GPU kernels for NVIDIA Hopper (H100, H200, H20, GH200), forward and backward.

forward.py and backward.py hold the two kernels, each with its algorithm at its top; ring.py brings the sources into
shared memory, rows.py is what threads do in their registers, plan.py lays a call over the GPU. They are imported when
first called, since a jax may come without Mosaic GPU.
"""

import jax

from ..inputs import Inputs
from ..kernels import Machine, common_limits

__all__ = ["MACHINE", "gpu_limits"]

MOST_CHANNELS = 8192


def _forward(*arguments):
    from .forward import forward

    return forward(*arguments)


def _backward(*arguments):
    from .backward import backward

    return backward(*arguments)


# A kernel takes seconds to lower: under a jit of its own that is done once for all sites of a model that are alike.
MACHINE = Machine(jax.jit(_forward, static_argnums=0), jax.jit(_backward, static_argnums=0))


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
