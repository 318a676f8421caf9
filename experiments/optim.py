"""Optimisers: AdamW for everything, or Muon for the matrices and AdamW for the rest."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from experiments.muon import leaf_name, scale_by_momentum_and_shape

OPTIMIZERS = ("adamw", "muon")

# What each parameter is, by the last name of its path. Nothing is guessed from shapes: a depthwise convolution, a
# table of biases and a scanned stack of vectors are 2-D as well, and a scanned stack of matrices is 3-D.
MATRICES = frozenset(
    "q k v o b g f_a f_b g_a g_b "  # KDA, MLA
    "q_a q_b kv_a kv_b "  # MLA
    "f "  # the decay of Gated DeltaNet and Mamba2 (synthetic_models)
    "gate up down "  # feed-forward; experts are stacks [E, in, out]
    "router latent_down latent_up "  # MoE
    "query_proj coefficients".split()  # AttnRes with a query from the hidden state, mHC
)
TABLES = frozenset("embedding head".split())
PLAIN = frozenset(
    "weight "  # norms, short convolutions
    "A_log dt_bias "  # forget gates
    "query key_scale scalars "  # AttnRes and its static forms
    "read_bias write_bias carry_bias".split()  # mHC
)
# Attention projections whose columns are heads, for Per-Head Muon, and the module field that counts the heads.
HEAD_MATRICES = {"q": "num_heads", "k": "num_heads", "v": "num_value_heads", "q_b": "num_heads", "kv_b": "num_heads"}


def make_optimizer(
    name: str,
    schedule: optax.Schedule,
    params: Any,
    *,
    weight_decay: float = 0.1,
    grad_clip: float = 1.0,
    momentum: float = 0.95,
    heads: Mapping[str, int] | None = None,
) -> optax.GradientTransformation:
    """Clip by the global norm, then update each kind of parameter in its own way.

    Matrices: Muon ("muon") or AdamW ("adamw"), with weight decay. Embedding and head: AdamW with weight decay. The rest
    (norms, convolutions, A_log, dt_bias, biases, AttnRes queries): AdamW without.

    Args:
      params: the parameters, or their shapes; only their names matter.
      grad_clip: largest global norm of the gradient; 0 switches clipping off.
      heads: see `muon.scale_by_momentum_and_shape`.

    Raises:
      ValueError: an unknown optimiser, or a parameter whose kind is not listed in this file.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer={name!r} is unknown; allowed: {', '.join(OPTIMIZERS)}")

    def finish(direction: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
        decayed = optax.add_decayed_weights(decay) if decay else optax.identity()
        return optax.chain(direction, decayed, optax.scale_by_learning_rate(schedule))

    adam = optax.scale_by_adam(b1=0.9, b2=0.95)
    muon = scale_by_momentum_and_shape(momentum=momentum, heads=heads)
    by_kind = {
        "matrix": finish(muon if name == "muon" else adam, weight_decay),
        "table": finish(adam, weight_decay),
        "plain": finish(adam, 0.0),
    }
    clip = optax.clip_by_global_norm(grad_clip) if grad_clip else optax.identity()
    return optax.chain(clip, optax.partition(by_kind, parameter_kinds(params)))


def parameter_kinds(params: Any) -> Any:
    """The kind of each leaf, "matrix", "table" or "plain", in a tree of the structure of params."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _kind(leaf_name(path)), params)


def _kind(name: str) -> str:
    last = name.split(".")[-1]
    for kind, names in (("matrix", MATRICES), ("table", TABLES), ("plain", PLAIN)):
        if last in names:
            return kind
    raise ValueError(f"parameter {name} is of no known kind; add {last!r} to MATRICES, TABLES or PLAIN of {__name__}")
