"""AttnRes as Pallas kernels for TPU (v5e, v5p, v6e, TPU7x), forward and backward.

forward.py and backward.py are the kernels, plan.py cuts a call into blocks of tokens, tiles.py walks through a block.
The traffic is the least there is: the forward reads every source once and writes the mixture, the backward reads the
sources and the mixture's cotangent once and writes the sources' gradients, or adds them in place to what the sources
get from elsewhere; besides them 1 KiB a token each way. bank.py puts a row into a bank.
"""

from ..inputs import Inputs
from ..kernels import Machine, common_limits
from .backward import backward
from .forward import forward
from .plan import make_plan

__all__ = ["MACHINE", "tpu_limits"]


MACHINE = Machine(forward, backward)


def tpu_limits(inputs: Inputs) -> str | None:
    """Why these kernels cannot serve the inputs, in a clause; None if they can."""
    if limit := common_limits(inputs, "TPU"):
        return limit
    if make_plan(inputs.sources, True, inputs.count is not None, backward=True) is None:
        first = inputs.sources if inputs.is_buffer else inputs.sources[0]
        size = f"{len(inputs.sources)} sources of {first.shape[-1]} channels in {first.dtype}"
        return f"the call has {size} and the kernel holds 8 or 16 tokens of all of them in VMEM"
    return None
