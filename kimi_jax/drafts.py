"""Drafts: tokens that are looked at together and of which only a part may stay (speculative decoding).

    logits, draft = verify(model, tokens, cache)      # as extend, but nothing is final
    cache = accept(model, draft, counts)              # the first counts[b] tokens of row b stay

Latents are cut by a length. A KDA state cannot be: it is one sum over all tokens. So `verify` leaves states and
convolution windows as they are and keeps the drafted tokens' projections, a few vectors per token and layer; `accept`
runs the recurrence over those that stay. The state is thus read by `verify` and read and written by `accept`, and no
layer's weights are multiplied twice.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from .cache import Cache, map_layers, set_length
from .layers import KDACache
from .layers.kda import KDADraft
from .layers.padding import is_concrete
from .model import KimiLM
from .sharding import constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """What `verify` leaves for `accept`, a pytree.

    Attributes:
        cache: as after all tokens, but KDA layers hold the state before them and the tokens' projections.
        start: int32 [B], the tokens that each row held before.
    """

    cache: Cache
    start: jax.Array


def verify(
    model: KimiLM, tokens: jax.Array, cache: Cache, *, lengths: jax.Array | None = None
) -> tuple[jax.Array, Draft]:
    """(logits [B, T, vocab], as `extend` gives them for these tokens; what `accept` needs).

    tokens: int [B, T], the drafts; T is meant to be small. lengths: int32 [B], how many count; None: all. Errors are
    those of `extend`. With the cache donated, latents are appended in place.
    """

    def hold(layer):
        return KDADraft.empty(layer, tokens.shape[1]) if isinstance(layer, KDACache) else layer

    held = dataclasses.replace(cache, layers=map_layers(hold, cache.layers))
    logits, after = model.extend(tokens, held, lengths=lengths)
    return logits, Draft(after, cache.length)


def accept(model: KimiLM, draft: Draft, counts: jax.Array) -> Cache:
    """The cache after the first counts [B] of each row's drafted tokens: what `extend` with lengths=counts gives.

    counts: int32 [B], 0 to the number of drafted tokens of the row. ValueError outside of it when concrete; NaN logits
    of the row from then on when traced.
    """
    counts = jnp.asarray(counts, jnp.int32)
    drafted = draft.cache.length - draft.start
    if counts.shape != drafted.shape:
        raise ValueError(f"counts must be [B] = {drafted.shape}, got {counts.shape}")
    if is_concrete(counts, drafted):
        given, most = np.asarray(counts), np.asarray(drafted)
        if (given < 0).any() or (given > most).any():
            raise ValueError(f"counts={given.tolist()} is not allowed: 0 to {most.tolist()}, the drafted tokens")
    counts = constrain(counts, "batch")

    def settle(layer, cache, inputs):
        return cache if inputs is None else layer.attention.settle(cache, inputs, counts)

    caches = map_layers(lambda c: c.cache if isinstance(c, KDADraft) else c, draft.cache.layers)
    inputs = map_layers(lambda c: c.inputs if isinstance(c, KDADraft) else None, draft.cache.layers)
    layers = model.layers.update_caches(settle, caches, inputs)
    fits = (counts >= 0) & (counts <= drafted)
    length = jnp.where(fits, draft.start + counts, draft.cache.max_len + 1)
    return set_length(dataclasses.replace(draft.cache, layers=layers), length)
