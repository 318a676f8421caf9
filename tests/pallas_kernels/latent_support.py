"""Problems for attention over cached latents, and their results in float64."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.latents import attend_latents
from pallas_kernels.latents.decode import SLOTS
from tests.support import BF16_FORWARD, assert_close

BF16 = jnp.bfloat16
SCALE = 0.1


class Case(NamedTuple):
    name: str
    lengths: tuple[int, ...]
    L: int
    T: int = 1
    N: int = 2
    C: int = 64
    pieces: int | None = 2  # of a row; None is as many as the kernel chooses
    stacked: bool = False


def problem(case: Case):
    r = np.random.default_rng(0)
    B, R = len(case.lengths), 64
    length = np.array(case.lengths, np.int32)

    def numbers(*shape):
        return jnp.asarray(r.normal(size=shape), BF16)

    queries = numbers(B, case.T, case.N, case.C), numbers(B, case.T, case.N, R)
    # The last token of a draft has no slot of its own: what is beyond the length is not there for it either.
    position = np.maximum(length[:, None] - case.T + np.arange(case.T, dtype=np.int32) + (case.T > 1), 0)
    # Dead slots hold a number that would show, and beyond the last live tile, which nobody has to read, none.
    slot, live = np.arange(case.L)[:, None], length[:, None, None]
    dead = jnp.where(slot < -(-live // SLOTS) * SLOTS, 1e3, jnp.nan).astype(BF16)
    cache = [jnp.where(slot < live, numbers(B, case.L, size), dead) for size in (case.C, R)]
    group = None
    if case.stacked:
        cache, group = [jnp.stack([x + 1, x, x - 1]) for x in cache], jnp.int32(1)
    return (*queries, *cache, jnp.asarray(length), jnp.asarray(position)), group


def by_hand(q, q_rope, latent, k_rope, length, position):
    """In float64."""
    q, q_rope, latent, k_rope = (np.nan_to_num(np.asarray(x, np.float64)) for x in (q, q_rope, latent, k_rope))
    scores = SCALE * (np.einsum("btnc,bsc->btns", q, latent) + np.einsum("btnr,bsr->btns", q_rope, k_rope))
    slot = np.arange(latent.shape[1])
    seen = (slot <= np.asarray(position)[..., None]) & (slot < np.asarray(length)[:, None, None])
    scores = np.where(seen[:, :, None], scores, -1e300)
    weights = np.where(seen[:, :, None], np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return np.einsum("btns,bsc->btnc", weights, latent) / np.maximum(weights.sum(-1), 1e-300)[..., None]


def check(case: Case):
    """attend_latents of a case, row by row; rows without a slot are zeros."""
    arrays, group = problem(case)
    o = jax.block_until_ready(attend_latents(*arrays, scale=SCALE, group=group))
    q, q_rope, latent, k_rope, length, position = arrays
    if case.stacked:
        latent, k_rope = latent[1], k_rope[1]
    expected = by_hand(q, q_rope, latent, k_rope, length, position)
    assert o.dtype == BF16
    for row in range(len(case.lengths)):
        assert_close(o[row], expected[row], BF16_FORWARD, f"row {row}")
