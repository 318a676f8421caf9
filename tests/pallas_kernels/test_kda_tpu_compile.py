"""The TPU kernels through the TPU's own compiler: real shapes on every generation, memory, meshes without gathers."""

import importlib.util
from functools import partial
from typing import NamedTuple

import jax
import pytest
from jax.sharding import AxisType

from experiments.tpu_aot import GENERATIONS, CompileError, compile_for
from pallas_kernels import kda, sharded
from pallas_kernels.kda.shapes import find_shape
from tests.pallas_kernels import compile_support as support
from tests.pallas_kernels.compile_support import Call, arguments
from tests.pallas_kernels.kda_support import NORMS, SOFTPLUS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPU needs libtpu (pip install libtpu)"
)
HERE = "tests.pallas_kernels.test_kda_tpu_compile"
GIB = 1 << 30


class Real(NamedTuple):
    shape: str
    generation: str
    program: str


# On the oldest and the newest generation one model's training by default.
BY_DEFAULT = {
    ("v5e", "kimi_linear_48b-8192"),
    ("tpu7x", "kimi_k3-8192"),
}
REAL = [
    pytest.param(
        Real(shape, generation, program),
        marks=() if program == "training" and (generation, shape) in BY_DEFAULT else pytest.mark.exhaustive,
        id=f"{generation}-{shape}-{program}",
    )
    for generation in GENERATIONS
    for shape, program in (
        ("kimi_linear_48b-8192", "forward"), ("kimi_linear_48b-8192", "training"), ("kimi_k3-8192", "training"),
    )
]  # fmt: skip


@pytest.mark.parametrize("case", REAL)
def test_real_shapes(case):
    """H = 32 (any gate) and H = 96 (bounded), T = 8192, bfloat16, all activations fused; VMEM below what there is."""
    shape = find_shape(case.shape)
    compiled = compile_for(
        f"experiments.tpu_schedule:{case.program}", {"shape": shape._asdict(), "backend": "mosaic_tpu"},
        case.generation, profile=False,
    )  # fmt: skip
    names = {"forward": {"kda_forward"}, "training": {"kda_forward", "kda_backward"}}[case.program]
    assert set(compiled.kernels) == names
    for kernel in compiled.kernels.values():
        assert kernel.vmem_bytes < compiled.generation.vmem_most_mib << 20
        heads = shape.HV // kernel.grid[1]
        assert kernel.grid == (1, shape.HV // heads, 128) and heads in (8, 16)
    if case.shape == "kimi_linear_48b-8192":
        assert compiled.temp_bytes <= GIB


call = partial(Call, B=1, T=256, H=4, HV=4, options=SOFTPLUS)
CALLS = [
    ("v5e", call("float32", dtype="float32")),
    ("tpu7x", call("float32", T=200, dtype="float32")),
    ("v6e", call("packed_groups", B=2, T=200, H=2, HV=8, K=64, segments=3)),
    ("v5e", call("packed_in_place", B=2, T=200, H=3, HV=3, K=64, V=64, segments=0)),
    ("v5p", call("heads_of_256", K=256, V=256)),
    ("v5e", call("padded_heads", K=100, V=32, options={"lower_bound": -5.0, **NORMS})),
    ("v6e", call("thirteen_heads", H=13, HV=13)),
]


# Compiled as real shapes are, and interpreted; float32 on one generation by default.
MORE = (("thirteen_heads", "v6e"), ("packed_groups", "v6e"), ("float32", "tpu7x"))


@pytest.mark.parametrize(
    "generation, case",
    [
        pytest.param(g, c, id=f"{c.name}-{g}", marks=[pytest.mark.exhaustive] if (c.name, g) in MORE else [])
        for g, c in CALLS
    ],
)
def test_every_kind_of_call(generation, case):
    """With the gradient of every input, states included."""
    compiled = compile_for(f"{HERE}:program", {"case": case._asdict()}, generation, profile=False)
    assert set(compiled.kernels) == {"kda_forward", "kda_backward"}


@pytest.mark.parametrize(
    ("axes", "H"),
    [
        pytest.param("explicit", 8, id="groups_split-explicit"),
        pytest.param("auto", 1, id="queries_repeated-auto", marks=pytest.mark.exhaustive),
        pytest.param("auto", 8, id="groups_split-auto", marks=pytest.mark.exhaustive),
        pytest.param("explicit", 1, id="queries_repeated-explicit", marks=pytest.mark.exhaustive),
    ],
)
def test_field_SH05_a_mesh_gathers_nothing(axes, H):
    """Batch and heads over four devices, under plain jit."""
    case = call("mesh", B=2, H=H, HV=16)
    compiled = compile_for(
        f"{HERE}:program_on_mesh", {"case": case._asdict(), "axes": axes}, "v5e", mesh={"data": 2, "tensor": 2},
        mesh_axes=axes,
    )  # fmt: skip
    assert set(compiled.kernels) == {"kda_forward", "kda_backward"}
    support.assert_nothing_gathered(compiled)


def test_auto_axes_without_a_word_of_how_the_heads_lie_are_refused():
    with pytest.raises(CompileError, match="sharded") as error:
        case = call("mesh", B=2, HV=16, H=16)._asdict()
        compile_for(
            f"{HERE}:program_on_mesh", {"case": case, "axes": "nothing said"}, "v5e",
            mesh={"data": 2, "tensor": 2}, mesh_axes="auto",
        )  # fmt: skip
    assert error.value.kind == "NotImplementedError"


def program(case, mesh=None, function=kda):
    """The gradient of kda's output and state for every float input, A_log and dt_bias included."""
    case = Call(**case)
    arrays, ids = arguments(case, mesh)
    return jax.jit(support.gradients(case, "mosaic_tpu", function)), (arrays, *ids)


def program_on_mesh(case, axes, mesh):
    assert mesh.axis_types == ({"explicit": AxisType.Explicit}.get(axes, AxisType.Auto),) * 2
    return program(case, mesh, sharded(kda, batch="data", heads="tensor") if axes == "auto" else kda)
