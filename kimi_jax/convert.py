"""Released checkpoints in and out: Hugging Face folders (config.json, safetensors) of Kimi Linear and Kimi K3's text.

    model = load_hf("Kimi-Linear-48B-A3B-Base", mesh=mesh, scan_layers=True)
    save_hf(model, "mine")

A folder is checked as a whole before anything of it is read: names, shapes, dtypes and the files' own completeness.
Then one matrix after the other goes from the file to the devices that keep a part of it, so that the host never holds
more than one layer. What tensors are called and how they lie is in hf_tensors.py, what config.json says in
hf_config.py, what makes a folder whole in hf_files.py.
"""

import functools
import json
import logging
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from . import mxfp4 as mxfp4_codec
from .configs import DTYPES, HF_ROOTS, ModelConfig
from .hf_config import check_parameters, config_from_hf, config_to_hf
from .hf_files import CONFIG, INDEX, SINGLE, HFFiles, listed
from .hf_tensors import FLOAT32_SUFFIXES, Index, Tensor, layer_of, official_tensors
from .model import KimiLM
from .sharding import check_divisible, param_shardings

OTHER_TOWERS = ("vision_tower.", "mm_projector.")  # of K3's files, beside the text tower

_DTYPES = {"BF16": jnp.bfloat16, "F32": np.float32, "F64": np.float64, "MXFP4": jnp.bfloat16}


def load_hf(path: str | Path, *, dtype: str | None = None, mesh: Mesh | None = None, **fields: Any) -> KimiLM:
    """The model of a released checkpoint's folder.

    Experts in MXFP4 are decoded. Parameters that the files keep in float32 (A_log, dt_bias, convolutions, the norm of
    KDA's output, selection biases) stay so whatever the dtype. Layer numbers count from 1 in config.json, from 0 here.

    Args:
        path: a folder with config.json and model.safetensors, or shards and their index.
        dtype: "float32", "bfloat16" or "float64", of parameters and computation. None: parameters as the file's
            embedding, or wider where the file is, so that nothing is rounded; computation as config.json says.
        mesh: parameters are laid out on it by their logical axes, and never whole where the rules cut them; None: the
            default device.
        **fields: of ModelConfig, to replace: how it is computed (scan_layers, remat, chunk_size), or where peers differ
            (router_weights="biased" as Kimi Linear's Hugging Face code, mla_inner_norm_eps=1e-5 as vLLM).

    Raises:
        ValueError: another family or unsupported settings; files that are absent or cut off; tensors that are missing,
            unused, of another shape or dtype, all in one message; widths that the mesh does not divide. Nothing is
            loaded then.
    """
    files, model = _open(path, dtype, fields)
    if mesh is not None:
        check_divisible(model.config, mesh)
    _give_notice(files, model.config)
    for (_, group), members in groupby(official_tensors(model).items(), _row_of):
        _load_variable(files, dict(members), group, mesh)
    return model


def load_hf_config(path: str | Path, *, dtype: str | None = None, **fields: Any) -> ModelConfig:
    """The config of the model that `load_hf` would return, after the same checks of the folder."""
    return _open(path, dtype, fields)[1].config


def save_hf(
    model: KimiLM,
    path: str | Path,
    *,
    dtype: str | None = None,
    mxfp4: bool = False,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model as a released checkpoint: config.json, and safetensors with the official names and shapes.

    What `load_hf` has read without a dtype comes out bit for bit, in the shapes it had; decoded experts come out
    decoded, or with mxfp4 as MXFP4 of the same values. The kinds of parameters that released files keep in float32 come
    out in float32, whatever the file had. Tokenizers are not written. The host holds one shard at a time; config.json
    is written last.

    Args:
        model: of any layout; every array must be within reach of this process.
        path: a new or empty folder.
        dtype: to round to, but for what stays in float32; None: as the parameters are.
        mxfp4: store routed experts in MXFP4.
        shard_bytes: layers share a file up to this size, a larger layer has its own; a model that fits is one file.

    Raises:
        ValueError: a folder that holds something, a model that the format has no place for, or with mxfp4 experts whose
            values are no MXFP4 numbers (the files written so far stay, without a config.json).
    """
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty: give a new folder")
    stored_dtype = model.config.param_dtype if dtype is None else dtype
    if stored_dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not allowed: one of {DTYPES}")
    raw_config = config_to_hf(model.config, dtype=stored_dtype, mxfp4=mxfp4)
    tensors = official_tensors(model)
    parts = {name: _parts(name, tensor, dtype, mxfp4) for name, tensor in tensors.items()}
    shards = _shards(parts, model.config.hf_root, shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        arrays = _fetch({name: tensors[name] for name in names}, parts)
        save_file(arrays, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(arrays, file)
        del arrays  # before the next ones are fetched
    if len(shards) > 1:
        total = sum(part.size for of_tensor in parts.values() for part in of_tensor.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / CONFIG, raw_config)


def _open(path: str | Path, dtype: str | None, fields: dict[str, Any]) -> tuple[HFFiles, KimiLM]:
    """A folder and the abstract model that it fills. ValueError where it does not."""
    files = HFFiles(path)
    config = _config(files, dtype, fields)
    model = nnx.eval_shape(lambda: KimiLM(config, rngs=nnx.Rngs(0)))
    tensors = official_tensors(model)
    _require_fit(files, tensors, config)
    if dtype is None and "param_dtype" not in fields:
        _keep_wide(files, tensors)
    return files, model


def _config(files: HFFiles, dtype: str | None, fields: dict[str, Any]) -> ModelConfig:
    """config.json, and what only the files tell: how they store things."""
    plain, wrapped = HF_ROOTS
    root = wrapped if any(name.startswith(wrapped) for name in files.stored) else plain
    found: dict[str, Any] = {"hf_root": root}
    if embedding := files.stored.get(f"{root}embed_tokens.weight"):
        found["param_dtype"] = jnp.dtype(_DTYPES.get(embedding.dtype, np.float32)).name
    if dtype is not None:
        found |= {"dtype": dtype, "param_dtype": dtype}
    try:
        config = config_from_hf(files.config, found | fields)
        check_parameters(config)
    except ValueError as error:
        raise ValueError(f"{files.folder}: {error}") from None
    found["first_mix"] = f"{root}layers.0.self_attention_res_proj.weight" in files.stored
    if "kda" in config.layer_kinds:
        layer = f"{root}layers.{config.layer_kinds.index('kda')}.self_attn."
        HV, A_log, dt_bias = config.value_heads, files.stored.get(f"{layer}A_log"), files.stored.get(f"{layer}dt_bias")
        padded = A_log is not None and len(A_log.shape) == 1 and A_log.shape[0] > HV
        if A_log is not None and (padded or A_log.shape == (1, 1, HV, 1)):
            found["hf_A_log_shape"] = A_log.shape
        found["hf_dt_bias_per_head"] = dt_bias is not None and dt_bias.shape == (HV, config.kda_head_dim)
    return config_from_hf(files.config, found | fields)


def _require_fit(files: HFFiles, tensors: dict[str, Tensor], config: ModelConfig) -> None:
    """ValueError that lists every tensor that is missing, unused or not as it should be."""
    stored, other = files.stored, _other_towers(files, config)
    wrong = []
    for name, tensor in tensors.items():
        if name not in stored:
            continue
        kind, shape = stored[name]
        if shape != tensor.shape:
            wrong.append(f"{name} is {list(shape)} and should be {list(tensor.shape)}")
        elif kind not in _DTYPES:
            wrong.append(f"{name} is {kind} and should be one of {', '.join(_DTYPES)}")
        elif name.endswith("A_log") and files.read(name, _whole(shape)).reshape(-1)[config.value_heads :].any():
            wrong.append(f"{name} is not 0 behind its first {config.value_heads} entries")
    problems = {
        "missing": [name for name in tensors if name not in stored],
        "unused": [name for name in stored if name not in tensors and name not in other],
        "not as they should be": wrong,
    }
    if any(problems.values()):
        lists = "; ".join(f"{kind}: {listed(names, ', ')}" for kind, names in problems.items() if names)
        raise ValueError(f"the tensors of {files.folder} are not those that its config.json describes: {lists}")


def _other_towers(files: HFFiles, config: ModelConfig) -> set[str]:
    """The tensors that are no part of the text tower, where there may be others."""
    return {name for name in files.stored if config.hf_root == HF_ROOTS[1] and name.startswith(OTHER_TOWERS)}


def _give_notice(files: HFFiles, config: ModelConfig) -> None:
    """Say what of the files is left out."""
    log = logging.getLogger("absl")
    if other := _other_towers(files, config):
        log.warning("%s: %d tensors of the vision tower are left out", files.folder, len(other))
    if config.hf_A_log_shape is not None and len(config.hf_A_log_shape) == 1:
        log.warning("%s: A_log is stored with %d entries, of which the first %d are the heads and the rest zeros",
                    files.folder, config.hf_A_log_shape[0], config.value_heads)  # fmt: skip


def _keep_wide(files: HFFiles, tensors: dict[str, Tensor]) -> None:
    """Give abstract parameters the dtype of the files where that is wider than theirs."""
    for name, (variable, *_) in tensors.items():
        stored = jax.dtypes.canonicalize_dtype(_DTYPES[files.stored[name].dtype])
        if (wide := jnp.promote_types(stored, variable.dtype)) != variable.dtype:
            variable.set_value(jax.ShapeDtypeStruct(variable.shape, wide))


def _load_variable(files: HFFiles, members: dict[str, Tensor], group: int | None, mesh: Mesh | None) -> None:
    """Read a variable, or one group's row of it, from the tensors that make it up (its experts, or just one)."""
    tensor = next(iter(members.values()))
    variable = tensor.variable
    shape, dtype = tuple(variable.shape), variable.dtype
    sharding = SingleDeviceSharding(jax.devices()[0]) if mesh is None else param_shardings(variable, mesh)
    if group is not None and isinstance(variable.get_value(), jax.ShapeDtypeStruct):
        variable.set_value(jnp.zeros(shape, dtype, device=sharding))
    if group is not None:
        shape, row_sharding = shape[1:], sharding
        sharding = sharding if mesh is None else NamedSharding(mesh, P(*sharding.spec[1:]))

    def read(index: Index) -> np.ndarray:
        if tensor.expert is None:
            ((name, _),) = members.items()
            return np.ascontiguousarray(_read(files, name, tensor, index).astype(dtype))
        names, within = list(members)[index[0]], index[1:]
        block = np.empty((len(names), *(entry.stop - entry.start for entry in within)), dtype)
        for row, name in enumerate(names):
            block[row] = _read(files, name, tensor, within)
        return block

    array = _place(shape, sharding, read)
    if group is not None:
        array = jax.block_until_ready(_set_row(row_sharding)(variable.get_value(), array, group))
    variable.set_value(array)


def _row_of(item: tuple[str, Tensor]) -> tuple[int, int | None]:
    """Equal for tensors that are read and written together: those of one variable, or of one group's row of it."""
    return id(item[1].variable), item[1].group


def _read(files: HFFiles, name: str, tensor: Tensor, index: Index) -> np.ndarray:
    return tensor.layout.read(lambda stored_index: files.read(name, stored_index), index)


def _place(shape: tuple[int, ...], sharding: Sharding, read: Callable[[Index], np.ndarray]) -> jax.Array:
    """An array of which every device gets its slice, read when it is needed and then let go of by the host."""
    devices_of: dict[tuple, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(entry.indices(size)[:2] for entry, size in zip(index, shape, strict=True))
        devices_of.setdefault(bounds, []).append(device)
    arrays = []
    for bounds, devices in devices_of.items():
        block = read(tuple(slice(*bound) for bound in bounds))
        arrays += jax.block_until_ready([jax.device_put(block, device) for device in devices])
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


@functools.cache
def _set_row(sharding: Sharding) -> Callable:
    """A compiled (stacked, row, index) -> stacked with that row, in the same memory."""
    return jax.jit(
        lambda stacked, row, index: jax.lax.dynamic_update_index_in_dim(stacked, row, index, 0),
        donate_argnums=0,
        out_shardings=sharding,
    )


class _Part(NamedTuple):
    """One tensor as it will be in a file."""

    dtype: np.dtype
    size: int  # bytes


def _parts(name: str, tensor: Tensor, dtype: str | None, mxfp4: bool) -> dict[str, _Part]:
    """What a tensor will be in the file: itself, or of MXFP4 codes and scales."""
    count = int(np.prod(tensor.shape))
    if mxfp4 and tensor.expert is not None:
        byte = np.dtype(np.uint8)
        return {f"{name}_packed": _Part(byte, count // 2), f"{name}_scale": _Part(byte, count // mxfp4_codec.RUN)}
    kept = jnp.dtype(tensor.variable.dtype if dtype is None else dtype)
    if name.endswith(FLOAT32_SUFFIXES):
        kept = jnp.promote_types(kept, jnp.float32)
    return {name: _Part(kept, count * kept.itemsize)}


def _shards(parts: dict[str, dict[str, _Part]], root: str, shard_bytes: int) -> list[list[str]]:
    """Tensor names by file: whole layers, in order, as many as fit."""
    shards: list[list[str]] = []
    room = 0
    for _, names in groupby(parts, lambda name: layer_of(name, root)):
        names = list(names)
        size = sum(part.size for name in names for part in parts[name].values())
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1] += names
        room -= size
    return shards


def _fetch(tensors: dict[str, Tensor], parts: dict[str, dict[str, _Part]]) -> dict[str, np.ndarray]:
    """The arrays of one file."""
    arrays = {}
    for (_, group), members in groupby(tensors.items(), _row_of):
        members = dict(members)
        value = next(iter(members.values())).variable.get_value()
        # Of a new array, since jax keeps the host's copy for as long as the array lives.
        value = np.asarray(jnp.copy(value) if group is None else value[group])
        for name, tensor in members.items():
            whole = tensor.layout.write(value if tensor.expert is None else value[tensor.expert])
            if name in parts[name]:
                arrays[name] = np.ascontiguousarray(whole.astype(parts[name][name].dtype))
                continue
            try:
                arrays |= zip(parts[name], mxfp4_codec.encode(whole), strict=True)
            except ValueError as error:
                raise ValueError(f"mxfp4=True: {name} cannot be stored so: {error}") from None
    return arrays


def _whole(shape: tuple[int, ...]) -> Index:
    return tuple(slice(0, size) for size in shape)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
