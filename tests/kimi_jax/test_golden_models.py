"""Two small published-format checkpoints: logits, gradients, every hidden activation, caches and generated tokens."""

import dataclasses
import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from kimi_jax import KimiLM, generate, get_config
from kimi_jax.configs import layer_pattern_from_one_based
from kimi_jax.layers.kda import KDALayer
from kimi_jax.layers.moe import MoE
from tests.support import GOLDEN, assert_close, golden, rel_l2

# The golden README's bounds for float32 whole models, built to amplify small mistakes.
LOGITS, GRADIENTS = 5e-4, 5e-3
MODELS = ("kimi_linear_a", "kimi_k3_a")


class Case(NamedTuple):
    model: KimiLM
    weights: dict[str, np.ndarray]
    arrays: dict[str, np.ndarray]


def parameters_by_official_name(model: KimiLM) -> dict[str, tuple[nnx.Variable, int | None]]:
    """Official tensor name (without prefix) -> (our variable, expert index for stacked experts)."""
    names = {"embed_tokens": model.embedding, "norm": model.final_norm.weight, "lm_head": model.head}
    if model.final_mix is not None:
        names |= {"output_attn_res_proj": model.final_mix.query, "output_attn_res_norm": model.final_mix.key_scale}
    for index, layer in enumerate(model.layers.lead):
        attention, ffn, here = layer.attention, layer.ffn, {}
        here |= {"input_layernorm": layer.attention_norm.weight, "post_attention_layernorm": layer.ffn_norm.weight}
        for site, mix in (("self_attention", layer.attention_mix), ("mlp", layer.ffn_mix)):
            if mix is not None:
                here |= {f"{site}_res_proj": mix.query, f"{site}_res_norm": mix.key_scale}
        if isinstance(attention, KDALayer):
            here |= {f"self_attn.{x}_proj": getattr(attention, x) for x in ("q", "k", "v", "f_a", "f_b", "b", "o")}
            here |= {f"self_attn.{x}_conv1d": getattr(attention, f"{x}_conv").weight for x in "qkv"}
            here |= {"self_attn.A_log": attention.A_log, "self_attn.dt_bias": attention.dt_bias}
            here |= {"self_attn.o_norm": attention.o_norm.weight}
            gate = ("g",) if attention.gate_form == "full" else ("g_a", "g_b")
            here |= {f"self_attn.{x}_proj": getattr(attention, x) for x in gate}
        else:
            here |= {
                "self_attn.kv_a_proj_with_mqa": attention.kv_a,
                "self_attn.kv_a_layernorm": attention.kv_norm.weight,
            }
            here |= {"self_attn.kv_b_proj": attention.kv_b, "self_attn.o_proj": attention.o}
            if attention.q_lora_rank is None:
                here |= {"self_attn.q_proj": attention.q}
            else:
                here |= {"self_attn.q_a_proj": attention.q_a, "self_attn.q_a_layernorm": attention.q_norm.weight}
                here |= {"self_attn.q_b_proj": attention.q_b}
            if attention.output_gate:
                here |= {"self_attn.g_proj": attention.g}
        dense, prefix = (ffn.shared, "block_sparse_moe.shared_experts") if isinstance(ffn, MoE) else (ffn, "mlp")
        here |= {f"{prefix}.{x}_proj": getattr(dense, x) for x in ("gate", "up", "down")}
        if isinstance(ffn, MoE):
            here |= {"block_sparse_moe.gate": ffn.router, "block_sparse_moe.gate.e_score_correction_bias": ffn.bias}
            if ffn.latent is not None:
                routed = {"down_proj": ffn.latent_down, "norm": ffn.latent_norm.weight, "up_proj": ffn.latent_up}
                here |= {f"block_sparse_moe.routed_expert_{name}": variable for name, variable in routed.items()}
            for expert in range(ffn.num_experts):
                stacked = {"w1": ffn.gate, "w3": ffn.up, "w2": ffn.down}
                here |= {f"block_sparse_moe.experts.{expert}.{x}": (w, expert) for x, w in stacked.items()}
        names |= {f"layers.{index}.{name}": variable for name, variable in here.items()}
    return {name: entry if isinstance(entry, tuple) else (entry, None) for name, entry in names.items()}


def ours(name: str, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """An official tensor in our layout: [in, out] instead of [out, in]; shape is that of our parameter."""
    if name.endswith("embed_tokens"):
        return tensor
    if tensor.ndim == 2 and len(shape) > 1:
        tensor = tensor.T
    return tensor.reshape(shape)


def strip(name: str) -> str:
    return name.removeprefix("language_model.").removeprefix("model.").removesuffix(".weight")


@functools.cache
def case(folder: str) -> Case:
    raw = json.loads((GOLDEN / folder / "config.json").read_text())
    raw = raw.get("text_config", raw)
    linear = raw["linear_attn_config"]
    attn_res_layers = raw.get("attn_res_block_size")
    config = get_config(
        "tiny",
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        mla_layers=layer_pattern_from_one_based(
            linear["kda_layers"], linear["full_attn_layers"], raw["num_hidden_layers"]
        ),
        kda_num_heads=linear["num_heads"],
        kda_head_dim=linear["head_dim"],
        lower_bound=linear.get("gate_lower_bound"),
        full_rank_gate=linear.get("use_full_rank_gate", False),
        mla_num_heads=raw["num_attention_heads"],
        q_lora_rank=raw["q_lora_rank"],
        kv_lora_rank=raw["kv_lora_rank"],
        qk_nope_dim=raw["qk_nope_head_dim"],
        qk_rope_dim=raw["qk_rope_head_dim"],
        v_dim=raw["v_head_dim"],
        mla_output_gate=raw.get("mla_use_output_gate", False),
        ffn_width=raw["intermediate_size"],
        activation="situ" if raw["hidden_act"] == "situ" else "swiglu",
        num_experts=raw["num_experts"],
        top_k=raw.get("num_experts_per_token"),
        num_shared_experts=raw["num_shared_experts"],
        expert_width=raw["moe_intermediate_size"],
        latent_width=raw.get("routed_expert_hidden_size"),
        routed_scaling_factor=raw["routed_scaling_factor"],
        residual="block_attn_res" if attn_res_layers else "standard",
        block_size=2 * (attn_res_layers or 1),
        norm_eps=raw["rms_norm_eps"],
        chunk_size=32,
    )
    model = KimiLM(config, rngs=nnx.Rngs(0))
    weights = {strip(name): value for name, value in load_file(GOLDEN / folder / "model.safetensors").items()}
    weights = {name: value for name, value in weights.items() if "layers.0.self_attention_res" not in name}  # unused
    targets = parameters_by_official_name(model)
    assert weights.keys() == targets.keys(), weights.keys() ^ targets.keys()
    for name, (variable, expert) in targets.items():
        shape = variable.shape if expert is None else variable.shape[1:]
        value = ours(name, weights[name], shape)
        variable[...] = value if expert is None else variable[...].at[expert].set(value)
    return Case(model, weights, golden(folder, "golden"))


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
    model, _, arrays = case("kimi_k3_a")
    record = trace(*nnx.split(model), jnp.asarray(arrays["input_ids"]))
    for name in ("attn_mix_b0", "attn_b0", "mlp_mix_b0", "partial_b0", "bank_b0", "output_mix_b0", "final_norm_b0"):
        assert record[name].shape == arrays[name].shape
        for row in range(len(record[name])) if record[name].ndim == 3 else ():
            assert_close(record[name][row], arrays[name][row], LOGITS, f"{name}[{row}]")
        assert_close(record[name], arrays[name], LOGITS, name)


def test_hidden_states_of_kimi_linear():
    model, _, arrays = case("kimi_linear_a")
    record = trace(*nnx.split(model), jnp.asarray(arrays["input_ids"]))
    assert_close(record["partial_b0"], arrays["hidden_states_b0"][1:], LOGITS, "hidden states")
    assert_close(record["attn_b0"], arrays["attn_out_b0"], LOGITS, "attention outputs")
    assert_close(record["final_norm_b0"], arrays["final_norm_b0"], LOGITS, "final norm")


@pytest.mark.slow
@pytest.mark.parametrize("folder", MODELS)
def test_logits_loss_and_gradients(folder):
    model, weights, arrays = case(folder)
    tokens, labels = jnp.asarray(arrays["input_ids"]), arrays["labels"]
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        logits = nnx.merge(graphdef, params, rest)(tokens)
        kept = labels[:, 1:] != -100
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), np.where(kept, labels[:, 1:], 0)[..., None], 2)
        return -jnp.sum(chosen[..., 0] * kept) / kept.sum(), logits

    (value, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert_close(logits, arrays["logits_f64"], LOGITS, "logits")
    assert_close(value, arrays["loss_f64"], LOGITS, "loss")
    expected = {strip(name): value for name, value in golden(folder, "gradients").items()}
    checked = 0
    for name, (variable, expert) in parameters_by_official_name(nnx.merge(graphdef, gradients, rest)).items():
        if name not in expected or name.endswith("e_score_correction_bias"):
            continue
        value = variable[...] if expert is None else variable[expert]
        assert_close(value, ours(name, expected[name], value.shape), GRADIENTS, name)
        checked += 1
    assert checked >= 20


@pytest.mark.slow
@pytest.mark.parametrize("folder", MODELS)
def test_generation_and_caches(folder):
    model, _, arrays = case(folder)
    ids = generate(model, arrays["generate_prompt_ids"], arrays["generate_ids"].shape[1])
    np.testing.assert_array_equal(ids, arrays["generate_ids"])

    prefix = int(arrays["cache_prefix_len"])
    tokens = jnp.asarray(arrays["input_ids"])[:, :prefix]
    extend = jax.jit(lambda state, cache: nnx.merge(nnx.graphdef(model), state).extend(tokens, cache)[1])
    cache = extend(nnx.state(model), model.init_cache(tokens.shape[0], prefix + 5))
    kda = [c for c, kind in zip(cache.layers.lead, model.config.layer_kinds, strict=True) if kind == "kda"]
    mla = [c for c, kind in zip(cache.layers.lead, model.config.layer_kinds, strict=True) if kind == "mla"]
    assert_close(np.stack([c.state for c in kda]), arrays["cache_kda_state"], LOGITS, "states")
    assert_close(np.stack([c.latent[:, :prefix] for c in mla]), arrays["cache_mla_latent"], LOGITS, "latents")
    assert_close(np.stack([c.k_rope[:, :prefix] for c in mla]), arrays["cache_mla_krope"], LOGITS, "shared keys")
    tails = np.stack([np.concatenate([c.q_tail, c.k_tail, c.v_tail], axis=-1) for c in kda])
    expected = arrays["cache_kda_conv"]
    if folder == "kimi_linear_a":  # channels first, and one column more than a width of 4 needs
        expected = np.swapaxes(expected, -1, -2)[:, :, 1:]
    assert_close(tails, expected, LOGITS, "convolution inputs")


@pytest.mark.parametrize("folder", MODELS)
def test_padding_on_either_side_changes_no_logits(folder):
    model, _, arrays = case(folder)
    forward = jax.jit(lambda state, tokens, ids: nnx.merge(nnx.graphdef(model), state)(tokens, ids))
    for side in ("left", "right"):
        mask = arrays[f"pad_{side}_mask"].astype(bool)
        logits = forward(nnx.state(model), arrays[f"pad_{side}_ids"], jnp.where(mask, 0, -1))
        assert_close(np.asarray(logits)[mask], arrays["pad_row_logits"], LOGITS, f"{side}-padded logits")


def test_one_wrong_block_size_is_visible():
    """The activations above can tell: with blocks one layer longer the logits are far off."""
    model, _, arrays = case("kimi_k3_a")
    longer = KimiLM(dataclasses.replace(model.config, block_size=8), rngs=nnx.Rngs(0))
    nnx.update(longer, nnx.state(model))
    logits = jax.jit(lambda state: nnx.merge(nnx.graphdef(longer), state)(jnp.asarray(arrays["input_ids"])))(
        nnx.state(longer)
    )
    assert rel_l2(logits, arrays["logits_f64"]) > 0.1
