"""Generation: greedy equals the argmax of full forward passes; sampling follows its distribution and its seed."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax import generate
from kimi_jax.generate import sample
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
    Bad("floats", dict(prompt=np.zeros((1, 2))), "prompt must be integers"),
    Bad("empty", dict(prompt=np.zeros((1, 0), np.int32)), "T >= 1"),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda b: b.name)
def test_bad_input_raises(bad):
    model, prompt = model_and_prompt()
    arguments = dict(prompt=prompt, max_new_tokens=2) | bad.kwargs
    with pytest.raises(ValueError, match=bad.message):
        generate(model, arguments.pop("prompt"), arguments.pop("max_new_tokens"), **arguments)
