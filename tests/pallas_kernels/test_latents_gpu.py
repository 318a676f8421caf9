"""Attention over cached latents: the Hopper kernel as plain Python on numpy (gpu_machine.py), against float64.

And what can serve which call; lowered and, where jax's CUDA plugin is, compiled for a Hopper that is not there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.latents import attend_latents, decode
from tests.pallas_kernels import gpu_machine
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
    pieces: int = 2
    stacked: bool = False


CASES = [
    Case("odd_cache", (197,), 197),
    Case("ragged_with_an_empty_row", (0, 64, 131), 192, pieces=3, stacked=True),
    Case("draft_over_two_blocks_of_queries", (70, 129), 130, T=3, N=16, C=128),
    Case("more_pieces_than_tiles", (65,), 200, T=2, N=32, pieces=4),
]


def problem(case: Case):
    r = np.random.default_rng(0)
    B, R = len(case.lengths), 64
    length = np.array(case.lengths, np.int32)

    def numbers(*shape):
        return jnp.asarray(r.normal(size=shape), BF16)

    queries = numbers(B, case.T, case.N, case.C), numbers(B, case.T, case.N, R)
    position = np.maximum(length[:, None] - case.T + np.arange(case.T, dtype=np.int32), 0)
    dead = np.arange(case.L)[:, None] >= length[:, None, None]
    cache = [jnp.where(dead, jnp.asarray(1e3, BF16), numbers(B, case.L, size)) for size in (case.C, R)]
    group = None
    if case.stacked:
        cache, group = [jnp.stack([x + 1, x, x - 1]) for x in cache], jnp.int32(1)
    return (*queries, *cache, jnp.asarray(length), jnp.asarray(position)), group


def by_hand(q, q_rope, latent, k_rope, length, position):
    """In float64."""
    q, q_rope, latent, k_rope = (np.asarray(x, np.float64) for x in (q, q_rope, latent, k_rope))
    scores = SCALE * (np.einsum("btnc,bsc->btns", q, latent) + np.einsum("btnr,bsr->btns", q_rope, k_rope))
    slot = np.arange(latent.shape[1])
    seen = (slot <= np.asarray(position)[..., None]) & (slot < np.asarray(length)[:, None, None])
    scores = np.where(seen[:, :, None], scores, -1e300)
    weights = np.where(seen[:, :, None], np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return np.einsum("btns,bsc->btnc", weights, latent) / np.maximum(weights.sum(-1), 1e-300)[..., None]


class Barrier(gpu_machine.Barrier):
    """Turns at every num_arrivals copies; what they bring is there for who has waited for the turn."""

    def __init__(self, num_arrivals, num_barriers=1):
        super().__init__(num_arrivals, num_barriers)
        self.copies = []

    def fetch(self, source, target):
        target[...] = np.full(target.shape, np.nan, target.dtype)
        self.copies.append((source, target))

    def wait(self):
        assert len(self.copies) == self.num_arrivals, "waits for what nobody fetches, or a turn was missed"
        for source, target in self.copies:
            target[...] = source[...]
        self.copies = []


@pytest.fixture
def machine(monkeypatch):
    machine = gpu_machine.Machine()
    machine.jax.typeof = jax.typeof
    machine.plgpu.Barrier = Barrier
    machine.plgpu.copy_gmem_to_smem = lambda source, target, barrier: barrier.fetch(source, target)
    machine.replace(monkeypatch, decode)
    return machine


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_float64(case, machine, monkeypatch):
    monkeypatch.setattr(decode, "pieces_of", lambda rows, L: case.pieces)
    arrays, group = problem(case)
    o = attend_latents(*arrays, scale=SCALE, group=group)
    assert o.dtype == BF16
    q, q_rope, latent, k_rope, length, position = arrays
    if case.stacked:
        latent, k_rope = latent[1], k_rope[1]
    expected = by_hand(q, q_rope, latent, k_rope, length, position)
    for row, tokens in enumerate(case.lengths):
        assert_close(o[row], expected[row], BF16_FORWARD, f"row {row}")
        assert tokens or not np.any(np.asarray(o[row]))
