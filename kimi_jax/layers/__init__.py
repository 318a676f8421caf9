"""The layers, one idea per file. All take x [B, T, hidden] and explicit keywords, never a model config."""

from .feed_forward import FeedForward
from .kda import KDACache, KDALayer
from .latents import MLACache
from .mla import MLA
from .moe import MoE, RouterBias
from .norms import GatedRMSNorm, RMSNorm
from .short_conv import ShortConv

__all__ = [
    "FeedForward",
    "GatedRMSNorm",
    "KDACache",
    "KDALayer",
    "MLA",
    "MLACache",
    "MoE",
    "RMSNorm",
    "RouterBias",
    "ShortConv",
]
