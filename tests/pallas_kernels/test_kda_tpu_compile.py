"""The TPU kernels through the TPU's own compiler: real shapes on every generation, memory, meshes without gathers."""

import importlib.util
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from experiments.tpu_aot import GENERATIONS, CompileError, compile_for
from pallas_kernels import kda, sharded
from pallas_kernels.kda.shapes import find_shape

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPU needs libtpu (pip install libtpu)"
)
HERE = "tests.pallas_kernels.test_kda_tpu_compile"
GIB = 1 << 30


class Real(NamedTuple):
    shape: str
    generation: str
    program: str


# On every generation one model's training by default.
BY_DEFAULT = {
    ("v5e", "kimi_linear_48b-8192"),
    ("v5p", "kimi_k3-8192"),
    ("v6e", "kimi_linear_48b-8192"),
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


class Call(NamedTuple):
    name: str
    generation: str
    B: int = 1
    T: int = 256
    H: int = 4
    HV: int = 4
    K: int = 128
    V: int = 128
    dtype: str = "bfloat16"
    segments: int | None = None  # 0 packs without states of their own
    options: dict = {}


CALLS = [
    Call("float32", "v5e", dtype="float32"),
    Call("float32", "tpu7x", T=200, dtype="float32"),
    Call("packed_groups", "v6e", B=2, T=200, H=2, HV=8, K=64, segments=3),
    Call("packed_in_place", "v5e", B=2, T=200, H=3, HV=3, K=64, V=64, segments=0),
    Call("heads_of_256", "v5p", K=256, V=256),
    Call("padded_heads", "v5e", K=100, V=32, options={"lower_bound": -5.0}),
    Call("thirteen_heads", "v6e", H=13, HV=13),
]


@pytest.mark.parametrize("case", CALLS, ids=lambda c: f"{c.name}-{c.generation}")
def test_every_kind_of_call(case):
    """With the gradient of every input, states included."""
    compiled = compile_for(f"{HERE}:gradient", {"case": case._asdict()}, case.generation, profile=False)
    assert set(compiled.kernels) == {"kda_forward", "kda_backward"}


@pytest.mark.parametrize(
    ("axes", "H"),
    [
        pytest.param("explicit", 8, id="groups_split-explicit"),
        pytest.param("auto", 1, id="queries_repeated-auto"),
        pytest.param("auto", 8, id="groups_split-auto", marks=pytest.mark.exhaustive),
        pytest.param("explicit", 1, id="queries_repeated-explicit", marks=pytest.mark.exhaustive),
    ],
)
def test_field_SH05_a_mesh_gathers_nothing(axes, H):
    """Batch and heads over four devices, under plain jit: only the gate parameters' gradients are reduced."""
    case = Call("mesh", "v5e", B=2, H=H, HV=16)
    compiled = compile_for(
        f"{HERE}:gradient_on_mesh", {"case": case._asdict(), "axes": axes}, "v5e", mesh={"data": 2, "tensor": 2},
        mesh_axes=axes,
    )  # fmt: skip
    assert set(compiled.kernels) == {"kda_forward", "kda_backward"}
    moved = {name: size for name, size in compiled.collectives.items() if name != "all-reduce"}
    assert not moved, moved


def test_auto_axes_without_a_word_of_how_the_heads_lie_are_refused():
    with pytest.raises(CompileError, match="sharded") as error:
        case = Call("mesh", "v5e", B=2, HV=16, H=16)._asdict()
        compile_for(
            f"{HERE}:gradient_on_mesh", {"case": case, "axes": "nothing said"}, "v5e",
            mesh={"data": 2, "tensor": 2}, mesh_axes="auto",
        )  # fmt: skip
    assert error.value.kind == "NotImplementedError"


def gradient(case):
    """The gradient of kda's output and state for every float input, A_log and dt_bias included."""
    return _gradient(kda, Call(**case))


def gradient_on_mesh(case, axes, mesh):
    assert mesh.axis_types == ({"explicit": AxisType.Explicit}.get(axes, AxisType.Auto),) * 2
    function = sharded(kda, batch="data", heads="tensor") if axes == "auto" else kda
    placed = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))  # noqa: E731
    case = Call(**case)
    queries = placed("data", None, "tensor" if case.H > 1 else None)
    tokens = placed("data", None, "tensor")
    return _gradient(
        function, case, q=queries, k=queries, v=tokens, g=tokens, beta=tokens, initial_state=placed("data", "tensor"),
        A_log=placed("tensor"), dt_bias=placed("tensor"),
    )  # fmt: skip


def _gradient(function, case: Call, **shardings):
    B, T, H, HV, K, V = case.B, case.T, case.H, case.HV, case.K, case.V
    shapes = {
        "q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V), "g": (B, T, HV, K), "beta": (B, T, HV),
        "initial_state": (B, *([case.segments] if case.segments else []), HV, K, V),
    }  # fmt: skip
    gated = "lower_bound" not in case.options
    shapes |= {"A_log": (HV,), "dt_bias": (HV, K)} if gated else {}
    fine = ("initial_state", "A_log", "dt_bias")
    arrays = {
        n: jax.ShapeDtypeStruct(s, "float32" if n in fine else case.dtype, sharding=shardings.get(n))
        for n, s in shapes.items()
    }
    options = {"gate": "softplus" if gated else "log", "qk_l2norm": True, "beta_sigmoid": True, **case.options}
    options |= {"num_segments": case.segments or None, "backend": "mosaic_tpu"}

    def loss(arrays, ids=None):
        output, state = function(**arrays, segment_ids=ids, **options)
        return jnp.sum(output.astype(jnp.float32) ** 2) + jnp.sum(state**2)

    ids = () if case.segments is None else (jax.ShapeDtypeStruct((B, T), jnp.int32),)
    return jax.jit(jax.grad(loss)), (arrays, *ids)
