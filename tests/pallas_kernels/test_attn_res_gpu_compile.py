"""attn_res's Hopper kernels lowered for a GPU that is not there; compiled where its compiler is.

What they compute is the matter of test_attn_res_gpu_device.py, on a GPU.
"""

import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.gpu_aot import compile_for, has_compiler, hopper_mesh, lower_for_hopper
from pallas_kernels import attn_res, which_backend

needs_plugin = pytest.mark.skipif(not has_compiler(), reason="compiling for GPU needs jax's CUDA plugin")
HERE = "tests.pallas_kernels.test_attn_res_gpu_compile"


class Call(NamedTuple):
    name: str
    N: int
    D: int
    T: int = 40
    dtype: str = "bfloat16"
    form: str = "sequence"
    norm: bool = False
    count: bool = False
    vectors: str = "float32"


CALLS = [
    Call("k3", 9, 7168),
    Call("kimi_linear_norm", 8, 2304, norm=True),
    Call("in_pieces", 27, 2304),
    Call("padded_channels", 5, 1168, T=37, norm=True),
    Call("float32", 4, 24, dtype="float32"),
    Call("bfloat16_vectors", 3, 64, vectors="bfloat16"),
    Call("buffer", 6, 512, form="buffer"),
    Call("live_prefix", 7, 1024, form="buffer", count=True, norm=True),
    Call("live_prefix_of_a_tuple", 5, 1264, count=True),
    Call("live_prefix_of_many", 20, 512, form="buffer", count=True),
    Call("one_source_norm", 1, 256, norm=True),
    Call("one_token", 3, 256, T=1),
]


def arguments(case: Call, sharding=None, mesh=None):
    tokens = (2, case.T)
    place = {} if mesh is None else {"sharding": NamedSharding(mesh, sharding)}
    if case.form == "buffer":
        if mesh is not None:
            place = {"sharding": NamedSharding(mesh, P(None, *sharding))}
        sources = jax.ShapeDtypeStruct((case.N, *tokens, case.D), case.dtype, **place)
    else:
        sources = tuple(jax.ShapeDtypeStruct((*tokens, case.D), case.dtype, **place) for _ in range(case.N))
    vector = jax.ShapeDtypeStruct((case.D,), case.vectors)
    arrays = {"sources": sources, "query": vector, "key_scale": vector}
    arrays |= {"output_scale": vector} if case.norm else {}
    return arrays, jax.ShapeDtypeStruct((), jnp.int32) if case.count else None


def forward(arrays, count=None, backend="mosaic_gpu"):
    return attn_res(**arrays, count=count, return_lse=True, backend=backend)


def training(arrays, count=None, backend="mosaic_gpu"):
    def loss(arrays):
        mixture, lse = forward(arrays, count, backend)
        return jnp.sum(mixture.astype(jnp.float32) ** 2) + jnp.sum(lse)

    return jax.grad(loss)(arrays)


def kernels(lowered) -> int:
    return lowered.as_text().count("@mosaic_gpu_v2")


@pytest.mark.parametrize("case", CALLS, ids=lambda c: c.name)
def test_every_kind_of_call(case):
    arrays, count = arguments(case)
    lowered = lower_for_hopper(training, arrays, count)
    assert kernels(lowered) == 2
    for x, primal in zip(jax.tree.leaves(lowered.out_info), jax.tree.leaves(arrays), strict=True):
        assert (x.shape, x.dtype) == (primal.shape, primal.dtype)
    mixture, lse = jax.eval_shape(forward, arrays, count)
    assert (mixture.shape, mixture.dtype) == ((2, case.T, case.D), case.dtype)
    assert (lse.shape, lse.dtype) == ((2, case.T), jnp.float32)


def test_no_source_is_copied():
    """Rows reach the kernels as they are: nothing stacks, pads or widens them."""
    arrays, _ = arguments(Call("k3", 9, 7168))
    text = lower_for_hopper(training, arrays).as_text()
    # cotangents of the mixture are formed in float32 by the loss: one array of that size, and no two in one
    assert not re.search(r"concatenate.*x7168xbf16", text) and "tensor<9x" not in text


def test_sites_of_nearly_as_many_sources_share_their_kernels():
    """Lowering one takes seconds, and in an unrolled model every site has one source more."""
    x, vector = jax.ShapeDtypeStruct((40, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.float32)

    def sites(sources, query):
        def loss(sources):
            for n in (10, 11, 12):
                h, passed = attn_res(sources[:n], query, return_sources=True, backend="mosaic_gpu")
                sources = (*passed, *sources[n:])
            return jnp.sum(h.astype(jnp.float32))

        return jax.grad(loss)(sources)

    assert kernels(lower_for_hopper(sites, (x,) * 12, vector)) == 2


def test_x64_changes_nothing():
    with jax.enable_x64(True):
        arrays, count = arguments(Call("x64", 7, 1024, form="buffer", count=True, norm=True))
        assert kernels(lower_for_hopper(training, arrays, jax.ShapeDtypeStruct((), jnp.int64))) == 2
        assert count.dtype == jnp.int32


@pytest.mark.parametrize("tokens", [P("data"), P(None, "tensor"), P("data", "tensor")], ids=str)
@pytest.mark.parametrize("form", ["sequence", "buffer"])
def test_explicit_mesh(form, tokens):
    """Each device mixes its own tokens; only the vectors' gradients are added up over devices."""
    mesh = hopper_mesh({"data": 2, "tensor": 2})
    case = Call("mesh", 3, 256, form=form, norm=True)
    sharding = P(*tokens, *[None] * (3 - len(tokens)))
    arrays, _ = arguments(case, sharding, mesh)
    lowered = lower_for_hopper(training, arrays, mesh=mesh)
    assert kernels(lowered) == 2
    assert "all_gather" not in lowered.as_text()


@pytest.mark.parametrize(
    "axes, sharding",
    [(AxisType.Explicit, P(None, None, "tensor")), (AxisType.Auto, P())],
    ids=["channels_cut", "auto_axes"],
)
def test_meshes_that_the_kernels_leave_to_xla(axes, sharding):
    mesh = hopper_mesh({"data": 2, "tensor": 2}, axes)
    arrays, _ = arguments(Call("mesh", 3, 256), sharding, mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        assert which_backend("attn_res", **arrays) == "xla"
    assert kernels(lower_for_hopper(partial(training, backend="auto"), arrays, mesh=mesh)) == 0


def test_vmap_and_remat():
    case = Call("vmap", 3, 256)
    arrays, _ = arguments(case)
    queries = jax.ShapeDtypeStruct((4, case.D), "float32")

    def both(sources, queries, key_scale):
        mix = jax.checkpoint(lambda q: forward({"sources": sources, "query": q, "key_scale": key_scale})[0])
        return jax.vmap(mix)(queries)

    def loss(queries, sources, key_scale):
        return jnp.sum(both(sources, queries, key_scale).astype(jnp.float32))

    lowered = lower_for_hopper(jax.grad(loss), queries, arrays["sources"], arrays["key_scale"])
    assert kernels(lowered) >= 2 and lowered.out_info.shape == (4, case.D)


def test_nothing_to_mix():
    empty = jax.ShapeDtypeStruct((0, 64), jnp.bfloat16)
    lowered = lower_for_hopper(
        partial(attn_res, backend="mosaic_gpu"), (empty,) * 2, jax.ShapeDtypeStruct((64,), "float32")
    )
    assert kernels(lowered) == 0 and lowered.out_info.shape == (0, 64)


# --- Compiled, where jax's CUDA plugin is --------------------------------------------------------------------------


def compiled_program(case):
    arrays, count = arguments(Call(**case))
    return jax.jit(lambda arrays, count: (forward(arrays, count), training(arrays, count))), (arrays, count)


@needs_plugin
@pytest.mark.parametrize("case", CALLS[:4] + CALLS[6:9], ids=lambda c: c.name)
def test_compiled_kernels_fit(case):
    """Every kernel fits a Hopper's registers and shared memory; only where a row fills them does one spill a little."""
    compiled = compile_for(f"{HERE}:compiled_program", {"case": case._asdict()})
    assert len(compiled.kernels) >= 2
    for kernel in compiled.kernels.values():
        assert kernel.blocks_per_sm >= 1, kernel
        assert max(kernel.spill_store_bytes, kernel.spill_load_bytes) <= 64, kernel
