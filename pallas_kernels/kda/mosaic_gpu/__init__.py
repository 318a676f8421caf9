"""KDA as Pallas Mosaic GPU kernels for NVIDIA Hopper (H100, H200, H20, GH200): forward, backward, one-token step.

sequence.py is the way in and holds the custom VJP. intra.py and state.py are the kernels of the forward pass,
state_backward.py, chunk_backward.py and intra_backward.py those of the backward, pieces.py cuts long sequences of few
heads; gate.py is the gate inside them, registers.py and warp_products.py what a warpgroup does in its registers;
step.py is the decode kernel. The algorithm is described in chunked.py and decay.py, what differs here in each file's
head. Kernels are imported when first called, since a jax may come without Mosaic GPU.
"""

import functools

import jax
import jax.numpy as jnp

from ...machine import Target, hopper_limits
from ..kernels import call_sequence, common_limits, pool_limits, sequence_mode_limits, with_step_gradient

__all__ = ["gpu_sequence", "gpu_sequence_limits", "gpu_token", "gpu_token_limits"]

HEAD_SIZES = (64, 128)


def gpu_sequence(*tokens: jax.Array, **options) -> tuple[jax.Array, jax.Array]:
    """Output `[B,T,HV,V]` in v's dtype and the final state, for validated arguments of `pallas_kernels.kda`."""
    from .sequence import sequence

    return call_sequence(sequence, *tokens, **options)


def gpu_token(*arrays: jax.Array, **options) -> tuple[jax.Array, jax.Array]:
    """Output `[B,HV,V]` and the new state or pool, for validated arguments of `pallas_kernels.kda_step`."""
    return _token()(*arrays, **options)


@functools.cache
def _token():
    from .step import gpu_step

    return with_step_gradient(gpu_step)


def gpu_sequence_limits(arrays: tuple, *, chunk_size: int, erase: bool, machine: Target) -> str | None:
    """Why these kernels cannot serve a sequence, in a clause; None if they can. arrays begin with q, k, v."""
    if limit := sequence_mode_limits(chunk_size, erase):
        return limit
    K, V = arrays[0].shape[-1], arrays[2].shape[-1]
    if K not in HEAD_SIZES or V not in HEAD_SIZES:
        return f"head sizes are K = {K}, V = {V} and the kernel's are 64 and 128"
    for name, x in zip("qkv", arrays, strict=False):
        if x.dtype != jnp.bfloat16:
            return f"{name} is {x.dtype} and the kernel multiplies in 16 bits, bfloat16 q, k and v"
    return hopper_limits(machine) or common_limits(arrays, "GPU")


def gpu_token_limits(arrays: tuple, state, slots, *, machine: Target) -> str | None:
    """`gpu_sequence_limits` for one token, which may be float32: nothing is multiplied in 16 bits."""
    if limit := pool_limits(arrays, state, slots) or hopper_limits(machine):
        return limit
    from .step import gpu_step_limits

    q, k, v, *others = arrays
    return gpu_step_limits(q, v, state, k, *others) or common_limits((*arrays, state), "GPU")
