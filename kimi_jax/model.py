"""KimiLM: embedding -> layers, joined along the depth by a residual -> final mix -> norm -> head.

    model = KimiLM(get_config("tiny"), rngs=nnx.Rngs(0))
    logits = model(tokens)                                   # [B, T, vocab], float32
    loss, aux = lm_loss(model, tokens, segment_ids)          # nats per predicted token

How layers repeat, are scanned and recomputed is in layers/stack.py; where arrays live, in sharding.py.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .cache import Cache, check_cache
from .configs import ModelConfig
from .layers.depth_variants import Weighing
from .layers.feed_forward import FeedForward
from .layers.kda import KDALayer
from .layers.mla import MLA
from .layers.moe import MoE, RouterBias
from .layers.norms import RMSNorm
from .layers.padding import left_align
from .layers.parameters import weight
from .layers.residuals import BlockAttnRes, Site, make_residual, make_site
from .layers.stack import LayerStack
from .sharding import check_divisible, constrain, lookup, project


class Aux(NamedTuple):
    """What a forward pass reports besides its result."""

    router_loads: jax.Array | None  # [MoE layers, E] float32: tokens that chose each expert; None without experts
    tokens: jax.Array  # float32 scalar: predicted tokens in the loss, or valid tokens


class KimiLM(nnx.Module):
    """The language model of a ModelConfig. Parameters are kept in config.param_dtype, computation is in config.dtype.

    Under a mesh set by jax.set_mesh, a ValueError names what the mesh does not divide.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        if not (mesh := jax.sharding.get_abstract_mesh()).empty:
            check_divisible(config, mesh)
        self.config = config
        self.dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
        self.residual = _residual(config)
        D, V = config.hidden_size, config.vocab_size
        self.embedding = weight(rngs, (V, D), ("vocab", "embed"), param_dtype)
        self.layers = LayerStack(
            lambda index, rngs: Layer(config, index, rngs=rngs),
            [_layer_kind(config, index) for index in range(config.num_layers)],
            self.residual,
            scan=config.scan_layers,
            remat=config.remat,
            rngs=rngs,
        )
        self.final_mix = _site(config, self.residual, 2 * config.num_layers, rngs)
        self.final_norm = RMSNorm(D, eps=config.norm_eps, rngs=rngs, dtype=self.dtype, param_dtype=param_dtype)
        self.head = weight(rngs, (D, V), ("embed", "vocab"), param_dtype)

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """Logits [B, T, vocab], float32 at least. tokens: int [B, T] in [0, vocab). segment_ids: int32 [B, T] or None,
        documents packed in a row (non-decreasing) and padding (negative); outputs at padding mean nothing."""
        return self.forward(tokens, segment_ids)[0]

    def forward(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> tuple[jax.Array, Aux]:
        """As calling the model, with Aux."""
        _check_tokens(tokens, segment_ids, self.config.vocab_size)
        state = self.residual.start(lookup(self.embedding, tokens, self.dtype))
        state, _, loads = self.layers(state, segment_ids)
        valid = jnp.float32(tokens.size) if segment_ids is None else (segment_ids >= 0).sum(dtype=jnp.float32)
        return self._read_out(state), Aux(loads, valid)

    def init_cache(self, batch: int, max_len: int, *, state_dtype: str | None = None) -> Cache:
        """An empty cache for `batch` rows of up to max_len tokens.

        state_dtype: what KDA states are kept in between calls; None: at least float32. "bfloat16" halves them and loses
        small updates (1.5e-2 after 4096 single tokens of slow decay).
        """
        for name, size in (("batch", batch), ("max_len", max_len)):
            if size < 1:
                raise ValueError(f"{name}={size} is not allowed: at least 1")
        if state_dtype not in (allowed := (None, "bfloat16", "float32", "float64")):
            raise ValueError(f"state_dtype={state_dtype!r} is not allowed: one of {allowed}")
        layers = self.layers.init_cache(lambda layer: layer.init_cache(batch, max_len, state_dtype))
        return Cache(layers, constrain(jnp.zeros(batch, jnp.int32), "batch"), max_len)

    def extend(
        self,
        tokens: jax.Array,
        cache: Cache,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        last_only: bool = False,
    ) -> tuple[jax.Array, Cache]:
        """Append tokens [B, T] to every row: prefill, chunked prefill and decode in one.

        A row that outgrows the cache is a ValueError when lengths are concrete, NaN logits when traced; a cache of
        another batch size, model or layout is a ValueError.

        Args:
            tokens: int [B, T] in [0, vocab).
            cache: of B rows; it stays valid unless it is donated.
            lengths: int32 [B], how many of the T tokens of each row count (the first ones); None: all. The rest changes
                nothing in the cache, and the logits there mean nothing.
            segment_ids: int32 [B, T], padding anywhere else in a row: negative where a token does not count.
            last_only: logits at each row's last token that counts, instead of at all of them.

        Returns:
            Logits [B, T, vocab], or with last_only [B, 1, vocab], and the new cache.
        """
        _check_tokens(tokens, segment_ids, self.config.vocab_size)
        B, T = tokens.shape
        restore = None
        if segment_ids is not None:
            tokens, lengths, restore = left_align(tokens[..., None], segment_ids, lengths)
            tokens = tokens[..., 0]
        added = np.full(B, T, np.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
        check_cache(cache, B, T, added)
        if lengths is not None:
            added = constrain(added, "batch")
        state = self.residual.start(lookup(self.embedding, tokens, self.dtype))
        state, layers, _ = self.layers(state, None, cache.layers, None if lengths is None else added)
        logits = self._read_out(state, jnp.maximum(added - 1, 0) if last_only else None)
        if restore is not None and not last_only:
            logits = restore(logits)
        length = jnp.where((added >= 0) & (added <= T), cache.length + added, cache.max_len + 1)
        logits = jnp.where((length > cache.max_len)[:, None, None], jnp.nan, logits)
        return logits, dataclasses.replace(cache, layers=layers, length=length)

    def _read_out(self, state, positions=None):
        """Final mix, norm and head; at all positions, or at one per row."""
        x_BTD = self.residual.mix(state, self.final_mix)
        if positions is not None:
            x_BTD = jnp.take_along_axis(x_BTD, positions[:, None, None], axis=1)
        logits = project(self.final_norm(x_BTD), self.head, ("batch", None, "vocab"))
        return logits.astype(jnp.promote_types(self.dtype, jnp.float32))


class Layer(nnx.Module):
    """One transformer layer: two sub-layers, attention and feed-forward, each reading its own mixture of the depth."""

    def __init__(self, config: ModelConfig, index: int, *, rngs: nnx.Rngs):
        D, eps = config.hidden_size, config.norm_eps
        dtypes = dict(rngs=rngs, dtype=jnp.dtype(config.dtype), param_dtype=jnp.dtype(config.param_dtype))
        self.residual = _residual(config)
        self.attention_mix = _site(config, self.residual, 2 * index, rngs)
        self.attention_norm = RMSNorm(D, eps=eps, **dtypes)
        self.attention = _attention(config, config.layer_kinds[index], dtypes)
        self.ffn_mix = _site(config, self.residual, 2 * index + 1, rngs)
        self.ffn_norm = RMSNorm(D, eps=eps, **dtypes)
        self.ffn = _feed_forward(config, config.ffn_kinds[index], dtypes)

    @property
    def sites(self) -> tuple[Site | None, Site | None]:
        return self.attention_mix, self.ffn_mix

    def __call__(self, state, segment_ids, cache=None, lengths=None):
        """(state with both outputs added, cache, router load [E] or None)."""
        x_BTD, state = self.residual.read(state, self.attention_mix, self.attention_norm)
        y_BTD, cache = self.attention(x_BTD, segment_ids, cache, lengths)
        state = self.residual.add(state, y_BTD, self.attention_mix)

        x_BTD, state = self.residual.read(state, self.ffn_mix, self.ffn_norm)
        if isinstance(self.ffn, MoE):
            y_BTD, load = self.ffn(x_BTD, None if segment_ids is None else segment_ids >= 0)
        else:
            y_BTD, load = self.ffn(x_BTD), None
        return self.residual.add(state, y_BTD, self.ffn_mix), cache, load

    def init_cache(self, batch: int, max_len: int, state_dtype: str | None):
        if isinstance(self.attention, MLA):
            return self.attention.init_cache(batch, max_len)
        return self.attention.init_cache(batch, state_dtype)


def lm_loss(model: KimiLM, tokens: jax.Array, segment_ids: jax.Array | None = None) -> tuple[jax.Array, Aux]:
    """Mean cross-entropy of each next token, in nats (natural log), and Aux with the number of predicted tokens.

    A token is predicted from the one before it in the same document: never across segments, never at or from padding.
    The log-sum-exp is float32. Without anything to predict the loss is 0.
    """
    logits_BTV, aux = model.forward(tokens, segment_ids)
    targets_BT = jnp.roll(tokens, -1, axis=1)
    predicts_BT = jnp.arange(tokens.shape[1]) < tokens.shape[1] - 1
    if segment_ids is not None:
        predicts_BT = predicts_BT & (segment_ids >= 0) & (segment_ids == jnp.roll(segment_ids, -1, axis=1))
    predicts_BT = jnp.broadcast_to(predicts_BT, tokens.shape)
    # Compared with an iota rather than gathered, so that a vocabulary cut over devices stays cut.
    is_target = jnp.arange(logits_BTV.shape[-1]) == targets_BT[..., None]
    target_logits_BT = jnp.sum(jnp.where(is_target, logits_BTV, 0), axis=-1)
    losses_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - target_logits_BT
    count = predicts_BT.sum(dtype=jnp.float32)
    loss = jnp.sum(jnp.where(predicts_BT, losses_BT, 0)) / jnp.maximum(count, 1)
    return loss, aux._replace(tokens=count)


def update_router_biases(model: KimiLM, loads: jax.Array, rate: float) -> None:
    """Balance the experts without a loss term: raise the selection bias of experts below the mean load, lower others'.

    bias += rate * sign(mean(load) - load), in place. loads: Aux.router_loads [MoE layers, E], summed over the batch.
    """
    biases = _router_biases(model.layers)
    expected = (model.config.ffn_kinds.count("moe"), model.config.num_experts)
    if not biases or loads is None or loads.shape != expected:
        given = None if loads is None else loads.shape
        raise ValueError(f"loads must be [MoE layers, E] = {expected} for this model, which needs some; got {given}")
    steps = rate * jnp.sign(loads.mean(axis=-1, keepdims=True) - loads)
    for bias, rows in biases:
        bias[...] += steps[rows]


def _router_biases(stack: LayerStack) -> list[tuple[RouterBias, int | slice]]:
    """Every selection bias and its row of Aux.router_loads; rows for layers that are stacked."""
    lead, group, tail = (
        [layer.ffn.bias for layer in layers if isinstance(layer.ffn, MoE)]
        for layers in (stack.lead, stack.group, stack.tail)
    )
    first, last = len(lead), len(lead) + stack.repetition.count * len(group)
    biases = [(bias, row) for row, bias in enumerate(lead)]
    biases += [(bias, slice(first + offset, last, len(group))) for offset, bias in enumerate(group)]
    return biases + [(bias, last + row) for row, bias in enumerate(tail)]


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the model, selection biases included; allocates nothing."""
    model = nnx.eval_shape(lambda: KimiLM(config, rngs=nnx.Rngs(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, (nnx.Param, RouterBias))))


def active_parameter_count(config: ModelConfig) -> int:
    """Parameters that take part in one token's forward pass, without embedding and head: top_k of the experts only."""
    total = parameter_count(config) - 2 * config.vocab_size * config.hidden_size
    moe_layers = config.ffn_kinds.count("moe")
    expert = 3 * (config.latent_width or config.hidden_size) * config.expert_width
    return total - moe_layers * (config.num_experts - config.top_k) * expert


def _attention(config: ModelConfig, kind: str, dtypes: dict) -> KDALayer | MLA:
    if kind == "mla":
        return MLA(
            config.hidden_size,
            num_heads=config.mla_num_heads,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_dim=config.qk_nope_dim,
            qk_rope_dim=config.qk_rope_dim,
            v_dim=config.v_dim,
            inner_norm_eps=config.mla_inner_norm_eps,
            output_gate=config.mla_output_gate,
            softmax1=config.mla_softmax1,
            rope_theta=config.mla_rope_theta,
            **dtypes,
        )
    return KDALayer(
        config.hidden_size,
        num_heads=config.kda_num_heads,
        num_value_heads=config.value_heads,
        head_k=config.kda_head_dim,
        head_v=config.value_head_dim,
        conv_width=config.conv_width,
        lower_bound=config.lower_bound,
        gate=config.kda_gate,
        gate_rank=config.gate_rank,
        full_rank_gate=config.full_rank_gate,
        output_gate=config.output_gate,
        norm_eps=config.norm_eps,
        chunk_size=config.chunk_size,
        backend=config.kernel_backend,
        **dtypes,
    )


def _feed_forward(config: ModelConfig, kind: str, dtypes: dict) -> FeedForward | MoE:
    options = dict(
        activation=config.activation,
        situ_beta=config.situ_beta,
        situ_linear_beta=config.situ_linear_beta,
        **dtypes,
    )
    if kind == "dense":
        return FeedForward(config.hidden_size, config.ffn_width, **options)
    return MoE(
        config.hidden_size,
        config.expert_width,
        config.num_experts,
        config.top_k,
        config.num_shared_experts,
        latent=config.latent_width,
        latent_norm_eps=config.norm_eps,
        renormalize=config.renormalize,
        routed_scaling_factor=config.routed_scaling_factor,
        router_weights=config.router_weights,
        num_groups=config.num_expert_groups,
        topk_groups=config.topk_groups,
        **options,
    )


def _residual(config: ModelConfig) -> BlockAttnRes:
    return make_residual(config.residual, config.block_size, config.depth_streams, config.depth_two_phase)


def _site(config: ModelConfig, residual: BlockAttnRes, sublayer: int, rngs: nnx.Rngs) -> Site | None:
    """What stands before a sub-layer, or at 2 * num_layers before the final norm."""
    depth = 2 * config.num_layers
    unused_one = config.first_mix and residual.has_mixes and sublayer == 0
    if not (residual.has_site(sublayer, depth) or unused_one):
        return None
    return make_site(
        residual,
        config.hidden_size,
        weighing=Weighing(
            config.depth_weights, config.depth_key_norm, config.depth_query, config.depth_heads, config.depth_window
        ),
        depth=depth,
        eps=config.norm_eps,
        rngs=rngs,
        param_dtype=jnp.dtype(config.param_dtype),
        backend=config.kernel_backend,
    )


def _layer_kind(config: ModelConfig, index: int) -> tuple:
    """Equal for layers that one compiled body can serve."""
    residual = _residual(config)
    opens = residual.opens_block(2 * index), residual.opens_block(2 * index + 1)
    return (
        config.layer_kinds[index],
        config.ffn_kinds[index],
        opens,
        residual.has_site(2 * index, 2 * config.num_layers),
    )


def _check_tokens(tokens, segment_ids, vocab_size):
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers [B, T], got {tokens.dtype}{list(tokens.shape)}")
    if segment_ids is not None and segment_ids.shape != tokens.shape:
        raise ValueError(f"segment_ids must have the shape of tokens {tokens.shape}, got {segment_ids.shape}")
    if not isinstance(tokens, jax.core.Tracer) and tokens.size:
        values = np.asarray(tokens)  # numpy, because inside jit even a concrete array's minimum would be traced
        low, high = values.min(), values.max()
        if low < 0 or high >= vocab_size:
            raise ValueError(f"tokens must lie in [0, {vocab_size}), got {low} to {high}")
