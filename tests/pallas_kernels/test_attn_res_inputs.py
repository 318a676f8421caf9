"""Bad input to attn_res is refused by name before anything is traced, and the dispatch says what it would run."""

import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import machine
from pallas_kernels.attn_res import attn_res, attn_res_reference, backend_of

GOOD = jnp.ones((3, 2, 8))
Q = jnp.ones(8)


class Bad(NamedTuple):
    name: str
    args: tuple
    says: str  # the argument, what was given and what is allowed
    kwargs: dict = {}


BAD = [
    Bad("no_sources", ([], Q), r"sources is empty.*at least one"),
    Bad("shapes", ([GOOD[0], jnp.ones((2, 7))], Q), r"sources\[1\] is float32\[2, 7\].*float32\[2, 8\].*one shape"),
    Bad("dtypes", ([GOOD[0], GOOD[1].astype(jnp.bfloat16)], Q), r"sources\[1\] is bfloat16.*one dtype"),
    Bad("integers", ([jnp.ones((2, 8), int)], Q), r"sources\[0\] has dtype int32.*floating"),
    Bad("scalars", ([jnp.float32(1)], Q), r"sources are scalars.*\[\.\.\., D\]"),
    Bad("one_vector", (jnp.ones(8), Q), r"sources is a buffer of shape \(8,\).*N >= 1"),
    Bad("empty_buffer", (jnp.ones((0, 2, 8)), Q), r"sources is a buffer of shape \(0, 2, 8\).*N >= 1"),
    Bad("no_channels", (jnp.ones((3, 0)), jnp.ones(0)), r"D=0"),
    Bad("query_length", (GOOD, jnp.ones(7)), r"query has shape \(7,\).*D=8.*\(8,\)"),
    Bad("query_rank", (GOOD, jnp.ones((1, 8))), r"query has shape \(1, 8\).*\(8,\)"),
    Bad("query_dtype", (GOOD, jnp.ones(8, int)), r"query has dtype int32.*floating"),
    Bad("key_scale", (GOOD, Q, jnp.ones(3)), r"key_scale has shape \(3,\).*\(8,\)"),
    Bad("output_scale", (GOOD, Q), r"output_scale has shape \(\).*\(8,\)", {"output_scale": 1.0}),
    Bad("count_zero", (GOOD, Q), r"count=0.*3 rows.*from 1 to 3", {"count": 0}),
    Bad("count_beyond", (GOOD, Q), r"count=4.*3 rows.*from 1 to 3", {"count": 4}),
    Bad("count_concrete_array", (GOOD, Q), r"count=4.*from 1 to 3", {"count": jnp.int32(4)}),
    Bad("count_float", (GOOD, Q), r"count=2\.0.*integer", {"count": 2.0}),
    Bad("count_vector", (GOOD, Q), r"count=.*integer scalar", {"count": np.array([1, 2])}),
    Bad("count_beyond_sequence", (list(GOOD), Q), r"count=4.*3 rows.*from 1 to 3", {"count": 4}),
    Bad("eps_negative", (GOOD, Q), r"eps=-1.*>= 0", {"eps": -1.0}),
    Bad("eps_nan", (GOOD, Q), r"eps=nan.*finite", {"eps": float("nan")}),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda b: b.name)
@pytest.mark.parametrize("entry", [attn_res, attn_res_reference, backend_of], ids=lambda f: f.__name__)
def test_bad_input(entry, bad):
    with pytest.raises(ValueError, match=bad.says):
        entry(*bad.args, **bad.kwargs)


@pytest.mark.parametrize("bad", BAD[:4], ids=lambda b: b.name)
def test_bad_input_under_jit(bad):
    with pytest.raises(ValueError, match=bad.says):
        jax.jit(attn_res)(*bad.args)


@pytest.mark.parametrize("count", [jnp.ones(2, int), 1.5], ids=["vector", "float"])
def test_bad_traced_count(count):
    with pytest.raises(ValueError, match=r"count is .*integer scalar"):
        jax.jit(lambda count: attn_res(GOOD, Q, count=count))(count)


def test_traced_eps_is_refused():
    with pytest.raises(ValueError, match=r"eps=.*concrete"):
        jax.jit(lambda eps: attn_res(GOOD, Q, eps=eps))(1e-6)


@pytest.mark.parametrize("entry", [attn_res, backend_of], ids=lambda f: f.__name__)
def test_unknown_backend(entry):
    with pytest.raises(ValueError, match=r"backend='triton'.*'auto', 'reference', 'xla', 'mosaic_tpu', 'mosaic_gpu'"):
        entry(GOOD, Q, backend="triton")


class Limit(NamedTuple):
    name: str
    says: str
    N: int = 3
    D: int = 64
    dtype: str = "bfloat16"
    vectors: str = "float32"
    kind: str = "NVIDIA H200"


LIMITS = [
    Limit("float16", "the sources are float16, computed in float32", dtype="float16"),
    Limit("float64", "the sources are float32, computed in float64", dtype="float32", vectors="float64"),
    Limit("many_sources", "there are 65 sources and the kernel takes 64", N=65),
    Limit("rows_of_bytes", "D = 60 and rows are copied 16 bytes at a time, multiples of 8 channels of bfloat16", D=60),
    Limit("rows_of_words", "D = 30 and .* multiples of 4 channels of float32", D=30, dtype="float32"),
    Limit("wide_rows", "D = 8200 and the kernel's registers hold rows of 8192", D=8200),
    Limit("another_gpu", "the device is a NVIDIA A100 and the kernel is built for Hopper", kind="NVIDIA A100"),
]


@pytest.mark.parametrize("case", LIMITS, ids=lambda c: c.name)
def test_field_TL04_limits_of_the_gpu_kernels(case, caplog):
    """Named, the kernel refuses and says why; "auto" says the same once and takes the XLA path."""
    with jax.enable_x64(True):
        sources = jax.ShapeDtypeStruct((case.N, 5, case.D), case.dtype)
        query = jax.ShapeDtypeStruct((case.D,), case.vectors)
        device = jax.sharding.AbstractDevice(device_kind=case.kind, num_cores=1, platform="gpu")
        mesh = jax.sharding.AbstractMesh((1,), ("_",), (jax.sharding.AxisType.Auto,), abstract_device=device)
        machine.say_once.cache_clear()
        with jax.sharding.use_abstract_mesh(mesh), caplog.at_level("WARNING", "absl"):
            with pytest.raises(NotImplementedError, match=f"'mosaic_gpu': {case.says}.*; backend='xla' serves"):
                jax.eval_shape(partial(attn_res, backend="mosaic_gpu"), sources, query)
            for _ in range(2):
                assert backend_of(sources, query) == "xla"
        said = [record.message for record in caplog.records]
        assert len(said) == 1 and re.search(f"attn_res falls back to the XLA path: {case.says}", said[0])


def test_each_machine_takes_its_kernels():
    sources = jax.ShapeDtypeStruct((3, 5, 64), jnp.bfloat16)
    query = jax.ShapeDtypeStruct((64,), jnp.float32)
    assert backend_of(sources, query, platform="gpu") == "mosaic_gpu"
    assert backend_of(sources, query, platform="tpu") == "mosaic_tpu"
    assert backend_of(sources, query, platform="cpu") == backend_of(sources, query, platform="rocm") == "xla"


@pytest.mark.parametrize("asked, runs", [("auto", "xla"), ("xla", "xla"), ("reference", "reference")])
def test_backend_of(asked, runs):
    abstract = jax.ShapeDtypeStruct((3, 2, 8), jnp.bfloat16)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    assert backend_of(abstract, Q, count=count, return_lse=True, backend=asked, platform="cpu") == runs


def test_unknown_platform():
    with pytest.raises(ValueError, match=r"platform='abacus'.*'cpu', 'gpu'"):
        backend_of(GOOD, Q, platform="abacus")


def test_every_welcome_form_of_input():
    """numpy arrays, lists of tracers and integer-like counts are all welcome."""
    want = attn_res_reference(GOOD[:2], Q)
    np.testing.assert_allclose(attn_res(np.asarray(GOOD), np.asarray(Q), count=np.int64(2)), want, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda a, b: attn_res((a, b), Q))(*GOOD[:2]), want, rtol=1e-6)
