"""Attention over cached latents: the Hopper kernel as plain Python on numpy (gpu_machine.py), against float64.

That products and copies overlap, and how registers hold a tile, is left out: for that the kernel must run on a GPU
(test_latents_gpu_device.py).
"""

import jax
import numpy as np
import pytest

from pallas_kernels.latents import decode
from tests.pallas_kernels import gpu_machine
from tests.pallas_kernels.latent_support import Case, check

CASES = [
    Case("no_whole_tiles", (197,), 200),
    Case("ragged_with_an_empty_row", (0, 64, 131), 192, pieces=3, stacked=True),
    Case("draft_over_two_blocks_of_queries", (70, 129), 136, T=3, N=16, C=128),
    Case("more_pieces_than_tiles", (65,), 200, T=2, N=32, pieces=4),
]


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
    check(case)
