"""attn_res under vmap, scan, shard_map and on meshes whose axes are Auto or Explicit."""

import re
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.attn_res import attn_res
from tests.quick_compile import quick_compile  # noqa: F401 (a fixture for all tests here)
from tests.support import F32_FORWARD, F32_GRADIENT, assert_close

N, B, T, D = 3, 4, 6, 16


class Args(NamedTuple):
    sources: object  # [N, B, T, D], or a list of N
    query: object
    key_scale: object
    output_scale: object
    cotangent: object  # [B, T, D]
    count: object


def make_args(form: str) -> Args:
    r = np.random.default_rng(0)
    sources = r.normal(size=(N, B, T, D)).astype(np.float32)
    vectors = r.normal(size=(3, D)).astype(np.float32)
    cotangent = r.normal(size=(B, T, D)).astype(np.float32)
    return Args(
        list(sources) if form == "sequence" else sources,
        *vectors,
        cotangent,
        np.int32(2) if form == "traced_count" else None,
    )


def loss(sources, query, key_scale, output_scale, cotangent, count):
    mixture, lse = attn_res(sources, query, key_scale, count=count, output_scale=output_scale, return_lse=True)
    return jnp.sum(mixture * cotangent) + jnp.sum(lse**2)


value_and_grads = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))


def assert_same(got, want):
    assert_close(got[0], want[0], F32_FORWARD, "loss")
    for name, a, b in zip(Args._fields, got[1], want[1], strict=False):
        assert_close(np.stack(list(a)), np.stack(list(b)), F32_GRADIENT, name)


class Placement(NamedTuple):
    name: str
    tokens: P  # of [B, T, D]
    vectors: P  # of [D]


PLACEMENTS = [
    Placement("batch", P("data"), P()),
    Placement("sequence", P(None, "tensor"), P()),
    Placement("channels", P(None, None, "tensor"), P("tensor")),
    Placement("batch_and_channels", P("data", None, "tensor"), P()),
    Placement("batch_and_sharded_vectors", P("data"), P("tensor")),
]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("form", ["sequence", "traced_count"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: p.name)
def test_mesh(placement, form, axis_type):
    args = make_args(form)
    want = jax.jit(value_and_grads)(*args)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)

    def put(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        if form == "sequence":
            sources = [put(v, placement.tokens) for v in args.sources]
        else:
            sources = put(args.sources, P(None, *placement.tokens))
        placed = Args(
            sources,
            *(put(x, placement.vectors) for x in args[1:4]),
            put(args.cotangent, placement.tokens),
            None if args.count is None else put(args.count, P()),
        )
        compiled = jax.jit(value_and_grads).lower(*placed).compile()
        assert_same(compiled(*placed), want)
        # Vectors [D] may be gathered, whatever has token axes may not, unless the vectors shard it against its will.
        if placement.name != "batch_and_sharded_vectors":
            assert not re.search(r"= \w+\[\d+,[\d,]+\]\S* all-gather", compiled.as_text())


@pytest.mark.parametrize("form", ["sequence", "buffer", "traced_count"])
def test_shard_map(form):
    """With check_vma on, jax itself adds up the gradients of the vectors that all devices share."""
    args = make_args(form)
    want = jax.jit(value_and_grads)(*args)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    specs = Args(P("data") if form == "sequence" else P(None, "data"), P(), P(), P(), P("data"), P())
    total = jax.shard_map(
        lambda *args: jax.lax.psum(loss(*args), "data"), mesh=mesh, in_specs=tuple(specs), out_specs=P(), check_vma=True
    )
    assert_same(jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3)))(*args), want)


@pytest.mark.parametrize("axis", ["queries", "counts", "tokens"])
def test_vmap(axis):
    """A batch of queries over the same sources is phase 1 of the two-phase schedule."""
    args = make_args("traced_count")
    r = np.random.default_rng(1)
    batched = {
        "queries": args._replace(query=r.normal(size=(2, D)).astype(np.float32)),
        "counts": args._replace(count=np.array([1, 3], np.int32)),
        "tokens": args._replace(sources=np.stack([args.sources, args.sources[::-1]], axis=2)),
    }[axis]
    axes = {"queries": {"query": 0}, "counts": {"count": 0}, "tokens": {"sources": 2}}[axis]
    in_axes = tuple(axes.get(name) for name in Args._fields)
    got = jax.jit(jax.vmap(value_and_grads, in_axes=in_axes))(*batched)
    for i in range(2):
        one = Args(*[x if a is None else np.take(x, i, axis=a) for x, a in zip(batched, in_axes, strict=True)])
        assert_same(jax.tree.map(lambda x, i=i: x[i], got), jax.jit(value_and_grads)(*one))


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
def test_scan_over_a_growing_buffer(remat):
    """A scan whose carry is the fixed buffer equals the unrolled network over a growing list."""
    r = np.random.default_rng(0)
    depth = 3
    weights, queries = r.normal(size=(depth, D, D)) / 4, r.normal(size=(depth, D))
    weights, queries, x = (jnp.asarray(a, jnp.float32) for a in (weights, queries, r.normal(size=(T, D))))

    def unrolled(weights, queries, x):
        sources = [x]
        for weight, query in zip(weights, queries, strict=True):
            sources.append(jnp.tanh(attn_res(sources, query) @ weight))
        return jnp.sum(sources[-1] ** 2)

    def scanned(weights, queries, x):
        def site(carry, layer):
            buffer, count = carry
            weight, query = layer
            out = jnp.tanh(attn_res(buffer, query, count=count) @ weight)
            return (jax.lax.dynamic_update_index_in_dim(buffer, out, count, axis=0), count + 1), None

        buffer = jnp.full((depth + 1, T, D), jnp.nan).at[0].set(x)
        (buffer, _), _ = jax.lax.scan(jax.checkpoint(site) if remat else site, (buffer, 1), (weights, queries))
        return jnp.sum(buffer[-1] ** 2)

    want, got = (jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(weights, queries, x) for f in (unrolled, scanned))
    assert_close(got[0], want[0], F32_FORWARD, "loss")
    for name, a, b in zip(("weights", "queries", "x"), got[1], want[1], strict=True):
        assert_close(a, b, F32_GRADIENT, name)


def test_forward_mode_raises_jax_own_error():
    query = jnp.ones(D)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: attn_res(jnp.ones((N, T, D)), q), (query,), (query,))


def test_eager_equals_jit():
    args = make_args("buffer")
    chex.assert_trees_all_close(value_and_grads(*args), jax.jit(value_and_grads)(*args), rtol=1e-5, atol=1e-5)
