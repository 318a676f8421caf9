"""Calls of kda as shapes alone, to be lowered or compiled for machines that are not there."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import kda


class Call(NamedTuple):
    name: str
    B: int = 2
    T: int = 192
    H: int = 2
    HV: int = 2
    K: int = 128
    V: int = 128
    options: dict = {}
    segments: int | None = None  # 0 packs without states of their own
    state: str | None = "float32"
    dtype: str = "bfloat16"
    gates: str | None = None  # the dtype of g and beta, if it is another


def arguments(case: Call, mesh: Mesh | None = None) -> tuple[dict, tuple]:
    """Shapes of kda's array arguments by name, and those of segment_ids or nothing.

    mesh has axes "data", for the batch, and "tensor", for the heads; a single query head is on all of "tensor".
    """
    B, T, H, HV, K, V = case.B, case.T, case.H, case.HV, case.K, case.V
    shapes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V), "g": (B, T, HV, K), "beta": (B, T, HV)}
    dtypes = {"g": case.gates or case.dtype, "beta": case.gates or case.dtype}
    if case.state:
        shapes["initial_state"] = (B, *([case.segments] if case.segments else []), HV, K, V)
        dtypes["initial_state"] = case.state
    if "gate" in case.options:
        shapes |= {"A_log": (HV,), "dt_bias": (HV, K)}
        dtypes |= {"A_log": "float32", "dt_bias": "float32"}
    specs = {n: ("data", None, "tensor") for n in shapes}
    specs |= {"initial_state": ("data", "tensor"), "A_log": ("tensor",), "dt_bias": ("tensor",)}
    if H == 1:
        specs |= {"q": ("data",), "k": ("data",)}
    placed = lambda n: None if mesh is None else NamedSharding(mesh, PartitionSpec(*specs[n]))  # noqa: E731
    arrays = {n: jax.ShapeDtypeStruct(s, dtypes.get(n, case.dtype), sharding=placed(n)) for n, s in shapes.items()}
    return arrays, () if case.segments is None else (jax.ShapeDtypeStruct((B, T), jnp.int32),)


def results(case: Call, backend: str, function: Callable = kda) -> Callable:
    """A function of `arguments` that gives output and state."""
    options = {**case.options, "num_segments": case.segments or None, "backend": backend}
    return lambda arrays, ids=None: function(**arrays, segment_ids=ids, **options)


def training(case: Call, backend: str, function: Callable = kda) -> Callable:
    """A function of `arguments` that gives the gradient of every array, by output and state, and those two."""

    def loss(arrays, ids=None):
        output, state = results(case, backend, function)(arrays, ids)
        return jnp.sum(output.astype(jnp.float32) ** 2) + jnp.sum(state**2), (output, state)

    return jax.grad(loss, has_aux=True)


def gradients(case: Call, backend: str, function: Callable = kda) -> Callable:
    """`training` without what is not a gradient."""
    return lambda *arrays: training(case, backend, function)(*arrays)[0]


def assert_nothing_gathered(compiled):
    """Only the gate parameters' gradients are reduced, and those of shared queries."""
    moved = {name: size for name, size in compiled.collectives.items() if name != "all-reduce"}
    assert not moved, moved
