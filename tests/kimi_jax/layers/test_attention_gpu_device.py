"""Causal attention by cuDNN on an NVIDIA GPU, against float64: `pytest -m gpu -n0`, skipped where there is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.layers.attention import attention
from tests.support import BF16_FORWARD, BF16_GRADIENT, assert_close

pytestmark = pytest.mark.gpu

T, N, H, V = 256, 3, 192, 128  # queries and keys, values: the sizes of both released models


@pytest.fixture(autouse=True)
def gpu():
    if jax.default_backend() != "gpu":
        pytest.skip(f"runs on an NVIDIA GPU, not on a {jax.devices()[0].device_kind}")


def problem(packed: bool):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, bar = (
        jax.random.normal(key, (2, T, N, size)).astype(jnp.bfloat16)
        for key, size in zip(keys, (H, H, V, V), strict=True)
    )
    ids = np.zeros((2, T), np.int32)
    ids[0, 37:], ids[1, 101:], ids[1, 250:] = 1, 3, -1
    return (q, k, v), bar, jnp.asarray(ids[:, :, None] == ids[:, None, :]) if packed else None


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_equals_float64_and_stays_in_cudnn(packed):
    inputs, bar, mask = problem(packed)

    def both(*inputs):
        o, pullback = jax.vjp(lambda *x: attention(*x, mask, scale=H**-0.5, causal=True), *inputs)
        return o, pullback(bar.astype(o.dtype))

    compiled = jax.jit(both).lower(*inputs).compile()
    assert "__cudnn$fmha" in compiled.as_text() and f"f32[2,{N},{T},{T}]" not in compiled.as_text()
    o, grads = compiled(*inputs)
    with jax.enable_x64():
        expected, grads_64 = jax.jit(both)(*(x.astype(jnp.float64) for x in inputs))
    assert_close(o, expected, BF16_FORWARD, "output")
    for name, got, want in zip("qkv", grads, grads_64, strict=True):
        assert_close(got, want, BF16_GRADIENT, name)
