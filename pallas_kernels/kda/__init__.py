"""Kimi Delta Attention (arXiv 2510.26692) and its lineage as pure functions on arrays.

Axes: B batch, T tokens, H heads of q and k, HV value heads (a multiple of H), K and V head sizes.
Log-decays are natural logarithms. States are [B, HV, K, V], K before V.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ..machine import BACKENDS, PLATFORMS, choose
from .check import check_activations, check_kda, check_step, describe, scale_of
from .chunked import chunked_kda
from .gates import bounded_gate, gate_parameters, softplus_gate
from .mesh import over_shards, place_alike
from .mesh_wrapper import sharded
from .mosaic_gpu import gpu_sequence, gpu_sequence_limits, gpu_token, gpu_token_limits
from .mosaic_tpu import tpu_sequence, tpu_sequence_limits, tpu_token, tpu_token_limits
from .reference import compute_dtype, scan_tokens
from .result import KDAResult
from .step import step_token

__all__ = [
    "KDAResult",
    "bounded_gate",
    "delta_net",
    "gated_delta_net",
    "kda",
    "kda_reference",
    "kda_step",
    "linear_attention",
    "segment_ids_from_cu_seqlens",
    "sharded",
    "softplus_gate",
    "which_kda_backend",
]

_SEQUENCE = {"mosaic_tpu": (tpu_sequence, tpu_sequence_limits), "mosaic_gpu": (gpu_sequence, gpu_sequence_limits)}
_TOKEN = {"mosaic_tpu": (tpu_token, tpu_token_limits), "mosaic_gpu": (gpu_token, gpu_token_limits)}


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    num_segments: int | None = None,
    gate: str = "log",
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    chunk_size: int = 64,
    backend: str = "auto",
) -> KDAResult:
    """Kimi Delta Attention over a sequence (KDA, section 3).

    Per token and value head, with a state S `[K, V]`: S <- diag(exp g) S; r = v - S^T k; S <- S + beta k r^T;
    output = scale * S^T q. Value head j reads q/k head j // (HV // H).

    Args:
        q, k: `[B, T, H, K]`, float.
        v: `[B, T, HV, V]`, float.
        g: `[B, T, HV, K]`, log-decay per channel in nats, <= 0 (-inf forgets all); raw logits if `gate` says so.
        beta: `[B, T, HV]`, write strength (logits with beta_sigmoid). Above 1 is accepted and not clipped: up to 2 the
            erase step has eigenvalues down to -1, beyond that the recurrence may grow.
        scale: static number multiplying q; None is K**-0.5.
        initial_state: `[B, HV, K, V]`, or `[B, num_segments, HV, K, V]`; None is zeros.
        segment_ids: integers `[B, T]`. Non-negative ids do not decrease along T and each begins a state of its own; a
            negative id is padding: output and gradients are exactly 0 there and the state passes by, whatever the
            padded inputs hold. Without num_segments, initial_state belongs to each row's first segment and the
            returned state is that of its last. Other ids never recompile.
        num_segments: static number of segments; ids at or above it are padding (an error when concrete). States then
            have an axis of segments after B; a segment without tokens returns its initial state.
        gate: "log" takes g as it is; "softplus" and "bounded" activate raw logits (`softplus_gate`, `bounded_gate`).
        A_log: `[HV]`, dt_bias: `[HV, K]` or `[HV*K]`, for the two activated gates; None is 0.
        lower_bound: the bound of gate="bounded"; with gate="log" the caller's promise that g >= lower_bound.
        qk_l2norm: q and k become x * rsqrt(sum x^2 + 1e-6) per head, before scale.
        beta_sigmoid: beta is a logit.
        chunk_size: 16, 32, 64 or 128 tokens are worked on at once.
        backend: "auto", "reference" (token scan), "xla" (chunkwise), "mosaic_tpu" or "mosaic_gpu" (its kernels for
            TPU and for NVIDIA Hopper, which "auto" takes there where they serve the call; Hopper's take q, k and v in
            bfloat16 with heads of 64 or 128). The results agree to rounding.

    Returns:
        KDAResult: output `[B, T, HV, V]` in v's dtype and state, float32 (float64 if any input is).
        float32 inputs get float32-grade products throughout, whatever default precision the caller has set.

    Raises:
        ValueError: for shapes, dtypes, options or concrete values that are not allowed, naming the argument.
        NotImplementedError: for a named kernel that cannot serve the call, saying why.

    Differentiable in reverse mode for every array argument, A_log, dt_bias and initial_state included, and for a
    cotangent of the state. Forward mode raises jax's own error, since the backward is written by hand.
    """
    arrays = _arrays(q, k, v, g, beta, A_log, dt_bias, initial_state, segment_ids)
    q, k, v, g, beta, A_log, dt_bias, initial_state, segment_ids = arrays
    return _run(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, segment_ids=segment_ids, num_segments=num_segments,
        activations=(gate, A_log, dt_bias, lower_bound, qk_l2norm, beta_sigmoid),
        chunk_size=chunk_size, backend=backend, erase=True,
    )  # fmt: skip


def kda_reference(q, k, v, g, beta, **options) -> KDAResult:
    """`kda` token by token, in the widest input dtype (at least float32): the oracle. Takes kda's keywords."""
    if options.pop("backend", "reference") not in ("auto", "reference"):
        raise ValueError("backend: kda_reference has one way to compute; call kda to choose a backend")
    return kda(q, k, v, g, beta, backend="reference", **options)


def linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None = None,
    *,
    beta: jax.Array | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    num_segments: int | None = None,
    gate: str = "log",
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    chunk_size: int = 64,
    backend: str = "auto",
) -> KDAResult:
    """The recurrence without the erase step: S <- diag(exp g) S + beta k v^T; output = scale * S^T q.

    The first generation of the lineage (KDA, section 2): plain linear attention with g=None, a Mamba2-style scalar
    decay with g `[B, T, HV]`, gated linear attention with g `[B, T, HV, K]`. Raw logits need the last shape.
    beta `[B, T, HV]` scales what is written (Mamba2's step size); None is 1. Everything else as in `kda`.
    """
    q, k, v, g, beta = _arrays(q, k, v, g, beta)
    A_log, dt_bias, initial_state, segment_ids = _arrays(A_log, dt_bias, initial_state, segment_ids)
    if g is None:
        if gate != "log":
            raise ValueError(f"g: got None with gate={gate!r}; pass raw logits [B, T, HV, K]")
        g = _no_decay(v, q)
    elif gate == "log" and getattr(g, "ndim", None) == 3:
        g = _per_channel(g, v, q)
    if beta is None:
        if beta_sigmoid:
            raise ValueError("beta: got None with beta_sigmoid=True; pass logits [B, T, HV]")
        beta = jnp.ones_like(v, jnp.float32, shape=v.shape[:3]) if _are_tokens(v) else None
    return _run(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, segment_ids=segment_ids, num_segments=num_segments,
        activations=(gate, A_log, dt_bias, lower_bound, qk_l2norm, beta_sigmoid),
        chunk_size=chunk_size, backend=backend, erase=False,
    )  # fmt: skip


def delta_net(q, k, v, beta, **options) -> KDAResult:
    """DeltaNet: `kda` that never forgets (g = 0). beta `[B, T, HV]`; keywords of kda but the gate's."""
    q, v = _arrays(q, v)
    return kda(q, k, v, _no_decay(v, q), beta, **options)


def gated_delta_net(q, k, v, g, beta, **options) -> KDAResult:
    """Gated DeltaNet: `kda` with one log-decay per value head, g `[B, T, HV]` <= 0; keywords of kda but the gate's."""
    q, v, g = _arrays(q, v, g)
    return kda(q, k, v, _per_channel(g, v, q), beta, **options)


def kda_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    scale: float | None = None,
    slots: jax.Array | None = None,
    gate: str = "log",
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    backend: str = "auto",
) -> KDAResult:
    """One token of `kda` for every row: q, k `[B, H, K]`; v `[B, HV, V]`; g `[B, HV, K]`; beta `[B, HV]`.

    Args:
        state: `[B, HV, K, V]`, or a pool `[P, HV, K, V]` with slots. Its dtype is kept: passing bfloat16 stores the
            state in bfloat16 (arithmetic stays float32), and small updates are then lost, about 1.5e-2 after 4096
            tokens of slow decay.
        slots: integers `[B]`; row b works on state[slots[b]]. A negative slot (or, under jit, one past the pool) is
            padding: its row writes nothing and gives 0, whatever it holds.

    The other keywords are those of `kda`. Donate `state` under jit for an update in place.

    Returns:
        KDAResult: output `[B, HV, V]` in v's dtype, and the whole state or pool.

    Raises:
        ValueError: as `kda`; also for a concrete slot past the pool or used twice.
    """
    arrays = _arrays(q, k, v, g, beta, state, A_log, dt_bias, slots)
    q, k, v, g, beta, state, A_log, dt_bias, slots = arrays
    check_step(q, k, v, g, beta, state, slots=slots, backend=backend)
    check_activations(gate, A_log, dt_bias, lower_bound, g, slots)
    backend = _choose(backend, partial(_step_limits, q, k, v, g, beta, state, slots))
    A_log, dt_bias = gate_parameters(g, A_log, dt_bias) if gate != "log" else (None, None)
    if q.shape[0] == 0:
        return KDAResult(jnp.zeros_like(v), state)
    axes = ("BHK", "BHK", "BHV", "BHK", "BH", "BHKV" if slots is None else "PHKV", "B", "H", "HK")
    arrays = place_alike((q, k, v, g, beta, state, slots, A_log, dt_bias), axes)

    def one_token(q, k, v, g, beta, state, slots, A_log, dt_bias):
        run = _TOKEN[backend][0] if backend in _TOKEN else step_token
        activations = (gate, A_log, dt_bias, lower_bound, qk_l2norm, beta_sigmoid)
        return run(q, k, v, g, beta, state, scale=scale_of(scale, q.shape[-1]), slots=slots, activations=activations)

    if backend in _TOKEN:
        return KDAResult(*over_shards(one_token, arrays, axes, ("BHV", axes[5])))
    return KDAResult(*one_token(*arrays))


def segment_ids_from_cu_seqlens(cu_seqlens: jax.Array, T: int) -> jax.Array:
    """Offsets `[N+1]` of sequences packed into one row of T tokens, as segment_ids `[1, T]` for `kda`.

    Sequence i holds tokens cu_seqlens[i] to cu_seqlens[i+1] - 1 and gets id i, an empty one no token; tokens after the
    last offset get -1, padding. ValueError if concrete offsets do not rise from 0 to at most T.
    """
    (cu,) = _arrays(cu_seqlens)
    if cu.ndim != 1 or cu.shape[0] < 1 or not jnp.issubdtype(cu.dtype, jnp.integer):
        raise ValueError(f"cu_seqlens: got {cu.dtype} of shape {cu.shape}; allowed is an integer array [N+1]")
    if not isinstance(cu, jax.core.Tracer):
        offsets = np.asarray(cu)
        if offsets[0] != 0 or (np.diff(offsets) < 0).any() or offsets[-1] > T:
            raise ValueError(
                f"cu_seqlens: got {offsets.tolist()}; allowed are offsets that rise from 0 to at most T = {T}"
            )
    t = jnp.arange(T)
    ids = jnp.sum(cu[1:, None] <= t, axis=0, dtype=jnp.int32)
    return jnp.where(t < cu[-1], ids, -1)[None]


def which_kda_backend(
    q,
    k,
    v,
    g,
    beta,
    state=None,
    *,
    platform: str | None = None,
    backend: str = "auto",
    chunk_size: int = 64,
    initial_state=None,
    slots=None,
    erase: bool = True,
    **options,
) -> str:
    """What `backend` would run for these arguments of kda, kda_step or linear_attention, without running it.

    platform names another machine, "cpu", "gpu" or "tpu" (of a kind that the kernels are built for); None is the
    abstract mesh's device, else this machine's.
    """
    if platform not in PLATFORMS:
        raise ValueError(f"platform: got {platform!r}; allowed is None, 'cpu', 'gpu', 'cuda', 'rocm' or 'tpu'")
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}; allowed is one of {', '.join(map(repr, BACKENDS))}")
    q, k, v, g, beta, state, initial_state, slots = _arrays(q, k, v, g, beta, state, initial_state, slots)
    if q.ndim == 3:
        return _choose(backend, partial(_step_limits, q, k, v, g, beta, state, slots), platform)
    limits = partial(_sequence_limits, q, k, v, g, beta, initial_state, chunk_size=chunk_size, erase=erase)
    return _choose(backend, limits, platform)


_choose = partial(choose, "kda")


def _sequence_limits(q, k, v, g, beta, initial_state, kernels, machine, *, chunk_size, erase):
    arrays = (q, k, v, g, beta, initial_state)
    return _SEQUENCE[kernels][1](arrays, chunk_size=chunk_size, erase=erase, machine=machine)


def _step_limits(q, k, v, g, beta, state, slots, kernels, machine):
    return _TOKEN[kernels][1]((q, k, v, g, beta), state, slots, machine=machine)


def _run(q, k, v, g, beta, *, scale, initial_state, segment_ids, num_segments, activations, chunk_size, backend, erase):
    check_kda(
        q, k, v, g, beta, initial_state=initial_state, segment_ids=segment_ids, num_segments=num_segments,
        chunk_size=chunk_size, backend=backend,
    )  # fmt: skip
    gate, A_log, dt_bias, *rest = activations
    check_activations(gate, A_log, dt_bias, rest[0], g, segment_ids)
    if gate != "log":
        A_log, dt_bias = gate_parameters(g, A_log, dt_bias)
    limits = partial(_sequence_limits, q, k, v, g, beta, initial_state, chunk_size=chunk_size, erase=erase)
    backend = _choose(backend, limits)
    B, T, _, K = q.shape
    if B == 0 or T == 0:  # nothing to compute: the state passes by
        shape = (B, *(() if num_segments is None else (num_segments,)), v.shape[2], K, v.shape[3])
        dtype = compute_dtype(q, k, v, g, beta, initial_state)
        state = jnp.zeros(shape, dtype) if initial_state is None else initial_state.astype(dtype)
        return KDAResult(jnp.zeros_like(v), state)
    state_axes = "BHKV" if num_segments is None else "BSHKV"
    axes = ("BTHK", "BTHK", "BTHV", "BTHK", "BTH", state_axes, "BT", "H", "HK")
    arrays = place_alike((q, k, v, g, beta, initial_state, segment_ids, A_log, dt_bias), axes)

    def tokens(q, k, v, g, beta, initial_state, segment_ids, A_log, dt_bias):
        activations = (gate, A_log, dt_bias, *rest)
        options = dict(
            scale=scale_of(scale, K), initial_state=initial_state, segment_ids=segment_ids, num_segments=num_segments,
            activations=activations,
        )  # fmt: skip
        if backend in _SEQUENCE:
            return _SEQUENCE[backend][0](q, k, v, g, beta, **options)
        if backend == "reference":
            return scan_tokens(q, k, v, g, beta, erase=erase, **options)
        return chunked_kda(q, k, v, g, beta, erase=erase, chunk_size=chunk_size, **options)

    if backend in _SEQUENCE:
        return KDAResult(*over_shards(tokens, arrays, axes, ("BTHV", state_axes)))
    return KDAResult(*tokens(*arrays))


def _per_channel(g, v, q):
    """One decay per head, [B, T, HV], repeated over the channels; left to `check_kda` if q or v is at fault."""
    if not _are_tokens(q, v):
        return g
    if getattr(g, "shape", None) != v.shape[:3]:
        raise ValueError(f"g: got {describe(g)}; allowed is one log-decay per value head, [B, T, HV] = {v.shape[:3]}")
    return jnp.repeat(g[..., None], q.shape[-1], axis=-1)


def _no_decay(v, q):
    return jnp.zeros_like(v, jnp.float32, shape=(*v.shape[:3], q.shape[-1])) if _are_tokens(q, v) else None


def _are_tokens(*xs):
    return all(getattr(x, "ndim", None) == 4 for x in xs)


def _arrays(*xs):
    return tuple(jnp.asarray(x) if isinstance(x, (np.ndarray, np.generic, list)) else x for x in xs)
