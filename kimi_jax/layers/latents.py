"""The cache of latent attention: what it holds, how it grows in place, how queries read it.

A decode step is bound by memory, so it reads what it must and nothing twice:

* Only live slots, with a running softmax: neither the scores of all slots nor their keys and values ever stand in
  memory together. On NVIDIA Hopper few queries have a kernel (`pallas_kernels.latents`), and many have cuDNN
  (`latent_pieces`), each device of a mesh with its own rows and heads. Everything else goes block by block up to the
  longest row.
* Without expansion where that is cheaper: with W_kvb = (W_k, W_v) per head, q (latent W_k)^T = (q W_k^T) latent^T, and
  weights (latent W_v) = (weights latent) W_v. All heads then read the one latent as both key and value. Per query and
  slot that costs 2 kv_lora instead of nope + v products; expanding costs kv_lora (nope + v) per slot. So few queries
  (one token, a draft) are folded and many (a piece of a prompt) expand, decided by T alone: equal for all rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kimi_jax.sharding import on_shards
from pallas_kernels.latents import attend_latents, latent_backend

from .latent_pieces import attend_piece, serves_piece
from .parameters import at_least_float32

LEAST_BLOCK, MOST_BLOCKS, MOST_SCORES = 512, 8, 2**22
_QUERIES, _SLOTS = ("batch", None, "heads", None), ("batch", None, None)  # logical axes


class MLACache(NamedTuple):
    """The latents of the tokens so far; slots at and beyond `length` are unused."""

    latent: jax.Array  # [B, L, kv_lora]  after its norm
    k_rope: jax.Array  # [B, L, rope]  the key slice that all heads share
    length: jax.Array  # [B] int32

    def pick(self, group: jax.Array) -> "StackedMLACache":
        """Of caches stacked [groups, ...], one layer's; `put` takes back what has become of it."""
        return StackedMLACache(*self._replace(length=_pick(self.length, group)), group)

    def put(self, group: jax.Array, new: "StackedMLACache") -> "MLACache":
        length = jax.lax.dynamic_update_index_in_dim(self.length, new.length, group, 0)
        return MLACache(new.latent, new.k_rope, length)


class StackedMLACache(NamedTuple):
    """One layer's cache inside the arrays of all groups: a slice of its own would be copied there and back."""

    latent: jax.Array  # [groups, B, L, kv_lora]
    k_rope: jax.Array  # [groups, B, L, rope]
    length: jax.Array  # [B] int32, this layer's
    group: jax.Array  # int32 scalar, which layer


def append(
    cache: MLACache | StackedMLACache, latent_BTC: jax.Array, k_rope_BTR: jax.Array, ids: jax.Array | None
) -> tuple[MLACache | StackedMLACache, jax.Array]:
    """The cache with the tokens whose id is not negative (they come first in each row), and every token's slot [B, T].

    Written in place where the old cache is not needed any more (donated, or carried by a loop). Of a row without room
    for all of them nothing is written, though `length` counts it: its outputs will be NaN, and in a slot even an unseen
    NaN would spoil the row for whoever has it next.
    """
    B, T, _ = latent_BTC.shape
    L = cache.latent.shape[-2]
    position_BT = cache.length[:, None] + jnp.arange(T)
    slot_BT = position_BT if ids is None else jnp.where(ids >= 0, position_BT, L)
    length = cache.length + (T if ids is None else (ids >= 0).sum(axis=1, dtype=jnp.int32))
    slot_BT = jnp.where((length > L)[:, None], L, slot_BT)
    group = getattr(cache, "group", None)
    new = cache._replace(
        latent=_write(cache.latent, group, slot_BT, latent_BTC),
        k_rope=_write(cache.k_rope, group, slot_BT, k_rope_BTR),
        length=length,
    )
    return new, position_BT


def attend(
    q_BTNH: jax.Array,
    kv_b_CNX: jax.Array,
    cache: MLACache | StackedMLACache,
    own: tuple[jax.Array, jax.Array],
    position_BT: jax.Array,
    scale: float,
    *,
    null_key: bool = False,
) -> jax.Array:
    """Attention of each query over the slots up to its position -> [B, T, N, v]; the softmax is at least float32.

    q [B, T, N, nope + rope]; kv_b [kv_lora, N, nope + v] in the same dtype; own: the T latents and key slices that have
    just been appended; null_key: over one more key and value of zeros too, by XLA on every device. Where the cache is
    longer than one block there is no reverse mode: the number of blocks is known at run time only, and kernels have
    none.
    """
    dtype, wide = q_BTNH.dtype, at_least_float32(q_BTNH.dtype)
    precision = None if dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    (B, T), L, nope = q_BTNH.shape[:2], cache.latent.shape[-2], q_BTNH.shape[-1] - cache.k_rope.shape[-1]
    folded, size = folds(T, kv_b_CNX.shape[0], kv_b_CNX.shape[2]), block_size(B * T, L)
    w_key_CNH, w_value_CNV = kv_b_CNX[..., :nope], kv_b_CNX[..., nope:]

    if not folded and not null_key and size < L and serves_piece(q_BTNH):
        return _by_parts(q_BTNH, kv_b_CNX, cache, own, position_BT[:, 0], scale)

    def product(spec, x, y, out=wide):
        return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=wide).astype(out)

    q_nope, q_rope = q_BTNH[..., :nope], q_BTNH[..., nope:]
    if folded:
        q_nope = product("BTNH,CNH->BTNC", q_nope, w_key_CNH, dtype)
    kernel = folded and size < L and not null_key
    if kernel and latent_backend(q_nope, q_rope, cache.latent, cache.k_rope) == "mosaic_gpu":
        o = _by_kernel(q_nope, q_rope, cache, position_BT, scale)
        return product("BTNC,CNV->BTNV", o, w_value_CNV, dtype)

    def block(index):
        """(maximum, sum, weighted values) of the softmax over one block of slots."""
        start = jnp.minimum(index * size, L - size)  # the last block overlaps the one before it
        latent, k_rope = (
            _read(x, getattr(cache, "group", None), start, size).astype(dtype) for x in (cache.latent, cache.k_rope)
        )
        if folded:
            scores = product("BTNC,BSC->BNTS", q_nope, latent)
        else:
            scores = product("BTNH,BSNH->BNTS", q_nope, product("BSC,CNH->BSNH", latent, w_key_CNH, dtype))
        scores = scale * (scores + product("BTNR,BSR->BNTS", q_rope, k_rope))
        slot_S = start + jnp.arange(size)
        visible = (slot_S >= index * size) & (slot_S <= position_BT[:, None, :, None])
        scores = jnp.where(visible, scores, -jnp.inf)
        # Slot 0 is visible to all, so only blocks after the first may have nothing to see; their maximum is not used.
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.where(visible, jnp.exp(scores - jnp.where(top > -jnp.inf, top, 0)), 0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        if folded:
            return top, total, product("BNTS,BSC->BNTC", weights.astype(dtype), latent)
        values = product("BSC,CNV->BSNV", latent, w_value_CNV, dtype)
        return top, total, product("BNTS,BSNV->BNTV", weights.astype(dtype), values)

    parts = block(0)
    if size < L:
        blocks = -(-jnp.minimum(jnp.max(cache.length), L) // size)
        parts = jax.lax.fori_loop(1, blocks, lambda index, parts: _merge(parts, block(index)), parts)
    if null_key:
        parts = _merge(parts, tuple(jnp.full_like(x, value) for x, value in zip(parts, (0, 1, 0), strict=True)))
    _, total, weighted = parts
    o = (weighted / total).astype(dtype)
    return product("BNTC,CNV->BTNV", o, w_value_CNV, dtype) if folded else jnp.swapaxes(o, 1, 2)


def folds(T: int, kv_lora: int, kv_width: int) -> bool:
    """Whether T queries are cheaper folded into the latents' space than slots expanded to kv_width = nope + v."""
    return T * (2 * kv_lora - kv_width) <= kv_lora * kv_width


def block_size(queries: int, L: int) -> int:
    """Slots per block, for the queries of all rows: few blocks for few queries, since each costs launches and, on a
    GPU, a word with its host; few scores at once for many."""
    return min(L, max(LEAST_BLOCK, min(L // MOST_BLOCKS, MOST_SCORES // queries)))


def _by_kernel(q_BTNC, q_rope_BTNR, cache, position_BT, scale):
    """`attend_latents`, every device with its own rows and heads; a stack of caches is read in place.

    Compiled for Hopper meshes, without collectives; run on one GPU only so far.
    """

    def run(q, q_rope, latent, k_rope, length, position, group=None):
        return attend_latents(q, q_rope, latent, k_rope, length, position, scale=scale, group=group)

    arrays = [q_BTNC, q_rope_BTNR, cache.latent, cache.k_rope, cache.length, position_BT.astype(jnp.int32)]
    slots = _SLOTS
    if isinstance(cache, StackedMLACache):
        arrays, slots = [*arrays, cache.group], (None, *slots)
    names = [_QUERIES, _QUERIES, slots, slots, ("batch",), ("batch", None), ()]
    return on_shards(run, arrays, names[: len(arrays)])


def _by_parts(q_BTNH, kv_b_CNX, cache, own, before_B, scale):
    """`attend_piece`, likewise, and as far tested."""

    def run(q, kv_b, own_latent, own_rope, latent, k_rope, before, group=None):
        def read(start, size):
            return [_read(x, group, start, size).astype(q.dtype) for x in (latent, k_rope)]

        return attend_piece(q, kv_b, (own_latent, own_rope), read, before, latent.shape[-2], scale)

    arrays = [q_BTNH, kv_b_CNX, *own, cache.latent, cache.k_rope, before_B]
    slots = _SLOTS
    if isinstance(cache, StackedMLACache):
        arrays, slots = [*arrays, cache.group], (None, *slots)
    names = [_QUERIES, (None, "heads", None), _SLOTS, _SLOTS, slots, slots, ("batch",), ()]
    return on_shards(run, arrays, names[: len(arrays)])


def _merge(one, other):
    """Two blocks as one."""
    top = jnp.maximum(one[0], other[0])
    one_share, other_share = jnp.exp(one[0] - top), jnp.exp(other[0] - top)
    return top, *(one_share * x + other_share * y for x, y in zip(one[1:], other[1:], strict=True))


def _write(slots, group, slot_BT, new_BTX):
    """slots [B, L, X], or [groups, B, L, X] with a group, where new [B, T, X] stands at slot_BT; slots >= L drop out.

    One scatter with the rows as batch dimension: indices for them would be gathered from all devices on a mesh, and
    vmap over rows would first move them to the front of the stack, all of it.
    """
    lead = 0 if group is None else 1
    index_BT1 = slot_BT[..., None]
    if group is not None:
        index_BT1 = jnp.concatenate([jnp.full_like(index_BT1, 0) + group, index_BT1], axis=-1)
    written = (0, 2) if lead else (1,)
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(2,),
        inserted_window_dims=written,
        scatter_dims_to_operand_dims=written,
        operand_batching_dims=(lead,),
        scatter_indices_batching_dims=(0,),
    )
    mode = jax.lax.GatherScatterMode.FILL_OR_DROP
    return jax.lax.scatter(slots, index_BT1, new_BTX.astype(slots.dtype), numbers, mode=mode, unique_indices=False)


def _read(slots, group, start, size):
    """`size` slots of every row from `start` on, [B, size, X]; of a stack, those of a layer."""
    if group is None:
        return jax.lax.dynamic_slice_in_dim(slots, start, size, axis=1)
    _, B, _, X = slots.shape
    zero, start = jnp.zeros_like(group), jnp.asarray(start, group.dtype)  # one type, also where integers have 64 bits
    return jax.lax.dynamic_slice(slots, (group, zero, start, zero), (1, B, size, X))[0]


def _pick(stacked, group):
    return jax.lax.dynamic_index_in_dim(stacked, group, keepdims=False)
