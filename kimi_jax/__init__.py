"""Kimi Linear and Kimi K3 style language models in JAX: KDA along the sequence, Attention Residuals along the depth."""

from .cache import Cache, trim
from .configs import ModelConfig, get_config
from .convert import load_hf, save_hf
from .drafts import Draft, accept, verify
from .generate import generate
from .model import Aux, KimiLM, lm_loss, parameter_count, update_router_biases
from .snapshots import PrefixCache, Snapshot, restore, snapshot

__all__ = [
    "Aux",
    "Cache",
    "Draft",
    "KimiLM",
    "ModelConfig",
    "PrefixCache",
    "Snapshot",
    "accept",
    "generate",
    "get_config",
    "lm_loss",
    "load_hf",
    "parameter_count",
    "restore",
    "save_hf",
    "snapshot",
    "trim",
    "update_router_biases",
    "verify",
]
