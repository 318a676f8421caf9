"""The whole model: its baseline at step 0, what rows and documents may know of each other, the loss, the balancer."""

import dataclasses
import functools
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax import Aux, KimiLM, lm_loss, update_router_biases
from tests.kimi_jax.small_models import EXPERTS, forward, small_config, small_model, tokens_for
from tests.support import F32_FORWARD, assert_close


@functools.cache
def step_zero(**fields):
    """Logits and gradients by parameter of a fresh float64 model, without the parameters of the mixes."""
    with jax.enable_x64(True):
        config = small_config(norm_eps=1e-12, dtype="float64", param_dtype="float64", **fields)
        model = KimiLM(config, rngs=nnx.Rngs(0))
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        tokens = tokens_for(config, 2, 12)

        def loss(params):
            logits = nnx.merge(graphdef, params, rest)(tokens)
            return -jnp.mean(jax.nn.log_softmax(logits)[:, :-1, 3]), logits

        run = jax.jit(jax.grad(loss, has_aux=True))
        gradients, logits = run(params)
        gradients = {
            path: np.asarray(leaf[...])
            for path, leaf in nnx.to_flat_state(gradients)
            if not any("mix" in str(part) for part in path)
        }
        return np.asarray(logits), gradients


def test_scanning_draws_the_same_parameters():
    """A seed says where a run begins, whether layers are stacked or not."""
    config = small_config(num_layers=5, mla_every=2, **EXPERTS)
    plain, scanned = (KimiLM(dataclasses.replace(config, scan_layers=scan), rngs=nnx.Rngs(3)) for scan in (False, True))
    assert scanned.layers.repetition.count > 1
    for layer in range(5):
        leaves, stacked = (jax.tree.leaves(nnx.state(model.layers.layer(layer))) for model in (plain, scanned))
        for leaf, other in zip(leaves, stacked, strict=True):
            np.testing.assert_array_equal(leaf, other)
    np.testing.assert_array_equal(plain.embedding[...], scanned.embedding[...])


@pytest.mark.parametrize("residual, block_size", [("full_attn_res", 2), ("block_attn_res", 2), ("block_attn_res", 100)])
def test_step_zero_equals_the_prenorm_baseline(residual, block_size):
    """With zero queries AttnRes is a rescaled residual stream, and every norm takes the scale out again: up to eps over
    the mean square of the stream, here 1e-12 over about 1e-4."""
    logits, gradients = step_zero(residual=residual, block_size=block_size)
    baseline_logits, baseline_gradients = step_zero(residual="standard")
    assert logits.dtype == np.float64
    assert_close(logits, baseline_logits, 1e-7, "logits")
    assert gradients.keys() == baseline_gradients.keys() and len(gradients) > 20
    for path, gradient in gradients.items():
        assert_close(gradient, baseline_gradients[path], 1e-7, str(path))


@functools.cache
def mixed_model():
    """KDA and MLA, dense and experts, Block AttnRes with weights that matter."""
    model = small_model(small_config(**EXPERTS))
    return model, forward(model)


def documents():
    """Three documents, one of them shorter than the convolution: as tokens."""
    config = small_config()
    return [np.asarray(tokens_for(config, 1, length, seed=length)[0]) for length in (9, 2, 5)]


def test_packing_equals_separate_documents_and_padding_means_nothing():
    model, run = mixed_model()
    docs = documents()
    # One row of three documents with padding before, between and after; against one row each, padded left or right.
    packed, ids = np.full((3, 20), 5), np.full((3, 20), -1)
    start = 2
    for index, doc in enumerate(docs):
        packed[0, start : start + len(doc)], ids[0, start : start + len(doc)] = doc, index
        start += len(doc) + 1
    packed_logits = run(packed, ids)

    separate, separate_ids = np.full((3, 20), 11), np.full((3, 20), -1)
    for index, doc in enumerate(docs):
        where = slice(0, len(doc)) if index % 2 else slice(20 - len(doc), 20)
        separate[index, where], separate_ids[index, where] = doc, 0
    separate_logits = run(separate, separate_ids)
    for index in range(3):
        assert_close(packed_logits[0][ids[0] == index], separate_logits[index][separate_ids[index] == 0], F32_FORWARD)


def test_a_batch_may_be_a_constant_of_a_compiled_function():
    model, run = mixed_model()
    tokens, ids = tokens_for(model.config, 3, 20), jnp.asarray([[0] * 11 + [1] * 9] * 3)
    assert_close(jax.jit(lambda: model(tokens, ids))(), run(tokens, ids), F32_FORWARD)
    prompt, lengths, cache = tokens[:, :4], jnp.asarray([4, 2, 3]), model.init_cache(3, 5)
    closed_over = jax.jit(lambda: model.extend(prompt, cache, lengths=lengths)[0])()
    as_argument = jax.jit(lambda lengths: model.extend(prompt, cache, lengths=lengths)[0])(lengths)
    assert_close(closed_over, as_argument, F32_FORWARD)
    too_high, too_small = tokens + 32, model.init_cache(3, 3)
    with pytest.raises(ValueError, match="tokens must lie in"):
        jax.jit(lambda: model(too_high, ids))()
    with pytest.raises(ValueError, match="room for 3 tokens per row"):
        jax.jit(lambda: model.extend(prompt, too_small, lengths=lengths)[0])()


def test_a_document_does_not_see_the_one_before_it():
    """Field case LY02 for the model: another first document changes the logits of the second by exactly nothing."""
    _, run = mixed_model()
    tokens = np.asarray(tokens_for(small_config(), 3, 20))
    ids = np.repeat([[0] * 11 + [1] * 9], 3, axis=0)
    changed = tokens.copy()
    changed[:, :11] = (changed[:, :11] + 1) % 32
    before, after = run(tokens, ids), run(changed, ids)
    assert np.abs(before[:, :11] - after[:, :11]).max() > 1e-3
    np.testing.assert_array_equal(before[:, 11:], after[:, 11:])


def test_a_later_token_changes_no_earlier_logits():
    _, run = mixed_model()
    tokens = np.asarray(tokens_for(small_config(), 3, 20))
    ids = np.zeros((3, 20), np.int32)
    changed = tokens.copy()
    changed[:, 13] = (changed[:, 13] + 1) % 32
    before, after = run(tokens, ids), run(changed, ids)
    np.testing.assert_array_equal(before[:, :13], after[:, :13])
    assert np.abs(before[:, 13:] - after[:, 13:]).max() > 1e-3


def test_a_row_alone_equals_the_row_in_a_batch():
    _, run = mixed_model()
    tokens = tokens_for(small_config(), 3, 20)
    ids = jnp.zeros((3, 20), jnp.int32)
    together = run(tokens, ids)
    for row in (0, 2):
        assert_close(run(tokens[row : row + 1], ids[:1])[0], together[row], F32_FORWARD)


def test_loss_predicts_within_documents_only():
    logits = jax.random.normal(jax.random.key(0), (2, 7, 5))
    tokens = np.array([[1, 2, 3, 4, 0, 1, 2], [4, 3, 2, 1, 0, 1, 2]])
    ids = np.array([[0, 0, 0, 1, 1, -1, -1], [-1, 2, 2, 2, 2, 2, 2]])
    model = SimpleNamespace(forward=lambda tokens, ids: (logits, Aux(None, jnp.float32(0))))
    loss, aux = lm_loss(model, tokens, ids)
    pairs = [(0, 0), (0, 1), (0, 3), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5)]  # (row, position of the token before)
    log_probabilities = np.asarray(jax.nn.log_softmax(logits))
    expected = -np.mean([log_probabilities[row, t, tokens[row, t + 1]] for row, t in pairs])
    assert_close(loss, expected, F32_FORWARD)
    assert aux.tokens == len(pairs)
    loss, aux = lm_loss(model, tokens)
    assert aux.tokens == 12
    loss, aux = lm_loss(model, tokens, np.full((2, 7), -1))
    assert (loss, aux.tokens) == (0, 0)


def test_loads_count_every_choice_of_a_valid_token():
    model, _ = mixed_model()
    graphdef, state = nnx.split(model)
    tokens = tokens_for(model.config, 3, 20)
    ids = jnp.where(jnp.arange(20) < 15, 0, -1) * jnp.ones((3, 1), jnp.int32)
    aux = jax.jit(lambda state: nnx.merge(graphdef, state).forward(tokens, ids)[1])(state)
    chex.assert_shape(aux.router_loads, (1, 4))
    assert aux.router_loads.sum() == 3 * 15 * model.config.top_k
    assert aux.tokens == 45


@pytest.mark.parametrize("scan", [False, True])
def test_balancer_moves_each_bias_towards_the_mean(scan):
    """Every layer's own loads reach its own bias, in layer order, stacked or not."""
    config = small_config(num_layers=7, first_dense_layers=1, residual="standard", scan_layers=scan, **EXPERTS)
    model = KimiLM(config, rngs=nnx.Rngs(0))
    assert (model.layers.repetition.count > 1) == scan
    loads = np.asarray(jax.random.permutation(jax.random.key(0), 24).reshape(6, 4), np.float32)
    update_router_biases(model, jnp.asarray(loads), 0.01)
    for layer in range(1, 7):
        row = loads[layer - 1]
        np.testing.assert_allclose(model.layers.layer(layer).ffn.bias[...], 0.01 * np.sign(row.mean() - row))
    with pytest.raises(ValueError, match=r"loads must be .*\(6, 4\).*got \(5, 4\)"):
        update_router_biases(model, jnp.asarray(loads[:5]), 0.01)


def test_bfloat16_computes_in_bfloat16_and_answers_in_float32():
    config = small_config(dtype="bfloat16")
    model = small_model(config)
    tokens = tokens_for(config, 1, 12)
    logits = forward(model)(tokens)
    assert logits.dtype == jnp.float32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    exact = small_model(small_config())
    assert_close(logits, forward(exact)(tokens), 0.05, "bf16 logits")
    assert np.any(np.asarray(logits) != np.asarray(forward(exact)(tokens)))


def test_bad_tokens_raise():
    model, _ = mixed_model()
    with pytest.raises(ValueError, match=r"tokens must lie in \[0, 32\), got 0 to 32"):
        model(np.array([[0, 32]]))
    with pytest.raises(ValueError, match=r"tokens must be integers \[B, T\], got int.*\[3\]"):
        model(np.array([0, 1, 2]))
    with pytest.raises(ValueError, match="tokens must be integers"):
        model(np.zeros((1, 3), np.float32))
    with pytest.raises(ValueError, match="segment_ids must have the shape"):
        model(np.zeros((1, 3), np.int32), np.zeros((1, 4), np.int32))
