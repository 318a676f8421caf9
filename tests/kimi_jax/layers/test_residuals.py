"""Which sums enter which softmax, the limits between the kinds of residual, and the baseline at step 0."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.gpu_aot import lower_for_hopper
from kimi_jax.layers.residuals import BlockAttnRes, DepthMix, DepthState, FullAttnRes, StandardResidual, make_residual
from tests.support import F32_FORWARD, F32_GRADIENT, assert_close


class Depth(NamedTuple):
    name: str
    layers: int
    block_layers: float  # half a layer: every sub-layer is a block

    @property
    def block_size(self) -> int:
        return int(2 * self.block_layers)


DEPTHS = [
    Depth("L7_block3", 7, 3),
    Depth("K3_L93_block12", 93, 12),
    Depth("L12_block8", 12, 8),
    Depth("L5_block1_layer", 5, 1),
    Depth("L4_full", 4, 0.5),
    Depth("block_over_depth", 3, 10),
    Depth("48B_L27_block3", 27, 3),
]


def sources_per_site(residual, sublayers: int) -> list[list[frozenset[int]]]:
    """Run the state machine on one-hot outputs (embedding 0, sub-layer i: i + 1): the sums that each site reads."""
    one_hot = np.eye(sublayers + 1)

    def sources(state):
        return [frozenset(np.flatnonzero(np.asarray(row)).tolist()) for row in (*state.bank, state.sum)]

    state, table = residual.start(one_hot[0]), []
    for sublayer in range(sublayers):
        table.append(sources(state))
        state = residual.add(state, one_hot[sublayer + 1])
    return [*table, sources(state)]


def specified_sources(sublayers: int, block_size: int) -> list[list[frozenset[int]]]:
    """AttnRes section 2, written down directly: b_0 = embedding, finished blocks, the partial sum if it has begun."""
    table = []
    for site in range(sublayers + 1):
        done = list(range(1, site + 1))  # outputs so far, counted from 1
        blocks = [done[start : start + block_size] for start in range(0, len(done), block_size)]
        table.append([frozenset({0}), *map(frozenset, blocks)])
    return table


@pytest.mark.parametrize("depth", DEPTHS, ids=lambda d: d.name)
def test_sums_that_enter_each_softmax(depth):
    """Field case AR06."""
    sublayers = 2 * depth.layers
    residual = BlockAttnRes(depth.block_size)
    table = sources_per_site(residual, sublayers)
    assert table == specified_sources(sublayers, depth.block_size)
    assert len(table[-1]) == residual.bank_rows(sublayers) + 1
    for site, sources in enumerate(table):  # nothing is lost and nothing counted twice
        assert sorted(i for source in sources for i in source) == list(range(site + 1))
    if depth.block_layers >= 1:  # K3's counts, in transformer layers
        K = int(depth.block_layers)
        assert len(table[-1]) == (depth.layers - 1) // K + 2
        for layer in range(depth.layers):
            assert len(table[2 * layer]) == (math.ceil(layer / K) + 1)
            assert len(table[2 * layer + 1]) == layer // K + 2


def test_published_counts_at_the_output():
    assert len(sources_per_site(BlockAttnRes(6), 14)[-1]) == 4
    assert len(sources_per_site(BlockAttnRes(24), 186)[-1]) == 9
    assert len(sources_per_site(BlockAttnRes(6), 54)[-1]) == 10


def test_full_is_block_size_one_and_one_block_isolates_the_embedding():
    assert sources_per_site(FullAttnRes(), 6) == sources_per_site(BlockAttnRes(1), 6)
    assert all(len(sources) == site + 1 for site, sources in enumerate(sources_per_site(FullAttnRes(), 6)))
    for site, sources in enumerate(sources_per_site(BlockAttnRes(100), 6)):
        running_sum = [frozenset(range(1, site + 1))] if site else []
        assert sources == [frozenset({0}), *running_sum]


def test_standard_is_one_running_sum():
    assert sources_per_site(StandardResidual(), 4) == [[frozenset(range(site + 1))] for site in range(5)]


@pytest.mark.parametrize("size", [0, -2, 3, 7])
def test_bad_block_sizes_raise(size):
    with pytest.raises(ValueError, match=f"block_size={size}"):
        BlockAttnRes(size)


def test_unknown_residual_raises():
    with pytest.raises(ValueError, match="hyper.*standard.*full_attn_res.*block_attn_res"):
        make_residual("hyper", 2)


def test_zero_query_takes_the_plain_mean():
    """Field case AR01: five sources of very different norm; the query has a gradient at init, the key gain has not."""
    scales = [1e-3, 0.1, 1.0, 30.0, 1e3]
    sources = [scale * x for scale, x in zip(scales, jax.random.normal(jax.random.key(0), (5, 2, 7, 16)), strict=True)]
    graphdef, params = nnx.split(DepthMix(16, eps=1e-6))
    state = DepthState(tuple(sources[:-1]), sources[-1])
    cotangent = jax.random.normal(jax.random.key(1), (2, 7, 16))
    mixture, pull_back = jax.vjp(lambda params: nnx.merge(graphdef, params)(state), params)
    assert_close(mixture, np.mean([np.asarray(s, np.float64) for s in sources], axis=0), F32_FORWARD)
    gradient = nnx.merge(graphdef, pull_back(cotangent)[0])
    assert float(jnp.abs(gradient.query[...]).max()) > 0
    assert not np.any(gradient.key_scale[...])


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("backend, kernels", [("auto", 1), ("mosaic_gpu", 1), ("xla", 0), ("reference", 0)])
def test_a_site_runs_the_kernels_of_its_machine(backend, kernels, scanned):
    graphdef, params = nnx.split(DepthMix(64, eps=1e-6, backend=backend))
    row = jax.ShapeDtypeStruct((2, 8, 64), jnp.bfloat16)
    state = DepthState((row, row), row, count=jax.ShapeDtypeStruct((), jnp.int32) if scanned else None)
    lowered = lower_for_hopper(lambda params, state: nnx.merge(graphdef, params)(state), params, state)
    assert lowered.as_text().count("@mosaic_gpu_v2") == kernels


def test_a_bank_with_dead_rows_mixes_like_one_without():
    """Rows beyond the live count may hold anything, NaN too, and get no gradient: the bank that a scan carries."""
    keys = jax.random.split(jax.random.key(0), 8)
    rows = [jax.random.normal(key, (2, 5, 16)) for key in keys[:4]]
    mix = DepthMix(16, eps=1e-6)
    mix.query[...] = jax.random.normal(keys[4], (16,))
    mix.key_scale[...] = 1 + 0.3 * jax.random.normal(keys[5], (16,))
    graphdef, params = nnx.split(mix)
    cotangent = jax.random.normal(keys[6], (2, 5, 16))

    def without(params, rows):
        return jnp.sum(cotangent * nnx.merge(graphdef, params)(DepthState(tuple(rows[:3]), rows[3])))

    def with_dead_rows(params, rows):
        bank = (*rows[:3], *[jnp.full((2, 5, 16), jnp.nan)] * 2)
        return jnp.sum(cotangent * nnx.merge(graphdef, params)(DepthState(bank, rows[3], jnp.int32(3))))

    value, gradients = jax.value_and_grad(without, argnums=(0, 1))(params, rows)
    dead_value, dead_gradients = jax.jit(jax.value_and_grad(with_dead_rows, argnums=(0, 1)))(params, rows)
    assert_close(dead_value, value, F32_FORWARD)
    for ours, reference in zip(jax.tree.leaves(dead_gradients), jax.tree.leaves(gradients), strict=True):
        assert_close(ours, reference, F32_GRADIENT)


@pytest.mark.parametrize(
    "residual", [FullAttnRes(), BlockAttnRes(2), BlockAttnRes(6)], ids=lambda r: f"S{r.block_size}"
)
def test_step_zero_equals_the_prenorm_baseline(residual):
    """With zero queries a mixture is the running sum over a constant, which the norm after it takes out again."""

    def network(residual, weights, mixes, x):
        state = residual.start(x)
        for index, weight in enumerate(weights):
            h = residual.mix(state, None if index == 0 or residual == StandardResidual() else mixes)
            h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-12)
            state = residual.add(state, jnp.tanh(h @ weight))
        h = residual.mix(state, None if residual == StandardResidual() else mixes)
        return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-12)

    with jax.enable_x64(True):
        weights = jax.random.normal(jax.random.key(0), (6, 12, 12), jnp.float64)
        x = jax.random.normal(jax.random.key(1), (3, 12), jnp.float64)
        cotangent = jax.random.normal(jax.random.key(2), (3, 12), jnp.float64)
        mixes = DepthMix(12, eps=1e-12, param_dtype=jnp.float64)

        def value_and_gradients(kind):
            value, pull_back = jax.vjp(lambda weights, x: network(kind, weights, mixes, x), weights, x)
            return value, *pull_back(cotangent)

        for ours, baseline in zip(value_and_gradients(residual), value_and_gradients(StandardResidual()), strict=True):
            assert_close(ours, baseline, 1e-10)
