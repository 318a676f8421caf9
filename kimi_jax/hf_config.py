"""The published config.json of Kimi Linear and of Kimi K3's text tower <-> ModelConfig.

K3 wraps the text tower's settings in "text_config"; those have Kimi Linear's keys and a few more. Keys that say nothing
about the text tower's maths (special tokens, position limits, generation) are not kept.
"""

from collections.abc import Mapping
from typing import Any

from .configs import ModelConfig, layer_pattern_from_one_based, replace_fields

FAMILIES = {"kimi_linear": "KimiLinearForCausalLM", "kimi_k3": "KimiK3ForConditionalGeneration"}

# What the models here can do, where the format leaves a choice. A key that is absent is taken to agree.
_SUPPORTED = {
    "mla_use_nope": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "moe_layer_freq": (1,),
    "latent_moe_use_norm": (True,),
    "tie_word_embeddings": (False,),
    "num_nextn_predict_layers": (0, None),
    "topk_method": ("noaux_tc",),
    "hidden_act": ("silu", "situ"),
    "model_type": ("kimi_linear",),
}
_ACTIVATIONS = {"silu": "swiglu", "situ": "situ"}

# Ours -> theirs, where only the name differs.
_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "mla_num_heads": "num_attention_heads",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_dim": "qk_nope_head_dim",
    "qk_rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
    "ffn_width": "intermediate_size",
    "norm_eps": "rms_norm_eps",
}
_LINEAR_NAMES = {"kda_num_heads": "num_heads", "kda_head_dim": "head_dim", "conv_width": "short_conv_kernel_size"}
_MOE_NAMES = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_token",
    "expert_width": "moe_intermediate_size",
    "first_dense_layers": "first_k_dense_replace",
    "renormalize": "moe_renormalize",
    "routed_scaling_factor": "routed_scaling_factor",
}


def config_from_hf(raw: Mapping[str, Any], fields: Mapping[str, Any] | None = None) -> ModelConfig:
    """The ModelConfig of a parsed config.json, with some `fields` of it replaced.

    What the file leaves open, and where peers differ, has ModelConfig's defaults: router_weights="unbiased" as vLLM,
    mla_inner_norm_eps=1e-6 as Hugging Face. Raises ValueError for another family, for keys that are missing (all are
    named), and for settings that the models here do not have.
    """
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type={family!r} is another family of models; known: {', '.join(FAMILIES)}")
    text = raw if family == "kimi_linear" else raw.get("text_config")
    if not isinstance(text, Mapping) or not isinstance(linear := text.get("linear_attn_config"), Mapping):
        missing = "linear_attn_config" if isinstance(text, Mapping) else "text_config"
        raise ValueError(f"config.json of a {family} model has no {missing}")
    _check_supported(text)
    read = _Reader(text)
    values = {ours: read(theirs) for ours, theirs in _NAMES.items()}
    read_linear = _Reader(linear, "linear_attn_config.")
    values |= {ours: read_linear(theirs) for ours, theirs in _LINEAR_NAMES.items()}
    pattern = read_linear("kda_layers"), read_linear("full_attn_layers")
    if text.get("num_experts"):
        values |= {ours: read(theirs) for ours, theirs in _MOE_NAMES.items()}
        values |= {"num_shared_experts": text.get("num_shared_experts") or 0}
        if text.get("use_grouped_topk"):
            values |= {"num_expert_groups": read("num_expert_group"), "topk_groups": read("topk_group")}
    if text.get("hidden_act") == "situ":
        values |= {"situ_beta": read("activation_situ_beta"), "situ_linear_beta": read("activation_situ_linear_beta")}
    if missing := read.missing + read_linear.missing:
        raise ValueError(f"config.json of a {family} model lacks {', '.join(missing)}")
    attn_res_layers = text.get("attn_res_block_size")
    values |= {
        "mla_layers": layer_pattern_from_one_based(*pattern, values["num_layers"]),
        "lower_bound": linear.get("gate_lower_bound"),
        "full_rank_gate": bool(linear.get("use_full_rank_gate", False)),
        "q_lora_rank": text.get("q_lora_rank"),
        "mla_output_gate": bool(text.get("mla_use_output_gate", False)),
        "activation": _ACTIVATIONS[text.get("hidden_act", "silu")],
        "latent_width": text.get("routed_expert_hidden_size"),
        "residual": "block_attn_res" if attn_res_layers else "standard",
        "block_size": 2 * (attn_res_layers or 1),  # we count sub-layers
        "dtype": text.get("dtype") or text.get("torch_dtype") or raw.get("dtype") or "float32",
    }
    return replace_fields(ModelConfig(name=family, **values), fields or {})


def config_to_hf(config: ModelConfig, *, dtype: str, mxfp4: bool = False) -> dict[str, Any]:
    """The config.json of a model whose weights are stored in dtype. ValueError names the fields that it cannot hold."""
    unheld = {
        "kda_num_value_heads": config.value_heads != config.kda_num_heads,
        "kda_value_head_dim": config.value_head_dim != config.kda_head_dim,
        "gate_rank": config.gate_rank not in (None, config.value_head_dim),
        "output_gate": config.output_gate != "sigmoid",
        "conv_width": config.conv_width < 1,
        "mla_softmax1": config.mla_softmax1,
        "residual": config.residual not in ("standard", "block_attn_res"),
        **_other_parameters(config),
        "depth_heads": config.depth_heads != 1,
        "depth_window": config.depth_window is not None,
        "block_size": config.residual == "block_attn_res" and config.block_size % 2 == 1,
    }
    if named := [f"{field}={getattr(config, field)!r}" for field, unhold in unheld.items() if unhold]:
        raise ValueError(f"the published format has no place for {', '.join(named)}")
    layers = range(1, config.num_layers + 1)
    linear = {theirs: getattr(config, ours) for ours, theirs in _LINEAR_NAMES.items()}
    linear |= {
        "kda_layers": [layer for layer in layers if config.layer_kinds[layer - 1] == "kda"],
        "full_attn_layers": [layer for layer in layers if config.layer_kinds[layer - 1] == "mla"],
        "use_full_rank_gate": config.full_rank_gate,
    }
    if config.lower_bound is not None:
        linear["gate_lower_bound"] = config.lower_bound
    text = {"architectures": [FAMILIES["kimi_linear"]], "model_type": "kimi_linear", "dtype": dtype}
    text |= {theirs: getattr(config, ours) for ours, theirs in _NAMES.items()}
    text |= {
        "num_key_value_heads": config.mla_num_heads,
        "q_lora_rank": config.q_lora_rank,
        "mla_use_nope": True,
        "mla_use_output_gate": config.mla_output_gate,
        "hidden_act": next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == config.activation),
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "linear_attn_config": linear,
        "num_experts": None,
    }
    if config.activation == "situ":
        text |= {
            "activation_situ_beta": config.situ_beta,
            "activation_situ_linear_beta": config.situ_linear_beta,
        }
    if config.num_experts:
        text |= {theirs: getattr(config, ours) for ours, theirs in _MOE_NAMES.items()}
        text |= {
            "num_shared_experts": config.num_shared_experts,
            "moe_router_activation_func": "sigmoid",
            "moe_layer_freq": 1,
            "use_grouped_topk": True,
            "num_expert_group": config.num_expert_groups,
            "topk_group": config.topk_groups,
        }
        if config.latent_width is not None:
            text |= {"routed_expert_hidden_size": config.latent_width, "latent_moe_use_norm": True}
    if config.residual == "block_attn_res":
        text["attn_res_block_size"] = config.block_size // 2  # they count transformer layers
    wrapped = config.hf_root.startswith("language_model.")
    raw = {"architectures": [FAMILIES["kimi_k3"]], "model_type": "kimi_k3", "text_config": text} if wrapped else text
    if mxfp4:
        raw |= {"quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}}
    return raw


def check_parameters(config: ModelConfig) -> None:
    """ValueError, naming the fields, if a model has other parameters than the published ones: at its depth mixes the
    query and key norm, in KDA a decay per channel, in MLA queries and keys that were trained without positions."""
    mixes = config.residual in ("standard", "full_attn_res", "block_attn_res")
    other = {"residual": not mixes, **_other_parameters(config)}
    if named := [f"{field}={getattr(config, field)!r}" for field, is_other in other.items() if is_other]:
        raise ValueError(f"the published format has no parameters for {', '.join(named)}")


def _other_parameters(config: ModelConfig) -> dict[str, bool]:
    return {
        "kda_gate": config.kda_gate != "channel",
        "mla_rope_theta": config.mla_rope_theta is not None,
        "depth_weights": config.depth_weights != "softmax",
        "depth_key_norm": not config.depth_key_norm,
        "depth_query": config.depth_query != "parameter",
    }


class _Reader:
    """Reads keys and remembers those that are missing, so that all can be named at once."""

    def __init__(self, values: Mapping[str, Any], where: str = ""):
        self._values, self._where, self.missing = values, where, []

    def __call__(self, key: str) -> Any:
        if self._values.get(key) is None:
            self.missing.append(self._where + key)
        return self._values.get(key)


def _check_supported(text: Mapping[str, Any]) -> None:
    other = [
        f"{key}={text[key]!r} (supported: {' or '.join(map(repr, allowed))})"
        for key, allowed in _SUPPORTED.items()
        if key in text and text[key] not in allowed
    ]
    heads, kv_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        other.append(f"num_key_value_heads={kv_heads} (supported: num_attention_heads={heads})")
    if other:
        raise ValueError(f"config.json asks for what the models here do not have: {', '.join(other)}")
