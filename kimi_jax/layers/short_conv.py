"""The short causal convolution in front of q, k and v: depthwise, W taps, then SiLU (KDA, section 4).

It mixes a few neighbouring tokens per channel. It respects documents: a tap that would reach into another segment or
into padding reads zero, just as before the start of the sequence.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from .padding import merge_ids
from .parameters import at_least_float32, weight


class ShortConv(nnx.Module):
    """y_t = SiLU(sum_i weight[:, i] * x_{t-W+1+i}), no bias, accumulated in float32; the last tap is the current token.

    `weight` [channels, W], never below float32, as the released models keep it; channels are head-major, so that tensor
    parallelism cuts them with the heads.
    """

    def __init__(self, channels: int, width: int = 4, *, rngs: nnx.Rngs, dtype=jnp.float32, param_dtype=jnp.float32):
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        self.width, self.dtype = width, dtype
        self.weight = weight(rngs, (channels, width), ("heads", None), at_least_float32(param_dtype))

    def __call__(
        self,
        x_BTD: jax.Array,
        segment_ids: jax.Array | None = None,
        tail: jax.Array | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """(y [B, T, D], new_tail [B, W-1, D]).

        tail: the W-1 raw inputs before position 0, oldest first, zeros where there were none; they belong to the
        document of position 0. new_tail is the same for the next call: the inputs up to each row's last valid token,
        zeros where they are of another document than it. What segment_ids and lengths mean, and what a wrong shape
        raises: `layers.padding`.
        """
        x_BTD = x_BTD.astype(self.dtype)
        ids = merge_ids(x_BTD, segment_ids, lengths)
        B, T, D = x_BTD.shape
        before = self.width - 1
        if tail is None:
            history = jnp.pad(x_BTD, ((0, 0), (before, 0), (0, 0)))
        elif tail.shape != (B, before, D):
            raise ValueError(f"tail must be [B, W-1, D] = {(B, before, D)}, got {tail.shape}")
        else:
            history = jnp.concatenate([tail.astype(x_BTD.dtype), x_BTD], axis=1)
        if ids is None:
            return _convolve(history, self.weight[...], None), history[:, T:]
        history_ids = jnp.concatenate([jnp.broadcast_to(ids[:, :1], (B, before)), ids], axis=1)
        return _convolve(history, self.weight[...], history_ids), _new_tail(history, history_ids, before)


@jax.checkpoint  # the backward recomputes the taps from the input instead of keeping W float32 copies of it
def _convolve(history, weight_DW, history_ids):
    W = weight_DW.shape[1]
    T = history.shape[1] - W + 1
    wide = at_least_float32(history.dtype)
    total = 0.0
    for i in range(W):
        tap = history[:, i : i + T]
        if history_ids is not None:
            ids = history_ids[:, W - 1 :]
            tap = jnp.where(((history_ids[:, i : i + T] == ids) & (ids >= 0))[..., None], tap, 0)
        total += tap.astype(wide) * weight_DW[:, i].astype(wide)
    return jax.nn.silu(total).astype(history.dtype)


def _new_tail(history, history_ids, before):
    """The inputs at the last valid token of each row and just before it; the old tail if the row has no valid token."""
    new_ids = history_ids[:, before:]
    T = new_ids.shape[1]
    end = jnp.max(jnp.where(new_ids >= 0, jnp.arange(1, T + 1), 0), axis=1)
    window = end[:, None] + jnp.arange(before)
    tail = jax.vmap(lambda row, index: row[index])(history, window)
    tail_ids = jax.vmap(lambda row, index: row[index])(history_ids, window)
    same = (tail_ids == tail_ids[:, -1:]) & (tail_ids >= 0) if before else jnp.zeros_like(window, bool)
    return jnp.where((same | (end == 0)[:, None])[..., None], tail, 0)
