"""Floating-point operations of training, counted from a model's sizes, two to a multiplication with addition.

Per token, forward:

* matrices: 2 for each parameter that takes part (`active_parameter_count`) and each of the head's; the embedding is
  looked up;
* KDA, per head of size d: 6 d^2 + 3 C d + C^2 with C = 64 (Kimi Linear, equation 13);
* attention, per head: 2 T d, the lower triangle over a row of T tokens (equation 14), with d the mean size of keys and
  values; documents packed in a row make less of it, which is not counted, as it is not there;
* AttnRes: 4 D for each source of each mixture, a score and a weighted sum. The paper's count of these is not known.

The backward pass is twice the forward one. What is recomputed to save memory is not counted: it is no part
of the model.

Model FLOPs utilisation (MFU) is the share of a card's peak that these operations are, of all that it is busy with.
"""

import functools

from kimi_jax.configs import ModelConfig
from kimi_jax.model import active_parameter_count

CHUNK = 64  # of the paper's formula, whatever the kernel's
COUNTED = ("standard", "full_attn_res", "block_attn_res")

# FLOP/s in bfloat16, dense, of the makers' data sheets, by jax's name of a device.
PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12, "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5": 459e12, "TPU v6 lite": 918e12,
}  # fmt: skip


@functools.cache  # the parameters are counted on a model
def training_flops(config: ModelConfig, sequence_length: int) -> float:
    """Of one token, forward and backward, in rows of sequence_length.

    Raises NotImplementedError for a residual whose operations are not counted here.
    """
    if config.residual not in COUNTED:
        raise NotImplementedError(
            f"residual={config.residual!r}: its operations are not counted; {', '.join(COUNTED)} are"
        )
    matrices = 2.0 * (active_parameter_count(config) + config.vocab_size * config.hidden_size)
    d = config.kda_head_dim
    kda = config.value_heads * (6 * d * d + 3 * CHUNK * d + CHUNK * CHUNK)
    key, value = config.qk_nope_dim + config.qk_rope_dim, config.v_dim
    attention = config.mla_num_heads * sequence_length * (key + value)
    mixers = config.layer_kinds.count("kda") * kda + config.layer_kinds.count("mla") * attention
    return 3.0 * (matrices + mixers + 4 * config.hidden_size * depth_sources(config))


def tokens_at_peak(config: ModelConfig, sequence_length: int, device_kind: str) -> float | None:
    """Tokens per second that a device would train on at its peak: MFU is tokens per second over this.

    None for a device whose peak is not in PEAKS, or a model whose operations are not counted.
    """
    if device_kind not in PEAKS or config.residual not in COUNTED:
        return None
    return PEAKS[device_kind] / training_flops(config, sequence_length)


def depth_sources(config: ModelConfig) -> int:
    """How many sources all mixtures of a model read together: the embedding, finished blocks and the growing one."""
    if config.residual == "standard":
        return 0
    block = config.block_size if config.residual == "block_attn_res" else 1
    return sum(1 + -(-before // block) for before in range(1, 2 * config.num_layers + 1))
