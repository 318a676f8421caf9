"""On eight fake devices: the loss and every gradient of one device, no gathered activations, errors by name."""

import contextlib
import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax import KimiLM, lm_loss
from kimi_jax import sharding as sharding_lib
from kimi_jax.sharding import ShardingRules, check_divisible, constrain, create_sharded, make_mesh, param_shardings
from tests.kimi_jax.small_models import EXPERTS, small_config, small_model, tokens_for
from tests.support import BF16_GRADIENT, F32_FORWARD, F32_GRADIENT, assert_close

BATCH, LENGTH = 8, 18  # a length that no parameter has


def config_of(scan: bool):
    # The chunked path, because that is what runs on a mesh in earnest.
    fields = dict(kernel_backend="auto", **EXPERTS)
    if scan:
        fields |= dict(num_layers=3, mla_layers=(0,), first_dense_layers=1, scan_layers=True, remat="layer")
    return small_config(**fields)


def batch():
    ids = np.zeros((BATCH, LENGTH), np.int32)
    ids[1, 9:], ids[2, 12:] = 1, -1
    return tokens_for(config_of(False), BATCH, LENGTH), jnp.asarray(ids)


def loss_and_gradients(model):
    """The compiled function, and its arguments."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, tokens, ids):
        return lm_loss(nnx.merge(graphdef, params, rest), tokens, ids)

    return jax.jit(jax.value_and_grad(loss, has_aux=True)), params, rest


@functools.cache
def one_device(scan: bool):
    run, params, rest = loss_and_gradients(small_model(config_of(scan)))
    return run(params, rest, *batch())


class Case(NamedTuple):
    name: str
    sizes: dict
    axis_type: AxisType
    scan: bool = False


CASES = [
    Case("data2_tensor4_auto", {"data": 2, "tensor": 4}, AxisType.Auto),
    Case("data2_tensor4_explicit", {"data": 2, "tensor": 4}, AxisType.Explicit),
    Case("fsdp8_auto", {"fsdp": 8}, AxisType.Auto),
    Case("data2_fsdp2_tensor2_explicit", {"data": 2, "fsdp": 2, "tensor": 2}, AxisType.Explicit),
    Case("fsdp4_tensor2_auto_scan", {"fsdp": 4, "tensor": 2}, AxisType.Auto, scan=True),
    Case("fsdp4_tensor2_explicit_scan", {"fsdp": 4, "tensor": 2}, AxisType.Explicit, scan=True),
]


# By default every axis, both types of axes, and a scan, once.
DEFAULT = ("data2_tensor4_auto", "data2_fsdp2_tensor2_explicit", "fsdp4_tensor2_auto_scan")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=() if c.name in DEFAULT else pytest.mark.exhaustive) for c in CASES]
)
def test_loss_and_each_gradient_equal_one_device(case):
    """Field case SH05 too: plain jit gathers parameters over fsdp and no activation, be it q, k, v, g or smaller."""
    (expected_loss, expected_aux), expected = one_device(case.scan)
    model = small_model(config_of(case.scan))
    mesh = make_mesh(case.sizes, axis_type=case.axis_type)
    with jax.set_mesh(mesh):
        sharding_lib.shard_model(model, mesh)
        run, params, rest = loss_and_gradients(model)
        tokens, ids = batch()
        place = NamedSharding(mesh, P(tuple(axis for axis in ("data", "fsdp") if axis in case.sizes)))
        compiled = run.lower(params, rest, jax.device_put(tokens, place), jax.device_put(ids, place)).compile()
        (loss, aux), gradients = compiled(params, rest, jax.device_put(tokens, place), jax.device_put(ids, place))
    assert_close(loss, expected_loss, F32_FORWARD, "loss")
    np.testing.assert_array_equal(aux.router_loads, expected_aux.router_loads)
    flat, expected_flat = dict(nnx.to_flat_state(gradients)), dict(nnx.to_flat_state(expected))
    assert flat.keys() == expected_flat.keys()
    for path, gradient in flat.items():
        assert_close(gradient[...], expected_flat[path][...], F32_GRADIENT, str(path))
    moved = resharded_shapes(compiled.as_text())
    assert bool(moved) == ("fsdp" in case.sizes)
    assert moved <= shapes_at_use(params, mesh), "only parameters may be gathered"


def resharded_shapes(hlo: str) -> set[tuple[int, ...]]:
    """Of everything that the program collects from or moves between devices (sums over devices aside)."""
    moves = "all-gather|all-to-all|ragged-all-to-all|collective-permute"
    results = re.findall(rf" = (.*?) (?:{moves})(?:-start)?\(", hlo)
    shapes = [shape for result in results for shape in re.findall(r"\w+\[([\d,]*)\]", result)]
    return {tuple(int(n) for n in shape.split(",") if n) for shape in shapes}


def shapes_at_use(params: nnx.State, mesh) -> set[tuple[int, ...]]:
    """Of the parameters that FSDP cuts, gathered over "fsdp"; a scanned layer sees its own slice of the stack."""
    cut, whole = (param_shardings(params, mesh, rules) for rules in (ShardingRules(), ShardingRules(embed=())))
    shapes = set()
    for leaf, stored, used in zip(*map(jax.tree.leaves, (params, cut, whole)), strict=True):
        if stored != used:
            shape = used.shard_shape(leaf.shape)
            shapes |= {shape, shape[1:]}
    return shapes


@pytest.mark.parametrize("sizes", [None, {"data": 2}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_the_gradient_of_a_frequent_id_is_whole(sizes):
    """8000 places of one id: added up in bfloat16, the sum would stop growing at 256."""
    ids = jnp.zeros((8, 1000), jnp.int32).at[:, ::10].set(5)
    bars = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.5, (8, 1000, 4)), jnp.bfloat16)
    table = nnx.Param(jnp.ones((8, 4)), axes=("vocab", "embed"))
    graphdef, params = nnx.split(nnx.Dict(table=table))

    def loss(params, ids, bars):
        rows = sharding_lib.lookup(nnx.merge(graphdef, params)["table"], ids, jnp.bfloat16)
        return jnp.sum(rows.astype(jnp.float32) * bars.astype(jnp.float32))

    with jax.set_mesh(make_mesh(sizes)) if sizes else contextlib.nullcontext():
        found = jax.tree.leaves(jax.jit(jax.grad(loss))(params, ids, bars))[0]
    expected = np.zeros((8, 4))
    np.add.at(expected, np.asarray(ids), np.asarray(bars, np.float64))
    assert_close(found, expected, F32_GRADIENT if sizes is None else BF16_GRADIENT)


def test_tensor_parallel_activations_stay_cut():
    """q, k, v, g [B, T, heads * dim] leave their projections cut over batch and heads, on Explicit axes by type."""
    mesh = make_mesh({"data": 2, "tensor": 4}, axis_type=AxisType.Explicit)
    w = nnx.Param(jnp.ones((32, 24)), axes=("embed", "heads"))
    with jax.set_mesh(mesh):
        q = jax.jit(lambda x: sharding_lib.project(x, w, ("batch", None, "heads")))(jnp.ones((4, 3, 32)))
    assert q.sharding.spec == P("data", None, "tensor")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_models_are_born_on_their_shards(axis_type):
    config = config_of(False)
    mesh = make_mesh({"fsdp": 2, "tensor": 4}, axis_type=axis_type)
    with jax.set_mesh(mesh):
        model = create_sharded(lambda: KimiLM(config, rngs=nnx.Rngs(0)), mesh)
    assert model.embedding[...].sharding.spec == P("tensor", "fsdp")
    assert model.layers.lead[0].attention.q[...].sharding.spec == P("fsdp", "tensor")
    assert model.layers.lead[0].attention.o[...].sharding.spec == P("tensor", "fsdp")
    assert model.layers.lead[0].attention.A_log[...].sharding.spec == P("tensor")
    assert model.layers.lead[1].attention.kv_a[...].sharding.spec in (P("fsdp"), P("fsdp", None))
    local = KimiLM(config, rngs=nnx.Rngs(0))
    for ours, reference in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(local)), strict=True):
        if jnp.issubdtype(ours.dtype, jnp.floating):
            assert_close(ours, reference, 1e-6)


def test_stacked_layers_keep_a_whole_leading_axis():
    model = nnx.eval_shape(lambda: KimiLM(config_of(True), rngs=nnx.Rngs(0)))
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    shardings = param_shardings(nnx.state(model), mesh)
    assert shardings["layers"]["group"][0]["ffn"]["gate"].spec == P(None, None, "fsdp", "tensor")


class Refusal(NamedTuple):
    name: str
    fields: dict
    sizes: dict
    message: str


REFUSALS = [
    Refusal("six_heads", dict(kda_num_heads=6), {"tensor": 4}, "kda_num_heads=6 is not divisible by tensor=4"),
    Refusal(
        "grouped_values",
        dict(kda_num_heads=2, kda_num_value_heads=8),
        {"tensor": 4},
        "kda_num_heads=2 is not divisible by tensor=4.*q/k heads are not replicated",
    ),
    Refusal("mla_heads", dict(mla_num_heads=2), {"tensor": 4}, "mla_num_heads=2 is not divisible by tensor=4"),
    Refusal("ffn", dict(ffn_width=30), {"tensor": 4}, "ffn_width=30 is not divisible by tensor=4"),
    Refusal("vocab", dict(vocab_size=33), {"tensor": 4}, "vocab_size=33 is not divisible by tensor=4"),
    Refusal("hidden", dict(hidden_size=36), {"fsdp": 8}, "hidden_size=36 is not divisible by fsdp=8"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda r: r.name)
def test_what_does_not_divide_is_refused_by_name(refusal):
    """Field case SH02: at construction, with the field and the mesh axis."""
    config = small_config(**refusal.fields)
    mesh = make_mesh(refusal.sizes)
    with pytest.raises(ValueError, match=refusal.message):
        check_divisible(config, mesh)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=refusal.message):
        KimiLM(config, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=refusal.message):
        create_sharded(lambda: KimiLM(config, rngs=nnx.Rngs(0)), mesh)


def test_gate_rank_need_not_divide():
    """Low-rank bottlenecks are whole on every shard (rank 128 on tp=12 in field case SH02)."""
    check_divisible(
        small_config(gate_rank=5, kv_lora_rank=7, kda_num_heads=8, mla_num_heads=8), make_mesh({"tensor": 8})
    )


def test_constrain_places_and_refuses():
    mesh = make_mesh({"data": 2, "tensor": 4})
    x = jnp.ones((4, 3, 8))
    assert constrain(x, "batch", None, "heads") is x  # no mesh, nothing to do
    with jax.set_mesh(mesh):
        assert constrain(x, "batch", None, "heads").sharding.spec == P("data", None, "tensor")
        odd = constrain(jnp.ones((3, 3, 8)), "batch", None, "heads")
        assert odd.sharding.spec == P(None, None, "tensor")
        with pytest.raises(ValueError, match="'heads' of size 6 is not divisible"):
            constrain(jnp.ones((4, 3, 6)), "batch", None, "heads")
        with pytest.raises(ValueError, match="2 logical names .* shape"):
            constrain(x, "batch", None)
        with pytest.raises(ValueError, match="'width' has no rule.*heads"):
            constrain(x, "batch", None, "width")


def test_bad_meshes_and_rules_raise():
    with pytest.raises(ValueError, match=r"mesh axes \['model'\] are unknown.*data.*fsdp.*tensor"):
        make_mesh({"model": 2})
    with pytest.raises(ValueError, match="needs 16 devices, there are 8"):
        make_mesh({"data": 16})
    with pytest.raises(ValueError, match="at least 1"):
        make_mesh({"data": 0})
    with pytest.raises(ValueError, match=r"rule heads=\('model',\) names \['model'\]"):
        ShardingRules(heads=("model",))
