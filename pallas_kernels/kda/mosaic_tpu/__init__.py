"""KDA as Pallas kernels for TPU (v5e, v5p, v6e, TPU7x): forward, backward and the one-token step.

sequence.py is the way in and holds the custom VJP; forward.py and backward.py are the kernels, chunk.py, factors.py,
inverse.py, activations.py and products.py what they are made of, order.py and grid.py how their work and their arrays
are laid out; step.py is the decode kernel. The algorithm is described in chunked.py and decay.py, what differs here in
each file's head.
"""

from functools import partial

from ...machine import Target, tpu_limits
from ..kernels import call_sequence, common_limits, pool_limits, sequence_mode_limits, with_step_gradient
from .sequence import sequence
from .step import step_limits, tpu_step

__all__ = ["tpu_sequence", "tpu_sequence_limits", "tpu_token", "tpu_token_limits"]

# Output [B,T,HV,V] in v's dtype and the final state, for validated arguments of `pallas_kernels.kda`.
tpu_sequence = partial(call_sequence, sequence)
# Output [B,HV,V] and the new state or pool, for validated arguments of `pallas_kernels.kda_step`.
tpu_token = with_step_gradient(tpu_step)


def tpu_sequence_limits(arrays: tuple, *, chunk_size: int, erase: bool, machine: Target) -> str | None:
    """Why these kernels cannot serve a sequence, in a clause; None if they can. arrays begin with q, k, v."""
    if limit := sequence_mode_limits(chunk_size, erase):
        return limit
    K, V = arrays[0].shape[-1], arrays[2].shape[-1]
    if max(K, V) > 256:
        return f"head sizes are K = {K}, V = {V} and the kernel holds states up to 256 x 256"
    return tpu_limits(machine) or common_limits(arrays, "TPU")


def tpu_token_limits(arrays: tuple, state, slots, *, machine: Target) -> str | None:
    """`tpu_sequence_limits` for one token."""
    q, k, v, *others = arrays
    limit = pool_limits(arrays, state, slots) or step_limits(q, v, state, k, *others)
    return limit or tpu_limits(machine) or common_limits((*arrays, state), "TPU")
