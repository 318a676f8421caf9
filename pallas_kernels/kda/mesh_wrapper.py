"""A documented wrapper for meshes whose axes are Auto: jax has no way to split a kernel over those by itself."""

import inspect
import math
from collections.abc import Callable

import jax

from .mesh import repeat_heads, split
from .result import KDAResult

__all__ = ["sharded"]

_SEQUENCE = {
    "q": "BTHK", "k": "BTHK", "v": "BTHV", "g": "BTHK", "beta": "BTH", "initial_state": "BHKV", "segment_ids": "BT",
    "A_log": "H", "dt_bias": "HK",
}  # fmt: skip
_STEP = {
    "q": "BHK", "k": "BHK", "v": "BHV", "g": "BHK", "beta": "BH", "state": "BHKV", "A_log": "H", "dt_bias": "HK",
}  # fmt: skip


def sharded(
    function: Callable,
    *,
    batch: str | tuple[str, ...] | None = None,
    heads: str | tuple[str, ...] | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Callable:
    """`kda`, `linear_attention` or `kda_step` with rows cut over the mesh axes batch and heads over the axes heads.

    Each device runs the function on its own rows and heads, so that nothing is gathered, whatever the backend. Needed
    for the TPU and GPU kernels on a mesh with Auto axes (jax.make_mesh's older default); on Explicit axes, and inside a
    shard_map, the functions do this by themselves.

    Args:
        batch, heads: mesh axes, or None for a whole axis. heads cuts the value heads, and q and k with them; q and k
            with too few heads are repeated first to one per value head.
        mesh: the mesh; None is the one in force (jax.set_mesh).

    Returns:
        A function with the same arguments and result. `kda_step` with slots is a ValueError: a pool has no rows to cut.

    Raises:
        ValueError: when called, for a batch or value heads that the mesh axes do not divide.
    """
    signature = inspect.signature(function)
    axes = _STEP if "state" in signature.parameters else _SEQUENCE

    def call(*args, **kwargs):
        bound = signature.bind(*args, **kwargs).arguments
        options = {**{n: x for n, x in bound.items() if n not in axes and n != "options"}, **bound.get("options", {})}
        if options.get("slots") is not None:
            raise ValueError("slots: got a pool of states, which has no rows to cut; pass state [B, HV, K, V]")
        arrays = {n: bound[n] for n in axes if bound.get(n) is not None}
        over = mesh or jax.sharding.get_abstract_mesh()
        parts = {axis: _parts(over, names) for axis, names in (("B", batch), ("H", heads))}
        B, HV = arrays["v"].shape[0], arrays["v"].shape[-2]
        for name, size, axis, cut in (("batch", B, "B", batch), ("value heads", HV, "H", heads)):
            if size % parts[axis]:
                raise ValueError(f"v: got {size} for its {name}, which mesh axes {cut} ({parts[axis]}) do not divide")
        if arrays["q"].shape[-2] % parts["H"]:
            group = HV // arrays["q"].shape[-2]
            arrays |= {n: repeat_heads(arrays[n], group, axis=arrays[n].ndim - 2) for n in "qk"}
        layouts = {n: axes[n] for n in arrays}
        if options.get("num_segments") is not None and "initial_state" in arrays:
            layouts["initial_state"] = "BSHKV"
        if "dt_bias" in arrays and arrays["dt_bias"].ndim == 1:
            layouts["dt_bias"] = "H"  # [HV * K], head-major
        if arrays.get("g") is not None and arrays["g"].ndim == arrays["beta"].ndim:
            layouts["g"] = axes["beta"]  # linear_attention with one decay per head
        state = "BSHKV" if options.get("num_segments") is not None else "BHKV"
        names = tuple(arrays)
        result = split(
            lambda *shards: tuple(function(**dict(zip(names, shards, strict=True)), **options)),
            tuple(arrays.values()), tuple(layouts.values()), (axes["v"], state), {"B": batch, "H": heads}, mesh,
        )  # fmt: skip
        return KDAResult(*result)

    return call


def _parts(mesh, names) -> int:
    names = () if names is None else (names,) if isinstance(names, str) else names
    if missing := [n for n in names if n not in mesh.axis_names]:
        raise ValueError(f"mesh axes {missing} are not in the mesh {dict(mesh.shape)}; set it by jax.set_mesh or mesh=")
    return math.prod(mesh.shape[n] for n in names)
