"""mHC against its formulas in numpy, the doubly stochastic mixing, and what is equal and what moves at step 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.layers.hyper_connections import HyperConnection, merge_streams, sinkhorn, split_streams
from kimi_jax.layers.residuals import HyperConnections
from tests.support import assert_close

M, D, EPS = 3, 8, 1e-5


def connection(seed: int = 0) -> HyperConnection:
    return HyperConnection(D, M, eps=EPS, rngs=nnx.Rngs(seed), param_dtype=jnp.float64)


def away_from_init(site, seed=0):
    rng = np.random.default_rng(seed)
    params = nnx.state(site, nnx.Param)
    nnx.update(site, jax.tree.map(lambda x: x + 0.3 * jnp.asarray(rng.normal(size=x.shape)), params))
    return site


def formula(site, streams, output):
    """(read, streams after) by the equations, one stream at a time; Sinkhorn without logarithms."""
    flat = streams.reshape(*streams.shape[:-2], M * D)
    normed = flat / np.sqrt(np.mean(flat**2, -1, keepdims=True) + EPS)
    arguments = normed @ np.asarray(site.coefficients[...])
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    read = sigmoid(arguments[..., :M] + site.read_bias[...])
    write = 2 * sigmoid(arguments[..., M : 2 * M] + site.write_bias[...])
    carry = np.exp(arguments[..., 2 * M :].reshape(*flat.shape[:-1], M, M) + site.carry_bias[...])
    for _ in range(20):
        carry = carry / carry.sum(-2, keepdims=True)
        carry = carry / carry.sum(-1, keepdims=True)
    seen = sum(read[..., j, None] * streams[..., j, :] for j in range(M))
    after = [
        sum(carry[..., j, k, None] * streams[..., k, :] for k in range(M)) + write[..., j, None] * output
        for j in range(M)
    ]
    return seen, np.stack(after, -2)


def test_equals_its_formulas_and_every_parameter_has_a_gradient():
    rng = np.random.default_rng(0)
    streams, output = rng.normal(size=(2, 5, M, D)), rng.normal(size=(2, 5, D))
    with jax.enable_x64(True):
        site = away_from_init(connection())
        graphdef, params = nnx.split(site)

        @jax.jit
        def run(params, streams, output):
            site = nnx.merge(graphdef, params)
            return site.read(streams), site.write(streams, output)

        (seen, after), pull_back = jax.vjp(run, params, streams, output)
        expected = formula(site, streams, output)
        assert_close(seen, expected[0], 1e-12, "read")
        assert_close(after, expected[1], 1e-12, "write")

        cotangents = rng.normal(size=seen.shape), rng.normal(size=after.shape)
        bars = pull_back(cotangents)
        for leaf in jax.tree.leaves(bars):
            assert np.isfinite(leaf).all() and np.abs(leaf).min() > 0

        leaves, tree = jax.tree.flatten((params, streams, output))
        directions = [rng.normal(size=leaf.shape) for leaf in leaves]

        def along(step):
            params, *arrays = tree.unflatten([x + step * d for x, d in zip(leaves, directions, strict=True)])
            values = formula(nnx.merge(graphdef, params), *map(np.asarray, arrays))
            return sum(np.sum(bar * value) for bar, value in zip(cotangents, values, strict=True))

        slope = sum(np.sum(bar * d) for bar, d in zip(jax.tree.leaves(bars), directions, strict=True))
        assert_close(slope, (along(1e-5) - along(-1e-5)) / 2e-5, 1e-6, "gradient")


def test_sinkhorn_is_doubly_stochastic():
    """Rows to rounding; columns as far as 20 rounds go. Logits far apart give no NaN."""
    with jax.enable_x64(True):
        x = sinkhorn(jnp.asarray(np.random.default_rng(0).normal(size=(7, 4, 4))))
        assert (x > 0).all()
        np.testing.assert_allclose(x.sum(-1), 1, atol=1e-14)
        np.testing.assert_allclose(x.sum(-2), 1, atol=1e-9)
    assert np.isfinite(sinkhorn(500 * jnp.asarray(np.random.default_rng(0).normal(size=(7, 4, 4))))).all()


def test_a_fresh_connection_is_the_plain_residual():
    """Equal streams are read as h times one positive number, and become h + f in every stream."""
    rng = np.random.default_rng(0)
    h, f = rng.normal(size=(2, 5, D)), rng.normal(size=(2, 5, D))
    with jax.enable_x64(True):
        site, streams = connection(), split_streams(jnp.asarray(h), M)
        seen, after = site.read(streams), site.write(streams, jnp.asarray(f))
        factor = float(jax.nn.sigmoid(site.read_bias[...]).sum())
        assert_close(seen, factor * h, 1e-14)
        assert_close(after, np.stack([h + f] * M, -2), 1e-14)
        assert_close(merge_streams(after), h + f, 1e-14)


def test_gradients_tell_equal_streams_apart():
    """Two sub-layers at step 0: what the second one reads most of has another gradient for the first one's write; how
    equal streams are read and carried makes no difference yet."""
    with jax.enable_x64(True):
        h = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, D)))
        cotangent = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, D)))
        residual, sites = HyperConnections(streams=M), nnx.List([connection(0), connection(1)])
        graphdef, params = nnx.split(sites)

        def loss(params):
            state = residual.start(h)
            for site in nnx.merge(graphdef, params):
                x = residual.mix(state, site)
                state = residual.add(state, jnp.tanh(x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))), site)
            return jnp.sum(cotangent * residual.mix(state, None))

        first, second = nnx.merge(graphdef, jax.grad(loss)(params))
    assert np.ptp(first.write_bias[...]) > 1e-3
    for site in (first, second):
        read, write, carry = np.split(site.coefficients[...], [M, 2 * M], axis=1)
        assert np.abs(write).max() > 1e-3
        assert max(np.abs(x).max() for x in (read, carry, site.read_bias[...], site.carry_bias[...])) < 1e-13


def test_one_stream_is_refused():
    with pytest.raises(ValueError, match="streams=1 .*at least 2"):
        HyperConnections(streams=1)
