"""Field case CK05 and its relatives: what is restored, where it lands, and what is refused by name."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from kimi_jax.checkpoints import Checkpoints, require_same_config

H, K, D = 8, 4, 16


class Layer(nnx.Module):
    """Head-major parameters of several kinds, a non-trained variable, and random state."""

    def __init__(self, rngs: nnx.Rngs):
        self.q = nnx.Param(jax.random.normal(rngs.params(), (D, H * K)))
        self.A_log = nnx.Param(jnp.log(1.0 + jnp.arange(H)))
        self.scale = nnx.Param(jnp.ones(D, jnp.bfloat16))
        self.bias = nnx.Variable(jnp.arange(3.0))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def make_trees() -> dict:
    """Model, optimiser, a decode cache and a random key, all different from zero."""
    graphdef, params, rest = nnx.split(Layer(nnx.Rngs(3)), nnx.Param, ...)
    optimizer = optax.adamw(1e-3)
    _, state = optimizer.update(jax.tree.map(lambda x: 0.1 * x, params), optimizer.init(params), params)
    cache = {
        "state": jax.random.normal(jax.random.key(5), (8, H, K, K)),
        "length": jnp.arange(8),
        "empty": jnp.zeros((8, 0)),
    }
    return {"model": (params, rest), "optimizer": state, "cache": cache, "key": jax.random.key(11)}


def on_mesh(tree, mesh: jax.sharding.Mesh | None):
    """The tree's shapes with shardings: any axis of H or H*K over "tensor", the cache's first over "data"."""

    def place(path, leaf):
        if mesh is None:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(jax.devices()[0]))
        names = [None] * leaf.ndim
        if "cache" in jax.tree_util.keystr(path):
            names[0] = "data"
        elif leaf.ndim and leaf.shape[-1] in (H, H * K):
            names[-1] = "tensor"
        names = [name if name in mesh.axis_names else None for name in names]
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P(*names)))

    return jax.tree_util.tree_map_with_path(place, tree)


def make_mesh(shape: tuple[int, ...]) -> jax.sharding.Mesh:
    devices = jax.devices()[: int(np.prod(shape))]
    names = ("data", "tensor")[-len(shape) :]
    return jax.make_mesh(shape, names, devices=devices, axis_types=(AxisType.Auto,) * len(shape))


def key_data(tree):
    """Typed keys as integers, so that trees can be compared."""
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


class MeshCase(NamedTuple):
    name: str
    shape: tuple[int, ...] | None


MESHES = [
    MeshCase("same_8", (8,)),
    MeshCase("grid_4x2", (4, 2)),
    MeshCase("subset_2x2", (2, 2)),
    MeshCase("one_device", None),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint written on a mesh of eight devices."""
    trees = make_trees()
    placed = jax.tree.map(lambda x, target: jax.device_put(x, target.sharding), trees, on_mesh(trees, make_mesh((8,))))
    directory = tmp_path_factory.mktemp("ck05")
    Checkpoints(directory).save(7, placed, config={"model": {"hidden_size": D, "dims": (1, 2)}}, extra={"position": 42})
    return Checkpoints(directory), trees  # opened again, as another process would


@pytest.mark.parametrize("case", MESHES, ids=lambda case: case.name)
def test_restores_onto_another_mesh(saved, case):
    checkpoints, trees = saved
    target = on_mesh(trees, None if case.shape is None else make_mesh(case.shape))
    restored = checkpoints.restore(target)
    chex.assert_trees_all_equal_structs(restored, trees)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored)), "a placeholder survived"
    chex.assert_trees_all_equal_shapes_and_dtypes(restored, trees)
    chex.assert_trees_all_equal(key_data(restored), key_data(trees))
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)


def test_abstract_target_without_sharding_lands_on_the_default_device(saved):
    checkpoints, trees = saved
    restored = checkpoints.restore({"model": jax.eval_shape(lambda: trees["model"])})
    chex.assert_trees_all_equal(key_data(restored["model"]), key_data(trees["model"]))
    assert {leaf.sharding.device_set == {jax.devices()[0]} for leaf in jax.tree.leaves(restored)} == {True}


def test_config_and_extra_come_back_without_reading_arrays(saved):
    config, extra = saved[0].describe()
    assert config == {"model": {"hidden_size": D, "dims": [1, 2]}}
    assert extra == {"position": 42}


class MisfitCase(NamedTuple):
    name: str
    in_file: dict
    asked: dict
    message: str


WHOLE = {"A_log": np.ones(H, np.float32), "q": np.ones((D, H), np.float32)}
MISFITS = [
    MisfitCase("dropped_from_file", {"q": WHOLE["q"]}, WHOLE, "A_log is missing from the checkpoint"),
    MisfitCase("left_over_in_file", WHOLE, {"q": WHOLE["q"]}, "A_log is in the checkpoint only"),
    MisfitCase("shape", {**WHOLE, "q": np.ones((D, 2 * H), np.float32)}, WHOLE, r"q is float32\[16, 16\].*\[16, 8\]"),
    MisfitCase("dtype", {**WHOLE, "A_log": np.ones(H, np.int32)}, WHOLE, r"A_log is int32\[8\].*float32\[8\]"),
]


@pytest.mark.parametrize("case", MISFITS, ids=lambda case: case.name)
def test_a_leaf_that_does_not_fit_is_named(tmp_path, case):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"model": jax.tree.map(jnp.asarray, case.in_file)}, config={})
    with pytest.raises(ValueError, match=case.message):
        checkpoints.restore({"model": jax.tree.map(jnp.asarray, case.asked)})


def test_missing_tree_step_and_checkpoint_are_named(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    tree = {"x": jnp.ones(2)}
    with pytest.raises(ValueError, match="no complete checkpoint"):
        checkpoints.restore({"model": tree})
    checkpoints.save(1, {"model": tree}, config={})
    with pytest.raises(ValueError, match=r"no checkpoint of step=2 .* there are \[1\]"):
        checkpoints.restore({"model": tree}, step=2)
    with pytest.raises(ValueError, match="holds no 'optimizer'"):
        checkpoints.restore({"optimizer": tree})


def test_an_abstract_leaf_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="x must be an array"):
        Checkpoints(tmp_path).save(1, {"model": {"x": jax.ShapeDtypeStruct((2,), jnp.float32)}}, config={})
    assert Checkpoints(tmp_path).steps() == []


def test_keeps_the_last_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, {"model": {"x": jnp.full(2, float(step))}}, config={})
    assert checkpoints.steps() == [2, 3]
    assert Checkpoints(tmp_path).latest_step() == 3
    np.testing.assert_array_equal(checkpoints.restore({"model": {"x": jnp.zeros(2)}}, step=2)["model"]["x"], 2.0)
    with pytest.raises(ValueError, match="keep must be at least 1"):
        Checkpoints(tmp_path, keep=0)


def test_an_unfinished_save_is_not_a_checkpoint(tmp_path):
    """What a killed writer leaves behind is neither listed nor in the way."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"model": {"x": jnp.ones(2)}}, config={})
    (tmp_path / "2.orbax-checkpoint-tmp" / "model").mkdir(parents=True)
    reopened = Checkpoints(tmp_path)
    assert reopened.steps() == [1]
    reopened.save(2, {"model": {"x": jnp.full(2, 2.0)}}, config={})
    np.testing.assert_array_equal(reopened.restore({"model": {"x": jnp.zeros(2)}})["model"]["x"], 2.0)


def test_saving_a_step_again_changes_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"model": {"x": jnp.ones(2)}}, config={})
    checkpoints.save(1, {"model": {"x": jnp.zeros(2)}}, config={})
    np.testing.assert_array_equal(checkpoints.restore({"model": {"x": jnp.zeros(2)}})["model"]["x"], 1.0)


def test_differing_fields_are_named():
    saved = {"model": {"hidden_size": 64, "layers": 4, "dims": (1, 2)}, "seed": 0}
    require_same_config(saved, {"model": {"hidden_size": 64, "layers": 4, "dims": [1, 2]}, "seed": 0})
    with pytest.raises(ValueError) as error:
        require_same_config(saved, {"model": {"hidden_size": 128, "layers": 4, "dims": (1, 2), "new": 1}, "seed": 0})
    assert "model.hidden_size (saved 64, given 128)" in str(error.value)
    assert "model.new (saved '(absent)', given 1)" in str(error.value)
    assert "layers" not in str(error.value) and "seed" not in str(error.value)
