"""Multi-head latent attention without positions (NoPE MLA): the full-attention layers of both models (KDA 4; K3).

Keys and values are expanded from one small latent per token, which is all that a cache keeps. The slice of the key that
other models rotate ("rope") is shared by all heads and is not rotated here: order comes from the KDA layers. To compare
with such models, rope_theta rotates it, and the queries' part that meets it.

    q       = x W_q, or RMSNorm(x W_qa) W_qb                [N, nope + rope]
    latent  = RMSNorm(x W_kva[:, :kv_lora])                 [kv_lora]
    key     = (latent W_kvb per head, x W_kva[:, kv_lora:]) [N, nope + rope]
    y       = (softmax(q key^T (nope + rope)^-0.5) value, optionally times sigmoid(x W_g)) W_o

With softmax1 a token may read nothing: exp(s_i) / (1 + sum_j exp(s_j)), the softmax with one more key of zeros, whose
score is 0 and whose value is 0. So it is computed, by the same kernels.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kimi_jax.sharding import constrain, gathered, logical_axes, project, spread

from .attention import attention
from .cache_check import check_cache
from .latents import LEAST_BLOCK, MLACache, StackedMLACache, append, attend
from .norms import RMSNorm
from .padding import concrete_ids, is_concrete, left_align, merge_ids, zero_padding
from .parameters import check_heads, weight
from .rope import document_positions, rotate


class MLA(nnx.Module):
    """Multi-head latent attention, causal.

    Args:
        q_lora_rank: None for a direct query projection (Kimi Linear), else through a normed bottleneck (K3).
        inner_norm_eps: of the norms of latent and query bottleneck; the released models use 1e-6 there whatever their
            other norms have.
        output_gate: a full-rank sigmoid gate on the heads' outputs (K3).
        softmax1: weights exp(s_i) / (1 + sum_j exp(s_j)), against attention sinks and outliers (arXiv 2605.17887).
        rope_theta: None (NoPE), or the base of rotary positions, which count the tokens of each document.

    Raises ValueError if the mesh in force does not divide the heads, or for a qk_rope_dim that cannot be rotated.
    """

    def __init__(
        self,
        hidden: int,
        *,
        num_heads: int,
        q_lora_rank: int | None = None,
        kv_lora_rank: int,
        qk_nope_dim: int,
        qk_rope_dim: int,
        v_dim: int,
        inner_norm_eps: float = 1e-6,
        output_gate: bool = False,
        softmax1: bool = False,
        rope_theta: float | None = None,
        rngs: nnx.Rngs,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    ):
        if rope_theta is not None and (qk_rope_dim < 2 or qk_rope_dim % 2):
            raise ValueError(f"qk_rope_dim={qk_rope_dim} is not allowed with rope_theta={rope_theta}: even, at least 2")
        check_heads(num_heads=num_heads)
        self.num_heads, self.kv_lora_rank = num_heads, kv_lora_rank
        self.qk_nope_dim, self.qk_rope_dim, self.v_dim = qk_nope_dim, qk_rope_dim, v_dim
        self.q_lora_rank, self.output_gate, self.softmax1, self.dtype = q_lora_rank, output_gate, softmax1, dtype
        self.rope_theta = rope_theta
        self.scale = (qk_nope_dim + qk_rope_dim) ** -0.5
        q_width = num_heads * (qk_nope_dim + qk_rope_dim)

        def new(shape, *axes):
            return weight(rngs, shape, axes, param_dtype)

        def norm(dim):
            return RMSNorm(dim, eps=inner_norm_eps, rngs=rngs, dtype=dtype, param_dtype=param_dtype)

        if q_lora_rank is None:
            self.q = new((hidden, q_width), "embed", "heads")
        else:
            self.q_a = new((hidden, q_lora_rank), "embed", None)
            self.q_norm = norm(q_lora_rank)
            self.q_b = new((q_lora_rank, q_width), None, "heads")
        self.kv_a = new((hidden, kv_lora_rank + qk_rope_dim), "embed", None)
        self.kv_norm = norm(kv_lora_rank)
        # Columns per head: nope key, then value.
        self.kv_b = new((kv_lora_rank, num_heads * (qk_nope_dim + v_dim)), None, "heads")
        if output_gate:
            self.g = new((hidden, num_heads * v_dim), "embed", "heads")
        self.o = new((num_heads * v_dim, hidden), "heads", "embed")

    def __call__(
        self,
        x_BTD: jax.Array,
        segment_ids: jax.Array | None = None,
        cache: MLACache | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, MLACache | None]:
        """(y [B, T, hidden], the cache with these tokens appended, or None if none was given).

        Documents in segment_ids do not see each other. At padding (a negative id, a position beyond lengths) the input
        is ignored, y and gradients are exactly 0 and nothing is appended. With a cache, segment_ids may only mark
        padding. A row that outgrows its cache is a ValueError when its length is concrete, NaN in y when it is traced.
        A cache of other sizes is a ValueError.
        How a cached call reads the latents, and where it has no gradient: `layers.latents`.
        """
        if cache is None:
            return self._attend_self(x_BTD, merge_ids(x_BTD, segment_ids, lengths)), None
        self._check_cache(cache, x_BTD.shape[0])
        aligned_BTD, valid, restore = left_align(x_BTD, segment_ids, lengths)
        ids = merge_ids(aligned_BTD, None, valid)
        _check_room(cache, concrete_ids(x_BTD, segment_ids, lengths))
        y_BTD, cache = self._attend_cache(aligned_BTD, ids, cache)
        return restore(y_BTD), cache

    def init_cache(self, batch: int, max_len: int) -> MLACache:
        """An empty cache with room for max_len tokens per row, and of a long one for up to seven more."""
        return self._empty(batch, max_len if max_len <= LEAST_BLOCK else -(-max_len // 8) * 8)  # as the kernel wants it

    def _empty(self, batch, slots):
        latent = jnp.zeros((batch, slots, self.kv_lora_rank), self.dtype)
        k_rope = jnp.zeros((batch, slots, self.qk_rope_dim), self.dtype)
        return MLACache(
            latent=constrain(latent, "batch", None, None),
            k_rope=constrain(k_rope, "batch", None, None),
            length=constrain(jnp.zeros(batch, jnp.int32), "batch"),
        )

    def _attend_self(self, x_BTD, ids):
        x_BTD = zero_padding(x_BTD.astype(self.dtype), ids)
        mask_BTS = None if ids is None else ids[:, :, None] == ids[:, None, :]
        position_BT = None if self.rope_theta is None else document_positions(x_BTD, ids)
        o = self._attend(self._queries(x_BTD, position_BT), *self._latents(x_BTD, position_BT), mask_BTS)
        return self._output(x_BTD, o, ids)

    def _attend_cache(self, x_BTD, ids, cache):
        x_BTD = zero_padding(x_BTD.astype(self.dtype), ids)
        position_BT = cache.length[:, None] + jnp.arange(x_BTD.shape[1])
        own = self._latents(x_BTD, position_BT)
        cache, _ = append(cache, *own, ids)
        kv_b = gathered(self.kv_b[...].astype(self.dtype), logical_axes(self.kv_b))
        kv_b_CNX = kv_b.reshape(self.kv_lora_rank, self.num_heads, self.qk_nope_dim + self.v_dim)
        q_BTNH = self._queries(x_BTD, position_BT)
        o = attend(q_BTNH, kv_b_CNX, cache, own, position_BT, self.scale, null_key=self.softmax1)
        y_BTD = self._output(x_BTD, o, ids)
        return jnp.where((cache.length > cache.latent.shape[-2])[:, None, None], jnp.nan, y_BTD), cache

    def _check_cache(self, cache, batch):
        if isinstance(cache, StackedMLACache):
            cache = jax.eval_shape(lambda cache: MLACache(cache.latent[0], cache.k_rope[0], cache.length), cache)
        slots = cache.latent.shape[1] if isinstance(cache, MLACache) and cache.latent.ndim > 1 else 1
        check_cache(cache, jax.eval_shape(lambda: self._empty(batch, slots)))

    def _queries(self, x_BTD, position_BT=None):
        if self.q_lora_rank is None:
            q = project(x_BTD, self.q, ("batch", None, "heads"))
        else:
            low = self.q_norm(project(x_BTD, self.q_a, ("batch", None, None)))
            q = project(low, self.q_b, ("batch", None, "heads"))
        return self._rotated(q.reshape(*q.shape[:2], self.num_heads, self.qk_nope_dim + self.qk_rope_dim), position_BT)

    def _latents(self, x_BTD, position_BT=None):
        both = self._rotated(project(x_BTD, self.kv_a, ("batch", None, None)), position_BT)
        return self.kv_norm(both[..., : self.kv_lora_rank]), both[..., self.kv_lora_rank :]

    def _rotated(self, x, position_BT):
        return x if self.rope_theta is None else rotate(x, position_BT, self.rope_theta, self.qk_rope_dim)

    def _attend(self, q_BTNH, latent_BSC, k_rope_BSR, mask_BTS):
        """Causal softmax attention over the keys and values expanded from S = T latents -> [B, T, N, v]."""
        B, S, _ = latent_BSC.shape
        kv = project(latent_BSC.astype(self.dtype), self.kv_b, ("batch", None, "heads"))
        kv = kv.reshape(B, S, self.num_heads, self.qk_nope_dim + self.v_dim)
        k_nope, v_BSNV = kv[..., : self.qk_nope_dim], kv[..., self.qk_nope_dim :]
        k_rope = k_rope_BSR.astype(self.dtype)[:, :, None]
        k_rope = spread(k_rope, (B, S, self.num_heads, self.qk_rope_dim), "batch", None, "heads", None)
        k_BSNH = jnp.concatenate([k_nope, k_rope], axis=-1)
        if not self.softmax1:
            return attention(q_BTNH, k_BSNH, v_BSNV, mask_BTS, scale=self.scale, causal=True)
        arrays = _with_null_key(q_BTNH, k_BSNH, v_BSNV, mask_BTS)
        return attention(*arrays, scale=self.scale, causal=True)[:, 1 : S + 1]

    def _output(self, x_BTD, o_BTNV, ids):
        # A row without any visible key averages over all of them: its output is dropped here.
        B, T, N, V = o_BTNV.shape
        o = zero_padding(o_BTNV.reshape(B, T, N * V), ids)
        if self.output_gate:
            o = o * jax.nn.sigmoid(project(x_BTD, self.g, ("batch", None, "heads")))
        return project(o, self.o, ("batch", None, None))


def _with_null_key(q_BTNH, k_BSNH, v_BSNV, mask_BTS):
    """All with a token of zeros in front, whose key every query sees, and one behind where the fast path wants an even
    number of them."""
    around = (1, 1 - q_BTNH.shape[1] % 2)
    q, k, v = (jnp.pad(x, ((0, 0), around, (0, 0), (0, 0))) for x in (q_BTNH, k_BSNH, v_BSNV))
    if mask_BTS is not None:
        mask_BTS = jnp.pad(mask_BTS, ((0, 0), around, around)) | (jnp.arange(q.shape[1]) == 0)
    return q, k, v, mask_BTS


def _check_room(cache: MLACache, ids_BT: np.ndarray | None) -> None:
    """ValueError if a row would outgrow the cache; silent where its length or the new tokens' ids are traced."""
    if ids_BT is None or not is_concrete(cache.length):
        return
    L = cache.latent.shape[-2]
    if L < (longest := int((np.asarray(cache.length) + (ids_BT >= 0).sum(axis=1)).max(initial=0))):
        raise ValueError(f"the cache has room for {L} tokens per row, its longest row would have {longest}")
