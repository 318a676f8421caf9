"""Models small enough to compile in seconds, with every parameter away from its initial value."""

import jax
import jax.numpy as jnp
from flax import nnx

from kimi_jax import KimiLM, ModelConfig, get_config

EXPERTS = dict(num_experts=4, top_k=2, num_shared_experts=1, expert_width=16)


def small_config(**fields) -> ModelConfig:
    """One KDA and one MLA layer, in turns."""
    defaults = dict(
        vocab_size=32,
        hidden_size=32,
        num_layers=2,
        mla_every=2,
        kda_num_heads=4,
        kda_head_dim=8,
        mla_num_heads=4,
        kv_lora_rank=16,
        qk_nope_dim=8,
        qk_rope_dim=4,
        v_dim=8,
        ffn_width=32,
        chunk_size=16,
        kernel_backend="reference",
    )
    return get_config("tiny", **(defaults | fields))


def small_model(config: ModelConfig, seed: int = 0) -> KimiLM:
    """A model whose queries, norms and biases are random too: with their initial zeros and ones mistakes can hide."""
    model = KimiLM(config, rngs=nnx.Rngs(seed))
    params = nnx.state(model, nnx.Param)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    leaves = [
        leaf + 0.1 * jax.random.normal(key, leaf.shape, leaf.dtype) for leaf, key in zip(leaves, keys, strict=True)
    ]
    nnx.update(model, jax.tree.unflatten(tree, leaves))
    return model


def tokens_for(config: ModelConfig, batch: int, length: int, seed: int = 7) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, config.vocab_size, jnp.int32)


def forward(model: KimiLM):
    """The model as one compiled function of (tokens, segment_ids)."""
    graphdef, state = nnx.split(model)
    compiled = jax.jit(lambda state, tokens, ids: nnx.merge(graphdef, state)(tokens, ids))
    return lambda tokens, ids=None: compiled(state, tokens, ids)
