import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.layers import FeedForward
from kimi_jax.layers.feed_forward import situ
from tests.support import BF16_FORWARD, F32_FORWARD, F32_GRADIENT, assert_close, golden


def test_situ_equals_the_published_one():
    z = golden("layer_ops", "situ")

    def loss(gate, up):
        y = situ(gate, up, float(z["beta"]), float(z["linear_beta"]))
        return (y * z["do"]).sum(), y

    (dgate, dup), y = jax.grad(loss, (0, 1), has_aux=True)(z["gate"], z["up"])
    assert_close(y, z["y_f64"], F32_FORWARD, "y")
    assert_close(dgate, z["dgate_f64"], F32_GRADIENT, "dgate")
    assert_close(dup, z["dup_f64"], F32_GRADIENT, "dup")


def test_situ_is_bounded_and_finite_at_any_input():
    extremes = jnp.asarray([-3e38, -1e4, 0.0, 1e4, 3e38])
    y, gradient = jax.value_and_grad(lambda x: situ(x, x).sum())(extremes)
    assert jnp.abs(situ(extremes, extremes)).max() <= 100 and np.isfinite(y) and np.isfinite(gradient).all()


def test_situ_computes_in_float32():
    gate = jnp.asarray(np.random.default_rng(0).normal(size=999) * 4, jnp.bfloat16)
    y = situ(gate, gate)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, situ(gate.astype(jnp.float32), gate.astype(jnp.float32)).astype(jnp.bfloat16))


@pytest.mark.parametrize("activation", ["swiglu", "situ"])
def test_the_whole_network(activation):
    network = FeedForward(8, 12, activation=activation, rngs=nnx.Rngs(0))
    for parameter in (network.gate, network.up, network.down):
        parameter[...] *= 50  # far enough from zero that the two activations differ
    x = np.random.default_rng(1).normal(size=(2, 3, 8))
    gate, up = x @ network.gate[...], x @ network.up[...]
    inner = gate / (1 + np.exp(-gate)) * up
    if activation == "situ":
        inner = 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)
    assert_close(network(jnp.asarray(x)), inner @ network.down[...], F32_FORWARD)

    low = nnx.merge(nnx.graphdef(FeedForward(8, 12, activation=activation, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)),
                    nnx.state(network))  # fmt: skip
    assert low(x).dtype == jnp.bfloat16
    assert_close(low(x), inner @ network.down[...], BF16_FORWARD)


def test_unknown_activation():
    with pytest.raises(ValueError, match="'gelu'.*swiglu.*situ"):
        FeedForward(8, 12, activation="gelu", rngs=nnx.Rngs(0))
