import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.layers import GatedRMSNorm, RMSNorm
from tests.support import F32_FORWARD, F32_GRADIENT, assert_close, golden


def test_gated_norm_equals_the_published_one():
    z = golden("layer_ops", "rmsnorm_gated")

    def loss(x, gate, weight):
        norm = GatedRMSNorm(32, eps=float(z["eps"]), rngs=nnx.Rngs(0))
        norm.weight[...] = weight
        y = norm(x, gate)
        return (y * z["do"]).sum(), y

    gradients, y = jax.grad(loss, (0, 1, 2), has_aux=True)(z["x"], z["gate"], z["weight"])
    assert_close(y, z["y_f64"], F32_FORWARD, "y")
    for name, gradient in zip(("dx", "dgate", "dweight"), gradients, strict=True):
        assert_close(gradient, z[f"{name}_f64"], F32_GRADIENT, name)


def test_swish_gate_and_no_gate():
    rng = np.random.default_rng(0)
    x, gate = rng.normal(size=(2, 2, 3, 8))
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    swish = GatedRMSNorm(8, eps=1e-5, activation="swish", rngs=nnx.Rngs(0))
    assert_close(swish(x, gate), normed * gate / (1 + np.exp(-gate)), F32_FORWARD, "swish")
    bare = GatedRMSNorm(8, eps=1e-5, activation=None, rngs=nnx.Rngs(0))
    assert_close(bare(x), normed, F32_FORWARD, "no gate")


def test_the_dtypes_between_norm_and_weight():
    """RMSNorm rounds before its weight, the gated norm after weight and gate: both visible in bfloat16."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(64, 16)), jnp.bfloat16)
    weight = jnp.linspace(0.3, 2.7, 16)
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)

    plain = RMSNorm(16, eps=1e-5, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    plain.weight[...] = weight
    early = normed.astype(jnp.bfloat16) * weight.astype(jnp.bfloat16)
    late = (normed * weight).astype(jnp.bfloat16)
    assert (early != late).any()
    assert plain(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(plain(x), early)

    gated = GatedRMSNorm(16, eps=1e-5, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    gated.weight[...] = weight
    gate = jnp.ones_like(x)
    np.testing.assert_array_equal(gated(x, gate), (normed * weight * jax.nn.sigmoid(1.0)).astype(jnp.bfloat16))


def test_a_zero_row_has_finite_gradients():
    norm = RMSNorm(4, eps=1e-5, rngs=nnx.Rngs(0))
    gradient = jax.grad(lambda x: norm(x).sum())(jnp.zeros((2, 4)))
    assert_close(gradient, np.full((2, 4), 1e-5**-0.5), F32_GRADIENT)


def test_bad_arguments():
    with pytest.raises(ValueError, match="'tanh'.*sigmoid"):
        GatedRMSNorm(8, eps=1e-5, activation="tanh", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="gate is missing"):
        GatedRMSNorm(8, eps=1e-5, rngs=nnx.Rngs(0))(jnp.ones((1, 8)))
