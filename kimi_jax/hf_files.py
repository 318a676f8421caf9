"""The files of a published checkpoint as one set of tensors: is it whole, what is in it, and slices of it.

Tensors are known by their official names here. Two tensors that make up a weight in MXFP4 are one.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors

from . import mxfp4

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"

# Where transformers' save_pretrained puts the matrices of a dense layer; released files have ".mlp." there.
SAVED_BY_TRANSFORMERS = re.compile(r"(\.layers\.\d+)\.block_sparse_moe\.((?:gate|up|down)_proj\.weight)$")
MOST_NAMES = 50  # that an error lists of each kind


class Stored(NamedTuple):
    """What a file says of a tensor, or what the two of a weight in MXFP4 amount to."""

    dtype: str  # as safetensors names it: "BF16", "F32", ...; or "MXFP4"
    shape: tuple[int, ...]


class HFFiles:
    """The tensors of a folder. Opening reads headers only; a ValueError names every file that will not do.

    Attributes:
        folder: its path.
        config: config.json.
        stored: name -> dtype and shape, for every tensor of every file.
    """

    def __init__(self, path: str | Path):
        self.folder = Path(path)
        if not self.folder.is_dir():
            raise ValueError(f"no folder {str(path)!r}")
        self.config = _read_json(self.folder / CONFIG)
        handles = self._open()
        self._slices = {}
        for name, handle in handles.items():
            official = SAVED_BY_TRANSFORMERS.sub(r"\1.mlp.\2", name)
            self._slices[name if official in handles else official] = handle.get_slice(name)
        self.stored = {n: Stored(s.get_dtype(), tuple(s.get_shape())) for n, s in self._slices.items()}
        for packed in [name for name in self.stored if name.endswith(".weight_packed")]:
            weight = packed.removesuffix("_packed")
            scale = f"{weight}_scale"
            if weight in self.stored or scale not in self.stored:
                continue
            if shape := _mxfp4_shape(self.stored[packed], self.stored[scale]):
                del self.stored[packed], self.stored[scale]
                self.stored[weight] = Stored("MXFP4", shape)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of a tensor; index must name every axis."""
        if self.stored[name].dtype != "MXFP4":
            return self._slices[name][index]
        rows, columns = index  # of whole rows, since a scale spans 32 columns
        packed, scale = (self._slices[name + part][rows] for part in ("_packed", "_scale"))
        return mxfp4.decode(packed, scale)[:, columns]

    def _open(self) -> dict[str, Any]:
        """Tensor name -> the open file that holds it."""
        index = self.folder / INDEX
        if index.is_file():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise ValueError(f"{index} has no weight_map of names and files")
        elif (self.folder / SINGLE).is_file():
            weight_map = None
        else:
            raise ValueError(f"{self.folder} holds neither {SINGLE} nor {INDEX}")
        names = [SINGLE] if weight_map is None else sorted(set(weight_map.values()))
        problems = [f"{file} is absent" for file in names if not (self.folder / file).is_file()]
        opened, handles = {}, {}
        for file in names if not problems else ():
            try:
                opened[file] = safetensors.safe_open(self.folder / file, "np")
            except (safetensors.SafetensorError, OSError) as error:
                problems.append(f"{file} is cut off or no safetensors file ({error})")
        for file, handle in opened.items():
            for name in handle.keys():  # noqa: SIM118  (it has no other iteration)
                if weight_map is not None and weight_map.get(name) != file:
                    problems.append(f"{file} holds {name}, which the index does not place there")
                handles[name] = handle
        if weight_map is not None and not problems:
            problems = [f"{weight_map[name]} lacks {name}" for name in weight_map if name not in handles]
        if problems:
            raise ValueError(f"{self.folder} is not a whole checkpoint: {listed(problems, '; ')}")
        return handles


def listed(names: Iterable[str], separator: str) -> str:
    """Names for an error message, which may be many thousands."""
    names = list(names)
    more = f"{separator}and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return separator.join(names[:MOST_NAMES]) + more


def _mxfp4_shape(packed: Stored, scale: Stored) -> tuple[int, int] | None:
    """The shape of the weight that codes and scales make up, None if they do not belong together."""
    if {packed.dtype, scale.dtype} != {"U8"} or not len(packed.shape) == len(scale.shape) == 2:
        return None
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    return (rows, columns) if scale.shape == (rows, columns / mxfp4.RUN) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent} holds no {path.name}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value
