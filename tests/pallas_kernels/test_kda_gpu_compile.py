"""The Hopper kernels behind the public functions, lowered for a GPU that is not there; compiled where its compiler is.

What they compute is the matter of test_kda_gpu_device.py, on a GPU.
"""

import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from experiments.gpu_aot import compile_for, has_compiler, hopper_mesh, lower_for_hopper
from pallas_kernels import gated_delta_net, kda, kda_step, sharded, which_backend
from pallas_kernels.kda.shapes import find_shape
from tests.pallas_kernels import compile_support as support
from tests.pallas_kernels.compile_support import Call, arguments
from tests.pallas_kernels.kda_support import BOUNDED, SOFTPLUS

needs_plugin = pytest.mark.skipif(not has_compiler(), reason="compiling for GPU needs jax's CUDA plugin")
HERE = "tests.pallas_kernels.test_kda_gpu_compile"

results = partial(support.results, backend="mosaic_gpu")
training = partial(support.training, backend="mosaic_gpu")
gradients = partial(support.gradients, backend="mosaic_gpu")


def kernels(lowered) -> int:
    """How many calls of Mosaic kernels there are."""
    return lowered.as_text().count("@mosaic_gpu_v2")


LOWERED = [
    Call("log"),
    Call("softplus", options=SOFTPLUS),
    Call("bounded", options=BOUNDED),
    Call("float32_gates", gates="float32", options=SOFTPLUS),
    Call("segments_in_place", segments=0, options=SOFTPLUS),
    Call("grouped_values_packed", H=1, HV=3, K=64, V=64, segments=2, options=BOUNDED),
]
TRACED = [  # alone, their kernels being those of others
    Call("log_without_a_state", state=None),
    Call("states_of_segments", T=200, segments=3, options=SOFTPLUS),
    Call("small_values", V=64, options=SOFTPLUS),
    Call("promised_bound", options={"lower_bound": -5.0, "scale": 0.5}),
    Call("bounded_beyond_the_tile", options=BOUNDED | {"lower_bound": -8.0}),
    Call("bfloat16_state", state="bfloat16"),
    Call("states_of_segments_from_zeros", segments=3, state=None, options=BOUNDED),
    Call("segments_in_place_bounded", T=100, segments=0, options=BOUNDED),
    Call("grouped_values", H=2, HV=8, options=SOFTPLUS),
    Call("small_keys", K=64),
    Call("small_heads", K=64, V=64, options=BOUNDED),
    Call("odd_length", T=77, options=BOUNDED),
    Call("one_token", T=1),
    Call("one_head", B=1, H=1, HV=1),
    Call("thirteen_heads", B=1, H=13, HV=13, options=SOFTPLUS),
]
FORWARD, BACKWARD = 2, 5  # kernels; the backward runs the first again and walks over the states twice


def check(case: Call, lowers=True):
    """Both directions lower, or at least trace, to kernels and to results of the right shapes."""
    arrays, ids = arguments(case)
    if lowers:
        lowered = lower_for_hopper(training(case), arrays, *ids)
        assert kernels(lowered) == FORWARD + BACKWARD - 1  # the same code where both run it
        gradient, (output, state) = lowered.out_info
    else:
        gradient, (output, state) = jax.eval_shape(training(case), arrays, *ids)
    lead = () if not case.segments else (case.segments,)
    assert output.shape == arrays["v"].shape and output.dtype == jnp.bfloat16
    assert state.shape == (case.B, *lead, case.HV, case.K, case.V) and state.dtype == jnp.float32
    for name, x in gradient.items():
        assert (x.shape, x.dtype) == (arrays[name].shape, arrays[name].dtype), name


# --- Configurations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", LOWERED + TRACED, ids=lambda c: c.name)
def test_every_kind_of_call(case):
    check(case, lowers=case in LOWERED)


def test_x64_changes_nothing():
    with jax.enable_x64(True):
        check(Call("x64", T=100, segments=2, options=SOFTPLUS))


def test_real_shapes():
    """Kernels do not grow with the number of heads, rows or tokens: the program of K3's heads is that of two."""

    def sizes(case):
        text = lower_for_hopper(results(case), *[x for x in arguments(case) if x]).as_text()
        return len(text), text.count("@mosaic_gpu_v2")

    shape = find_shape("kimi_k3-8192")
    (small, few), (large, many) = (
        sizes(Call("small", B=1, T=128, options=BOUNDED)),
        sizes(Call("large", B=1, T=shape.T, H=shape.H, HV=shape.HV, options=BOUNDED)),
    )
    assert few == many and large < 1.5 * small


def test_the_lineage():
    """gated_delta_net is kda; "auto" on an abstract Hopper is the named backend."""
    arrays, _ = arguments(Call("lineage", state=None))
    q, k, v, g, beta = arrays.values()
    scalar = jax.ShapeDtypeStruct(g.shape[:3], g.dtype)
    assert kernels(lower_for_hopper(gated_delta_net, q, k, v, scalar, beta)) == FORWARD
    assert kernels(lower_for_hopper(partial(kda, backend="mosaic_gpu"), q, k, v, g, beta)) == FORWARD
    assert kernels(lower_for_hopper(partial(kda, backend="xla"), q, k, v, g, beta)) == 0


class Step(NamedTuple):
    name: str
    B: int = 3
    H: int = 2
    HV: int = 2
    K: int = 128
    V: int = 128
    pool: int | None = None
    dtype: str = "bfloat16"
    state: str = "float32"
    options: dict = {}


STEPS = [
    Step("log"),
    Step("pool", pool=7, options=BOUNDED),
    Step("softplus", options=SOFTPLUS, state="bfloat16"),
    Step("float32", dtype="float32", K=64, V=64),
    Step("grouped_values", HV=8, pool=4, K=64, options=SOFTPLUS),
]


@pytest.mark.parametrize("case", STEPS, ids=lambda c: c.name)
def test_decode_step(case):
    B, H, HV, K, V = case.B, case.H, case.HV, case.K, case.V
    shape = jax.ShapeDtypeStruct
    tokens = [shape(s, case.dtype) for s in ((B, H, K), (B, H, K), (B, HV, V), (B, HV, K), (B, HV))]
    tokens.append(shape((case.pool or B, HV, K, V), case.state))
    gate = (shape((HV,), "float32"), shape((HV, K), "float32")) if "gate" in case.options else ()
    slots = (shape((B,), jnp.int32),) if case.pool else ()

    def step(tokens, gate, slots):
        options = dict(zip(("A_log", "dt_bias"), gate, strict=False)) | dict(zip(("slots",), slots, strict=False))
        return kda_step(*tokens, **options, **case.options)

    def loss(tokens, gate, slots):
        output, state = step(tokens, gate, slots)
        return jnp.sum(output.astype(jnp.float32)), (output, state)

    lowered = lower_for_hopper(step, tokens, gate, slots)
    output, state = lowered.out_info
    assert kernels(lowered) == 1
    assert (output.shape, output.dtype) == (tokens[2].shape, tokens[2].dtype)
    assert (state.shape, state.dtype) == (tokens[5].shape, tokens[5].dtype)
    both = lower_for_hopper(jax.grad(loss, argnums=(0, 1), has_aux=True), tokens, gate, slots)
    assert kernels(both) == 1  # the backward is that of the XLA path
    assert [x.shape for x in both.out_info[0][0]] == [x.shape for x in tokens]


# --- Transformations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "segments"),
    [
        pytest.param(True, 3, id="own_parameters"),
        pytest.param(False, None, id="shared_parameters", marks=pytest.mark.exhaustive),
    ],
)
def test_vmap(own, segments):
    case = Call("vmap", T=100, segments=segments, options=SOFTPLUS)
    arrays, ids = arguments(case)
    axes = {n: 0 if own or n not in ("A_log", "dt_bias") else None for n in arrays}
    stacked = {n: x if axes[n] is None else jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for n, x in arrays.items()}
    more_ids = tuple(jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in ids)
    mapped = jax.vmap(gradients(case), in_axes=(axes, *(0 for _ in ids)))
    lowered = lower_for_hopper(mapped, stacked, *more_ids)
    assert kernels(lowered) >= 2
    assert {n: x.shape for n, x in lowered.out_info.items()} == {n: (3, *x.shape) for n, x in arrays.items()}


def test_scan_over_layers():
    case = Call("scan", options=SOFTPLUS, state=None)
    arrays, _ = arguments(case)
    layers = {n: jax.ShapeDtypeStruct((3, *arrays[n].shape), arrays[n].dtype) for n in ("A_log", "dt_bias")}

    def loss(arrays, layers):
        def body(v, layer):
            return v + results(case)(arrays | {"v": v} | layer).output, None

        return jnp.sum(jax.lax.scan(jax.checkpoint(body), arrays["v"], layers)[0] ** 2.0)

    lowered = lower_for_hopper(
        jax.grad(loss, argnums=(0, 1)), {n: arrays[n] for n in ("q", "k", "v", "g", "beta")}, layers
    )
    assert kernels(lowered) >= 2


# --- Meshes ------------------------------------------------------------------------------------------------------


MESHED = Call("mesh", B=2, H=4, HV=4, options=SOFTPLUS)


@pytest.mark.parametrize(
    ("axes", "H"),
    [
        pytest.param(AxisType.Explicit, 4, id="groups_split"),
        pytest.param(AxisType.Auto, 1, id="queries_repeated", marks=pytest.mark.exhaustive),
    ],
)
def test_field_SH05_a_mesh(axes, H):
    """Explicit axes say how arguments lie, Auto ones need `sharded`: each device gets 1 row and 2 of the 4 heads."""
    case, mesh = MESHED._replace(H=H), hopper_mesh({"data": 2, "tensor": 2}, axes)
    function = kda if axes == AxisType.Explicit else sharded(kda, batch="data", heads="tensor")
    arrays, _ = arguments(case, mesh)
    lowered = lower_for_hopper(gradients(case, function=function), arrays, mesh=mesh)
    alone = lower_for_hopper(gradients(case), arguments(case._replace(B=1, H=2, HV=2))[0])
    assert len(operands(alone)) == kernels(alone) >= 2 and operands(lowered) == operands(alone)
    assert {n: x.shape for n, x in lowered.out_info.items()} == {n: x.shape for n, x in arrays.items()}


def operands(lowered) -> list[str]:
    """Types of what every kernel takes and gives."""
    return sorted(re.findall(r"@mosaic_gpu_v2\(.* : (\(.*)", lowered.as_text()))


def test_inside_shard_map():
    mesh = hopper_mesh({"data": 2, "tensor": 2})
    arrays, _ = arguments(MESHED, mesh)
    specs = {n: x.sharding.spec for n, x in arrays.items()}
    mapped = jax.shard_map(gradients(MESHED), mesh=mesh, in_specs=(specs,), out_specs=specs)
    assert kernels(lower_for_hopper(mapped, arrays, mesh=mesh)) >= 2


def test_a_step_on_a_mesh():
    mesh = hopper_mesh({"data": 2, "tensor": 2})
    rows = NamedSharding(mesh, PartitionSpec("data", "tensor"))
    shapes = ((4, 2, 128), (4, 2, 128), (4, 2, 128), (4, 2, 128), (4, 2))
    tokens = [jax.ShapeDtypeStruct(s, "bfloat16", sharding=rows) for s in shapes]
    state = jax.ShapeDtypeStruct((4, 2, 128, 128), "float32", sharding=rows)
    assert kernels(lower_for_hopper(kda_step, *tokens, state, mesh=mesh)) == 1


# --- Bad input ---------------------------------------------------------------------------------------------------


def test_bad_input_is_refused_before_the_kernel_is_chosen():
    x = np.ones((1, 4, 1, 64), jnp.bfloat16)
    good = {"q": x, "k": x, "v": x, "g": -x, "beta": x[..., 0], "backend": "mosaic_gpu"}
    with pytest.raises(ValueError, match="^g: got 1.0; allowed is a log-decay in nats"):
        kda(**good | {"g": x})
    with pytest.raises(ValueError, match="^segment_ids: got 0 after 1 at row 0, token 1"):
        kda(**good, segment_ids=np.array([[1, 0, 0, 0]]))
    with pytest.raises(ValueError, match=r"^initial_state: got .*; allowed is a float array \[B, HV, K, V\]"):
        kda(**good, initial_state=np.ones((1, 64, 64), np.float32))


def test_nothing_to_compute_runs_no_kernel():
    for B, T in ((0, 4), (2, 0)):
        x = jax.ShapeDtypeStruct((B, T, 1, 64), jnp.bfloat16)
        beta = jax.ShapeDtypeStruct((B, T, 1), jnp.bfloat16)
        lowered = lower_for_hopper(partial(kda, backend="mosaic_gpu"), x, x, x, x, beta)
        assert kernels(lowered) == 0 and lowered.out_info.output.shape == x.shape


def test_what_is_chosen_on_a_mesh_of_gpus():
    arrays, _ = arguments(MESHED)
    chosen = partial(which_backend, "kda", *(arrays[n] for n in ("q", "k", "v", "g", "beta")))
    for axes, served in ((AxisType.Explicit, "mosaic_gpu"), (AxisType.Auto, "xla")):
        with jax.sharding.use_abstract_mesh(hopper_mesh({"data": 2}, axes)):
            assert chosen() == served


# --- Compiled, where jax's CUDA plugin is --------------------------------------------------------------------------


def compiled_program(case, mesh=None):
    case = Call(**case)
    arrays, ids = arguments(case, mesh)
    return jax.jit(gradients(case)), (arrays, *ids)


COMPILED = [
    Call("kimi_linear_48b", B=1, T=8192, H=32, HV=32, options=SOFTPLUS),
    Call("kimi_k3", B=1, T=8192, H=96, HV=96, options=BOUNDED),
    Call("packed_groups", T=200, H=2, HV=8, K=64, segments=3, options=SOFTPLUS),
    Call("in_place", T=200, V=64, segments=0),
]


@needs_plugin
@pytest.mark.parametrize("case", COMPILED, ids=lambda c: c.name)
def test_field_compiled_kernels_fit(case):
    """Every kernel fits a Hopper's registers and shared memory and spills little, the intra-chunk ones alone."""
    compiled = compile_for(f"{HERE}:compiled_program", {"case": case._asdict()})
    assert len(compiled.kernels) >= 2
    for name, kernel in compiled.kernels.items():
        assert kernel.blocks_per_sm >= 1, kernel
        # Of two programs on a multiprocessor a few dozen registers each stay in its first-level cache.
        assert max(kernel.spill_store_bytes, kernel.spill_load_bytes) <= (200 if "intra" in name else 0), kernel
        assert not [w for w in kernel.warnings if "spilled" not in w], kernel  # such as that wgmma is serialised


@needs_plugin
@pytest.mark.parametrize("H", [4, 1], ids=["groups_split", "queries_repeated"])
def test_field_SH05_a_mesh_gathers_nothing(H):
    case = MESHED._replace(H=H)._asdict()
    compiled = compile_for(f"{HERE}:compiled_program", {"case": case}, mesh={"data": 2, "tensor": 2})
    assert len(compiled.kernels) >= 2
    support.assert_nothing_gathered(compiled)
