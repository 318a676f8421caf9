"""A piece of a prompt over cached latents, on NVIDIA GPUs: by cuDNN's attention, a block of slots at a time.

Latents are expanded to keys and values, which is cheaper for many queries (`latents`). The piece's own tokens are
causal and come from the call; the slots before it are visible to all its queries, block by block up to the longest row.
Each part gives its softmax's result and log-sum-exp, and parts are merged by those. No scores reach memory.

cuDNN computes in float16 here. jax returns the log-sum-exp in the dtype of the queries, and in bfloat16 it could be off
by 0.03 where it is 8 to 16, and with it the weight of a block by 3 %; in float16 it is 0.004. Products are as fast, and
numbers that float16 cannot hold, as no model has them, would become infinite and the result NaN.
"""

import jax
import jax.numpy as jnp

from .attention import cudnn_head_size

__all__ = ["LEAST_SLOTS", "MOST_SLOTS", "attend_piece", "serves_piece"]

# Of a block: slots of one row at least, and of all rows at most; their keys and values of all heads stand in memory.
LEAST_SLOTS, MOST_SLOTS = 512, 2**14


def serves_piece(q_BTNH: jax.Array) -> bool:
    """Whether `attend_piece` can run here: bfloat16, on NVIDIA GPUs with an attention of these heads' size."""
    H = q_BTNH.shape[-1]
    return q_BTNH.dtype == jnp.bfloat16 and H % 8 == 0 and cudnn_head_size() >= H


def attend_piece(
    q_BTNH: jax.Array,
    kv_b_CNX: jax.Array,
    own: tuple[jax.Array, jax.Array],
    read,
    before_B: jax.Array,
    L: int,
    scale: float,
    implementation: str = "cudnn",
) -> jax.Array:
    """Attention of each query over the row's first `before` slots and the piece's tokens up to its own -> [B, T, N, v].

    own: latents [B, T, kv_lora] and key slices [B, T, rope] of the piece. read(start, size): those of `size` slots of
    every row, of L. implementation as in jax.nn.dot_product_attention.
    """
    (B, _, _, H), R = q_BTNH.shape, own[1].shape[-1]
    nope = H - R
    half = jnp.float16 if q_BTNH.dtype == jnp.bfloat16 else q_BTNH.dtype
    V = kv_b_CNX.shape[-1] - nope
    # The key slices are columns of the latents, with an identity for every head; and values are as wide as keys, since
    # dot_product_attention wants them so: products write keys and values as they are needed.
    w_key = jnp.pad(kv_b_CNX[..., :nope], ((0, R), (0, 0), (0, R)))
    w_key = w_key.at[-R:, :, nope:].set(jnp.eye(R, dtype=w_key.dtype)[:, None])
    w_value = jnp.pad(kv_b_CNX[..., nope:], ((0, 0), (0, 0), (0, max(H - V, 0))))
    q = q_BTNH.astype(half)

    def part(latent_BSC, k_rope_BSR, count_B=None):
        """(result, log-sum-exp) over the first count slots of each row, or over the piece itself."""
        both = jnp.concatenate([latent_BSC, k_rope_BSR], axis=-1).astype(q_BTNH.dtype)
        k = _product("BSC,CNH->BSNH", both, w_key, half)
        v = _product("BSC,CNH->BSNH", both[..., :-R], w_value, half)
        o, lse = jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=scale,
            is_causal=count_B is None,
            key_value_seq_lengths=count_B,
            implementation=implementation,
            return_residual=True,
        )
        o, lse = o[..., :V].astype(jnp.float32), lse.astype(jnp.float32)[..., None]
        if count_B is None:
            return o, lse
        some = (count_B > 0)[:, None, None, None]
        return jnp.where(some, o, 0), jnp.where(some, lse, -jnp.inf)

    size = min(L, max(MOST_SLOTS // B, LEAST_SLOTS))

    def block(index):
        # The last block would reach beyond the cache: it begins earlier, and its first slots are moved behind its own.
        start = jnp.minimum(index * size, L - size)
        slots = read(start, size)
        if L % size:
            slots = [jnp.where(start < index * size, jnp.roll(x, L % size, axis=1), x) for x in slots]
        return part(*slots, jnp.clip(before_B - index * size, 0, size))

    blocks = -(-jnp.minimum(jnp.max(before_B), L) // size)
    o, _ = jax.lax.fori_loop(0, blocks, lambda index, parts: _merge(parts, block(index)), part(*own))
    return o.astype(q_BTNH.dtype)


def _merge(one, other):
    """Two parts as one."""
    (o_1, lse_1), (o_2, lse_2) = one, other
    share = jax.nn.sigmoid(lse_2 - lse_1)
    return o_1 + share * (o_2 - o_1), jnp.logaddexp(lse_1, lse_2)


def _product(spec, x, y, dtype):
    precision = None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=jnp.float32).astype(dtype)
