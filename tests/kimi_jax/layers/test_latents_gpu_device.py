"""Attention over cached latents as an NVIDIA GPU does it, against float64: `pytest -m gpu -n0`, skipped without one.

A token and a draft by the kernel for Hopper, a piece of a prompt by cuDNN; which it is, the compiled programs say.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.layers import latent_pieces
from kimi_jax.layers.latents import StackedMLACache, append, attend
from tests.support import BF16_FORWARD, assert_close

pytestmark = pytest.mark.gpu

N, C, R, NOPE, V = 8, 512, 64, 128, 128  # as in both released models, with fewer heads
SCALE = (NOPE + R) ** -0.5


@pytest.fixture(autouse=True)
def hopper():
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) != "9.0":
        pytest.skip(f"runs on a Hopper GPU, not on a {device.device_kind}")


class Case(NamedTuple):
    name: str
    T: int
    before: tuple[int, ...]
    L: int
    runs: str
    most_slots: int = latent_pieces.MOST_SLOTS


KERNEL, CUDNN = "mosaic_gpu_v2", "__cudnn$fmhaSoftmax"
CASES = [
    Case("token", 1, (0, 1499), 1504, KERNEL),
    Case("draft", 5, (700, 3), 1504, KERNEL),
    Case("piece_of_even_length", 512, (0, 777), 2005, CUDNN),
    Case("piece_of_odd_length", 511, (700, 3), 2005, CUDNN),
    Case("piece_after_many_blocks", 256, (1500, 1303), 1903, CUDNN, most_slots=1024),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_float64(case, monkeypatch):
    monkeypatch.setattr(latent_pieces, "MOST_SLOTS", case.most_slots)
    rng, B, before = np.random.default_rng(0), len(case.before), np.array(case.before, np.int32)

    def numbers(*shape, scale=1.0):
        return jnp.asarray(scale * rng.normal(size=shape), jnp.bfloat16)

    live = np.arange(case.L)[:, None] < before[:, None, None]
    slots = [jnp.where(live, numbers(2, B, case.L, x), 1e3).astype(jnp.bfloat16) for x in (C, R)]
    inputs = numbers(B, case.T, N, NOPE + R), numbers(C, N, NOPE + V, scale=C**-0.5), slots
    new = numbers(B, case.T, C), numbers(B, case.T, R)

    @jax.jit
    def run(q, kv_b, slots, new):
        cache, position = append(StackedMLACache(*slots, jnp.asarray(before), jnp.int32(1)), *new, None)
        return attend(q, kv_b, cache, new, position, SCALE)

    compiled = run.lower(*inputs, new).compile()
    assert case.runs in compiled.as_text()
    o = compiled(*inputs, new)
    with jax.enable_x64():
        expected = run(*jax.tree.map(lambda x: x.astype(jnp.float64), (*inputs, new)))
    for row in range(B):
        assert_close(o[row], expected[row], BF16_FORWARD, f"row {row}")
