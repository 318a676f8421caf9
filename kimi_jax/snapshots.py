"""Copies of rows of a cache, and prompts that begin alike computed once.

A KDA state holds all tokens before it and cannot be cut, so it has to be copied where it may be wanted again. A
PrefixCache does so at every multiple of `block` tokens of a prompt: the states and convolution windows there, and the
latents of the block before. Another prompt goes on from the longest such boundary that it shares.
"""

import dataclasses
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .cache import Cache, layer_caches
from .generate import append_piece, padded_length
from .layers import KDACache, MLACache
from .layers.padding import is_concrete
from .layers.stack import StackCache
from .model import KimiLM


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Snapshot:
    """One row of a cache, a copy: nothing that happens to the cache changes it, and `restore` copies again.

    Attributes:
        layers: as Cache.layers, with one row; the latents are those of the slots from `start` on.
        start: where the latents begin.
        length: the number of tokens that the states have seen, and that the row holds.
    """

    layers: StackCache
    start: int = dataclasses.field(metadata=dict(static=True))
    length: int = dataclasses.field(metadata=dict(static=True))

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.layers))


def snapshot(cache: Cache, row: int) -> Snapshot:
    """A copy of one row. Outside of jit; ValueError for a row that is not there.

    Of latents a few slots more may be copied, so that not every length is compiled anew.
    """
    length = _row_length(cache, row)
    size = min(padded_length(max(length, 1)), cache.max_len)
    return Snapshot(_take(cache.layers, row, 0, size), 0, length)


def restore(cache: Cache, row: int, snapshots: Snapshot | Sequence[Snapshot]) -> Cache:
    """The cache with one row replaced, whatever it held. The given cache is donated: use the one returned.

    Outside of jit. A sequence is a row in pieces: each begins where the one before ends, the first at 0. ValueError for
    snapshots of another model, pieces that do not meet, a row that is not there or a cache that is too short.
    """
    pieces = [snapshots] if isinstance(snapshots, Snapshot) else list(snapshots)
    _row_length(cache, row)
    at = 0
    for piece in pieces:
        if piece.start != at:
            raise ValueError(f"a snapshot begins at token {piece.start}, the row is known up to {at}")
        at = piece.length
        if (own := _row_shapes(cache.layers)) != (theirs := _row_shapes(piece.layers)):
            raise ValueError(f"the snapshot is of another model: its layers are {theirs}, the cache's are {own}")
    if not pieces or at > cache.max_len:
        raise ValueError(f"the cache has room for 1 to {cache.max_len} tokens per row, the snapshot has {at}")
    for piece in pieces:
        cache = _give(cache, row, piece.layers, piece.start, piece.length, last=piece is pieces[-1])
    return cache


class PrefixCache:
    """Prompts of one model that begin alike are computed once.

    Args:
        model: snapshots are its; when its parameters have changed they are dropped.
        block: snapshots stand at multiples of it, and prompts go in by pieces of it. One costs all KDA states of a row.
        byte_budget: for all snapshots, on the device; the longest unused go first.
    """

    def __init__(self, model: KimiLM, *, block: int = 512, byte_budget: int = 2**30):
        for name, size in (("block", block), ("byte_budget", byte_budget)):
            if size < 1:
                raise ValueError(f"{name}={size} is not allowed: at least 1")
        self.model, self.block, self.byte_budget = model, block, byte_budget
        self.clear()

    def clear(self) -> None:
        """Forget all snapshots."""
        # By the hash of the text up to a boundary. A text is always used after all that begin with it: so the one that
        # was not used for longest begins no other, and dropping it leaves none behind that cannot be reached.
        self._kept: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._parameters = jax.tree.leaves(nnx.state(self.model))
        self.nbytes = 0

    def lookup(self, tokens: np.ndarray) -> list[Snapshot]:
        """The pieces of the longest beginning of tokens [T] that is known; at least the last token is left to compute,
        since its logits are in no snapshot."""
        self._drop_if_stale()
        keys = self._keys(np.asarray(tokens, np.int32)[:-1])
        count = next((i for i, key in enumerate(keys) if key not in self._kept), len(keys))
        self._use(keys[:count])
        return [self._kept[key] for key in keys[:count]]

    def prefill(
        self, tokens: np.ndarray, max_len: int, *, lengths: np.ndarray | None = None
    ) -> tuple[jax.Array, Cache, np.ndarray]:
        """(logits [B, vocab] after each row's last token, the cache, int [B] the tokens that were known already).

        tokens: int [B, T], lengths: int [B], left-aligned; None: all. ValueError where extend has one;
        NotImplementedError for a batch cut over Explicit mesh axes.
        """
        tokens = np.asarray(tokens, np.int32)
        B, T = tokens.shape
        lengths = np.full(B, T) if lengths is None else np.asarray(lengths)
        if lengths.shape != (B,) or lengths.min() < 1 or lengths.max() > min(T, max_len):
            raise ValueError(f"lengths={lengths.tolist()} is not allowed: {B} numbers from 1 to {min(T, max_len)}")
        rows = [tokens[row, :length] for row, length in enumerate(lengths)]
        keys = [self._keys(text) for text in rows]
        cache, logits = self.model.init_cache(B, max_len), None
        _check_mesh(cache)
        known = np.zeros(B, int)
        for row, text in enumerate(rows):
            if pieces := self.lookup(text):
                cache = restore(cache, row, pieces)
                known[row] = pieces[-1].length
        position = known.copy()
        while (position < lengths).any():
            added = np.clip(lengths - position, 0, self.block)
            piece = np.zeros((B, self.block), np.int32)
            for row, text in enumerate(rows):
                piece[row, : added[row]] = text[position[row] : position[row] + added[row]]
            logits, cache = append_piece(self.model, piece, added, cache, logits)
            position += added
            for row in np.flatnonzero(added == self.block):
                self._keep(keys[row][: position[row] // self.block], cache, row)
        return logits, cache, known

    def _keep(self, keys, cache, row):
        """Remember the text of the last key, if what comes before its last block still is remembered."""
        *before, key = keys
        if key in self._kept or (before and before[-1] not in self._kept):
            return
        start = len(before) * self.block
        self._kept[key] = Snapshot(_take(cache.layers, row, start, self.block), start, start + self.block)
        self.nbytes += self._kept[key].nbytes
        self._use(keys)
        while self.nbytes > self.byte_budget:
            self.nbytes -= self._kept.popitem(last=False)[1].nbytes

    def _use(self, keys):
        for key in reversed(keys):
            self._kept.move_to_end(key)

    def _keys(self, text):
        """A hash of the text up to each boundary."""
        hash_, keys = hashlib.sha256(), []
        for end in range(self.block, len(text) + 1, self.block):
            hash_.update(text[end - self.block : end].tobytes())
            keys.append(hash_.copy().digest())
        return keys

    def _drop_if_stale(self):
        now = jax.tree.leaves(nnx.state(self.model))
        if len(now) != len(self._parameters) or any(a is not b for a, b in zip(now, self._parameters, strict=True)):
            self.clear()


@functools.partial(jax.jit, static_argnames="size")
def _take(layers, row, start, size):
    """One row of all layers' caches, and of latents `size` slots."""

    def take(layer, axis):
        def one(x):
            return jax.lax.dynamic_slice_in_dim(x, row, 1, axis)

        if isinstance(layer, KDACache):
            return jax.tree.map(one, layer)
        latent, k_rope = (
            jax.lax.dynamic_slice_in_dim(one(x), start, size, axis + 1) for x in (layer.latent, layer.k_rope)
        )
        return MLACache(latent, k_rope, one(layer.length))

    return _by_row_axis(take, layers)


@functools.partial(jax.jit, static_argnames="last", donate_argnames="cache")
def _give(cache, row, layers, start, length, last):
    """The cache with these latents in a row from `start` on, and for the last piece the states."""

    def give(layer, new, axis):
        def one(x, y):
            return jax.lax.dynamic_update_slice_in_dim(x, y, row, axis)

        if isinstance(layer, KDACache):
            return jax.tree.map(lambda x, y: one(x, y.astype(x.dtype)), layer, new) if last else layer

        def slots(x, y):
            y = jax.lax.slice_in_dim(y, 0, min(y.shape[axis + 1], x.shape[axis + 1]), axis=axis + 1)
            index = [0] * x.ndim
            index[axis], index[axis + 1] = row, start
            return jax.lax.dynamic_update_slice(x, y, index)

        return MLACache(
            slots(layer.latent, new.latent),
            slots(layer.k_rope, new.k_rope),
            one(layer.length, jnp.full_like(new.length, length)),
        )

    layers = _by_row_axis(give, cache.layers, layers)
    return dataclasses.replace(cache, layers=layers, length=cache.length.at[row].set(length))


def _by_row_axis(function, *stacks):
    """function(layer, ..., axis of rows) for every layer of stacks."""
    axes = StackCache(0, 1, 0)
    return StackCache(
        *(
            tuple(function(*layers, axis) for layers in zip(*parts, strict=True))
            for axis, *parts in zip(axes, *stacks, strict=True)
        )
    )


def _row_shapes(layers):
    """What tells the models apart whose rows are held, [(kind, sizes of a row)]; slots and float types do not count."""

    def shapes(layer, axis):
        def sizes(x, skipped):
            return tuple(n for i, n in enumerate(x.shape) if i not in skipped)

        latents = ("latent", "k_rope")
        return type(layer).__name__, [
            sizes(x, (axis, axis + 1) if name in latents else (axis,))
            for name, x in zip(layer._fields, layer, strict=True)
        ]

    return layer_caches(_by_row_axis(shapes, layers))


def _row_length(cache, row):
    if not is_concrete(cache.length):
        raise ValueError("snapshots are taken and restored outside of jit")
    _check_mesh(cache)
    if not 0 <= row < cache.length.shape[0]:
        raise ValueError(f"row={row} is not allowed: 0 to {cache.length.shape[0] - 1}")
    return int(cache.length[row])


def _check_mesh(cache):
    if any(entry is not None for entry in jax.typeof(cache.length).sharding.spec):
        raise NotImplementedError("snapshots of a batch cut over Explicit mesh axes are not built; use Auto axes")
