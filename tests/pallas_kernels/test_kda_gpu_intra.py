"""The terms that the GPU's intra.py makes of a chunk, by its code run as plain Python (gpu_machine.py)."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda.mosaic_gpu import gate, intra, registers
from pallas_kernels.kda.mosaic_gpu.intra import Options
from tests.pallas_kernels.gpu_machine import Machine
from tests.support import BF16_FORWARD, assert_close

B, N, SCALE, LOWEST = 2, 2, 0.25, -5.0
T = 64 * N


class Case(NamedTuple):
    name: str
    gate: str
    norm: bool = True
    K: int = 128
    H: int = 1
    HV: int = 2


CASES = [
    Case("bounded", "bounded"),
    Case("softplus", "softplus", K=64, H=2),
    Case("without_norm", "bounded", norm=False),
    Case("log", "log"),
    Case("log_without_norm", "log", norm=False),
    Case("log_small_heads", "log", K=64),
]


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    Machine().replace(monkeypatch, gate, intra, registers)


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def inputs(case):
    """q, k, g, beta, rate and bias as intra takes them. Log gates are from -0.001 to -30, and some -inf; those of the
    last value head are weak, so that a chunk's first token counts for its last."""
    bf16 = lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16))  # noqa: E731
    q, k = (bf16(10.0**i * numbers(i, B, T, case.H * case.K)) for i in range(2))
    if not case.norm:
        k = bf16(k.astype(np.float64) / 10 / np.sqrt(case.K))
    g = 2 * numbers(2, B, T, case.HV * case.K)
    if case.gate == "log":
        g = -np.exp(np.random.default_rng(3).uniform(-7, 3.4, (B, T, case.HV * case.K)))
        g[:, 20, ::3] = g[:, 90] = -np.inf
    g[..., -case.K :] = -0.02 * np.abs(g[..., -case.K :].clip(-30)) if case.gate == "log" else g[..., -case.K :] - 8
    beta = 1 / (1 + np.exp(-numbers(4, B, case.HV, T)))
    rate, bias = np.exp(0.5 * numbers(5, case.HV)), 0.5 * numbers(6, case.HV, case.K)
    wide = [np.asarray(x, np.float32) for x in (beta, rate, bias)]
    return q, k, (g.astype(np.float32) if case.gate == "log" else bf16(g)), *wide


def expected(case, q, k, g, beta, rate, bias):
    """By pairs of tokens, each decay the exponential of a sum of gates."""
    heads = lambda x: x.astype(np.float64).reshape(B, N, 64, -1, case.K).transpose(0, 3, 1, 2, 4)  # noqa: E731
    q, k, g = map(heads, (q, k, g))
    if case.norm:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (np.repeat(x, case.HV // case.H, axis=1) for x in (q, k))
    if case.gate != "log":
        a, z = (x.astype(np.float64)[:, None] for x in (rate[:, None, None], bias[:, None]))
        z = g + z
        g = LOWEST / (1 + np.exp(-a * z)) if case.gate == "bounded" else -a * np.logaddexp(0, z)
    decayed = lambda first, end: np.exp(g[..., first:end, :].sum(axis=-2))  # noqa: E731
    A, L = np.zeros((2, B, case.HV, N, 64, 64))
    for i, j in np.ndindex(64, 64):
        if i >= j:
            weighted = k[..., j, :] * decayed(j + 1, i + 1)
            A[..., i, j], L[..., i, j] = ((x[..., i, :] * weighted).sum(-1) for x in (SCALE * q, k))
    L = np.tril(L, -1) * beta.astype(np.float64).reshape(B, case.HV, N, 64, 1)
    before = np.stack([decayed(0, i + 1) for i in range(64)], axis=-2)
    after = np.stack([decayed(i + 1, 64) for i in range(64)], axis=-2)
    return dict(
        k_in=k * before, q_in=SCALE * q * before, k_out=k * after, a=A, inverse=np.linalg.inv(np.eye(64) + L),
        decay=decayed(0, 64),
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_terms(case):
    arrays = inputs(case)
    bound = LOWEST if case.gate == "bounded" else None
    got = intra.intra(*arrays, Options(SCALE, case.gate, bound, case.norm, case.K, 64))._asdict()
    got["inverse"] = np.asarray(got["inverse"], np.float64).sum(axis=0)
    for name, reference in expected(case, *arrays).items():
        value = np.asarray(got[name], np.float64).reshape(reference.shape)
        # Two bf16 terms of products of fp16 numbers, which are rounded once each.
        tolerance = 1e-3 if name == "inverse" else BF16_FORWARD
        for head in range(case.HV):
            assert_close(value[:, head], reference[:, head], tolerance, f"{name} of head {head}")
