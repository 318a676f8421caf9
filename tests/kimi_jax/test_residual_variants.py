"""Every residual beside Attention Residuals' own, by config, in the whole model: step 0, decode, bfloat16."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax import KimiLM, lm_loss
from kimi_jax.layers.depth_variants import Weighing
from kimi_jax.layers.residuals import DepthMix
from kimi_jax.sharding import make_mesh, shard_model
from tests.kimi_jax.small_models import forward, small_config, small_model, tokens_for
from tests.kimi_jax.test_model import step_zero
from tests.support import F32_FORWARD, F32_GRADIENT, assert_close


class Case(NamedTuple):
    name: str
    fields: dict


# A window that leaves sources out has no identity at step 0: see depth_variants.py.
WINDOW = Case("window", dict(residual="full_attn_res", depth_window=2))
# One more term in a sum: decoding and meshes know nothing of it.
SOFTMAX1 = Case("softmax1", dict(residual="block_attn_res", depth_weights="softmax1"))
WITH_IDENTITY = [
    Case("delta_attn_res", dict(residual="delta_attn_res")),
    Case("delta_block", dict(residual="delta_block", block_size=4)),
    Case("delta_heads_sigmoid", dict(residual="delta_block", depth_heads=4, depth_weights="sigmoid")),
    Case("heads", dict(residual="full_attn_res", depth_heads=4)),
    Case("sigmoid", dict(residual="full_attn_res", depth_weights="sigmoid")),
    Case("no_key_norm", dict(residual="block_attn_res", depth_key_norm=False)),
    Case("hidden", dict(residual="block_attn_res", depth_query="hidden")),
    Case("static", dict(residual="full_attn_res", depth_weights="static")),
    Case("dense_former", dict(residual="full_attn_res", depth_weights="dense_former")),
    Case("mhc", dict(residual="mhc", depth_streams=3)),
]
CASES = [*WITH_IDENTITY, WINDOW]
# Of one place alone test_depth_variants.py shows the same.
WEIGHTS_ALONE = ("heads", "sigmoid", "no_key_norm", "dense_former", "softmax1")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=pytest.mark.exhaustive if case.name in WEIGHTS_ALONE else ())
        for case in (*WITH_IDENTITY, SOFTMAX1)
    ],
)
def test_step_zero_equals_the_prenorm_baseline(case):
    """In float64 with eps 1e-12: all that a fresh site may change is the scale of what the next norm reads."""
    logits, gradients = step_zero(**case.fields)
    baseline_logits, baseline_gradients = step_zero(residual="standard")
    assert_close(logits, baseline_logits, 1e-7, "logits")
    assert gradients.keys() == baseline_gradients.keys() and len(gradients) > 20
    for path, gradient in gradients.items():
        assert_close(gradient, baseline_gradients[path], 1e-7, str(path))


def test_a_window_changes_step_zero():
    logits, _ = step_zero(**WINDOW.fields)
    baseline, _ = step_zero(residual="standard")
    assert np.abs(logits - baseline).max() > 1e-4 * np.abs(baseline).max()


def sites_of(config) -> list:
    """What stands before each sub-layer and before the final norm, of an abstract model."""
    model = nnx.eval_shape(lambda: KimiLM(config, rngs=nnx.Rngs(0)))
    layers = [model.layers.layer(index) for index in range(config.num_layers)]
    return [site for layer in layers for site in (layer.attention_mix, layer.ffn_mix)] + [model.final_mix]


def test_fields_reach_every_site():
    fields = dict(depth_weights="sigmoid", depth_key_norm=False, depth_query="hidden", depth_heads=4, depth_window=3)
    weighing = Weighing("sigmoid", False, "hidden", 4, 3)
    first, *sites = sites_of(small_config(residual="full_attn_res", **fields))
    assert first is None and [(site.weighing, site.adds) for site in sites] == [(weighing, False)] * 4
    first, *sites, final = sites_of(small_config(residual="delta_block", **fields))
    assert first is None and [(site.weighing, site.adds) for site in sites] == [(weighing, True)] * 3
    assert final is None
    *sites, final = sites_of(small_config(residual="mhc", depth_streams=3))
    assert [site.streams for site in sites] == [3] * 4 and final is None
    assert {type(site) for site in sites_of(small_config())[1:]} == {DepthMix}  # which has attn_res


def test_softmax1_over_tokens_reaches_the_attention():
    model = nnx.eval_shape(lambda: KimiLM(small_config(mla_every=1, mla_softmax1=True), rngs=nnx.Rngs(0)))
    assert [model.layers.layer(index).attention.softmax1 for index in range(2)] == [True, True]


@functools.cache
def extending(name: str, scan: bool):
    """(model, its compiled extend)."""
    fields = next(case.fields for case in CASES if case.name == name)
    # Attention is not the point: MLA compiles fastest.
    layers = 5 if fields.get("block_size") == 4 else 3
    model = small_model(small_config(num_layers=layers, mla_every=1, scan_layers=scan, remat="layer", **fields))
    graphdef, state = nnx.split(model)
    extend = jax.jit(lambda state, tokens, cache: nnx.merge(graphdef, state).extend(tokens, cache))
    return model, lambda tokens, cache: extend(state, tokens, cache)


@pytest.mark.parametrize(
    "case, scan",
    [
        # By default each in one of the two ways.
        pytest.param(case, scan, id=f"{case.name}-{scan}", marks=() if scan == index % 2 else pytest.mark.exhaustive)
        for index, case in enumerate(CASES)
        for scan in (False, True)
    ],
)
def test_decoding_token_by_token_equals_the_full_forward(case, scan):
    model, extend = extending(case.name, scan)
    assert (model.layers.repetition.count > 1) == scan
    tokens, cache = tokens_for(model.config, 2, 7), model.init_cache(2, 8)
    full = forward(model)(tokens)
    for position in range(7):
        logits, cache = extend(tokens[:, position : position + 1], cache)
        assert_close(logits[:, 0], full[:, position], F32_FORWARD, f"position {position}")


def loss_and_gradients(model, tokens):
    graphdef, params = nnx.split(model)
    return jax.jit(jax.value_and_grad(lambda params, tokens: lm_loss(nnx.merge(graphdef, params), tokens)[0]))(
        params, tokens
    )


MESHED_BY_DEFAULT = [("hidden", "Explicit"), ("mhc", "Auto")]
MESHED = [
    pytest.param(name, axes, marks=() if (name, axes) in MESHED_BY_DEFAULT else pytest.mark.exhaustive)
    for name in ("hidden", "mhc", "static", "delta_heads_sigmoid")
    for axes in ("Auto", "Explicit")
]


@pytest.mark.parametrize("name, axes", MESHED)
def test_equals_one_device_on_a_mesh(name, axes):
    """Loss and each gradient, scanned and recomputed; the matrices of a query from the hidden state and of mHC are cut
    over fsdp."""
    model, _ = extending(name, True)
    tokens = tokens_for(model.config, 4, 7)
    loss, gradients = loss_and_gradients(model, tokens)
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, axis_type=AxisType[axes])
    model = small_model(model.config)
    with jax.set_mesh(mesh):
        shard_model(model, mesh)
        tokens = jax.device_put(tokens, NamedSharding(mesh, P(("data", "fsdp"))))
        mesh_loss, mesh_gradients = loss_and_gradients(model, tokens)
    assert_close(mesh_loss, loss, F32_FORWARD, "loss")
    for (path, ours), (_, theirs) in zip(*map(nnx.to_flat_state, (mesh_gradients, gradients)), strict=True):
        assert_close(ours[...], theirs[...], F32_GRADIENT, str(path))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_differs_from_the_plain_residual_once_trained(case):
    """Away from the initial values each is a model of its own: no field is without effect."""
    model, _ = extending(case.name, False)
    graphdef, state = nnx.split(model)
    tokens = tokens_for(model.config, 2, 7)
    run = jax.jit(lambda state: nnx.merge(graphdef, state)(tokens))
    sites = [path for path, _ in nnx.to_flat_state(state) if any("mix" in str(part) for part in path)]
    assert sites and run(state).dtype == jnp.float32
    fresh = [
        (path, leaf.replace(jnp.zeros_like(leaf[...])) if path in sites and path[-1] != "key_scale" else leaf)
        for path, leaf in nnx.to_flat_state(state)
    ]
    assert np.abs(run(state) - run(nnx.from_flat_state(fresh))).max() > 1e-3
