"""The TPU's sequence kernels in each of Pallas's interpreters, under jax's transformations, and on meshes."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import kda, kda_reference, sharded
from tests.pallas_kernels.kda_support import ARRAYS, PLAIN, QUICK, TPU, base, check, interpreted, rounded, run
from tests.pallas_kernels.test_kda_transforms import (
    FUSED,
    IDS,
    TOKEN,
    arguments,
    assert_same,
    cotangents_of,
    with_gradients,
)
from tests.support import F32_FORWARD, F32_GRADIENT, assert_close, rel_l2

tpu = partial(kda, backend="mosaic_tpu")


# --- Interpreters ------------------------------------------------------------------------------------------------


class Mode(NamedTuple):
    name: str
    interpreter: object


MODES = [
    Mode("plain", PLAIN),
    Mode("races_of_two_cores", dataclasses.replace(TPU, detect_races=True, num_cores_or_threads=2, random_seed=5)),
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_field_TL03_every_interpreter_agrees(mode):
    """Slots that are read, carried, written in place and left alone. Only the plain one has NaN in unwritten ones."""
    tokens = base(35, 2, 100, 1, 64, 64, HV=2)
    ids = np.stack([np.repeat([0, 2, -1], [70, 20, 10]), np.repeat([1, 2], [1, 99])])
    states = np.random.default_rng(3).standard_normal((2, 4, 2, 64, 64))
    with interpreted(mode.interpreter):
        check(tokens._replace(initial_state=states), ids=ids, num_segments=4, backend="mosaic_tpu")
        if mode.interpreter is not PLAIN:
            assert interpret_pallas_call.races.races_found is False


def test_a_carry_along_a_parallel_axis_is_caught(monkeypatch):
    """What the random order is for: were chunks declared independent, results would be wrong."""
    honest = pltpu.CompilerParams

    def careless(*, dimension_semantics, **others):
        return honest(dimension_semantics=("parallel",) * len(dimension_semantics), **others)

    tokens = rounded(base(36, 1, 256, 1, 64, 64), jnp.float32)
    reference = run(kda_reference, tokens, jnp.float64, gradients=False)["output"]
    errors = []
    for seed, parameters in enumerate((honest, careless), 1):
        monkeypatch.setattr(pltpu, "CompilerParams", parameters)
        with interpreted(dataclasses.replace(TPU, random_seed=seed)):
            result = run(kda, tokens, jnp.float32, gradients=False, backend="mosaic_tpu")["output"]
        errors.append(rel_l2(result, reference))
    assert errors[0] <= F32_FORWARD
    assert not errors[1] <= 0.1  # or NaN


# --- Transformations ---------------------------------------------------------------------------------------------


def small(options: dict, **shape):
    """float32 arrays of few heads of 8 channels and 24 tokens, cotangents, and the token scan's results."""
    arrays = arguments(**shape)
    cotangents = cotangents_of(arrays, options.get("num_segments"))
    return arrays, cotangents, jax.jit(with_gradients(kda_reference, **options))(arrays, IDS, cotangents)


class Mapped(NamedTuple):
    name: str
    options: dict
    shape: dict
    shared: tuple


MAPPED = [
    # Rows of all calls become those of one: their slots too, and what they share is repeated.
    Mapped("rows", {"num_segments": 3, **FUSED}, {"S": 3, "fused": True}, ("initial_state", "A_log", "dt_bias")),
    # Gate parameters of their own: one call after the other.
    Mapped("parameters", FUSED, {"fused": True}, ("initial_state",)),
]


@pytest.mark.parametrize("case", MAPPED, ids=lambda case: case.name)
def test_vmap(case):
    """Over tokens and ids, with gradients of what the calls share and of what they do not."""
    (first, cotangents, _), (second, *_) = (small(case.options, H=1, HV=1, seed=s, **case.shape) for s in (0, 1))
    arrays = {n: x if n in case.shared else np.stack([x, second[n]]) for n, x in first.items()}
    axes = {n: None if n in case.shared else 0 for n in arrays}
    ids = np.stack([IDS, IDS[::-1]])
    mapped = jax.vmap(with_gradients(tpu, **case.options), in_axes=(axes, 0, None))
    with interpreted():
        got = jax.block_until_ready(jax.jit(mapped, compiler_options=QUICK)(arrays, ids, cotangents))
    alone = jax.jit(with_gradients(kda_reference, **case.options))
    for i in range(2):
        one = {n: x if n in case.shared else x[i] for n, x in arrays.items()}
        assert_same(jax.tree.map(lambda x, i=i: x[i], got), alone(one, ids[i], cotangents), f"call {i}")


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
def test_scan_over_layers(remat):
    """Three layers that share a compiled body equal the unrolled token scan, weights' gradients included.

    remat refuses the callbacks of the TPU's interpreter.
    """
    r = np.random.default_rng(3)
    arrays = arguments(H=1, HV=1, state=False, fused=True)
    x, cotangent = arrays.pop("v"), r.standard_normal((2, 24, 1, 8)).astype(np.float32)
    layers = {"weight": 0.3 * r.standard_normal((3, 8, 8)) + np.eye(8), "A_log": r.standard_normal((3, 1)),
              "dt_bias": r.standard_normal((3, 1, 8))}  # fmt: skip
    layers = jax.tree.map(np.float32, layers)

    def layer(function, x, weight, **gate):
        return x + function(**arrays | gate, v=jnp.tanh(x @ weight), segment_ids=IDS, **FUSED).output

    def scanned(x, layers):
        body = lambda x, one: (layer(tpu, x, **one), None)  # noqa: E731
        return jnp.sum(cotangent * jax.lax.scan(jax.checkpoint(body) if remat else body, x, layers)[0])

    def unrolled(x, layers):
        for i in range(3):
            x = layer(kda_reference, x, **{n: w[i] for n, w in layers.items()})
        return jnp.sum(cotangent * x)

    want = jax.jit(jax.grad(unrolled, argnums=(0, 1)))(x, layers)
    with interpreted(PLAIN if remat else TPU):
        got = jax.block_until_ready(jax.jit(jax.grad(scanned, argnums=(0, 1)), compiler_options=QUICK)(x, layers))
    for (path, value), expected in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert_close(value, expected, F32_GRADIENT, jax.tree_util.keystr(path))


# --- Meshes (SH05) -----------------------------------------------------------------------------------------------


class Placed(NamedTuple):
    name: str
    axis_type: AxisType
    options: dict
    shape: dict
    cut: tuple = ARRAYS  # arrays that are sharded; the others lie on every device


PLACED = [
    Placed("explicit", AxisType.Explicit, {"num_segments": 3}, {"H": 2, "HV": 4, "S": 3}),
    Placed("explicit_little_sharded", AxisType.Explicit, FUSED, {"H": 1, "HV": 4, "fused": True}, ("v",)),
    Placed("auto_by_sharded", AxisType.Auto, FUSED, {"H": 4, "fused": True}),
]


@pytest.mark.parametrize("case", PLACED, ids=lambda case: case.name)
def test_field_SH05_mesh(case):
    """(data 2, tensor 2): one device's numbers, and results that lie as the arguments do."""
    arrays, cotangents, want = small(case.options, **case.shape)
    explicit = case.axis_type == AxisType.Explicit
    state = P("data", None, "tensor") if "S" in case.shape else P("data", "tensor")
    specs = dict.fromkeys(ARRAYS, TOKEN) | {"initial_state": state, "A_log": P("tensor"), "dt_bias": P("tensor")}
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (case.axis_type,) * 2, devices=jax.devices()[:4])
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    function = tpu if explicit else sharded(tpu, batch="data", heads="tensor")
    with jax.set_mesh(mesh), interpreted():
        placed = {n: put(x, specs[n] if n in case.cut else P()) for n, x in arrays.items()}
        program = jax.jit(with_gradients(function, **case.options), compiler_options=QUICK)
        got = jax.block_until_ready(program(placed, IDS, tuple(map(put, cotangents, (TOKEN, state)))))
    assert_same(got, want)
    (output, final), gradients = got
    assert output.sharding.is_equivalent_to(NamedSharding(mesh, TOKEN), 4)
    assert final.sharding.is_equivalent_to(NamedSharding(mesh, state), final.ndim)
    for name, gradient in gradients.items() if explicit else ():
        assert gradient.sharding.is_equivalent_to(placed[name].sharding, gradient.ndim), name
