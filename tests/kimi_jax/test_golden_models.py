"""Small checkpoints in the published format: logits, gradients, hidden activations, caches and generated tokens."""

import dataclasses
import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax import KimiLM, generate, load_hf
from kimi_jax.hf_tensors import official_tensors
from tests.support import GOLDEN, golden, rel_l2

# The golden README's bounds on max|a-b| / max|b| for float32 whole models, built to amplify small mistakes.
LOGITS, GRADIENTS = 5e-4, 5e-3
MODELS = ("kimi_linear_a", "kimi_k3_a")
STORED_OTHERWISE = ("kimi_k3_b",)  # two shards, bfloat16, MXFP4 experts, A_log padded


class Case(NamedTuple):
    model: KimiLM
    arrays: dict[str, np.ndarray]


@functools.cache
def case(folder: str) -> Case:
    return Case(load_hf(GOLDEN / folder, dtype="float32", chunk_size=32), golden(folder, "golden"))


def assert_within(x, ref, bound: float, name: str) -> None:
    """Fail unless x is finite, has the shape of ref and max|x - ref| <= bound * max|ref|."""
    x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
    assert x.shape == ref.shape, f"{name}: {x.shape} against {ref.shape}"
    error = np.abs(x - ref).max()
    assert error <= bound * np.abs(ref).max(), f"{name}: {error:.3g} of {np.abs(ref).max():.3g} is over {bound:.3g}"


@functools.partial(jax.jit, static_argnums=0)
def trace(graphdef, state, tokens):
    """Every hidden activation of a forward pass."""
    model = nnx.merge(graphdef, state)
    residual, record = model.residual, {}
    depth = residual.start(model.embedding[...][tokens])
    for name in ("attn_mix_b0", "attn_b0", "mlp_mix_b0", "partial_b0"):
        record[name] = []
    for layer in model.layers.lead:
        mixed = residual.mix(depth, layer.attention_mix)
        attended, _ = layer.attention(layer.attention_norm(mixed))
        record["attn_mix_b0"].append(mixed[0])
        record["attn_b0"].append(attended[0])
        record["mlp_mix_b0"].append(residual.mix(residual.add(depth, attended), layer.ffn_mix)[0])
        depth, _, _ = layer(depth, None)
        record["partial_b0"].append(depth.sum[0])
    mixed = residual.mix(depth, model.final_mix)
    record = {name: jnp.stack(values) for name, values in record.items()}
    record |= {"output_mix_b0": mixed[0], "final_norm_b0": model.final_norm(mixed)[0]}
    if depth.bank:
        record["bank_b0"] = jnp.stack([row[0] for row in depth.bank])
    return record


def test_hidden_activations_of_kimi_k3():
    model, arrays = case("kimi_k3_a")
    record = trace(*nnx.split(model), jnp.asarray(arrays["input_ids"]))
    for name in ("attn_mix_b0", "attn_b0", "mlp_mix_b0", "partial_b0", "bank_b0", "output_mix_b0", "final_norm_b0"):
        assert record[name].shape == arrays[name].shape
        for row in range(len(record[name])) if record[name].ndim == 3 else ():
            assert_within(record[name][row], arrays[name][row], LOGITS, f"{name}[{row}]")
        assert_within(record[name], arrays[name], LOGITS, name)


def test_hidden_states_of_kimi_linear():
    model, arrays = case("kimi_linear_a")
    record = trace(*nnx.split(model), jnp.asarray(arrays["input_ids"]))
    assert_within(record["partial_b0"], arrays["hidden_states_b0"][1:], LOGITS, "hidden states")
    assert_within(record["attn_b0"], arrays["attn_out_b0"], LOGITS, "attention outputs")
    assert_within(record["final_norm_b0"], arrays["final_norm_b0"], LOGITS, "final norm")


@pytest.mark.slow
@pytest.mark.parametrize("folder", MODELS + STORED_OTHERWISE)
def test_logits_loss_and_gradients(folder):
    model, arrays = case(folder)
    tokens, labels = jnp.asarray(arrays["input_ids"]), arrays["labels"]
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        logits = nnx.merge(graphdef, params, rest)(tokens)
        kept = labels[:, 1:] != -100
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), np.where(kept, labels[:, 1:], 0)[..., None], 2)
        return -jnp.sum(chosen[..., 0] * kept) / kept.sum(), logits

    (value, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert_within(logits, arrays["logits_f64"], LOGITS, "logits")
    assert_within(value, arrays["loss_f64"], LOGITS, "loss")
    expected = golden(folder, "gradients")
    norms = dict(zip(json.loads(bytes(expected["allgrad_names_json"])), expected["allgrad_l2"], strict=True))
    named = official_tensors(nnx.merge(graphdef, gradients, rest))
    for name, norm in norms.items():
        tensor = named[name]
        rows = tuple(row for row in (tensor.group, tensor.expert) if row is not None)
        gradient = tensor.layout.write(np.asarray(tensor.variable[rows] if rows else tensor.variable[...]))
        if name in expected:
            assert_within(gradient, expected[name], GRADIENTS, name)
        # Of a gradient that is only rounding noise the norm says nothing.
        np.testing.assert_allclose(np.linalg.norm(gradient), norm, rtol=GRADIENTS, atol=1e-6, err_msg=name)
    assert len(norms) > 200 and len(expected.keys() & norms.keys()) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("folder", MODELS)
def test_generation_and_caches(folder):
    model, arrays = case(folder)
    ids = generate(model, arrays["generate_prompt_ids"], arrays["generate_ids"].shape[1])
    np.testing.assert_array_equal(ids, arrays["generate_ids"])

    prefix = int(arrays["cache_prefix_len"])
    tokens = jnp.asarray(arrays["input_ids"])[:, :prefix]
    extend = jax.jit(lambda state, cache: nnx.merge(nnx.graphdef(model), state).extend(tokens, cache)[1])
    cache = extend(nnx.state(model), model.init_cache(tokens.shape[0], prefix + 5))
    kda = [c for c, kind in zip(cache.layers.lead, model.config.layer_kinds, strict=True) if kind == "kda"]
    mla = [c for c, kind in zip(cache.layers.lead, model.config.layer_kinds, strict=True) if kind == "mla"]
    assert_within(np.stack([c.state for c in kda]), arrays["cache_kda_state"], LOGITS, "states")
    assert_within(np.stack([c.latent[:, :prefix] for c in mla]), arrays["cache_mla_latent"], LOGITS, "latents")
    assert_within(np.stack([c.k_rope[:, :prefix] for c in mla]), arrays["cache_mla_krope"], LOGITS, "shared keys")
    tails = np.stack([np.concatenate([c.q_tail, c.k_tail, c.v_tail], axis=-1) for c in kda])
    expected = arrays["cache_kda_conv"]
    if folder == "kimi_linear_a":  # channels first, and one column more than a width of 4 needs
        expected = np.swapaxes(expected, -1, -2)[:, :, 1:]
    assert_within(tails, expected, LOGITS, "convolution inputs")


@pytest.mark.parametrize("folder", MODELS)
def test_padding_on_either_side_changes_no_logits(folder):
    model, arrays = case(folder)
    forward = jax.jit(lambda state, tokens, ids: nnx.merge(nnx.graphdef(model), state)(tokens, ids))
    for side in ("left", "right"):
        mask = arrays[f"pad_{side}_mask"].astype(bool)
        logits = forward(nnx.state(model), arrays[f"pad_{side}_ids"], jnp.where(mask, 0, -1))
        assert_within(np.asarray(logits)[mask], arrays["pad_row_logits"], LOGITS, f"{side}-padded logits")


def test_one_wrong_block_size_is_visible():
    """The activations above can tell: with blocks one layer longer the logits are far off."""
    model, arrays = case("kimi_k3_a")
    longer = KimiLM(dataclasses.replace(model.config, block_size=8), rngs=nnx.Rngs(0))
    nnx.update(longer, nnx.state(model))
    logits = jax.jit(lambda state: nnx.merge(nnx.graphdef(longer), state)(jnp.asarray(arrays["input_ids"])))(
        nnx.state(longer)
    )
    assert rel_l2(logits, arrays["logits_f64"]) > 0.1
