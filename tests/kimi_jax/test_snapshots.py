"""Copies of rows, and prompts that begin alike: equal to a cold run, whoever used the copy before."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from kimi_jax import PrefixCache, Snapshot, restore, snapshot
from kimi_jax.cache import set_length
from kimi_jax.generate import append_piece, prefill
from kimi_jax.sharding import make_mesh, shard_model
from tests.kimi_jax.small_models import forward, small_config, small_model, tokens_for
from tests.support import F32_FORWARD, assert_close

BLOCK, ROOM = 64, 144


@functools.cache
def setting():
    """A model with a scan over both kinds of attention; rows A, B, C, D, their lengths, all logits.

    B shares 64 tokens with A and ends with the 128th; C shares nothing and is too short for a boundary; D has the
    second block of A after another first one.
    """
    model = small_model(small_config(num_layers=4, scan_layers=True, mla_every=2, residual="standard"))
    tokens = np.array(tokens_for(model.config, 4, 130))
    tokens[1, :BLOCK], tokens[3, BLOCK:128] = tokens[0, :BLOCK], tokens[0, BLOCK:128]
    return model, tokens, np.array([130, 128, 63, 130]), np.asarray(forward(model)(tokens))


@functools.cache
def cold():
    """The cache of A's first 64 and first 128 tokens."""
    model, tokens, _, _ = setting()
    return prefill(model, np.tile(tokens[:1, :128], (2, 1)), np.array([64, 128]), model.init_cache(2, ROOM))[1]


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_field_DC07_hits_equal_a_cold_run():
    """A, then B from A's first boundary, then A again from its last one: A -> B -> A finds what A -> A would hide."""
    model, tokens, lengths, full = setting()
    prefixes = PrefixCache(model, block=BLOCK)
    for rows, expected in (([0, 2], [0, 0]), ([2, 1], [0, 64]), ([0, 3], [128, 0]), ([3, 1], [128, 64])):
        logits, cache, known = prefixes.prefill(tokens[rows], ROOM, lengths=lengths[rows])
        np.testing.assert_array_equal(known, expected, f"rows {rows}")
        np.testing.assert_array_equal(cache.length, lengths[rows])
        assert_close(logits, full[rows, lengths[rows] - 1], F32_FORWARD, f"rows {rows} from {expected}")
    # One token more than two whole blocks finds both, and nothing is kept of a prompt of 63.
    assert [s.length for s in prefixes.lookup(np.append(tokens[1, :128], 1))] == [64, 128]
    assert prefixes.lookup(tokens[2]) == []


def test_field_DC07_snapshots_stand_at_the_boundaries():
    model, tokens, _, _ = setting()
    prefixes = PrefixCache(model, block=BLOCK)
    prefixes.prefill(tokens[:2], ROOM)
    pieces = prefixes.lookup(tokens[0])
    restored = model.init_cache(2, ROOM)
    for row in range(2):
        restored = restore(restored, row, pieces[: row + 1])
    np.testing.assert_array_equal(restored.length, [64, 128])
    for ours, theirs in zip(leaves(restored), leaves(cold()), strict=True):
        assert_close(ours, theirs, F32_FORWARD)


def test_field_DC08_two_requests_from_one_snapshot():
    model, tokens, _, full = setting()
    kept = snapshot(cold(), 1)
    before = leaves(kept)
    old = model.init_cache(2, ROOM)
    both = restore(restore(old, 0, kept), 1, kept)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(old.length)
    np.testing.assert_array_equal(both.length, [128, 128])
    step = np.array([[tokens[0, 128]], [(tokens[0, 128] + 1) % 32]], np.int32)
    logits, _ = append_piece(model, step, [1, 1], both, None)
    assert_close(logits[0], full[0, 128], F32_FORWARD, "the prompt goes on")
    other, _ = append_piece(model, step[::-1], [1, 0], restore(model.init_cache(2, ROOM), 0, kept), None)
    assert_close(logits[1], other[0], F32_FORWARD, "another continuation, alone")
    for now, then in zip(leaves(kept), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_a_row_that_was_full_can_be_used_again():
    """The layers after the one that runs out of room see NaN, and must not leave it in slots."""
    model, tokens, _, full = setting()
    cache = set_length(jax.tree.map(jnp.copy, cold()), jnp.array([ROOM - 10, 100]))
    logits, cache = append_piece(model, tokens[[0, 0], :BLOCK].astype(np.int32), [BLOCK, 1], cache, None)
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
    step, cache = tokens[[0, 0], 128:129].astype(np.int32), restore(cache, 0, snapshot(cold(), 1))
    assert_close(append_piece(model, step, [1, 1], cache, None)[0][0], full[0, 128], F32_FORWARD)


def test_the_longest_unused_go_first():
    model, tokens, _, _ = setting()
    prefixes = PrefixCache(model, block=BLOCK)
    prefixes.prefill(tokens[[0, 0]], ROOM)
    size = prefixes.nbytes // 2
    assert prefixes.nbytes == 2 * size == sum(s.nbytes for s in prefixes.lookup(tokens[0]))

    def known(row):
        return [s.length for s in prefixes.lookup(tokens[row])]

    prefixes = PrefixCache(model, block=BLOCK, byte_budget=3 * size)
    prefixes.prefill(tokens[[0, 0]], ROOM)
    prefixes.prefill(tokens[[1, 1]], ROOM)  # shares the first block
    assert known(1) == [64, 128] and known(0) == [64, 128] and prefixes.nbytes == 3 * size
    prefixes.prefill(tokens[[2, 2], :70], ROOM)  # B's second block was used before A's
    assert known(1) == [64] and known(0) == [64, 128] and known(2) == [64] and prefixes.nbytes == 3 * size
    for room, expected in ((size, [64]), (size - 1, [])):  # a second block without the first would be of no use
        small = PrefixCache(model, block=BLOCK, byte_budget=room)
        small.prefill(tokens[[0, 0]], ROOM)
        assert [s.length for s in small.lookup(tokens[0])] == expected and small.nbytes == size * len(expected)
    prefixes.clear()
    assert known(0) == [] and prefixes.nbytes == 0


def test_other_parameters_find_nothing():
    model, tokens, _, _ = setting()
    model = nnx.clone(model)
    prefixes = PrefixCache(model, block=BLOCK)
    prefixes.prefill(tokens[:2], ROOM)
    assert len(prefixes.lookup(tokens[0])) == 2
    model.head[...] = model.head[...] * 2
    assert prefixes.lookup(tokens[0]) == []


def test_what_does_not_fit_is_refused():
    model, tokens, _, _ = setting()
    cache = model.init_cache(2, ROOM)
    kept = snapshot(cache, 0)
    longer = Snapshot(kept.layers, 0, ROOM + 1)
    second = Snapshot(kept.layers, 64, 128)
    wider = small_model(small_config(num_layers=4, scan_layers=True, mla_every=2, residual="standard", kv_lora_rank=8))
    for call, message in (
        (lambda: snapshot(cache, 2), "row=2 is not allowed: 0 to 1"),
        (lambda: restore(cache, -1, kept), "row=-1 is not allowed: 0 to 1"),
        (lambda: restore(cache, 0, longer), "room for 1 to 144 tokens per row, the snapshot has 145"),
        (lambda: restore(cache, 0, []), "the snapshot has 0"),
        (lambda: restore(cache, 0, [second]), "begins at token 64, the row is known up to 0"),
        (lambda: restore(wider.init_cache(1, ROOM), 0, kept), "the snapshot is of another model"),
        (lambda: PrefixCache(model, block=0), "block=0 is not allowed"),
        (lambda: PrefixCache(model, byte_budget=0), "byte_budget=0 is not allowed"),
        (lambda: PrefixCache(model).prefill(tokens, 100), r"lengths=\[130, .* 4 numbers from 1 to 100"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    np.testing.assert_array_equal(cache.length, [0, 0])  # refused before it was donated


@pytest.mark.exhaustive
def test_a_mesh_with_auto_axes_changes_nothing_and_explicit_ones_are_refused():
    _, tokens, lengths, full = setting()
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        model, mesh = small_model(setting()[0].config), make_mesh(dict(data=2, tensor=2), axis_type=axis_type)
        shard_model(model, mesh)
        with jax.set_mesh(mesh):
            prefixes = PrefixCache(model, block=BLOCK)
            if axis_type == AxisType.Explicit:
                with pytest.raises(NotImplementedError, match="a batch cut over Explicit mesh axes"):
                    prefixes.prefill(tokens[:2], ROOM)
                continue
            for expected in ([0, 0], [128, 64]):
                logits, _, known = prefixes.prefill(tokens[:2], ROOM, lengths=lengths[:2])
                np.testing.assert_array_equal(known, expected)
                assert_close(logits, full[[0, 1], lengths[:2] - 1], F32_FORWARD)
