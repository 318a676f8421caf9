"""The arithmetic of the gate inside the Hopper kernels, forward and backward, as plain jax against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import gates
from pallas_kernels.kda.mosaic_gpu import gate as gpu_gate
from pallas_kernels.kda.mosaic_gpu.gate import LOG2E, gate_cotangents, log2_gate
from pallas_kernels.kda.mosaic_gpu.intra import Options
from tests.pallas_kernels.field_support import EXTREME_LOGITS
from tests.support import assert_close

GATES = [None, -5.0, -20.0]  # lower bounds; None is softplus
BIAS = np.array([0.0, -1.5, 2.0, 0.25])


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setattr(gpu_gate, "over_tokens", lambda x, layout: x)


def options(lower_bound) -> Options:
    return Options(1.0, "softplus" if lower_bound is None else "bounded", lower_bound, False, 64, 64)


def both(x, rate, lower_bound, dg):
    """Gate, dx and the cotangent of log(rate), each number apart, by the kernels' formulas and by gates.py."""
    o, x, dg, bias = options(lower_bound), *(jnp.asarray(a, jnp.float32) for a in (x, dg, BIAS))
    gate = log2_gate(x, jnp.float32(rate), bias, o) / LOG2E
    got = (gate, *gate_cotangents(x, jnp.float32(rate), bias, o, dg))
    with jax.enable_x64(True):
        wide = jnp.asarray(x, jnp.float64), jnp.full_like(x, np.log(np.float64(rate)), jnp.float64)
        expected = gates.activate_gate(*wide, jnp.asarray(BIAS), lower_bound)
        dx, dA, _ = gates.activate_gate_vjp(*wide, jnp.broadcast_to(BIAS, x.shape), lower_bound, jnp.float64(dg))
    return got, (expected, dx, dA)


@pytest.mark.parametrize("lower_bound", GATES)
@pytest.mark.parametrize("rate", [1e-3, 1.0, 7.5])
def test_gate_and_its_cotangents(lower_bound, rate):
    r = np.random.default_rng(0)
    got, expected = both(3 * r.standard_normal((256, 4)), rate, lower_bound, r.standard_normal((256, 4)))
    for x, reference, name in zip(got, expected, ("gate", "dx", "dA"), strict=True):
        assert_close(np.asarray(x), np.asarray(reference), 2e-6, name)


@pytest.mark.parametrize("lower_bound", GATES)
@pytest.mark.parametrize("rate", [1e-13, 1.0, 7.5, 3e32])
def test_extreme_logits_leave_finite_cotangents(lower_bound, rate):
    """Where the decay underflows dg is rounding, and nothing may come of it."""
    x = np.repeat(np.array(EXTREME_LOGITS, np.float32)[:, None], 4, axis=1)
    (gate, dx, dA), _ = both(x, rate, lower_bound, np.full(x.shape, 1e-9))
    assert not np.isnan(gate).any()
    gone = np.exp2(np.asarray(gate, np.float64) * LOG2E) < 2.0**-126
    assert (np.asarray(dx)[gone] == 0).all() and (np.asarray(dA)[gone] == 0).all()
    assert np.isfinite(dx).all() and np.isfinite(dA).all()
