"""Attention over cached latents: block by block, folded or expanded, in place."""

import re
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.gpu_aot import hopper_mesh, lower_for_hopper
from kimi_jax.layers import MLACache, latent_pieces, latents
from kimi_jax.layers.latent_pieces import attend_piece
from kimi_jax.layers.latents import StackedMLACache, append, attend, block_size, folds
from kimi_jax.sharding import make_mesh
from tests.kimi_jax.layers.layer_support import inputs
from tests.support import F32_FORWARD, assert_close, equations

B, N, C, R, NOPE, V = 3, 2, 6, 2, 4, 3
LENGTHS = np.array([2, 19, 11])  # tokens before the call


class Case(NamedTuple):
    name: str
    T: int
    L: int
    stacked: bool = False
    null_key: bool = False


CASES = [
    Case("one_token_overlapping_last_block", 1, 21),
    Case("one_token_stacked", 1, 24, stacked=True),
    Case("draft", 3, 24),
    Case("piece_expanded", 9, 29),
    Case("piece_expanded_stacked", 9, 29, stacked=True),
    Case("single_block", 2, 24),
    Case("null_key", 3, 24, null_key=True),
    Case("null_key_expanded", 9, 29, null_key=True),
]


def cache_of(case):
    """Live slots random, the rest a number that would show."""
    slots = np.arange(case.L) < LENGTHS[:, None]
    latent, k_rope = (np.where(slots[..., None], inputs(B, case.L, x, seed=x), 1e3) for x in (C, R))
    if not case.stacked:
        return MLACache(jnp.asarray(latent), jnp.asarray(k_rope), jnp.asarray(LENGTHS))
    latent, k_rope = (jnp.stack([jnp.full_like(x, 7), x, jnp.full_like(x, 8)]) for x in (latent, k_rope))
    return StackedMLACache(latent, k_rope, jnp.asarray(LENGTHS), jnp.int32(1))


def by_hand(q, kv_b, latent, k_rope, position, scale, null_key=False):
    """One row in float64."""
    kv = np.einsum("sc,cnx->snx", *(np.asarray(x, np.float64) for x in (latent, kv_b)))
    key = np.concatenate([kv[..., :NOPE], np.broadcast_to(k_rope[:, None], (len(k_rope), N, R))], axis=-1)
    scores = scale * np.einsum("tnh,snh->nts", np.asarray(q, np.float64), key)
    scores = np.where(np.arange(len(key)) <= position[:, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True) + null_key * np.exp(-top)
    return np.einsum("nts,snv->tnv", weights / total, kv[..., NOPE:])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_of_different_lengths_equal_plain_attention(case, monkeypatch):
    if case.name != "single_block":
        monkeypatch.setattr(latents, "LEAST_BLOCK", 8)
    if case.null_key:  # which what runs on a GPU does not know
        monkeypatch.setattr(latents, "serves_piece", lambda q: True)
        monkeypatch.setattr(latents, "latent_backend", lambda *arrays: "mosaic_gpu")
    assert (block_size(case.T, case.L) < case.L) == (case.name != "single_block")
    assert folds(case.T, C, NOPE + V) == ("expanded" not in case.name)
    q, kv_b = inputs(B, case.T, N, NOPE + R), inputs(C, N, NOPE + V, seed=2)
    new = inputs(B, case.T, C, seed=3), inputs(B, case.T, R, seed=4)
    before, ids = cache_of(case), jnp.asarray([[0] * (case.T - 1) + [-1], [0] * case.T, [-1] * case.T])

    @jax.jit
    def run(cache):
        cache, position = append(cache, *new, ids)
        return attend(q, kv_b, cache, new, position, 0.7, null_key=case.null_key), cache, position

    o, cache, position = run(before)
    if case.stacked:
        for x, old in zip(cache[:2], before[:2], strict=True):
            np.testing.assert_array_equal(x[::2], old[::2])
        cache, before = (MLACache(x.latent[1], x.k_rope[1], x.length) for x in (cache, before))
    added = np.sum(np.asarray(ids) >= 0, axis=1)
    np.testing.assert_array_equal(cache.length, LENGTHS + added)
    for row in range(B):
        for x, old, fresh in zip(cache[:2], before[:2], new, strict=True):
            expected = np.array(old[row])
            expected[LENGTHS[row] :][: added[row]] = fresh[row, : added[row]]
            np.testing.assert_array_equal(x[row], expected, f"slots of row {row}")
        valid = slice(0, added[row])
        arrays = q[row], kv_b, cache.latent[row], cache.k_rope[row], np.asarray(position[row])
        assert_close(o[row, valid], by_hand(*arrays, 0.7, case.null_key)[valid], F32_FORWARD, f"row {row}")


PIECES = [
    ("one_layer", CASES[3], None),
    ("stacked", CASES[4], None),
    ("auto_mesh", CASES[3], AxisType.Auto),
    ("explicit_mesh_stacked", CASES[4], AxisType.Explicit),
]


@pytest.mark.parametrize("case, axis_type", [piece[1:] for piece in PIECES], ids=[piece[0] for piece in PIECES])
def test_a_piece_by_parts_that_are_merged(case, axis_type, monkeypatch):
    """What cuDNN does on a GPU, by XLA: blocks of 16 slots, the last of 29 moved, none visible to the first row."""
    monkeypatch.setattr(latents, "LEAST_BLOCK", 8)
    monkeypatch.setattr(latent_pieces, "LEAST_SLOTS", 8)
    monkeypatch.setattr(latent_pieces, "MOST_SLOTS", 16 * (1 if axis_type else B))
    monkeypatch.setattr(latents, "serves_piece", lambda q: True)
    monkeypatch.setattr(latents, "attend_piece", partial(attend_piece, implementation="xla"))
    lengths = np.array([0, 19, 11])
    q, kv_b = inputs(B, case.T, N, NOPE + R), inputs(C, N, NOPE + V, seed=2)
    new = inputs(B, case.T, C, seed=3), inputs(B, case.T, R, seed=4)
    before = cache_of(case)._replace(length=jnp.asarray(lengths))

    @jax.jit
    def run(q, kv_b, cache, new):
        cache, position = append(cache, *new, None)
        return attend(q, kv_b, cache, new, position, 0.7), cache, position

    mesh = axis_type and make_mesh({"data": B, "tensor": N}, axis_type=axis_type)
    with jax.set_mesh(mesh) if mesh else nullcontext():
        o, cache, position = jax.tree.map(np.asarray, run(q, kv_b, before, new))
    latent, k_rope = (x[1] if case.stacked else x for x in cache[:2])
    for row in range(B):
        expected = by_hand(q[row], kv_b, latent[row], k_rope[row], np.asarray(position[row]), 0.7)
        assert_close(o[row], expected, F32_FORWARD, f"row {row}")


def test_few_queries_never_expand_the_context():
    """Of the 48B's sizes, with fewer heads: a step of one token makes nothing as large as the keys of all slots."""
    rank, width, L = 512, 256, 4096
    assert folds(1, rank, width) and folds(8, rank, width) and not folds(256, rank, width)
    slots = [jax.ShapeDtypeStruct((1, L, x), jnp.bfloat16) for x in (rank, 64)]
    cache = MLACache(*slots, jax.ShapeDtypeStruct((1,), jnp.int32))

    def largest(T):
        arrays = (
            jax.ShapeDtypeStruct((1, T, 8, 128 + 64), jnp.bfloat16),
            jax.ShapeDtypeStruct((rank, 8, width), jnp.bfloat16),
            cache,
            tuple(jax.ShapeDtypeStruct((1, T, x), jnp.bfloat16) for x in (rank, 64)),
            jax.ShapeDtypeStruct((1, T), jnp.int32),
        )
        jaxpr = jax.make_jaxpr(lambda *xs: attend(*xs, 1.0))(*arrays)
        return max(out.aval.size for e in equations(jaxpr.jaxpr) if e.primitive.name != "while" for out in e.outvars)

    block = block_size(1, L)
    assert block == 512
    assert largest(1) <= max(block * (rank + 64), rank * 8 * width)
    assert largest(256) >= block * 8 * 128


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("sizes", [{}, {"data": 2, "tensor": 2}], ids=["one_device", "mesh"])
def test_a_token_has_a_kernel_on_hopper(sizes, axis_type):
    """Every device with its own rows and heads of a stack, read in place; float32 and a short cache have none."""
    mesh = hopper_mesh(sizes or {"data": 1}, axis_type)
    data, tensor = (mesh.shape.get(axis, 1) for axis in ("data", "tensor"))

    def kernels(dtype="bfloat16", L=1024):
        def array(*shape, dtype=dtype, spec=()):
            sharding = NamedSharding(mesh, P(*(axis if axis in mesh.axis_names else None for axis in spec)))
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        rows, heads = ("data",), ("data", None, "tensor")
        slots = [array(3, 4, L, x, spec=(None, "data")) for x in (512, 64)]
        cache = StackedMLACache(*slots, array(4, dtype="int32", spec=rows), array(dtype="int32"))
        own = tuple(array(4, 1, x, spec=rows) for x in (512, 64))
        q, kv_b = array(4, 1, 8, 192, spec=heads), array(512, 8, 256, spec=(None, "tensor"))
        position = array(4, 1, dtype="int32", spec=rows)
        run = jax.jit(lambda *xs: attend(*xs, 1.0))
        text = lower_for_hopper(run, q, kv_b, cache, own, position, mesh=mesh).as_text()
        return re.findall(r"@mosaic_gpu_v2\(.*", text)

    (call,) = kernels()
    assert f"tensor<3x{4 // data}x1024x512xbf16>" in call and f"tensor<{4 // data}x32x512xbf16>" in call
    assert not kernels("float32") and not kernels(L=512)


def test_blocks_are_few_for_a_token_and_small_for_a_piece():
    assert block_size(1, 2**20) == 2**17
    assert block_size(2048, 2**20) == 2048
    assert block_size(16 * 2048, 2**20) == 512
    assert block_size(1, 100) == 100
