"""Every sub-layer of two tiny published models, fed with their own activations: outputs, routing, and caches."""

import functools
import json
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from kimi_jax.layers import MLA, FeedForward, KDALayer, MoE, RMSNorm
from tests.kimi_jax.layers.layer_support import call
from tests.support import GOLDEN, golden

TOLERANCE = 5e-4  # of max|a-b| / max|b|, as the golden files suggest for float32: they are built to amplify mistakes


class Tiny(NamedTuple):
    """A golden model: its config, its weights, and per layer the inputs and outputs of attention and MLP."""

    config: dict
    weights: dict
    z: dict
    attn_in: np.ndarray  # before the norm
    attn_out: np.ndarray
    mlp_in: np.ndarray  # before the norm
    mlp_out: np.ndarray


@functools.cache
def tiny(name) -> Tiny:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    config = config.get("text_config", config)
    weights = load_file(GOLDEN / name / "model.safetensors")
    weights = {key.split("model.layers.")[1]: value for key, value in weights.items() if "model.layers." in key}
    z = golden(name, "golden")
    if "hidden_states_b0" in z:
        hidden, attn = z["hidden_states_b0"], z["attn_out_b0"]
        return Tiny(config, weights, z, hidden[:-1], attn, hidden[:-1] + attn, hidden[1:] - hidden[:-1] - attn)
    attn, partial, block = z["attn_b0"], z["partial_b0"], config["attn_res_block_size"]
    before = np.concatenate([z["embed_b0"][None], partial[:-1]])
    starts = (np.arange(len(attn)) % block == 0)[:, None, None]
    return Tiny(
        config, weights, z, z["attn_mix_b0"], attn, z["mlp_mix_b0"], partial - attn - np.where(starts, 0, before)
    )


MODELS = ("kimi_linear_a", "kimi_k3_a")
LAYERS = [(name, layer) for name in MODELS for layer in range(7)]


def assert_near(x, ref, name):
    error = np.abs(np.asarray(x) - ref).max() / np.abs(ref).max()
    assert error <= TOLERANCE, f"{name}: {error:.2g}"


def is_mla(model, layer):
    return layer + 1 in model.config["linear_attn_config"]["full_attn_layers"]


def assign(parameter, value):
    assert parameter.shape == value.shape, f"{parameter.shape} is given {value.shape}"
    parameter[...] = value


def assign_all(layer, weights, prefix, names):
    for ours, theirs in names.items():
        value = weights[f"{prefix}.{theirs}.weight"]
        value = value[:, 0] if "conv" in theirs else value.T  # norms are vectors, linear maps are stored [out, in]
        parameter = functools.reduce(getattr, ours.split("."), layer)
        assign(parameter, value)


def attention(model, index):
    c, prefix = model.config, f"{index}.self_attn"
    if is_mla(model, index):
        q_lora, gate = c["q_lora_rank"], c.get("mla_use_output_gate", False)
        layer = MLA(
            c["hidden_size"], num_heads=c["num_attention_heads"], q_lora_rank=q_lora, kv_lora_rank=c["kv_lora_rank"],
            qk_nope_dim=c["qk_nope_head_dim"], qk_rope_dim=c["qk_rope_head_dim"], v_dim=c["v_head_dim"],
            output_gate=gate, rngs=nnx.Rngs(0),
        )  # fmt: skip
        names = {"kv_a": "kv_a_proj_with_mqa", "kv_norm.weight": "kv_a_layernorm", "kv_b": "kv_b_proj", "o": "o_proj"}
        names |= {"q": "q_proj"} if q_lora is None else {"q_a": "q_a_proj", "q_b": "q_b_proj"}
        names |= {} if q_lora is None else {"q_norm.weight": "q_a_layernorm"}
        names |= {"g": "g_proj"} if gate else {}
        assign_all(layer, model.weights, prefix, names)
        return layer
    linear = c["linear_attn_config"]
    heads, dim, full = linear["num_heads"], linear["head_dim"], linear.get("use_full_rank_gate", False)
    layer = KDALayer(
        c["hidden_size"], num_heads=heads, head_k=dim, head_v=dim, lower_bound=linear.get("gate_lower_bound"),
        full_rank_gate=full, norm_eps=c["rms_norm_eps"], rngs=nnx.Rngs(0),
    )  # fmt: skip
    names = {f"{x}": f"{x}_proj" for x in ("q", "k", "v", "o", "f_a", "f_b", "b")}
    names |= {f"{x}_conv.weight": f"{x}_conv1d" for x in "qkv"} | {"o_norm.weight": "o_norm"}
    names |= {"g": "g_proj"} if full else {"g_a": "g_a_proj", "g_b": "g_b_proj"}
    assign_all(layer, model.weights, prefix, names)
    assign(layer.A_log, model.weights[f"{prefix}.A_log"].reshape(-1)[:heads])  # K3 stores it zero-padded
    assign(layer.dt_bias, model.weights[f"{prefix}.dt_bias"])
    return layer


def feed_forward(model, index):
    c = model.config
    options = dict(activation="situ" if c["hidden_act"] == "situ" else "swiglu", rngs=nnx.Rngs(0))
    if index < c["first_k_dense_replace"]:
        layer = FeedForward(c["hidden_size"], c["intermediate_size"], **options)
        dense = "mlp" if f"{index}.mlp.up_proj.weight" in model.weights else "block_sparse_moe"
        assign_all(layer, model.weights, f"{index}.{dense}", {x: f"{x}_proj" for x in ("gate", "up", "down")})
        return layer
    layer = MoE(
        c["hidden_size"], c["moe_intermediate_size"], c["num_experts"], c["num_experts_per_token"],
        c["num_shared_experts"], latent=c.get("routed_expert_hidden_size"), latent_norm_eps=c["rms_norm_eps"],
        routed_scaling_factor=c["routed_scaling_factor"], **options,
    )  # fmt: skip
    prefix = f"{index}.block_sparse_moe"
    names = {"router": "gate"} | {f"shared.{x}": f"shared_experts.{x}_proj" for x in ("gate", "up", "down")}
    if layer.latent is not None:
        names |= {f"latent_{x}": f"routed_expert_{x}_proj" for x in ("down", "up")}
        names |= {"latent_norm.weight": "routed_expert_norm"}
    assign_all(layer, model.weights, prefix, names)
    assign(layer.bias, model.weights[f"{prefix}.gate.e_score_correction_bias"])
    for ours, theirs in {"gate": "w1", "up": "w3", "down": "w2"}.items():
        experts = [model.weights[f"{prefix}.experts.{e}.{theirs}.weight"].T for e in range(c["num_experts"])]
        assign(getattr(layer, ours), np.stack(experts))
    return layer


def normed(model, index, name, x):
    norm = RMSNorm(model.config["hidden_size"], eps=model.config["rms_norm_eps"], rngs=nnx.Rngs(0))
    assign(norm.weight, model.weights[f"{index}.{name}.weight"])
    return norm(jnp.asarray(x))[None]


@pytest.mark.parametrize("name, index", LAYERS)
def test_attention(name, index):
    model = tiny(name)
    x = normed(model, index, "input_layernorm", model.attn_in[index])
    y, _ = call(attention(model, index), x)
    assert_near(y[0], model.attn_out[index], "y")


@pytest.mark.parametrize("name, index", LAYERS)
def test_attention_with_a_cache(name, index):
    """A prefix leaves the published cache behind; the rest, in a chunk and token by token, gives the same outputs."""
    model = tiny(name)
    layer, mla = attention(model, index), is_mla(model, index)
    x = normed(model, index, "input_layernorm", model.attn_in[index])
    n = int(model.z["cache_prefix_len"])
    y, cache = call(layer, x[:, :n], cache=layer.init_cache(1, 70) if mla else layer.init_cache(1))
    assert_near(y[0], model.attn_out[index][:n], "prefix")

    place = sum(is_mla(model, i) == mla for i in range(index))
    if mla:
        assert_near(cache.latent[0, :n], model.z["cache_mla_latent"][place, 0], "latent")
        assert_near(cache.k_rope[0, :n], model.z["cache_mla_krope"][place, 0], "k_rope")
    else:
        tails = jnp.concatenate([cache.q_tail, cache.k_tail, cache.v_tail], axis=-1)[0]
        conv = model.z["cache_kda_conv"][place, 0]
        assert_near(tails, conv[:, -3:].T if conv.shape[-1] == 4 else conv, "raw inputs of the convolution")
        assert_near(cache.state[0], model.z["cache_kda_state"][place, 0], "state")

    for start, stop in ((n, 67), (67, 68), (68, 69), (69, 70)):
        y, cache = call(layer, x[:, start:stop], cache=cache)
        assert_near(y[0], model.attn_out[index][start:stop], f"tokens {start} to {stop}")


@pytest.mark.parametrize("name, index", LAYERS)
def test_feed_forward(name, index):
    model = tiny(name)
    layer = feed_forward(model, index)
    x = normed(model, index, "post_attention_layernorm", model.mlp_in[index])
    if not isinstance(layer, MoE):
        assert_near(call(layer, x)[0], model.mlp_out[index], "y")
        return
    y, load = call(layer, x)
    assert_near(y[0], model.mlp_out[index], "y")
    ids, weights = (np.asarray(part[0]) for part in layer.route(x))
    place = list(model.z["router_layers"]).index(index)
    expected_ids = model.z["router_topk_ids_sorted"][place, :70]
    ascending = np.argsort(ids, axis=-1)
    np.testing.assert_array_equal(np.take_along_axis(ids, ascending, axis=-1), expected_ids)
    weights = np.take_along_axis(weights, ascending, axis=-1)
    assert_near(weights, model.z["router_topk_weights"][place, :70], "router weights")
    np.testing.assert_array_equal(load, np.bincount(expected_ids.ravel(), minlength=layer.num_experts))
