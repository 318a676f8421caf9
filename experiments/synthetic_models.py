"""The models of the synthetic study: two layers whose token mixers differ in their memory and in nothing else.

    kda              S <- diag(exp g) S, then erase and write by the delta rule; a decay per channel
    gated_delta_net  the same with one decay per head (Gated DeltaNet, arXiv 2412.06464)
    delta_net        the same without decay (DeltaNet, arXiv 2406.06484)
    softmax          causal softmax attention over all tokens, no positions
    mamba2           S <- exp(g) S + dt k v^T with g = -A dt: one decay per head, nothing is erased (Mamba2, 2405.21060)

Everything else is KDA's layer for all of them: projections, short convolution with SiLU, norm per head with a low-rank
sigmoid gate. In particular mamba2 has KDA's L2 norm of q and k and no skip connection, and softmax attention has the
convolution, from which it knows the order of neighbours; only its q and k are not normalised.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from kimi_jax.layers import FeedForward, GatedRMSNorm, RMSNorm, ShortConv
from kimi_jax.layers.attention import attention
from kimi_jax.layers.parameters import at_least_float32, weight
from kimi_jax.sharding import project
from pallas_kernels import delta_net, gated_delta_net, kda, linear_attention, softplus_gate

MIXERS = ("kda", "gated_delta_net", "delta_net", "softmax", "mamba2")
DECAYS = {"kda": "channel", "gated_delta_net": "head", "mamba2": "head"}  # the others have none
DELTA_RULE = ("kda", "gated_delta_net", "delta_net")
A_RANGE, DT_RANGE = (1.0, 16.0), (1e-3, 0.1)  # of the decays at the start, as KDA's layer draws them
NORM_EPS = 1e-5
MEMORIES = {"kda": kda, "gated_delta_net": gated_delta_net, "delta_net": delta_net, "mamba2": linear_attention}
BATCH, HEADS = ("batch", None, None), ("batch", None, "heads")  # how `project` lays out results


class Mixer(nnx.Module):
    """One token mixer, x [B, T, hidden] -> [B, T, hidden]; kind is one of MIXERS. "kda" equals `KDALayer`."""

    def __init__(self, kind: str, hidden: int, *, num_heads: int, head_dim: int, rngs: nnx.Rngs, dtype=jnp.float32):
        if kind not in MIXERS:
            raise ValueError(f"model={kind!r} is unknown; allowed: {', '.join(MIXERS)}")
        self.kind, self.num_heads, self.dtype = kind, num_heads, dtype
        width = num_heads * head_dim

        def new(*shape):
            return weight(rngs, shape, (None, None), jnp.float32)

        self.q, self.k, self.v = (new(hidden, width) for _ in range(3))
        self.q_conv, self.k_conv, self.v_conv = (ShortConv(width, rngs=rngs, dtype=dtype) for _ in range(3))
        decay = DECAYS.get(kind)
        if decay == "channel":
            self.f_a, self.f_b = new(hidden, head_dim), new(head_dim, width)
        elif decay == "head":
            self.f = new(hidden, num_heads)
        if decay:
            self.A_log = nnx.Param(jnp.log(_uniform(rngs, num_heads, A_RANGE)))
            dt = jnp.exp(_uniform(rngs, width if decay == "channel" else num_heads, map(math.log, DT_RANGE)))
            self.dt_bias = nnx.Param(dt + jnp.log(-jnp.expm1(-dt)))  # softplus^-1(dt)
        if kind in DELTA_RULE:
            self.b = new(hidden, num_heads)
        self.g_a, self.g_b = new(hidden, head_dim), new(head_dim, width)
        self.o_norm = GatedRMSNorm(head_dim, eps=NORM_EPS, rngs=rngs, dtype=dtype)
        self.o = new(width, hidden)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = x_BTD.astype(self.dtype)
        q, k, v = (self._heads(getattr(self, f"{n}_conv")(project(x_BTD, getattr(self, n), HEADS))[0]) for n in "qkv")
        o_BTHV = self._remember(x_BTD, q, k, v).astype(self.dtype)
        gate_BTHV = self._heads(project(project(x_BTD, self.g_a, BATCH), self.g_b, HEADS))
        B, T, H, V = o_BTHV.shape
        return project(self.o_norm(o_BTHV, gate_BTHV).reshape(B, T, H * V), self.o, BATCH)

    def _remember(self, x_BTD, q, k, v):
        if self.kind == "softmax":
            return attention(q, k, v, None, scale=q.shape[-1] ** -0.5, causal=True)
        memory = MEMORIES[self.kind]
        if self.kind == "mamba2":
            g_BTH, dt_BTH = self._decay(x_BTD)
            return memory(q, k, v, g_BTH, beta=dt_BTH, qk_l2norm=True).output
        options = dict(qk_l2norm=True, beta_sigmoid=True)
        beta_BTH = project(x_BTD, self.b, HEADS)
        if self.kind == "delta_net":
            return memory(q, k, v, beta_BTH, **options).output
        if self.kind == "gated_delta_net":
            return memory(q, k, v, self._decay(x_BTD)[0], beta_BTH, **options).output
        g_BTHK = self._heads(project(project(x_BTD, self.f_a, BATCH), self.f_b, HEADS))
        gate = dict(gate="softplus", A_log=self.A_log[...], dt_bias=self.dt_bias[...])
        return memory(q, k, v, g_BTHK, beta_BTH, **gate, **options).output

    def _decay(self, x_BTD):
        """(log-decay in nats, step size), both float32 [B, T, H]."""
        logits_BTH = project(x_BTD, self.f, HEADS)
        g_BTH1 = softplus_gate(logits_BTH[..., None], self.A_log[...], self.dt_bias[...])
        dt_BTH = jax.nn.softplus(logits_BTH.astype(at_least_float32(self.dtype)) + self.dt_bias[...])
        return g_BTH1[..., 0], dt_BTH

    def _heads(self, x_BTW):
        B, T, W = x_BTW.shape
        return x_BTW.reshape(B, T, self.num_heads, W // self.num_heads)


class SyntheticLM(nnx.Module):
    """Embedding, layers of mixer and SwiGLU with pre-norms, norm, head: tokens int [B, T] -> float32 [B, T, vocab].

    The hidden width is num_heads * head_dim, the feed-forward's twice that.
    """

    def __init__(
        self,
        kind: str,
        *,
        vocab: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        rngs: nnx.Rngs,
        dtype=jnp.float32,
    ):
        hidden = num_heads * head_dim
        self.dtype = dtype

        def norm():
            return RMSNorm(hidden, eps=NORM_EPS, rngs=rngs, dtype=dtype)

        self.embedding = weight(rngs, (vocab, hidden), (None, None), jnp.float32)
        self.layers = nnx.List()
        for _ in range(num_layers):
            mixer = Mixer(kind, hidden, num_heads=num_heads, head_dim=head_dim, rngs=rngs, dtype=dtype)
            self.layers.append(_Layer(norm(), mixer, norm(), FeedForward(hidden, 2 * hidden, rngs=rngs, dtype=dtype)))
        self.final_norm = norm()
        self.head = weight(rngs, (hidden, vocab), (None, None), jnp.float32)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        # A product rather than a gather: its gradient is a sum in fixed order, and not one of colliding writes.
        x_BTD = project(jax.nn.one_hot(tokens_BT, len(self.embedding[...]), dtype=self.dtype), self.embedding, BATCH)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return project(self.final_norm(x_BTD), self.head, BATCH).astype(at_least_float32(self.dtype))


class _Layer(nnx.Module):
    def __init__(self, mixer_norm: RMSNorm, mixer: Mixer, ffn_norm: RMSNorm, ffn: FeedForward):
        self.mixer_norm, self.mixer, self.ffn_norm, self.ffn = mixer_norm, mixer, ffn_norm, ffn

    def __call__(self, x_BTD):
        x_BTD = x_BTD + self.mixer(self.mixer_norm(x_BTD))
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


def _uniform(rngs, size, bounds):
    low, high = bounds
    return jax.random.uniform(rngs.params(), (size,), minval=low, maxval=high)
