"""Attention over cached latents on a Hopper GPU, against float64: `pytest -m gpu -n0`, skipped where there is none."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.latents import decode
from tests.pallas_kernels.latent_support import Case, check

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper():
    """Memory that a kernel is given and does not write holds NaN."""
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) != "9.0":
        pytest.skip(f"runs on a Hopper GPU, not on a {device.device_kind}")
    jnp.full((1 << 28,), jnp.nan).block_until_ready().delete()


CASES = [
    Case("kimi_linear", (4101,), 4104, N=32, C=512, pieces=None),
    Case("ragged_drafts", (0, 1, 64, 65, 500, 777, 999, 1000), 1000, T=3, N=32, C=512, pieces=None, stacked=True),
    Case("heads_of_k3", (3000, 17), 3000, N=96, C=512, pieces=None),
    Case("few_heads_and_channels", (700, 650), 704, T=2, N=5, C=128, pieces=None),
    Case("many_tiles_of_a_program", (2999,), 3000, N=32, C=512, pieces=1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_float64(case, monkeypatch):
    if case.pieces:
        monkeypatch.setattr(decode, "pieces_of", lambda rows, L: case.pieces)
    check(case)
