"""Generation: greedy equals the argmax of full forward passes; sampling follows its distribution and its seed."""

import functools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from kimi_jax import PrefixCache, generate
from kimi_jax.generate import _append, _steps, padded_length, sample, stream
from kimi_jax.sharding import make_mesh, shard_model
from tests.kimi_jax.small_models import forward, small_config, small_model, tokens_for


@functools.cache
def model_and_prompt():
    model = small_model(small_config())
    return model, np.asarray(tokens_for(model.config, 3, 6))


@functools.cache
def greedy():
    model, prompt = model_and_prompt()
    return np.asarray(generate(model, prompt, 5, lengths=np.array([6, 2, 4])))


def test_greedy_equals_argmax_of_the_full_forward():
    model, prompt = model_and_prompt()
    run, lengths = forward(model), np.array([6, 2, 4])
    tokens = np.zeros((3, 11), np.int32)
    for row, length in enumerate(lengths):
        tokens[row, :length] = prompt[row, :length]
    for step in range(5):  # causal: what stands after the last token does not matter
        logits = np.asarray(run(tokens))
        tokens[np.arange(3), lengths + step] = logits[np.arange(3), lengths + step - 1].argmax(-1)
    expected = np.stack([tokens[row, length : length + 5] for row, length in enumerate(lengths)])
    assert greedy().dtype == np.int32
    np.testing.assert_array_equal(greedy(), expected)


def test_one_row_without_a_batch_axis():
    model, prompt = model_and_prompt()
    ids = generate(model, prompt[1, :2], 5)
    assert ids.shape == (5,)
    np.testing.assert_array_equal(ids, greedy()[1])


def test_padding_anywhere_equals_padding_on_the_right():
    model, prompt = model_and_prompt()
    ids = np.array([[0] * 6, [-1, -1, 3, -1, 3, -1], [-1, -1, 0, 0, 0, 0]])
    padded = np.where(ids >= 0, 0, 31)
    for row, length in enumerate((6, 2, 4)):
        padded[row, ids[row] >= 0] = prompt[row, :length]
    np.testing.assert_array_equal(generate(model, padded, 5, segment_ids=ids), greedy())
    np.testing.assert_array_equal(generate(model, padded[2], 5, segment_ids=ids[2]), greedy()[2])


def test_long_prompts_go_in_by_pieces(monkeypatch):
    """Of 4 tokens, so that the rows end in different ones."""
    model, prompt = model_and_prompt()
    monkeypatch.setattr(sys.modules["kimi_jax.generate"], "LONGEST_PIECE", 4)  # the package's attribute is the function
    np.testing.assert_array_equal(generate(model, prompt, 5, lengths=np.array([6, 2, 4])), greedy())


def test_known_prefixes_change_nothing():
    model, prompt = model_and_prompt()
    prefixes, lengths = PrefixCache(model, block=4), np.array([6, 2, 4])
    for known in (0, 1):
        assert len(prefixes.lookup(prompt[0])) == known
        np.testing.assert_array_equal(generate(model, prompt, 5, lengths=lengths, prefixes=prefixes), greedy())
    with pytest.raises(ValueError, match="prefixes is of another model"):
        generate(nnx.clone(model), prompt, 1, prefixes=prefixes)


def test_other_lengths_compile_nothing():
    model, prompt = model_and_prompt()
    greedy()
    before = _append._cache_size(), _steps._cache_size()
    for T, n in ((6, 10), (5, 2), (1, 15)):
        assert generate(model, prompt[:, :T], n).shape == (3, n)
    assert (_append._cache_size(), _steps._cache_size()) == before
    sizes = [padded_length(n) for n in range(1, 10_000)]
    assert all(n <= size <= max(16, 1.25 * n) for n, size in enumerate(sizes, start=1)) and len(set(sizes)) < 50


def test_pieces_come_as_they_are_ready():
    model, prompt = model_and_prompt()
    pieces = list(stream(model, prompt, 20))
    assert [piece.shape for piece in pieces] == [(3, 1), (3, 16), (3, 3)]
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), generate(model, prompt, 20))


def test_ended_rows_repeat_their_last_id():
    model, prompt = model_and_prompt()
    free = np.asarray(generate(model, prompt, 20))

    def ended(row, stops):
        at = np.flatnonzero(np.isin(row, stops))
        return row if not at.size else np.concatenate([row[: at[0]], np.full(len(row) - at[0], row[at[0]])])

    some = [int(free[0, 2])]
    np.testing.assert_array_equal(generate(model, prompt, 20, stop_ids=some), [ended(row, some) for row in free])
    all_of_them = [int(row[2]) for row in free]
    pieces = list(stream(model, prompt, 20, stop_ids=all_of_them))
    np.testing.assert_array_equal(np.concatenate(pieces, 1), [ended(row, all_of_them)[:3] for row in free])
    expected = [ended(row, all_of_them) for row in free]
    np.testing.assert_array_equal(generate(model, prompt, 20, stop_ids=all_of_them), expected)


@pytest.mark.parametrize(
    "axis_type", [pytest.param(AxisType.Auto, marks=pytest.mark.exhaustive), AxisType.Explicit], ids=str
)
def test_a_mesh_changes_nothing(axis_type):
    model, prompt = model_and_prompt()
    lengths = np.array([6, 2, 4])
    sharded, mesh = small_model(model.config), make_mesh(dict(data=3, tensor=2), axis_type=axis_type)
    shard_model(sharded, mesh)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(generate(sharded, prompt, 5, lengths=lengths), greedy())


@pytest.mark.exhaustive
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_mesh_draws_the_same(axis_type):
    """Three rows over two devices too, which are then not cut."""
    model, prompt = model_and_prompt()
    prompt = np.tile(prompt, (2, 1))
    sharded, mesh = small_model(model.config), make_mesh(dict(data=2, tensor=2), axis_type=axis_type)
    shard_model(sharded, mesh)
    for rows in (4, 3):
        expected = generate(model, prompt[:rows], 5, temperature=2.0, seed=3)
        with jax.set_mesh(mesh):
            np.testing.assert_array_equal(generate(sharded, prompt[:rows], 5, temperature=2.0, seed=3), expected)


def test_seeds_reproduce_and_differ():
    model, prompt = model_and_prompt()
    draws = [np.asarray(generate(model, prompt, 12, temperature=3.0, seed=seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert np.any(draws[0] != draws[2])
    assert 0 <= draws[0].min() and draws[0].max() < model.config.vocab_size


def test_sampling_follows_temperature_and_top_p():
    logits = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3]))
    keys = jax.random.split(jax.random.key(0), 4000)

    def frequencies(temperature, top_p):
        ids = jax.vmap(lambda key: sample(key, logits, temperature, top_p))(keys)
        return np.bincount(ids, minlength=4) / len(keys)

    np.testing.assert_allclose(frequencies(1.0, 1.0), [0.1, 0.4, 0.2, 0.3], atol=0.03)
    squared = np.array([0.01, 0.16, 0.04, 0.09])
    np.testing.assert_allclose(frequencies(0.5, 1.0), squared / squared.sum(), atol=0.03)
    np.testing.assert_allclose(frequencies(1.0, 0.65), [0, 4 / 7, 0, 3 / 7], atol=0.03)
    np.testing.assert_allclose(frequencies(1.0, 1e-6), [0, 1, 0, 0])


class Bad(NamedTuple):
    name: str
    kwargs: dict
    message: str


BAD = [
    Bad("no_tokens", dict(max_new_tokens=0), "max_new_tokens=0"),
    Bad("temperature", dict(temperature=-1.0), "temperature=-1.0"),
    Bad("top_p_zero", dict(top_p=0.0), "top_p=0.0"),
    Bad("top_p_high", dict(top_p=1.5), "top_p=1.5"),
    Bad("length_zero", dict(lengths=[0, 1, 2]), r"lengths=\[0, 1, 2\].*3 numbers from 1 to 6"),
    Bad("length_over", dict(lengths=[7, 1, 2]), r"lengths=\[7, 1, 2\]"),
    Bad("ids", dict(prompt=np.full((1, 2), 32)), r"prompt ids must lie in \[0, 32\)"),
    Bad("stop", dict(stop_ids=[32]), r"stop_ids=\[32\] is not allowed: ids in \[0, 32\)"),
    Bad("all_padding", dict(segment_ids=[[0] * 6, [-1] * 6, [0] * 6]), "no token in row 1"),
    Bad("documents", dict(segment_ids=[[0] * 6, [0, 0, 0, 1, 1, 1], [0] * 6]), "may only mark padding"),
    Bad("shape", dict(segment_ids=[[0] * 5] * 3), "segment_ids must have the shape of prompt"),
    Bad("floats", dict(prompt=np.zeros((1, 2))), "prompt must be integers"),
    Bad("empty", dict(prompt=np.zeros((1, 0), np.int32)), "T >= 1"),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda b: b.name)
def test_bad_input_raises(bad):
    model, prompt = model_and_prompt()
    arguments = dict(prompt=prompt, max_new_tokens=2) | bad.kwargs
    with pytest.raises(ValueError, match=bad.message):
        generate(model, arguments.pop("prompt"), arguments.pop("max_new_tokens"), **arguments)
