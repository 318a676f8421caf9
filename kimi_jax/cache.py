"""What a model remembers of each row between calls of `extend`: fixed-size KDA states and growing MLA latents."""

import dataclasses

import jax
import numpy as np

from .layers.stack import StackCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """A pytree; `extend` returns a new one and leaves the old one valid.

    Attributes:
        layers: per layer a KDACache (state float32 [B, HV, K, V] and the convolutions' last inputs) or an MLACache
            (latents [B, max_len, ...]); layers that the model scans are stacked.
        length: int32 [B], the number of tokens that each row holds.
        max_len: how many it may hold.
    """

    layers: StackCache
    length: jax.Array
    max_len: int = dataclasses.field(metadata=dict(static=True))


def check_room(cache: Cache, added: jax.Array) -> None:
    """ValueError if a row would outgrow the cache; silent where lengths are traced (then its outputs are NaN)."""
    if isinstance(cache.length, jax.core.Tracer) or isinstance(added, jax.core.Tracer):
        return
    if (longest := int(np.max(np.asarray(cache.length) + np.asarray(added)))) > cache.max_len:
        raise ValueError(f"the cache has room for {cache.max_len} tokens per row, its longest row would have {longest}")
