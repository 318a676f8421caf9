"""attn_res's TPU kernels through the TPU's own compiler: real shapes, every kind of call, on every generation."""

import importlib.util
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.tpu_aot import GENERATIONS, compile_for
from experiments.tpu_schedule_attn_res import Mix, find_mix
from pallas_kernels import attn_res_put
from pallas_kernels.attn_res import mosaic_tpu
from pallas_kernels.attn_res.inputs import check_inputs
from pallas_kernels.attn_res.kernels import mix_by

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPU needs libtpu (pip install libtpu)"
)
HERE = "tests.pallas_kernels.test_attn_res_tpu_compile"


class Call(NamedTuple):
    generation: str
    mix: Mix

    @property
    def id(self):
        return f"{self.generation}-{self.mix.name}"


# Every kind of call once, spread over the generations; the rest shows the same on one machine more.
BY_DEFAULT = [
    Call("v5e", find_mix("kimi_k3-9-normed")),
    Call("v5p", find_mix("kimi_linear_48b-27")),
    Call("v6e", find_mix("attn_res_436m-17")),
    Call("tpu7x", find_mix("kimi_linear_48b-8")),
    Call("tpu7x", find_mix("kimi_linear_48b-8-float32")),
    Call("v5e", Mix("buffer_of_10", 10, 2304, buffer=True, output_scale=True)),
    Call("v6e", Mix("narrow_odd_tokens", 3, 24, M=1001, dtype="float32", output_scale=True)),
    Call("v5p", Mix("odd_lanes_odd_tokens", 3, 200, M=1001, output_scale=True)),
    Call("tpu7x", Mix("one_normed", 1, 1024, M=4096, output_scale=True)),
    Call("v5p", Mix("many", 64, 512, M=1024, buffer=True)),
]
OTHERS = [Call(g, call.mix) for g in GENERATIONS for call in BY_DEFAULT if g != call.generation]
SLOW = ("many", "kimi_linear_48b-27", "kimi_k3-9-normed")  # to compile: the others show it with smaller tokens
CALLS = [
    pytest.param(call, id=call.id, marks=pytest.mark.exhaustive if call.mix.name in SLOW else ()) for call in BY_DEFAULT
]
CALLS += [pytest.param(call, id=call.id, marks=pytest.mark.exhaustive) for call in OTHERS]


@pytest.mark.parametrize("call", CALLS)
def test_forward_and_backward(call):
    """VMEM below what there is, few registers spilled, and no copy of a source or its gradient around the kernels."""
    m = call.mix
    compiled = compile_for(
        "experiments.tpu_schedule_attn_res:mix_training", {"mix": m._asdict()}, call.generation, profile=False
    )
    assert set(compiled.kernels) == {"attn_res_forward", "attn_res_backward"}
    for kernel in compiled.kernels.values():
        assert kernel.vmem_bytes < 48 << 20 < compiled.generation.vmem_most_mib << 20
        assert kernel.bundles < 16000
    # A table of 128 float32 a token, a column for lse each way (which fills registers of 128 lanes too), vectors. With
    # other D, XLA keeps a program's own arguments transposed, which has nothing to do with the kernels.
    if m.D % 128 == 0:
        assert compiled.temp_bytes <= 3.2 * 512 * m.M + 64 * 4 * m.D + (1 << 20)


@pytest.mark.parametrize(
    "generation", ["v5e", *(pytest.param(g, marks=pytest.mark.exhaustive) for g in GENERATIONS if g != "v5e")]
)
def test_a_mixture_alone(generation):
    """Inference: the forward only."""
    mix = find_mix("kimi_linear_48b-8")
    compiled = compile_for(
        "experiments.tpu_schedule_attn_res:mix_forward", {"mix": mix._asdict()}, generation, profile=False
    )
    assert set(compiled.kernels) == {"attn_res_forward"}
    assert compiled.kernels["attn_res_forward"].grid == (64,)


def test_one_row_of_a_bank_is_written_by_a_kernel():
    """As a scan carries it."""
    compiled = compile_for(f"{HERE}:growing_bank", {}, "v5e", profile=False)
    assert set(compiled.kernels) == {"bank_put", "bank_take"}


def test_under_enable_x64():
    """Where python ints are int64, which Mosaic knows nothing of. A buffer with a traced int64 count, odd tokens."""
    compiled = compile_for(f"{HERE}:wide_program", {}, "v6e", profile=False)
    assert set(compiled.kernels) == {"attn_res_forward", "attn_res_backward"}


def test_a_mesh_moves_only_the_vectors_gradients():
    """Tokens over four devices on Explicit axes, under plain jit."""
    compiled = compile_for(
        f"{HERE}:program_on_mesh", {}, "v5e", mesh={"data": 2, "tensor": 2}, mesh_axes="explicit", profile=False
    )
    assert set(compiled.kernels) == {"attn_res_forward", "attn_res_backward"}
    assert set(compiled.collectives) == {"all-reduce"} and compiled.collectives["all-reduce"] <= 2 * 256 * 4


def _loss(sources, query, count=None):
    inputs = check_inputs(sources, query, output_scale=query, count=count)
    return jnp.sum(mix_by(mosaic_tpu.MACHINE, inputs, False).astype(jnp.float32) ** 2)


def growing_bank():
    def loss(x, bank):
        def step(carry, count):
            bank, x = carry
            x = jnp.tanh(x)
            return (attn_res_put(bank, x, count), x), None

        bank, _ = jax.lax.scan(step, (bank, x), jnp.arange(4, dtype=jnp.int32))[0]
        return sum(jnp.sum(row.astype(jnp.float32)) * (i + 1) for i, row in enumerate(bank))

    x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
    return jax.jit(jax.value_and_grad(loss)), (x, (x,) * 4)


def wide_program():
    jax.config.update("jax_enable_x64", True)  # of the process that compiles
    shapes = ((4, 1001, 256), jnp.bfloat16), ((256,), jnp.float32), ((), jnp.int64)
    return jax.jit(jax.grad(_loss, argnums=(0, 1))), tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)


def program_on_mesh(mesh):
    source = jax.ShapeDtypeStruct((4, 512, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P("data", "tensor", None)))
    query = jax.ShapeDtypeStruct((256,), jnp.float32, sharding=NamedSharding(mesh, P()))
    return jax.jit(jax.grad(_loss, argnums=(0, 1))), ((source,) * 3, query)
