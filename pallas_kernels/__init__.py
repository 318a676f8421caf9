"""KDA and AttnRes as pure functions on arrays. Needs jax alone.

Kimi Delta Attention: `kda`, `kda_step`, `kda_reference`, its gates, and the lineage (`linear_attention`, `delta_net`,
`gated_delta_net`); `sharded` for meshes with Auto axes. Attention Residuals: `attn_res`, `attn_res_reference`,
in two phases `attn_res_ahead`, `attn_res_merge`, and `attn_res_put` for a bank that a scan carries.
`which_backend` says what would run.
"""

from functools import partial

from .attn_res import attn_res, attn_res_reference
from .attn_res import backend_of as which_attn_res_backend
from .attn_res.bank import attn_res_put
from .attn_res.two_phase import attn_res_ahead, attn_res_merge
from .kda import (
    KDAResult,
    bounded_gate,
    delta_net,
    gated_delta_net,
    kda,
    kda_reference,
    kda_step,
    linear_attention,
    segment_ids_from_cu_seqlens,
    sharded,
    softplus_gate,
    which_kda_backend,
)

__all__ = [
    "KDAResult",
    "attn_res",
    "attn_res_ahead",
    "attn_res_merge",
    "attn_res_put",
    "attn_res_reference",
    "bounded_gate",
    "delta_net",
    "gated_delta_net",
    "kda",
    "kda_reference",
    "kda_step",
    "linear_attention",
    "segment_ids_from_cu_seqlens",
    "sharded",
    "softplus_gate",
    "which_backend",
]

_CHOICES = {
    "kda": which_kda_backend,
    "kda_step": which_kda_backend,
    "linear_attention": partial(which_kda_backend, erase=False),
    "attn_res": which_attn_res_backend,
}


def which_backend(op: str, *args, platform: str | None = None, **kwargs) -> str:
    """The backend that op ("kda", "kda_step", "linear_attention" or "attn_res") would run for these arguments.

    args and kwargs are those of the op; platform is the machine asked about, None for this one. Nothing is run.
    Raises ValueError for an unknown op, and what the op itself would raise for its backend.
    """
    if op not in _CHOICES:
        raise ValueError(f"op: got {op!r}; allowed is one of {', '.join(map(repr, _CHOICES))}")
    return _CHOICES[op](*args, platform=platform, **kwargs)
