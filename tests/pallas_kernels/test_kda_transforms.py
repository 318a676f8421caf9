"""KDA under jax's transformations, and on meshes: sharded over batch and heads, every device works on its own alone."""

import math
import re
import sys
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import (
    bounded_gate,
    kda,
    kda_reference,
    kda_step,
    linear_attention,
    segment_ids_from_cu_seqlens,
    softplus_gate,
)
from tests.pallas_kernels.kda_support import base
from tests.quick_compile import quick_compile  # noqa: F401 (a fixture for all tests here)
from tests.support import F32_FORWARD, F32_GRADIENT, assert_close

NAMES = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
FUSED = {"gate": "softplus", "qk_l2norm": True, "beta_sigmoid": True}
IDS = np.array([[0] * 5 + [1] * 7 + [-1] * 3 + [2] * 9, [0] * 20 + [-1] * 4], np.int32)
TOKEN, HEADS = P("data", None, "tensor"), P("tensor")


def arguments(*, B=2, T=24, H=4, HV=4, S=None, state=True, beta=True, fused=False, seed=0):
    """float32 arrays by name; with fused gates g holds raw logits."""
    r = np.random.default_rng(seed)
    tokens = base(seed, B, T, H, 8, 8, HV=HV)
    arrays = dict(zip(NAMES[:5], tokens[:5], strict=True))
    if not beta:
        del arrays["beta"]
    if state:
        arrays["initial_state"] = 0.1 * r.standard_normal((B, *([] if S is None else [S]), HV, 8, 8))
    if fused:
        logits = r.standard_normal(tokens.g.shape)
        arrays |= {"g": logits, "A_log": 0.3 * r.standard_normal(HV), "dt_bias": r.standard_normal((HV, 8))}
    return {n: np.asarray(x, np.float32) for n, x in arrays.items()}


def with_gradients(function, **options):
    """(arrays, ids, cotangents) -> (output and state, gradient of each array)."""

    def program(arrays, ids, cotangents):
        results, vjp = jax.vjp(lambda arrays: tuple(function(**arrays, segment_ids=ids, **options)), arrays)
        return results, vjp(cotangents)[0]

    return program


def cotangents_of(arrays, S=None):
    r = np.random.default_rng(99)
    B, _, HV, V = arrays["v"].shape
    shape = (B, *([] if S is None else [S]), HV, arrays["q"].shape[-1], V)
    return tuple(r.standard_normal(x).astype(np.float32) for x in (arrays["v"].shape, shape))


def assert_same(got, want, what=""):
    (output, state), gradients = got
    assert_close(output, want[0][0], F32_FORWARD, f"{what} output")
    assert_close(state, want[0][1], F32_FORWARD, f"{what} state")
    assert gradients.keys() == want[1].keys()
    for name, gradient in gradients.items():
        assert_close(gradient, want[1][name], F32_GRADIENT, f"{what} d{name}")


@pytest.fixture
def small_groups(monkeypatch):
    """Groups of at most one chunk of 16, so that the tests' short sequences are scanned in several."""
    monkeypatch.setattr(sys.modules["pallas_kernels.kda.chunked"], "GROUP_ELEMENTS", {"cpu": 1, "other": 1})


# --- Meshes (SH05) -----------------------------------------------------------------------------------------------


class Placed(NamedTuple):
    name: str
    function: object
    arguments: dict
    options: dict = {}
    ids: np.ndarray | None = None
    replicated: tuple = ()  # arrays that are not sharded


PLACED = [
    Placed("plain", kda, {"state": False}),
    Placed("fused_grouped_packed", kda, {"HV": 8, "fused": True}, FUSED, IDS),
    Placed("segments", kda, {"HV": 8, "S": 3}, {"num_segments": 3}, IDS),
    Placed("replicated_gate", kda, {"S": 3, "fused": True}, {"num_segments": 3, **FUSED}, IDS, ("A_log", "dt_bias")),
    Placed("linear_attention", linear_attention, {"beta": False}),
    Placed("reference", kda, {"HV": 8, "S": 3, "state": False}, {"num_segments": 3, "backend": "reference"}, IDS),
    Placed("reference_packed", kda, {"fused": True}, {"backend": "reference", **FUSED}, IDS),
]  # fmt: skip


@cache
def on_one_device(name):
    case = next(c for c in PLACED if c.name == name)
    arrays = arguments(**case.arguments)
    cotangents = cotangents_of(arrays, case.options.get("num_segments"))
    program = jax.jit(with_gradients(case.function, chunk_size=16, **case.options))
    return arrays, cotangents, program(arrays, case.ids, cotangents)


def collectives(compiled):
    """(operation, elements of each result) of every collective in the compiled program."""
    kinds = "all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute|collective-broadcast|ragged-all-to-all"
    found = []
    for result, kind in re.findall(rf"= (\S.*?) ({kinds})(?:-start)?\(", compiled.as_text()):
        sizes = [math.prod(map(int, dims.split(","))) if dims else 1 for dims in re.findall(r"\w\[([\d,]*)\]", result)]
        found.append((kind, sizes))
    return found


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("case", PLACED, ids=lambda c: c.name)
def test_field_SH05_mesh(case, axis_type, small_groups):
    """Plain jit on (data 2, tensor 4): one device's numbers, no collective but the sums of the gate's parameters."""
    arrays, cotangents, want = on_one_device(case.name)
    S = case.options.get("num_segments")
    state = P("data", "tensor") if S is None else P("data", None, "tensor")
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(axis_type,) * 2)
    specs = dict.fromkeys(NAMES, TOKEN) | {"initial_state": state, "A_log": HEADS, "dt_bias": HEADS}
    specs |= dict.fromkeys(case.replicated, P())

    def put(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        placed = {n: put(x, specs[n]) for n, x in arrays.items()}
        ids = None if case.ids is None else put(case.ids, P("data"))
        placed_cotangents = tuple(map(put, cotangents, (TOKEN, state)))
        program = jax.jit(with_gradients(case.function, chunk_size=16, **case.options))
        compiled = program.lower(placed, ids, placed_cotangents).compile()
        got = compiled(placed, ids, placed_cotangents)
    assert_same(got, want)
    (output, final), gradients = got
    assert output.sharding.is_equivalent_to(placed["v"].sharding, 4)
    assert final.sharding.is_equivalent_to(placed_cotangents[1].sharding, final.ndim)
    for name, gradient in gradients.items():
        if name not in case.replicated:
            assert gradient.sharding.is_equivalent_to(placed[name].sharding, gradient.ndim), name

    # The gate's parameters are summed over data; where they were replicated their gradients may be gathered again.
    allowed = {"all-reduce"} if "A_log" in arrays else set()
    allowed |= {"all-gather"} if case.replicated else set()
    largest = arrays["dt_bias"].size if "A_log" in arrays else 0
    found = collectives(compiled)
    assert all(kind in allowed and max(sizes) <= largest for kind, sizes in found), found
    assert ("A_log" in arrays) == any(kind == "all-reduce" for kind, _ in found)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("pooled", [False, True], ids=["state", "pool"])
def test_field_SH05_step_on_a_mesh(pooled, axis_type):
    """One token needs no collective; with slots the rows' new states meet where the pool lies, heads stay apart."""
    arrays = arguments(B=4, T=1, HV=8, state=False, fused=True)
    arrays = {n: x[:, 0] if n in NAMES[:5] else x for n, x in arrays.items()}
    r = np.random.default_rng(5)
    arrays["state"] = r.standard_normal((6 if pooled else 4, 8, 8, 8)).astype(np.float32)
    if pooled:
        arrays["slots"] = np.array([5, -1, 0, 2], np.int32)
    step = partial(kda_step, **FUSED)
    want = jax.jit(step)(**arrays)
    row = P("data", "tensor")
    pool = P(None, "tensor") if pooled else row
    specs = dict.fromkeys(NAMES[:5], row) | {"state": pool, "A_log": HEADS, "dt_bias": P(), "slots": P("data")}
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arrays.items()}
        compiled = jax.jit(step).lower(**placed).compile()
        output, state = compiled(**placed)
    assert_close(output, want.output, F32_FORWARD, "output")
    assert_close(state, want.state, F32_FORWARD, "state")
    assert output.sharding.is_equivalent_to(NamedSharding(mesh, row), 3)
    assert state.sharding.is_equivalent_to(NamedSharding(mesh, pool), 4)
    found = collectives(compiled)
    if pooled:  # [4 rows, 8 / 4 heads, 8, 8] at most
        assert {kind for kind, _ in found} <= {"all-gather"} and all(max(sizes) <= 4 * 2 * 64 for _, sizes in found), (
            found
        )
    else:
        assert not found


def test_explicit_mesh_with_little_sharded(small_groups):
    """On Explicit axes the call follows whichever array is sharded, also with one q/k head for four parts."""
    arrays = arguments(H=1, HV=4, fused=True)
    cotangents = cotangents_of(arrays)
    program = jax.jit(with_gradients(kda, chunk_size=16, **FUSED))
    want = program(arrays, IDS, cotangents)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        specs = dict.fromkeys(arrays, P()) | {"v": TOKEN}
        placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arrays.items()}
        state = P("data", "tensor")
        cotangents = [
            jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(cotangents, (TOKEN, state), strict=True)
        ]
        got = program(placed, IDS, tuple(cotangents))
    assert_same(got, want)
    for name, gradient in got[1].items():
        assert gradient.sharding.is_equivalent_to(placed[name].sharding, gradient.ndim), name


@pytest.mark.parametrize("gate", [softplus_gate, bounded_gate])
@pytest.mark.parametrize("way", ["shard_map", "explicit"])
def test_gates_with_replicated_parameters(gate, way):
    """The gates alone: gradients of the shared A_log and dt_bias are summed, in shard_map and on Explicit axes."""
    arrays = [arguments(B=4, fused=True)[n] for n in ("g", "A_log", "dt_bias")]

    def loss(function, *arrays):
        return jnp.sum(function(*arrays) ** 2)

    gradients = jax.grad(loss, argnums=(1, 2, 3))
    want = jax.jit(partial(gradients, gate))(*arrays)
    if way == "shard_map":
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
        mapped = jax.shard_map(gate, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"), check_vma=True)
        got = jax.jit(partial(gradients, mapped))(*arrays)
    else:
        mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
        with jax.set_mesh(mesh):
            placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, (TOKEN, P(), P()), strict=True)]
            got = jax.jit(partial(gradients, gate))(*placed)
    for name, a, b in zip(("x", "A_log", "dt_bias"), got, want, strict=True):
        assert_close(a, b, F32_GRADIENT, f"d{name}")


# --- Transformations ---------------------------------------------------------------------------------------------


class Mapped(NamedTuple):
    name: str
    arguments: dict
    options: dict
    specs: dict


MAPPED = [
    Mapped("replicated_parameters", {"fused": True}, FUSED, {"A_log": HEADS, "dt_bias": HEADS}),
    Mapped("segments_without_state", {"state": False, "S": 3}, {"num_segments": 3}, {}),
]


@pytest.mark.parametrize("case", MAPPED, ids=lambda c: c.name)
def test_shard_map(case, small_groups):
    """With check_vma on; the gradients of what devices share are summed over them by jax."""
    arrays = arguments(**case.arguments)
    S = case.options.get("num_segments")
    cotangents = cotangents_of(arrays, S)
    state = P("data", "tensor") if S is None else P("data", None, "tensor")
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = {n: TOKEN for n in arrays} | ({"initial_state": state} if "initial_state" in arrays else {}) | case.specs
    function = partial(kda, chunk_size=16, **case.options)

    def mapped(segment_ids, **arrays):
        inner = jax.shard_map(
            lambda arrays, ids: tuple(function(**arrays, segment_ids=ids)),
            mesh=mesh, in_specs=(specs, P("data")), out_specs=(TOKEN, state), check_vma=True,
        )  # fmt: skip
        return inner(arrays, segment_ids)

    want = jax.jit(with_gradients(function))(arrays, IDS, cotangents)
    got = jax.jit(with_gradients(mapped))(arrays, IDS, cotangents)
    assert_same(got, want)


def test_shard_map_of_a_step():
    arrays = arguments(B=4, T=1, state=False, fused=True)
    arrays = {n: x[:, 0] if n in NAMES[:5] else x for n, x in arrays.items()}
    arrays["state"] = np.random.default_rng(5).standard_normal((4, 4, 8, 8)).astype(np.float32)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    specs = {n: P() if n in ("A_log", "dt_bias") else P("data") for n in arrays}

    def loss(arrays, mapped):
        step = lambda arrays: tuple(kda_step(**arrays, **FUSED))  # noqa: E731
        if mapped:
            step = jax.shard_map(step, mesh=mesh, in_specs=(specs,), out_specs=P("data"), check_vma=True)
        output, state = step(arrays)
        return jnp.sum(output**2) + jnp.sum(state**2)

    got, want = (jax.jit(jax.grad(partial(loss, mapped=m)))(arrays) for m in (True, False))
    for name in arrays:
        assert_close(got[name], want[name], F32_GRADIENT, f"d{name}")


def test_vmap(small_groups):
    """Over tokens and ids with a shared state and shared gate parameters."""
    both = [arguments(fused=True, seed=seed) for seed in (0, 1)]
    shared = ("initial_state", "A_log", "dt_bias")
    arrays = {n: x if n in shared else np.stack([b[n] for b in both]) for n, x in both[0].items()}
    ids = np.stack([IDS, IDS[::-1]])
    cotangents = cotangents_of(both[0])
    program = with_gradients(kda, chunk_size=16, **FUSED)
    axes = {n: None if n in shared else 0 for n in arrays}
    got = jax.jit(jax.vmap(program, in_axes=(axes, 0, None)))(arrays, ids, cotangents)
    alone = jax.jit(program)
    for i in range(2):
        one = {n: x if n in shared else x[i] for n, x in arrays.items()}
        assert_same(jax.tree.map(lambda x, i=i: x[i], got), alone(one, ids[i], cotangents), f"row {i}")


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
def test_scan_over_layers(remat):
    """Three layers that share a compiled body equal the unrolled float64 token scan, weights' gradients included."""
    r = np.random.default_rng(3)
    arrays = arguments(state=False, fused=True)
    weights = 0.3 * r.standard_normal((3, 8, 8)) + np.eye(8)
    A_log, dt_bias = r.standard_normal((3, 4)), r.standard_normal((3, 4, 8))
    cotangent = r.standard_normal(arrays["v"].shape)

    def layer(function, x, weight, A_log, dt_bias):
        tokens = {n: arrays[n].astype(x.dtype) for n in ("q", "k", "g", "beta")}
        return x + function(**tokens, v=jnp.tanh(x @ weight), A_log=A_log, dt_bias=dt_bias, segment_ids=IDS, **FUSED)[0]

    def scanned(x, layers):
        def body(x, parameters):
            return layer(partial(kda, chunk_size=16), x, *parameters), None

        return jnp.sum(cotangent * jax.lax.scan(jax.checkpoint(body) if remat else body, x, layers)[0])

    def unrolled(x, layers):
        for i in range(3):
            x = layer(kda_reference, x, *(p[i] for p in layers))
        return jnp.sum(cotangent * x)

    inputs = (arrays["v"], (weights, A_log, dt_bias))
    with jax.enable_x64(True):
        want = jax.jit(jax.grad(unrolled, argnums=(0, 1)))(*jax.tree.map(np.float64, inputs))
    cotangent = np.float32(cotangent)
    got = jax.jit(jax.grad(scanned, argnums=(0, 1)))(*jax.tree.map(np.float32, inputs))
    for name, a, b in zip(
        ("x", "weights", "A_log", "dt_bias"), jax.tree.leaves(got), jax.tree.leaves(want), strict=True
    ):
        assert_close(a, b, F32_GRADIENT, f"d{name}")


def test_forward_mode_raises_jax_own_error():
    arrays = arguments(state=False)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda v: kda(**arrays | {"v": v}, chunk_size=16), (arrays["v"],), (arrays["v"],))


# --- Compilations (TL01) -----------------------------------------------------------------------------------------


def test_field_TL01_lengths_never_recompile():
    """20 packings of one shape, by offsets, by ids and with segments: each program is traced and compiled once."""
    r = np.random.default_rng(2)
    arrays = arguments(B=1, T=24, state=False)
    traced = []

    @jax.jit
    def by_offsets(arrays, cu_seqlens):
        traced.append("offsets")
        ids = segment_ids_from_cu_seqlens(cu_seqlens, 24)
        return kda(**arrays, segment_ids=ids, num_segments=8, chunk_size=16)

    @jax.jit
    def by_ids(arrays, ids):
        traced.append("ids")
        return kda(**arrays, segment_ids=ids, chunk_size=16)

    seen = set()
    for _ in range(20):
        cu = np.concatenate([[0], np.sort(r.integers(0, 25, 8))]).astype(np.int32)
        seen.add(tuple(cu))
        output, state = by_offsets(arrays, cu)
        ids = segment_ids_from_cu_seqlens(cu, 24)
        same, _ = by_ids(arrays, ids)
        assert_close(same, output, F32_FORWARD, f"{cu}")
        empty = np.diff(cu) == 0
        assert not np.any(state[0][empty]) and np.any(state[0][~empty], axis=(1, 2, 3)).all()
    assert len(seen) == 20 and traced == ["offsets", "ids"]
    assert by_offsets._cache_size() == by_ids._cache_size() == 1
