"""The gradients of the GPU's intra_backward.py, by its code run as plain Python (gpu_machine.py), against float64.

Of the products of warp_products.py only what they give is taken, not how warps load their operands.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda.mosaic_gpu import gate, intra_backward, registers
from pallas_kernels.kda.mosaic_gpu.intra import Options
from tests.pallas_kernels.gpu_machine import Machine, multiply
from tests.support import BF16_GRADIENT, assert_close

B, N, SCALE, LOWEST = 2, 2, 0.25, -5.0
T = 64 * N


class Case(NamedTuple):
    name: str
    gate: str
    norm: bool = True
    K: int = 128
    H: int = 2
    HV: int = 2


CASES = [
    Case("bounded", "bounded"),
    Case("softplus_small_heads", "softplus", K=64),
    Case("softplus_grouped", "softplus", H=1),
    Case("without_norm", "bounded", norm=False),
    Case("log", "log"),
    Case("log_grouped_without_norm", "log", norm=False, H=1),
]


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    Machine().replace(monkeypatch, gate, intra_backward, registers)
    for name, function in dict(add_inner_level=add_level, add_outer_level=add_level, diagonal_blocks=diagonal).items():
        monkeypatch.setattr(intra_backward, name, function)


def add_level(sums, factors, operands, cotangents, *, half):
    """The formulas of warp_products.py, with the bf16 numbers that it multiplies exactly."""
    (x, p, y), f, (k, q, r), (a, m) = (
        sums,
        *([z[...].astype(np.float32) for z in group] for group in ([factors], operands, cotangents)),
    )
    (f,), i = f, np.arange(64)
    pairs = ((i[:, None] // half) % 2 == 1) & (i[None] // half == i[:, None] // half - 1)
    a, m = a * pairs, m * pairs
    return x + f * multiply(a, f * k), p + f * multiply(m, f * k), y + f * (multiply(a.T, f * q) + multiply(m.T, f * r))


def diagonal(tile):
    x = tile[...]
    return np.concatenate([x[i : i + 16, i : i + 16] for i in range(0, 64, 16)])


def numbers(seed, *shape, dtype=jnp.bfloat16):
    return np.asarray(jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype))


def inputs(case):
    """As intra_backward takes them; gates of the last value head are weak."""
    HV, K = case.HV, case.K
    q, k = (numbers(i, B, T, case.H * K) for i in range(2))
    if not case.norm:
        k = np.asarray(jnp.asarray(k.astype(np.float32) / np.sqrt(K), jnp.bfloat16))
    g = 2 * np.random.default_rng(2).standard_normal((B, T, HV * K))
    if case.gate == "log":
        g = -np.exp(np.random.default_rng(3).uniform(-7, 3.4, g.shape))
    g[..., -K:] = 0.02 * g[..., -K:] if case.gate == "log" else g[..., -K:] - 8
    beta = 1 / (1 + np.exp(-numbers(4, B, HV, T, dtype=jnp.float32)))
    rate, bias = np.exp(0.5 * numbers(5, HV, dtype=jnp.float32)), 0.5 * numbers(6, HV, K, dtype=jnp.float32)
    wide, tokens = lambda i, *s: numbers(i, B, HV, *s, dtype=jnp.float32), lambda i, w: numbers(i, B, HV, T, w)  # noqa: E731
    cotangents = tokens(7, 64), tokens(8, 64), tokens(9, K), tokens(10, K), tokens(11, K), wide(12, 4 * N, K)
    return (
        q,
        k,
        np.asarray(jnp.asarray(g, jnp.float32 if case.gate == "log" else jnp.bfloat16)),
        beta,
        rate,
        bias,
        *cotangents,
    )


def expected(case, q, k, g, beta, rate, bias, dA, M, dq_in, PS, dk_out, dtotal):
    """Gradients of the terms, each times its cotangent, in float64, by value head."""
    HV, K = case.HV, case.K
    chunks = lambda x: x.astype(np.float64).reshape(B, HV, N, 64, -1)  # noqa: E731
    heads = lambda x: x.astype(np.float64).reshape(B, N, 64, -1, K).transpose(0, 3, 1, 2, 4)  # noqa: E731
    repeated = lambda x: np.repeat(heads(x), HV // case.H, axis=1)  # noqa: E731
    log_rate = np.broadcast_to(np.log(rate.astype(np.float64)).reshape(HV, 1, 1, 1), (B, HV, N, 1, K))
    biases = np.broadcast_to(bias.astype(np.float64).reshape(HV, 1, 1, K), (B, HV, N, 1, K))
    dA, M, dq_in, PS, dk_out = map(chunks, (dA, M, dq_in, PS, dk_out))
    dtotal = dtotal.astype(np.float64).reshape(B, HV, N, 4, K).sum(3)
    lower = np.tril(np.ones((64, 64)))

    def loss(q, k, g, beta, log_rate, bias):
        if case.norm:
            q, k = (x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        if case.gate != "log":
            a, z = jnp.exp(log_rate), g + bias
            g = LOWEST / (1 + jnp.exp(-a * z)) if case.gate == "bounded" else -a * jnp.logaddexp(0, z)
        G = jnp.cumsum(g, axis=-2)
        D = jnp.exp(jnp.minimum(G[..., :, None, :] - G[..., None, :, :], 0))
        A, Ak = (jnp.einsum("...ic,...jc,...ijc->...ij", x, k, D) for x in (SCALE * q, k))
        terms = ((A, dA * lower), (beta * Ak, -M * (lower - np.eye(64))), (beta * k * jnp.exp(G), -PS))
        terms += ((SCALE * q * jnp.exp(G), dq_in), (k * jnp.exp(G[..., -1:, :] - G), dk_out), (G[..., -1, :], dtotal))
        return sum((x * y).sum() for x, y in terms)

    with jax.enable_x64(True):
        arrays = repeated(q), repeated(k), heads(g), chunks(beta), log_rate, biases
        dq, dk, dg, dbeta, drate, dbias = jax.grad(loss, argnums=tuple(range(6)))(*map(jnp.asarray, arrays))
    tokens = lambda x: np.asarray(x).transpose(0, 2, 3, 1, 4).reshape(B, T, HV, K)  # noqa: E731
    return tokens(dq), tokens(dk), tokens(dg), np.asarray(dbeta).reshape(B, HV, T), *map(np.asarray, (dbias, drate))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gradients(case):
    arrays = inputs(case)
    bound = LOWEST if case.gate == "bounded" else None
    got = intra_backward.intra_backward(*arrays, Options(SCALE, case.gate, bound, case.norm, case.K, 64))
    dq, dk, dg, dbeta, *parameters = (None if x is None else np.asarray(x, np.float64) for x in got)
    names = ("dq", "dk", "dg", "dbeta", "dbias", "drate")
    if case.gate == "log":
        assert parameters == [None, None]
    else:
        parameters = [x.reshape(B, case.HV, N, 4, case.K).sum(3) for x in parameters]
    for name, x, reference in zip(names, (dq, dk, dg, dbeta, *parameters), expected(case, *arrays), strict=True):
        if x is not None:
            head = 2 if x.ndim == 3 and name in ("dq", "dk", "dg") else 1
            x = x.reshape(reference.shape)
            for h in range(case.HV):
                pair = (np.take(z, h, axis=head) for z in (x, reference))
                assert_close(*pair, BF16_GRADIENT, f"{name} of head {h}")
