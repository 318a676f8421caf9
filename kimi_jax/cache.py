"""What a model remembers of each row between calls of `extend`: fixed-size KDA states and growing MLA latents."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .layers import KDACache, MLACache
from .layers.kda import KDADraft
from .layers.padding import is_concrete
from .layers.stack import StackCache

LAYOUT = "states [B, HV, K, V], convolutions oldest first"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """A pytree; `extend` returns a new one and leaves the old one valid, unless it was donated.

    Donate it to have it updated in place: `jax.jit(step, donate_argnames="cache")`. The old one is deleted then, and to
    use it again raises jax's own error.

    Attributes:
        layers: per layer a KDACache (state [B, HV, K, V] and the convolutions' last inputs) or an MLACache (latents
            [B, max_len, ...]); layers that the model scans are stacked.
        length: int32 [B], the number of tokens that each row holds.
        max_len: how many it may hold.
        layout: how the states lie, for those who fill one with states from elsewhere: with K = V no shape tells a
            state from its transpose. `extend` refuses any other.
    """

    layers: StackCache
    length: jax.Array
    max_len: int = dataclasses.field(metadata=dict(static=True))
    layout: str = dataclasses.field(default=LAYOUT, metadata=dict(static=True))


def check_cache(cache: Cache, batch: int, T: int, added: jax.Array) -> None:
    """ValueError for a cache of another batch or layout, for added outside 0..T, and if a row would outgrow it.

    Silent where lengths are traced (then its outputs are NaN). What is in it, the layers check.
    """
    if cache.layout != LAYOUT:
        raise ValueError(f"cache.layout={cache.layout!r} is not allowed: {LAYOUT!r}")
    if cache.length.shape != (batch,):
        raise ValueError(f"tokens have {batch} rows, the cache has {cache.length.shape[0]}")
    if added.shape != (batch,):
        raise ValueError(f"lengths must be [B] = {(batch,)}, got {added.shape}")
    if not is_concrete(added):
        return
    given = np.asarray(added)
    if (given < 0).any() or (given > T).any():
        raise ValueError(f"lengths={given.tolist()} is not allowed: 0 to T={T}")
    if is_concrete(cache.length) and (longest := int(np.max(np.asarray(cache.length) + given))) > cache.max_len:
        raise ValueError(f"the cache has room for {cache.max_len} tokens per row, its longest row would have {longest}")


def trim(cache: Cache, length: jax.Array) -> Cache:
    """The cache with each row cut to its first length [B] tokens, for models of MLA layers alone.

    ValueError for a cache with KDA states: they hold all tokens at once and cannot be cut. Take back drafts with
    `verify` and `accept`, and longer pieces by `snapshot` and `restore`. Also for a length that is negative or longer
    than the row (when traced: NaN logits afterwards).
    """
    if any(isinstance(layer, KDACache | KDADraft) for layer in layer_caches(cache.layers)):
        raise ValueError(
            "a KDA state cannot be cut at a token: use verify and accept for drafts, snapshot and restore otherwise"
        )
    length = jnp.asarray(length, jnp.int32)
    if length.shape != cache.length.shape:
        raise ValueError(f"length must be [B] = {cache.length.shape}, got {length.shape}")
    if is_concrete(length, cache.length):
        given, held = np.asarray(length), np.asarray(cache.length)
        if (given < 0).any() or (given > held).any():
            raise ValueError(f"length={given.tolist()} is not allowed: 0 to {held.tolist()}, what each row holds")
    fits = (length >= 0) & (length <= cache.length)
    return set_length(cache, jnp.where(fits, length, cache.max_len + 1))


def set_length(cache: Cache, length: jax.Array) -> Cache:
    """The cache with its rows' lengths [B] replaced, in the latents too; states stay as they are."""

    def replace(layer):
        if not isinstance(layer, MLACache):
            return layer
        return layer._replace(length=jnp.broadcast_to(length, layer.length.shape))

    return dataclasses.replace(cache, layers=map_layers(replace, cache.layers), length=length)


def map_layers(function: Callable[[object], object], layers: StackCache) -> StackCache:
    """function of each layer's cache; of layers that are scanned, of all groups at once, stacked."""
    return StackCache(*(tuple(map(function, part)) for part in layers))


def layer_caches(layers: StackCache) -> list[object]:
    return [cache for part in layers for cache in part]
