"""Checkpoints on Orbax: whole or not at all, and readable on another mesh than the one that wrote them.

A checkpoint is a folder <directory>/<step> that appears by its last write. It holds named trees of arrays ("model",
"optimizer", ...) and a JSON description: the config it belongs to and whatever else the writer needs to go on (the
position in the data). Leaves are stored under their paths, "blocks.0.attention.A_log", so that a tree which has lost,
gained or changed a leaf is refused by name instead of being filled with something else.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from kimi_jax.configs import ModelConfig
from kimi_jax.model import KimiLM
from kimi_jax.sharding import check_divisible, param_shardings

_DESCRIPTION = "description"


class Checkpoints:
    """The checkpoints in one directory. Saving is synchronous: when `save` returns, the files are there."""

    def __init__(self, directory: str | Path, *, keep: int | None = 3):
        """Opens the directory (made if missing) and removes what an interrupted save left. keep=None keeps all."""
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be at least 1, or None for all, got {keep}")
        logging.getLogger("absl").addFilter(_without_orbax_chatter)
        self.directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
            ),
        )

    def steps(self) -> list[int]:
        """The complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """The newest complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, trees: Mapping[str, Any], *, config: Mapping[str, Any], extra: Any = None) -> None:
        """Write a checkpoint; one that is there already is left alone.

        Args:
          trees: name -> tree of arrays. Random keys are stored as their data.
          config: what `restore` will compare, in JSON types (tuples become lists).
          extra: anything else in JSON types.
        """
        if step in self.steps():
            return
        items = {name: ocp.args.PyTreeSave(_to_arrays(tree)) for name, tree in trees.items()}
        description = {"config": _as_json(config), "extra": _as_json(extra)}
        items[_DESCRIPTION] = ocp.args.JsonSave(description)
        self._manager.save(step, args=ocp.args.Composite(**items))
        self._manager.wait_until_finished()

    def describe(self, step: int | None = None) -> tuple[dict[str, Any], Any]:
        """(config, extra) of a checkpoint, by default the newest."""
        step = self._existing(step)
        restored = self._manager.restore(step, args=ocp.args.Composite(**{_DESCRIPTION: ocp.args.JsonRestore()}))
        return restored[_DESCRIPTION]["config"], restored[_DESCRIPTION]["extra"]

    def restore(self, targets: Mapping[str, Any], *, step: int | None = None) -> dict[str, Any]:
        """Read trees of a checkpoint, by default of the newest.

        Args:
          targets: name -> tree of arrays or jax.ShapeDtypeStruct, of the structure, shapes and dtypes to be restored.
            Each leaf comes back with its target's sharding (on the default device if that has none), whatever mesh it
            was saved on. Trees that are not named here are not read.

        Raises:
          ValueError: no such checkpoint, no such tree in it, or leaves that are missing, left over, or of another shape
            or dtype; each is named.
        """
        step = self._existing(step)
        items, empty = {}, {}
        for name, target in targets.items():
            wanted, empty[name] = _to_wanted(target)
            folder = self.directory / str(step) / name
            if not folder.is_dir():
                raise ValueError(f"checkpoint {self.directory}/{step} holds no {name!r}")
            self._compare(step, name, ocp.PyTreeCheckpointHandler().metadata(folder), wanted)
            restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
            items[name] = ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args)
        restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        return {name: _from_arrays(target, {**restored[name], **empty[name]}) for name, target in targets.items()}

    def close(self) -> None:
        self._manager.close()

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise ValueError(f"no complete checkpoint in {self.directory}")
        if step is not None and step not in steps:
            raise ValueError(f"no checkpoint of step={step} in {self.directory}; there are {steps}")
        return steps[-1] if step is None else step

    def _compare(self, step: int, name: str, saved: Any, wanted: dict[str, jax.ShapeDtypeStruct]) -> None:
        saved = {path: (tuple(leaf.shape), str(leaf.dtype)) for path, leaf in saved.items()}
        asked = {path: (tuple(leaf.shape), str(leaf.dtype)) for path, leaf in wanted.items()}
        problems = [f"{path} is missing from the checkpoint" for path in sorted(asked.keys() - saved.keys())]
        problems += [f"{path} is in the checkpoint only" for path in sorted(saved.keys() - asked.keys())]
        problems += [
            f"{path} is {saved[path][1]}{list(saved[path][0])} in the checkpoint, {asked[path][1]}"
            f"{list(asked[path][0])} was asked for"
            for path in sorted(saved.keys() & asked.keys())
            if saved[path] != asked[path]
        ]
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise ValueError(f"{name!r} of checkpoint {self.directory}/{step} does not fit: {shown}")


def load_model(directory: str | Path, *, step: int | None = None, mesh: Mesh | None = None) -> KimiLM:
    """The model of a checkpoint that has a tree "model" and a config with the ModelConfig under "model".

    directory holds the checkpoints; step is by default the newest. With a mesh, parameters are laid out on it by their
    logical axes. Raises ValueError as `Checkpoints.restore` does, and where the directory does not exist.
    """
    if not Path(directory).is_dir():
        raise ValueError(f"no directory {str(directory)!r}")
    checkpoints = Checkpoints(directory, keep=None)
    fields = checkpoints.describe(step)[0]["model"]
    config = ModelConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    graphdef, target = nnx.split(nnx.eval_shape(lambda: KimiLM(config, rngs=nnx.Rngs(0))))
    if mesh is not None:
        check_divisible(config, mesh)
        target = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            target,
            param_shardings(target, mesh),
        )
    model = nnx.merge(graphdef, checkpoints.restore({"model": target}, step=step)["model"])
    checkpoints.close()
    return model


def require_same_config(saved: Mapping[str, Any], given: Mapping[str, Any], *, where: str = "the checkpoint") -> None:
    """ValueError that names every field in which two configs differ; nested ones by dotted names."""
    saved, given = _flat(_as_json(saved)), _flat(_as_json(given))
    absent = "(absent)"
    differing = [
        f"{name} (saved {saved.get(name, absent)!r}, given {given.get(name, absent)!r})"
        for name in sorted(saved.keys() | given.keys())
        if saved.get(name, absent) != given.get(name, absent)
    ]
    if differing:
        raise ValueError(f"{where} belongs to another config; these fields differ: {', '.join(differing)}")


def _name(path: tuple[Any, ...]) -> str:
    # Flax ends every path with the "value" of its Variable.
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value") or "."


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(leaf: Any) -> Any:
    found = []  # key_impl takes arrays and tracers, but no ShapeDtypeStruct
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]


def _to_arrays(tree: Any) -> dict[str, jax.Array]:
    """Leaves by name; Orbax stores no empty arrays and no typed keys."""
    arrays = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = _name(path)
        if not hasattr(leaf, "dtype") or isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(f"{name} must be an array to be saved, got {leaf!r}")
        if name in arrays:
            raise ValueError(f"two leaves are called {name}")
        arrays[name] = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    return {name: leaf for name, leaf in arrays.items() if leaf.size}


def _to_wanted(target: Any) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, jax.Array]]:
    """(what to ask Orbax for, the empty arrays that it does not store), both by name."""
    wanted, empty = {}, {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(target)[0]:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, Sharding):
            sharding = SingleDeviceSharding(jax.devices()[0])
        data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
        if 0 in data.shape:
            empty[_name(path)] = jax.device_put(jax.numpy.zeros(data.shape, data.dtype), sharding)
        else:
            wanted[_name(path)] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
    return wanted, empty


def _from_arrays(target: Any, arrays: dict[str, jax.Array]) -> Any:
    def pick(path, leaf):
        array = arrays[_name(path)]
        return jax.random.wrap_key_data(array, impl=_key_impl(leaf)) if _is_key(leaf) else array

    return jax.tree_util.tree_map_with_path(pick, target)


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {k: v for name, child in value.items() for k, v in _flat(child, f"{prefix}.{name}".strip(".")).items()}


def _without_orbax_chatter(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or "orbax" not in record.pathname
