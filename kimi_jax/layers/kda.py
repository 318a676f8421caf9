"""The KDA layer: a fixed-size memory per head, erased and written by the delta rule (KDA, sections 3 and 4; K3).

    q, k, v = heads(SiLU(conv(x W)))        q and k are normalised inside the kernel
    g       = gate(x W_fa W_fb)             log-decay, per value head and channel of k (Gated DeltaNet: per head alone)
    beta    = sigmoid(x W_b)                writing strength, per value head
    o       = kda(q, k, v, g, beta)
    y       = (RMSNorm(o) * gate(x)) W_o    norm per head, gate low-rank (Kimi Linear) or full-rank (K3)

Everything per head is stored head-major, so that tensor parallelism cuts heads, convolution channels, gates, A_log and
dt_bias together; only the low-rank down-projections are whole on every shard.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from kimi_jax.sharding import constrain, per_shard, project, spread
from pallas_kernels import kda, kda_step

from .cache_check import check_cache
from .norms import GatedRMSNorm
from .padding import left_align, merge_ids, zero_padding
from .parameters import at_least_float32, check_heads, weight
from .short_conv import ShortConv

A_RANGE = (1.0, 16.0)
DT_RANGE, DT_FLOOR = (1e-3, 0.1), 1e-4


class KDACache(NamedTuple):
    """What a KDA layer remembers of a row: its size does not depend on the number of tokens."""

    q_tail: jax.Array  # [B, W-1, H*K]  the last raw inputs of the convolution, oldest first
    k_tail: jax.Array  # [B, W-1, H*K]
    v_tail: jax.Array  # [B, W-1, HV*V]
    state: jax.Array  # [B, HV, K, V]  float32, or as init_cache was told


class KDAInputs(NamedTuple):
    """All that the recurrence takes from the tokens: projections as they are, before convolution and activations."""

    q: jax.Array  # [B, T, H*K]
    k: jax.Array  # [B, T, H*K]
    v: jax.Array  # [B, T, HV*V]
    g: jax.Array  # [B, T, HV*K]
    beta: jax.Array  # [B, T, HV]


class KDADraft(NamedTuple):
    """A cache and the tokens after it of which not all may stay: a state cannot be cut, so it waits for `settle`."""

    cache: KDACache  # before these tokens
    inputs: KDAInputs

    @classmethod
    def empty(cls, cache: KDACache, T: int) -> "KDADraft":
        """To pass as a cache with T tokens; caches may be stacked."""
        *lead, HV, K, _ = cache.state.shape
        widths = [tail.shape[-1] for tail in (cache.q_tail, cache.k_tail, cache.v_tail)] + [HV * K, HV]
        names = (None,) * (len(lead) - 1) + ("batch", None, "heads")
        zeros = (constrain(jnp.zeros((*lead, T, width), cache.q_tail.dtype), *names) for width in widths)
        return cls(cache, KDAInputs(*zeros))


class KDALayer(nnx.Module):
    """Kimi Delta Attention.

    Args:
        num_value_heads: a multiple of num_heads; value head j reads q/k head j // (num_value_heads // num_heads).
        conv_width: taps of the short convolution; 0 leaves SiLU alone (the paper's ablation).
        lower_bound: None for the unbounded gate -exp(A_log) softplus(z) of Kimi Linear; a negative number (K3: -5) for
            the gate lower_bound * sigmoid(exp(A_log) z). They are different models, not a speed switch.
        gate: "channel"; "head" has one log-decay for all channels of a value head, which is Gated DeltaNet.
        gate_rank: rank of the forget gate and of the low-rank output gate; default head_v.
        full_rank_gate: K3's output gate, in place of the low-rank one.
        output_gate: "sigmoid", or the ablations "swish" and None (norm without gate).

    Raises ValueError for sizes that do not fit together or onto the mesh in force, an unknown gate or output_gate, or a
    lower_bound that is not negative.
    """

    def __init__(
        self,
        hidden: int,
        *,
        num_heads: int,
        num_value_heads: int | None = None,
        head_k: int,
        head_v: int,
        conv_width: int = 4,
        lower_bound: float | None = None,
        gate: str = "channel",
        gate_rank: int | None = None,
        full_rank_gate: bool = False,
        output_gate: str | None = "sigmoid",
        norm_eps: float = 1e-5,
        chunk_size: int = 64,
        backend: str = "auto",
        rngs: nnx.Rngs,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    ):
        num_value_heads = num_heads if num_value_heads is None else num_value_heads
        if num_value_heads % num_heads:
            raise ValueError(f"num_value_heads={num_value_heads} must be a multiple of num_heads={num_heads}")
        if lower_bound is not None and lower_bound >= 0:
            raise ValueError(f"lower_bound must be None (unbounded gate) or negative, got {lower_bound}")
        if gate not in ("channel", "head"):
            raise ValueError(f"gate={gate!r} is not allowed: 'channel' or 'head'")
        if conv_width < 0:
            raise ValueError(f"conv_width must be at least 0 (no convolution), got {conv_width}")
        check_heads(num_heads=num_heads, num_value_heads=num_value_heads)
        self.num_heads, self.num_value_heads, self.head_k, self.head_v = num_heads, num_value_heads, head_k, head_v
        self.conv_width, self.lower_bound, self.gate = conv_width, lower_bound, gate
        self.chunk_size, self.backend, self.dtype = chunk_size, backend, dtype
        qk_width, v_width = num_heads * head_k, num_value_heads * head_v
        gate_width = num_value_heads * (head_k if gate == "channel" else 1)
        rank = head_v if gate_rank is None else gate_rank
        dtypes = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)

        def column_parallel(width):
            return weight(rngs, (hidden, width), ("embed", "heads"), param_dtype)

        def low_rank(width):
            down = weight(rngs, (hidden, rank), ("embed", None), param_dtype)
            return down, weight(rngs, (rank, width), (None, "heads"), param_dtype)

        self.q, self.k, self.v = column_parallel(qk_width), column_parallel(qk_width), column_parallel(v_width)
        if conv_width:
            self.q_conv = ShortConv(qk_width, conv_width, **dtypes)
            self.k_conv = ShortConv(qk_width, conv_width, **dtypes)
            self.v_conv = ShortConv(v_width, conv_width, **dtypes)
        self.f_a, self.f_b = low_rank(gate_width)
        self.b = column_parallel(num_value_heads)
        self.A_log = nnx.Param(_init_A_log(rngs, num_value_heads, lower_bound, param_dtype), axes=("heads",))
        self.dt_bias = nnx.Param(_init_dt_bias(rngs, gate_width, param_dtype), axes=("heads",))
        self.gate_form = "none" if output_gate is None else "full" if full_rank_gate else "low_rank"
        if self.gate_form == "full":
            self.g = column_parallel(v_width)
        elif self.gate_form == "low_rank":
            self.g_a, self.g_b = low_rank(v_width)
        self.o_norm = GatedRMSNorm(head_v, eps=norm_eps, activation=output_gate, **dtypes)
        self.o = weight(rngs, (v_width, hidden), ("heads", "embed"), param_dtype)

    def __call__(
        self,
        x_BTD: jax.Array,
        segment_ids: jax.Array | None = None,
        cache: KDACache | KDADraft | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, KDACache | KDADraft | None]:
        """(y [B, T, hidden], the cache after these tokens, or None if none was given).

        Documents in segment_ids do not see each other. At padding (a negative id, a position beyond lengths) the input
        is ignored, y is exactly 0 and the cache is left alone. Padding between two tokens of one document is read as
        zeros by the convolution (with a cache: skipped). With a cache, segment_ids may only mark padding. Given a
        KDADraft it returns one that holds these tokens, for `settle`. A cache of other sizes is a ValueError.
        """
        if cache is None:
            return self._mix(x_BTD, merge_ids(x_BTD, segment_ids, lengths), None)
        self._check_cache(cache.cache if isinstance(cache, KDADraft) else cache, x_BTD.shape[0])
        x_BTD, lengths, restore = left_align(x_BTD, segment_ids, lengths)
        y_BTD, cache = self._mix(x_BTD, merge_ids(x_BTD, None, lengths), cache)
        return restore(y_BTD), cache

    def init_cache(self, batch: int, state_dtype: jnp.dtype | None = None) -> KDACache:
        """The cache before the first token.

        state_dtype: of the state between calls; None: at least float32. In bfloat16 it is half as much to read and
        write, and updates that are small beside it are lost (see `kda_step`). Computation is float32 either way.
        """

        def tail(width):  # each its own array, because none can be donated twice
            return constrain(jnp.zeros((batch, max(self.conv_width - 1, 0), width), self.dtype), "batch", None, "heads")

        dtype = at_least_float32(self.dtype) if state_dtype is None else state_dtype
        state = jnp.zeros((batch, self.num_value_heads, self.head_k, self.head_v), dtype)
        qk_width = self.num_heads * self.head_k
        return KDACache(
            q_tail=tail(qk_width),
            k_tail=tail(qk_width),
            v_tail=tail(self.num_value_heads * self.head_v),
            state=constrain(state, "batch", "heads", None, None),
        )

    def settle(self, cache: KDACache, inputs: KDAInputs, counts: jax.Array) -> KDACache:
        """The cache after the first counts [B] of each row's drafted tokens, as if only they had been given."""
        T = inputs.q.shape[1]
        ids = jnp.where(jnp.arange(T) < counts[:, None], 0, -1)
        return self._advance(inputs, ids, cache)[1]

    def _mix(self, x_BTD, ids, cache):
        x_BTD = zero_padding(x_BTD.astype(self.dtype), ids)
        heads = ("batch", None, "heads")
        inputs = KDAInputs(
            q=project(x_BTD, self.q, heads),
            k=project(x_BTD, self.k, heads),
            v=project(x_BTD, self.v, heads),
            g=self._forget_gate(x_BTD),
            beta=project(x_BTD, self.b, heads),
        )
        if isinstance(cache, KDADraft):
            o_BTHV, _ = self._advance(inputs, ids, cache.cache)
            cache = KDADraft(cache.cache, inputs)
        else:
            o_BTHV, cache = self._advance(inputs, ids, cache)
        o_BTHV = self.o_norm(o_BTHV, self._output_gate(x_BTD))
        B, T, HV, V = o_BTHV.shape
        return project(o_BTHV.reshape(B, T, HV * V), self.o, ("batch", None, None)), cache

    def _advance(self, inputs, ids, cache):
        """Convolutions and recurrence: output [B, T, HV, V], and the cache after these tokens or None."""
        q, q_tail = self._convolve("q", inputs.q, ids, cache)
        k, k_tail = self._convolve("k", inputs.k, ids, cache)
        v, v_tail = self._convolve("v", inputs.v, ids, cache)
        q_BTHK, k_BTHK = _split(q, self.num_heads), _split(k, self.num_heads)
        v_BTHV, g_BTHK = _split(v, self.num_value_heads), _split(inputs.g, self.num_value_heads)
        o_BTHV, state = self._recur(q_BTHK, k_BTHK, v_BTHV, g_BTHK, inputs.beta, ids, cache)
        return o_BTHV, None if cache is None else KDACache(q_tail, k_tail, v_tail, state)

    def _check_cache(self, cache, batch):
        check_cache(cache, jax.eval_shape(lambda: self.init_cache(batch)), any_float=("state",))

    def _convolve(self, name, x, ids, cache):
        tail = None if cache is None else getattr(cache, f"{name}_tail")
        if not self.conv_width:
            return jax.nn.silu(x), tail
        return getattr(self, f"{name}_conv")(x, segment_ids=ids, tail=tail)

    def _low_rank(self, x_BTD, down, up):
        return project(project(x_BTD, down, ("batch", None, None)), up, ("batch", None, "heads"))

    def _forget_gate(self, x_BTD):
        """Raw logits [B, T, HV*K]."""
        logits = self._low_rank(x_BTD, self.f_a, self.f_b)
        if self.gate == "channel":
            return logits
        B, T, HV = logits.shape
        logits = spread(logits[..., None], (B, T, HV, self.head_k), "batch", None, "heads", None)
        return logits.reshape(B, T, HV * self.head_k)

    def _output_gate(self, x_BTD):
        if self.gate_form == "none":
            return None
        if self.gate_form == "full":
            return _split(project(x_BTD, self.g, ("batch", None, "heads")), self.num_value_heads)
        return _split(self._low_rank(x_BTD, self.g_a, self.g_b), self.num_value_heads)

    def _recur(self, q, k, v, g, beta, ids, cache):
        """Output [B, T, HV, V] and, with a cache, the new state. Gate and beta are raw logits, q and k unnormalised."""
        dt_bias = self.dt_bias[...]
        if self.gate == "head":
            dt_bias = spread(dt_bias[:, None], (self.num_value_heads, self.head_k), "heads", None)
        options = dict(
            gate="softplus" if self.lower_bound is None else "bounded",
            A_log=self.A_log[...],
            dt_bias=dt_bias,
            lower_bound=self.lower_bound,
            qk_l2norm=True,
            beta_sigmoid=True,
            backend=self.backend,
        )
        scan, step = (per_shard(f, q.shape[0]) for f in (kda, kda_step))
        if cache is None:
            return scan(q, k, v, g, beta, segment_ids=ids, chunk_size=self.chunk_size, **options)
        if q.shape[1] > 1:
            options |= dict(segment_ids=ids, chunk_size=self.chunk_size)
            before = cache.state.astype(at_least_float32(cache.state.dtype))
            o, state = scan(q, k, v, g, beta, initial_state=before, **options)
            return o, state.astype(cache.state.dtype)
        o, state = step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], cache.state, **options)
        if ids is not None:
            valid = (ids[:, 0] >= 0)[:, None, None]
            o, state = jnp.where(valid, o, 0), jnp.where(valid[..., None], state, cache.state)
        return o[:, None], state


def _split(x, num_heads):
    B, T, width = x.shape
    return x.reshape(B, T, num_heads, width // num_heads)


def _init_A_log(rngs, num_value_heads, lower_bound, param_dtype):
    """log U(1, 16) for the unbounded gate, 0 for the bounded one (K3). Never below float32."""
    dtype = at_least_float32(param_dtype)
    if lower_bound is not None:
        return jnp.zeros(num_value_heads, dtype)
    low, high = A_RANGE
    return jnp.log(jax.random.uniform(rngs.params(), (num_value_heads,), minval=low, maxval=high)).astype(dtype)


def _init_dt_bias(rngs, size, param_dtype):
    """softplus^-1 of a time step dt drawn log-uniformly from [1e-3, 0.1], so that at x = 0 a softplus gate is -A dt."""
    low, high = (math.log(dt) for dt in DT_RANGE)
    dt = jnp.exp(jax.random.uniform(rngs.params(), (size,), minval=low, maxval=high))
    dt = jnp.maximum(dt, DT_FLOOR)
    return (dt + jnp.log(-jnp.expm1(-dt))).astype(at_least_float32(param_dtype))
