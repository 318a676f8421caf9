"""Field cases SH01 and SH02 for single layers: on a mesh they give what they give on one device, or refuse by name."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from kimi_jax.layers import MLA, FeedForward, KDALayer, MoE
from kimi_jax.sharding import constrain, make_mesh, shard_model
from tests.kimi_jax.layers.layer_support import call, inputs, randomise
from tests.support import F32_FORWARD, F32_GRADIENT, assert_close

HIDDEN, B, T = 16, 4, 12


def kda_layer():
    """Gate parameters that tell every head and channel apart, K != V."""
    kda = randomise(KDALayer(HIDDEN, num_heads=8, head_k=32, head_v=48, rngs=nnx.Rngs(0)))
    head, channel = jnp.arange(8.0)[:, None], jnp.arange(32.0)
    kda.dt_bias[...] = (head + channel / 100).reshape(-1)
    kda.A_log[...] = jnp.log(1 + head[:, 0])
    return kda


def grouped_kda_layer():
    options = dict(num_heads=4, num_value_heads=8, head_k=8, head_v=4, lower_bound=-5.0, full_rank_gate=True)
    return randomise(KDALayer(HIDDEN, **options, rngs=nnx.Rngs(0)))


def gated_delta_net_layer():
    options = dict(num_heads=4, num_value_heads=8, head_k=8, head_v=4, gate="head")
    return randomise(KDALayer(HIDDEN, **options, rngs=nnx.Rngs(0)))


def mla_layer():
    sizes = dict(q_lora_rank=6, kv_lora_rank=8, qk_nope_dim=8, qk_rope_dim=4, v_dim=8)
    return randomise(MLA(HIDDEN, num_heads=8, **sizes, output_gate=True, rngs=nnx.Rngs(0)))


def rope_softmax1_layer():
    options = dict(kv_lora_rank=8, qk_nope_dim=8, qk_rope_dim=4, v_dim=8, rope_theta=5.0, softmax1=True)
    return randomise(MLA(HIDDEN, num_heads=8, **options, rngs=nnx.Rngs(0)))


def feed_forward_layer():
    return randomise(FeedForward(HIDDEN, 24, rngs=nnx.Rngs(0)))


def moe_layer():
    return randomise(MoE(HIDDEN, 8, 4, 2, 1, activation="situ", latent=6, rngs=nnx.Rngs(0)))


class Case(NamedTuple):
    build: object
    sizes: dict
    axis_type: AxisType

    @property
    def name(self):
        mesh = "_".join(f"{axis}{size}" for axis, size in self.sizes.items())
        return f"{self.build.__name__}-{mesh}-{self.axis_type.name}"


ALL_AXES = dict(data=2, fsdp=2, tensor=2)
LAYERS = (kda_layer, grouped_kda_layer, mla_layer, feed_forward_layer, moe_layer)
CASES = [Case(kda_layer, dict(tensor=tp), AxisType.Auto) for tp in (2, 4, 8)]
CASES += [Case(build, ALL_AXES, kind) for build in LAYERS for kind in (AxisType.Auto, AxisType.Explicit)]
CASES = [pytest.param(case, id=case.name) for case in CASES]
OTHERS = [Case(build, ALL_AXES, AxisType.Explicit) for build in (gated_delta_net_layer, rope_softmax1_layer)]
CASES += [pytest.param(case, id=case.name, marks=pytest.mark.exhaustive) for case in OTHERS]


def value_and_gradients(layer, x, dy, *args):
    graphdef, state = nnx.split(layer)

    @jax.jit
    def run(state, x, dy):
        def loss(state, x):
            y = nnx.merge(graphdef, state)(x, *args)
            y = y[0] if isinstance(y, tuple) else y
            return (y * dy).sum(), y

        return jax.grad(loss, (0, 1), has_aux=True)(state, x)

    (dstate, dx), y = run(state, x, dy)
    gradients = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(dstate)}
    return y, gradients | {"x": dx}


@functools.cache
def on_one_device(build):
    x, dy, ids = arguments(build)
    return value_and_gradients(build(), x, dy, *ids)


def arguments(build):
    """x, dy and, for layers that take them, segment ids."""
    ids = jnp.asarray(np.repeat([[0] * 5 + [1] * 6 + [-1]], B, axis=0))
    return (
        inputs(B, T, HIDDEN),
        inputs(B, T, HIDDEN, seed=2),
        () if build in (feed_forward_layer, moe_layer) else (ids,),
    )


def laid_out(x):
    return constrain(x, "batch", None, None)


@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(case):
    y_alone, gradients_alone = on_one_device(case.build)
    x, dy, ids = arguments(case.build)
    layer, mesh = case.build(), make_mesh(case.sizes, axis_type=case.axis_type)
    shard_model(layer, mesh)
    with jax.set_mesh(mesh):
        ids = tuple(constrain(array, "batch", None) for array in ids)
        y, gradients = value_and_gradients(layer, laid_out(x), laid_out(dy), *ids)
    assert_close(y, y_alone, F32_FORWARD, "y")
    for name, gradient in gradients.items():
        assert_close(gradient, gradients_alone[name], F32_GRADIENT, name)


@pytest.mark.parametrize("build", [kda_layer, mla_layer])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_decoding_equals_one_device(build, axis_type):
    x, lengths = inputs(B, T, HIDDEN), jnp.asarray([5, 4, 3, 5])

    def decode(layer, lay=lambda x, *names: x):
        cache = layer.init_cache(B) if isinstance(layer, KDALayer) else layer.init_cache(B, T)
        prompt, cache = call(layer, lay(x[:, :5], "batch", None, None), cache=cache, lengths=lay(lengths, "batch"))
        step, cache = call(layer, lay(x[:, 5:6], "batch", None, None), cache=cache)
        return prompt, step, *cache

    alone = decode(build())
    layer, mesh = build(), make_mesh(ALL_AXES, axis_type=axis_type)
    shard_model(layer, mesh)
    with jax.set_mesh(mesh):
        for part, part_alone in zip(decode(layer, constrain), alone, strict=True):
            assert_close(part, part_alone, F32_FORWARD)


@pytest.mark.parametrize("build", [grouped_kda_layer, mla_layer, moe_layer])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_nothing_is_gathered(build, axis_type):
    """Field case SH05 for layers: data and tensor parallelism sum partial results and gather nothing."""
    layer, mesh = build(), make_mesh(dict(data=2, tensor=4), axis_type=axis_type)
    shard_model(layer, mesh)
    graphdef, state = nnx.split(layer)
    with jax.set_mesh(mesh):
        loss = jax.jit(jax.grad(lambda state, x: (nnx.merge(graphdef, state)(x)[0] ** 2).sum(), (0, 1)))
        hlo = loss.lower(state, laid_out(inputs(B, T, HIDDEN))).compile().as_text()
    assert "all-reduce" in hlo
    assert "all-gather" not in hlo and "all-to-all" not in hlo


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_batch_that_does_not_divide_is_whole(axis_type):
    layer, x = moe_layer(), inputs(3, 5, HIDDEN)
    y_alone, load_alone = call(layer, x)
    mesh = make_mesh(dict(data=2, tensor=2), axis_type=axis_type)
    shard_model(layer, mesh)
    with jax.set_mesh(mesh):
        y, load = call(layer, laid_out(x))
    assert_close(y, y_alone, F32_FORWARD)
    np.testing.assert_array_equal(load, load_alone)


class Misfit(NamedTuple):
    name: str
    tensor: int
    build: object
    message: str


MISFITS = [
    Misfit("kda", 4, lambda: KDALayer(8, num_heads=6, head_k=4, head_v=4, rngs=nnx.Rngs(0)), "num_heads=6.*tensor=4"),
    Misfit(
        "grouped",
        4,
        lambda: KDALayer(8, num_heads=2, num_value_heads=8, head_k=4, head_v=4, rngs=nnx.Rngs(0)),
        "num_heads=2.*tensor=4",
    ),
    Misfit(
        "mla",
        4,
        lambda: MLA(8, num_heads=6, kv_lora_rank=4, qk_nope_dim=4, qk_rope_dim=4, v_dim=4, rngs=nnx.Rngs(0)),
        "num_heads=6.*tensor=4",
    ),
]


@pytest.mark.parametrize("case", MISFITS, ids=lambda case: case.name)
def test_heads_that_do_not_divide_are_refused(case):
    with jax.set_mesh(make_mesh(dict(tensor=case.tensor))), pytest.raises(ValueError, match=case.message):
        case.build()


def test_a_gate_rank_need_not_divide():
    """The low-rank side of the gates is whole on every shard."""
    layer = randomise(KDALayer(8, num_heads=4, head_k=4, head_v=4, gate_rank=3, rngs=nnx.Rngs(0)))
    x = inputs(2, 6, 8)
    alone, _ = call(layer, x)
    mesh = make_mesh(dict(tensor=4))
    shard_model(layer, mesh)
    with jax.set_mesh(mesh):
        assert_close(call(layer, x)[0], alone, F32_FORWARD)
