"""Mixture of experts: a sigmoid router with a selection bias, dropless experts, always-on shared experts (KDA 4; K3).

    s = sigmoid(x W_r)                 float32
    chosen = top-k of s + bias         the bias balances the load; no gradient goes through it
    p = s[chosen] / (sum + 1e-20) * routed_scaling_factor
    y = shared(x) + sum_i p_i E_i(x)                           Kimi Linear
    y = shared(x) + RMSNorm(sum_i p_i E_i(x W_down)) W_up      K3, experts in a smaller latent space

No token is ever dropped: the (token, expert) pairs are sorted by expert and each expert multiplies its own run of rows
(`jax.lax.ragged_dot`), so shapes do not depend on the routing. On a mesh every device sorts its own tokens and holds a
slice of every expert's width.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from kimi_jax.sharding import constrain, current_spec, gathered, project

from .feed_forward import Activation, FeedForward
from .norms import RMSNorm
from .padding import zero_padding
from .parameters import at_least_float32, weight

ROUTER_WEIGHTS = ("unbiased", "biased")


class RouterBias(nnx.Variable):
    """The selection bias: part of the model and of its parameter count, but moved by the balancer, not by gradients."""


class Routing(NamedTuple):
    ids: jax.Array  # [..., k] int32, the chosen experts, best first
    weights: jax.Array  # [..., k] float32


class MoE(nnx.Module):
    """Routed and shared experts, hidden -> hidden.

    Args:
        num_shared: the shared experts are one FeedForward of width num_shared * width on the full hidden width; 0:
            none.
        latent: the width in which the routed experts work, None for the hidden width itself.
        latent_norm_eps: the eps of the norm after the latent experts' sum.
        router_weights: "unbiased" takes the weights from the scores alone (the papers, vLLM); "biased" from score +
            bias, as the code released with Kimi-Linear-48B does.
        num_groups: experts come in so many equal groups.
        topk_groups: only so many groups, those with the largest sum of their two best biased scores, are eligible.

    Raises ValueError for counts that do not fit together or an unknown option.
    """

    def __init__(
        self,
        hidden: int,
        width: int,
        num_experts: int,
        top_k: int,
        num_shared: int,
        *,
        latent: int | None = None,
        latent_norm_eps: float = 1e-5,
        renormalize: bool = True,
        routed_scaling_factor: float = 1.0,
        activation: str = "swiglu",
        situ_beta: float = 4.0,
        situ_linear_beta: float | None = 25.0,
        router_weights: str = "unbiased",
        num_groups: int = 1,
        topk_groups: int = 1,
        rngs: nnx.Rngs,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    ):
        _check_groups(num_experts, top_k, num_groups, topk_groups)
        if router_weights not in ROUTER_WEIGHTS:
            raise ValueError(f"router_weights {router_weights!r} is unknown; allowed: {ROUTER_WEIGHTS}")
        self.num_experts, self.latent, self.num_shared, self.dtype = num_experts, latent, num_shared, dtype
        self.top_k, self.num_groups, self.topk_groups = top_k, num_groups, topk_groups
        self.renormalize, self.routed_scaling_factor = renormalize, routed_scaling_factor
        self.router_weights = router_weights
        self.activation = Activation(activation, situ_beta, situ_linear_beta)

        def new(shape, *axes):
            return weight(rngs, shape, axes, param_dtype)

        self.router = new((hidden, num_experts), "embed", None)
        self.bias = RouterBias(jnp.zeros(num_experts, jnp.float32), axes=(None,))
        # A latent is never cut: it is the small width between two projections that are whole over "tensor".
        inner, inner_axis = (hidden, "embed") if latent is None else (latent, None)
        self.gate = new((num_experts, inner, width), "experts", inner_axis, "ffn")
        self.up = new((num_experts, inner, width), "experts", inner_axis, "ffn")
        self.down = new((num_experts, width, inner), "experts", "ffn", inner_axis)
        dtypes = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        if latent is not None:
            self.latent_down = new((hidden, latent), "embed", None)
            self.latent_norm = RMSNorm(latent, eps=latent_norm_eps, **dtypes)
            self.latent_up = new((latent, hidden), None, "embed")
        if num_shared:
            self.shared = FeedForward(
                hidden,
                num_shared * width,
                activation=activation,
                situ_beta=situ_beta,
                situ_linear_beta=situ_linear_beta,
                **dtypes,
            )

    def __call__(self, x_BTD: jax.Array, valid_BT: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """(y [B, T, hidden], load [E] float32: how many (valid) tokens chose each expert).

        valid_BT: bool, False at padding, where the input is ignored, y is exactly 0 and nothing counts in the load.
        """
        ids = None if valid_BT is None else jnp.where(valid_BT, 0, -1)
        x_BTD = zero_padding(x_BTD.astype(self.dtype), ids)
        routing = self.route(x_BTD)
        chosen_BTkE = routing.ids[..., None] == jnp.arange(self.num_experts)
        load_E = zero_padding(chosen_BTkE, ids).sum(axis=(0, 1, 2), dtype=jnp.float32)

        inner_BTD = x_BTD
        if self.latent is not None:
            inner_BTD = project(x_BTD, self.latent_down, ("batch", None, None))
        y_BTD = self._experts(inner_BTD, routing)
        if self.latent is not None:
            y_BTD = project(self.latent_norm(y_BTD), self.latent_up, ("batch", None, None))
        if self.num_shared:
            y_BTD = y_BTD + self.shared(x_BTD)
        return zero_padding(y_BTD, ids), load_E

    def route(self, x_BTD: jax.Array) -> Routing:
        """Which experts each token goes to, and with which weights."""
        wide_BTD = x_BTD.astype(at_least_float32(x_BTD.dtype))
        logits_BTE = project(wide_BTD, self.router, ("batch", None, None))
        run = functools.partial(
            route,
            top_k=self.top_k,
            renormalize=self.renormalize,
            routed_scaling_factor=self.routed_scaling_factor,
            router_weights=self.router_weights,
            num_groups=self.num_groups,
            topk_groups=self.topk_groups,
        )
        tokens = _token_spec(x_BTD.shape[0])
        if tokens is None:
            return run(logits_BTE, self.bias[...])
        # Left to itself the compiler gathers the whole batch for top_k.
        return jax.shard_map(run, in_specs=(tokens, P(None)), out_specs=tokens)(logits_BTE, self.bias[...])

    def _experts(self, x_BTD, routing):
        weights = [gathered(w[...].astype(self.dtype), w.get_metadata("axes")) for w in (self.gate, self.up, self.down)]
        run = functools.partial(dropless, activation=self.activation)
        tokens = _token_spec(x_BTD.shape[0])
        if tokens is None:
            return run(x_BTD, *routing, *weights)
        columns, rows = current_spec((None, None, "ffn")), current_spec((None, "ffn", None))

        def shard(*args):
            y_BTD = run(*args)
            return y_BTD if columns[2] is None else jax.lax.psum(y_BTD, columns[2])

        in_specs = (tokens, tokens, tokens, columns, columns, rows)
        x_BTD = constrain(x_BTD, "batch", None, None)
        return jax.shard_map(shard, in_specs=in_specs, out_specs=tokens)(x_BTD, *routing, *weights)


def route(
    logits: jax.Array,
    bias_E: jax.Array,
    top_k: int,
    *,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    router_weights: str = "unbiased",
    num_groups: int = 1,
    topk_groups: int = 1,
) -> Routing:
    """Top-k routing from router logits [..., E] (float32); see `MoE` for the options. Differentiable in the logits."""
    scores = jax.nn.sigmoid(logits)
    biased = scores + jax.lax.stop_gradient(bias_E).astype(scores.dtype)
    eligible = jax.lax.stop_gradient(biased)
    if num_groups > 1:
        grouped = eligible.reshape(*eligible.shape[:-1], num_groups, -1)
        group_scores = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
        best = jax.lax.top_k(group_scores, topk_groups)[1]
        open_groups = (best[..., None] == jnp.arange(num_groups)).any(axis=-2)
        eligible = jnp.where(open_groups[..., None], grouped, -jnp.inf).reshape(eligible.shape)
    ids = jax.lax.top_k(eligible, top_k)[1]
    weights = jnp.take_along_axis(biased if router_weights == "biased" else scores, ids, axis=-1)
    if renormalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return Routing(ids, weights * routed_scaling_factor)


def dropless(
    x_BTD: jax.Array,
    ids_BTk: jax.Array,
    weights_BTk: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    *,
    activation: Activation,
) -> jax.Array:
    """sum_i weight_i E_i(x) over the k chosen experts of every token, E(x) = down(activation(gate x, up x)).

    Memory and arithmetic are those of B*T*k rows, however unevenly they are spread over the experts.
    """
    B, T, D = x_BTD.shape
    E, k = gate_EDF.shape[0], ids_BTk.shape[-1]
    expert_of_pair = ids_BTk.reshape(B * T * k)
    order = jnp.argsort(expert_of_pair, stable=True)  # pairs sorted by expert
    place = jnp.argsort(order)  # of every pair in that order
    rows = (expert_of_pair[:, None] == jnp.arange(E)).sum(axis=0, dtype=jnp.int32)
    precision = None if x_BTD.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    multiply = functools.partial(jax.lax.ragged_dot, group_sizes=rows, precision=precision)

    x_PD = _dispatch(x_BTD.reshape(B * T, D), order, place, k)
    y_PD = multiply(activation(multiply(x_PD, gate_EDF), multiply(x_PD, up_EDF)), down_EFD)
    y_BTkD = _permute(y_PD, place, order).reshape(B, T, k, D)
    return (y_BTkD.astype(weights_BTk.dtype) * weights_BTk[..., None]).sum(axis=2).astype(x_BTD.dtype)


# A gather's transpose is a scatter-add, slow and on GPUs not reproducible to the bit. For permutations the transpose is
# the gather by the inverse permutation.


@jax.custom_vjp
def _permute(x_PD, order, inverse):
    return x_PD[order]


def _permute_forward(x_PD, order, inverse):
    return x_PD[order], inverse


def _permute_backward(inverse, dy_PD):
    return dy_PD[inverse], None, None


_permute.defvjp(_permute_forward, _permute_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dispatch(x_ND, order, inverse, k):
    """Every token k times, pairs in the given order."""
    return x_ND[order // k]


def _dispatch_forward(x_ND, order, inverse, k):
    return x_ND[order // k], inverse


def _dispatch_backward(k, inverse, dy_PD):
    return dy_PD[inverse].reshape(-1, k, dy_PD.shape[-1]).sum(axis=1), None, None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


def _check_groups(num_experts, top_k, num_groups, topk_groups):
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_experts={num_experts} must be a multiple of num_groups={num_groups}")
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(f"topk_groups={topk_groups} must be between 1 and num_groups={num_groups}")
    if not 1 <= top_k <= (eligible := num_experts // num_groups * topk_groups):
        raise ValueError(f"top_k={top_k} must be between 1 and the {eligible} experts of the chosen groups")


def _token_spec(batch: int) -> P | None:
    """How [B, T, ...] lies on the mesh in force (a batch that it does not divide is whole); None without a mesh."""
    spec = current_spec(("batch", None, None))
    if spec is None or spec[0] is None:
        return spec
    shape = jax.sharding.get_abstract_mesh().shape
    shards = math.prod(shape[axis] for axis in ((spec[0],) if isinstance(spec[0], str) else spec[0]))
    return P(None, None, None) if batch % shards else spec
