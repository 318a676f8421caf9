import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.layers import MoE
from kimi_jax.layers.moe import RouterBias, _dispatch, _permute, route
from tests.kimi_jax.layers.layer_support import call, inputs, randomise
from tests.support import BF16_FORWARD, F32_FORWARD, F32_GRADIENT, assert_close, golden


class Variant(NamedTuple):
    name: str
    options: dict


VARIANTS = [
    Variant("kimi_linear", dict(num_shared=1, routed_scaling_factor=2.446)),
    Variant("kimi_k3", dict(num_shared=2, latent=6, activation="situ")),
    Variant("routed_only", dict(num_shared=0, renormalize=False)),
    Variant("grouped", dict(num_shared=1, num_groups=4, topk_groups=2)),
    Variant("biased_weights", dict(num_shared=1, router_weights="biased")),
]
HIDDEN, WIDTH, EXPERTS, TOP_K = 10, 7, 8, 3
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)


def layer(variant, **kwargs):
    moe = MoE(HIDDEN, WIDTH, EXPERTS, TOP_K, **variant.options, rngs=nnx.Rngs(0), **kwargs)
    randomise(moe)
    moe.bias[...] = 0.3 * np.random.default_rng(5).normal(size=EXPERTS)
    return moe


def dense(moe, x_BTD):
    """Every expert on every token, weighted by a matrix that is mostly zero."""
    logits = jnp.dot(x_BTD, moe.router[...], precision="highest")
    ids, weights = moe.route(x_BTD)
    weights_BTE = (jax.nn.one_hot(ids, EXPERTS) * weights[..., None]).sum(axis=2)
    inner = x_BTD if moe.latent is None else x_BTD @ moe.latent_down[...]
    gate = jnp.einsum("btd,edf->btef", inner, moe.gate[...])
    up = jnp.einsum("btd,edf->btef", inner, moe.up[...])
    y = jnp.einsum("btef,efd->bted", moe.activation(gate, up), moe.down[...])
    y = jnp.einsum("bted,bte->btd", y, weights_BTE)
    if moe.latent is not None:
        y = moe.latent_norm(y) @ moe.latent_up[...]
    if moe.num_shared:
        y = y + moe.shared(x_BTD)
    return y, logits


class Router(NamedTuple):
    name: str
    top_k: int
    options: dict


ROUTERS = [
    Router("router", 2, dict(routed_scaling_factor=2.446)),
    Router("router_grouped", 4, dict(num_groups=4, topk_groups=2)),
]


@pytest.mark.parametrize("case", ROUTERS, ids=lambda case: case.name)
def test_router_equals_the_published_one(case):
    z = golden("layer_ops", case.name)

    def loss(x, gate_weight):
        logits = jnp.dot(x, gate_weight.T, precision="highest")
        ids, weights = route(logits, z["e_score_correction_bias"], case.top_k, **case.options)
        dense_weights = (jax.nn.one_hot(ids, len(gate_weight)) * weights[..., None]).sum(axis=1)
        return (dense_weights * z["dweights"]).sum(), dense_weights

    (dx, dgate_weight), dense_weights = jax.grad(loss, (0, 1), has_aux=True)(z["x"], z["gate_weight"])
    np.testing.assert_array_equal(dense_weights > 0, z["dense_weights_f64"] > 0)
    assert_close(dense_weights, z["dense_weights_f64"], F32_FORWARD, "weights")
    assert_close(dx, z["dx_f64"], F32_GRADIENT, "dx")
    assert_close(dgate_weight, z["dgate_weight_f64"], F32_GRADIENT, "dgate_weight")


def test_the_two_readings_of_router_weights():
    logits, bias = jnp.asarray([[0.0, 1.0, -1.0]]), jnp.asarray([0.9, 0.0, 0.0])
    score = 1 / (1 + np.exp(-np.asarray([0.0, 1.0, -1.0])))
    unbiased = route(logits, bias, 2)
    np.testing.assert_array_equal(unbiased.ids, [[0, 1]])  # by 1.4 and 0.73: the bias decides the order
    assert_close(unbiased.weights[0], score[:2] / score[:2].sum(), F32_FORWARD)
    biased = route(logits, bias, 2, router_weights="biased")
    expected = np.asarray([score[0] + 0.9, score[1]])
    assert_close(biased.weights[0], expected / expected.sum(), F32_FORWARD)


@each_variant
def test_dropless_equals_dense(variant):
    moe, x = layer(variant), inputs(2, 9, HIDDEN)
    graphdef, state = nnx.split(moe)
    dy = inputs(2, 9, HIDDEN, seed=2)

    def loss(run, state, x):
        y, _ = run(nnx.merge(graphdef, state), x)
        return (y * dy).sum(), y

    run, oracle = (
        jax.jit(jax.grad(functools.partial(loss, run), (0, 1), has_aux=True)) for run in (MoE.__call__, dense)
    )
    (dstate, dx), y = run(state, x)
    (dstate_dense, dx_dense), y_dense = oracle(state, x)
    assert_close(y, y_dense, F32_FORWARD, "y")
    assert_close(dx, dx_dense, F32_GRADIENT, "dx")
    for path, gradient in nnx.to_flat_state(dstate_dense):
        if not isinstance(gradient, RouterBias):
            name = ".".join(map(str, path))
            assert np.any(gradient[...]), f"{name} has no gradient to compare"
            assert_close(dict(nnx.to_flat_state(dstate))[path][...], gradient[...], F32_GRADIENT, name)


def test_all_tokens_on_one_expert_are_all_served():
    variant = Variant("one", dict(num_shared=0))
    moe, x = layer(variant), inputs(2, 9, HIDDEN)
    moe.bias[...] = jnp.asarray([5.0, 0, 0, 0, 0, 0, 4.0, 3.0])
    y, load = call(moe, x)
    np.testing.assert_array_equal(load, [18, 0, 0, 0, 0, 0, 18, 18])
    assert_close(y, dense(moe, x)[0], F32_FORWARD)


def test_the_bias_chooses_but_has_no_gradient():
    moe, x = layer(VARIANTS[0]), inputs(1, 5, HIDDEN)
    graphdef, state = nnx.split(moe)
    gradient = jax.jit(jax.grad(lambda state: nnx.merge(graphdef, state)(x)[0].sum()))(state)
    np.testing.assert_array_equal(gradient["bias"][...], 0)


@each_variant
def test_padding_is_ignored_and_not_counted(variant):
    moe, x = layer(variant), inputs(2, 6, HIDDEN)
    valid = jnp.asarray([[False, True, True, True, False, False], [True] * 6])
    y, load = call(moe, jnp.where(valid[..., None], x, jnp.nan), valid)
    assert (y[~valid] == 0).all()
    assert load.sum() == 9 * TOP_K
    alone, alone_load = call(moe, x[:1, 1:4])
    assert_close(y[:1, 1:4], alone, F32_FORWARD)
    np.testing.assert_array_equal(load - call(moe, x[1:])[1], alone_load)


def test_a_row_alone_equals_the_row_in_a_batch():
    moe, x = layer(VARIANTS[1]), inputs(3, 7, HIDDEN)
    y, _ = call(moe, x)
    for row in range(3):
        assert_close(y[row], call(moe, x[row : row + 1])[0][0], F32_FORWARD)


def test_bfloat16_is_close_where_it_routes_alike():
    exact, low = layer(VARIANTS[0]), layer(VARIANTS[0], dtype=jnp.bfloat16)
    x = inputs(2, 30, HIDDEN).astype(jnp.bfloat16)  # the router sees the same numbers, in float32
    np.testing.assert_array_equal(low.route(x).ids, exact.route(x).ids)
    y, _ = call(low, x)
    assert y.dtype == jnp.bfloat16
    assert_close(y, call(exact, x)[0], BF16_FORWARD)


def test_permutations_have_exact_gradients():
    rng = np.random.default_rng(0)
    x, order = inputs(6, 3), jnp.asarray(rng.permutation(6))
    place, dy = jnp.argsort(order), inputs(6, 3, seed=2)
    plain = jax.grad(lambda x: (x[order] * dy).sum())(x)
    np.testing.assert_array_equal(jax.grad(lambda x: (_permute(x, order, place) * dy).sum())(x), plain)
    tokens = x[:3]
    plain = jax.grad(lambda x: (x[order // 2] * dy).sum())(tokens)
    assert_close(jax.grad(lambda x: (_dispatch(x, order, place, 2) * dy).sum())(tokens), plain, 1e-6)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(num_groups=3), "num_experts=8 must be a multiple of num_groups=3"),
        (dict(num_groups=4, topk_groups=5), "topk_groups=5 must be between 1 and num_groups=4"),
        (dict(num_groups=4), "top_k=3 must be between 1 and the 2 experts"),
        (dict(router_weights="raw"), "'raw' is unknown; allowed: .*unbiased"),
        (dict(activation="relu"), "'relu' is unknown"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        MoE(HIDDEN, WIDTH, EXPERTS, TOP_K, 1, **options, rngs=nnx.Rngs(0))
