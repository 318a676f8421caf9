"""Field case DC05: of drafted tokens each row keeps as many as were accepted, as if the others had never been."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from kimi_jax import accept, verify
from kimi_jax.sharding import make_mesh, shard_model
from tests.kimi_jax.small_models import EXPERTS, small_config, small_model, tokens_for
from tests.support import F32_FORWARD, assert_close

B, DRAFTED, MORE, WIDTH = 6, 5, 4, 17
PROMPTS = np.array([3, 8, 5, 1, 8, 2])
FIELDS = dict(
    unrolled=dict(EXPERTS, num_layers=2),
    scan=dict(num_layers=4, scan_layers=True, mla_every=2, residual="standard", kda_num_value_heads=8),
)


@functools.cache
def setting(name):
    """(model, compiled extend, verify and accept, prompts, the cache after them, drafts, what comes then)."""
    model = small_model(small_config(**FIELDS[name]))
    graphdef, state = nnx.split(model)

    @jax.jit
    def extend(state, tokens, cache, lengths):
        return nnx.merge(graphdef, state).extend(tokens, cache, lengths=lengths)

    @jax.jit
    def look(state, tokens, cache, lengths):
        return verify(nnx.merge(graphdef, state), tokens, cache, lengths=lengths)

    @jax.jit
    def keep(state, draft, counts):
        return accept(nnx.merge(graphdef, state), draft, counts)

    extend, look, keep = (functools.partial(f, state) for f in (extend, look, keep))
    tokens = np.asarray(tokens_for(model.config, B, WIDTH + 2 * DRAFTED))  # few shapes: few programs
    prompts, drafts, more = np.split(tokens, [WIDTH, WIDTH + DRAFTED], axis=1)
    cache = extend(prompts, model.init_cache(B, 24), PROMPTS)[1]
    return model, extend, look, keep, prompts, cache, drafts, more


@pytest.mark.parametrize("name", [pytest.param("unrolled", marks=pytest.mark.exhaustive), "scan"])
def test_field_DC05_accepted_tokens_stay(name):
    model, extend, look, keep, prompts, cache, drafts, more = setting(name)
    assert (model.layers.repetition.count == 2) == (name == "scan")
    everything, counts = np.full(B, DRAFTED), np.arange(B)
    logits, draft = look(drafts, cache, everything)
    np.testing.assert_array_equal(logits, extend(drafts, cache, everything)[0])
    after = keep(draft, counts)
    jax.tree.map(assert_same_slots, after, extend(drafts, cache, counts)[1])

    # and as in a cold run over prompt, accepted tokens and what comes then
    rows = [np.concatenate([prompts[b, : PROMPTS[b]], drafts[b, : counts[b]], more[b, :MORE]]) for b in range(B)]
    whole = np.zeros((B, WIDTH), np.int32)
    for row, values in zip(whole, rows, strict=True):
        row[: len(values)] = values
    lengths = np.array([len(row) for row in rows])
    expected, _ = extend(whole, model.init_cache(B, 24), lengths)
    found, expected = (np.asarray(x) for x in (extend(more, after, np.full(B, MORE))[0], expected))
    for row, length in enumerate(lengths):
        assert_close(
            found[row, :MORE], expected[row, length - MORE : length], F32_FORWARD, f"{row} of {DRAFTED} accepted"
        )


def assert_same_slots(ours, theirs):
    """To the bit; of latents, what lies beyond a row's length does not count and is left by both as it was written."""
    if ours.ndim >= 3 and 24 in ours.shape:
        slots = ours.shape.index(24)
        ours, theirs = (np.moveaxis(np.asarray(x), slots, 0) for x in (ours, theirs))
        for row in range(B):
            length = PROMPTS[row] + row
            np.testing.assert_array_equal(ours[:length][..., row, :], theirs[:length][..., row, :])
        return
    np.testing.assert_array_equal(ours, theirs)


def test_rows_may_have_drafted_less():
    model, extend, look, keep, _, cache, drafts, _ = setting("scan")
    _, draft = look(drafts, cache, np.array([5, 0, 1, 2, 3, 4]))
    counts = np.array([2, 0, 1, 1, 0, 4])
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x, y),
        keep(draft, counts).layers.groups[0],
        extend(drafts, cache, counts)[1].layers.groups[0],
    )
    with pytest.raises(ValueError, match=r"counts=\[5, 1, .* is not allowed: 0 to \[5, 0, 1, 2, 3, 4\]"):
        accept(model, draft, np.array([5, 1, 0, 0, 0, 0]))
    with pytest.raises(ValueError, match=r"counts must be \[B\]"):
        accept(model, draft, np.array([5]))
    logits, _ = extend(drafts, keep(draft, np.array([5, 1, 0, 0, 0, -1])), np.ones(B, int))
    logits = np.asarray(logits)
    finite = np.isfinite(logits[:, 0]).all(axis=-1)
    np.testing.assert_array_equal(finite, [True, False, True, True, True, False])


def test_a_draft_keeps_vectors_and_no_states_per_token():
    model, _, look, _, _, cache, drafts, _ = setting("scan")
    _, draft = jax.eval_shape(look, drafts, cache, np.full(B, DRAFTED))
    added = sum(x.size for x in jax.tree.leaves(draft)) - sum(x.size for x in jax.tree.leaves(cache))
    config = model.config
    widths = config.kda_num_heads * 8 * 2 + config.value_heads * (8 + 8 + 1)
    assert added == B * DRAFTED * widths * config.layer_kinds.count("kda") + B


@pytest.mark.exhaustive
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", FIELDS)
def test_a_mesh_changes_nothing(name, axis_type):
    model, _, look, keep, _, cache, drafts, _ = setting(name)
    counts = np.arange(B)
    expected_logits, draft = look(drafts, cache, np.full(B, DRAFTED))
    expected = keep(draft, counts)
    sharded, mesh = small_model(model.config), make_mesh(dict(data=2, tensor=2), axis_type=axis_type)
    shard_model(sharded, mesh)
    graphdef, state = nnx.split(sharded)

    @jax.jit
    def run(state, prompts, drafts):
        model = nnx.merge(graphdef, state)
        cache = model.extend(prompts, model.init_cache(B, 24), lengths=jnp.asarray(PROMPTS))[1]
        logits, draft = verify(model, drafts, cache)
        return logits, accept(model, draft, jnp.asarray(counts))

    with jax.set_mesh(mesh):
        logits, after = run(state, setting(name)[4], drafts)
    assert_close(logits, expected_logits, F32_FORWARD)
    np.testing.assert_array_equal(after.length, expected.length)
    for ours, theirs in zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True):
        if 24 not in ours.shape:
            assert_close(ours, theirs, F32_FORWARD)
