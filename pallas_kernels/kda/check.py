"""What the public functions refuse before anything is traced; each error names the argument, what it got, what may be.

Shapes and options are always checked. Values (a positive gate, decreasing ids) are checked only when they are
concrete; under jit they are the caller's promise.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from ..machine import BACKENDS
from .gates import check_lower_bound

__all__ = ["check_activations", "check_kda", "check_step", "describe", "scale_of"]

GATES = ("log", "softplus", "bounded")


def check_kda(q, k, v, g, beta, *, initial_state, segment_ids, num_segments, chunk_size, backend) -> None:
    """Shapes, dtypes and options of `kda` without its activations."""
    _check_choice("backend", backend, BACKENDS)
    _check_choice("chunk_size", chunk_size, (16, 32, 64, 128))
    B, T, H, K, HV, V = _check_tokens(q, k, v, g, beta, "BTHK")
    if num_segments is not None:
        if isinstance(num_segments, bool) or not isinstance(num_segments, int) or num_segments < 1:
            raise ValueError(f"num_segments: got {num_segments!r}; allowed is a static int of at least 1, or None")
        if segment_ids is None:
            raise ValueError(
                f"num_segments: got {num_segments} without segment_ids; pass segment_ids [B, T] = ({B}, {T})"
            )
    if segment_ids is not None:
        _check_segment_ids(segment_ids, (B, T), num_segments)
    state = (B, HV, K, V) if num_segments is None else (B, num_segments, HV, K, V)
    if initial_state is not None:
        axes = "[B, HV, K, V]" if num_segments is None else "[B, num_segments, HV, K, V]"
        _check_array("initial_state", initial_state, state, f"{axes}, K before V,")


def check_step(q, k, v, g, beta, state, *, slots, backend) -> None:
    """Shapes, dtypes and options of `kda_step` without its activations."""
    _check_choice("backend", backend, BACKENDS)
    B, H, K, HV, V = _check_tokens(q, k, v, g, beta, "BHK")
    if slots is None:
        _check_array("state", state, (B, HV, K, V), "[B, HV, K, V], K before V,")
        return
    if getattr(state, "ndim", None) != 4 or state.shape[1:] != (HV, K, V):
        raise ValueError(
            f"state: got {describe(state)}; allowed with slots is [P, HV, K, V], K before V, = (P, {HV}, {K}, {V})"
        )
    _check_array("state", state, state.shape, "")
    if getattr(slots, "shape", None) != (B,) or not jnp.issubdtype(slots.dtype, jnp.integer):
        raise ValueError(f"slots: got {describe(slots)}; allowed is an integer array [B] = ({B},)")
    if (ids := _concrete(slots)) is not None:
        live = ids[ids >= 0]
        if live.size and live.max() >= state.shape[0]:
            raise ValueError(
                f"slots: got {live.max()}; the pool has slots 0 to {state.shape[0] - 1}, negative is padding"
            )
        if len(np.unique(live)) != len(live):
            raise ValueError(f"slots: got {ids.tolist()}; a live slot may appear once, since two rows would write it")


def check_activations(gate, A_log, dt_bias, lower_bound, g, ids=None) -> None:
    """The gate's options against the raw or activated g `[..., HV, K]`, anything where ids are negative."""
    _check_choice("gate", gate, GATES)
    HV, K = g.shape[-2:]
    if lower_bound is not None:
        check_lower_bound(lower_bound)
    if gate == "bounded" and lower_bound is None:
        raise ValueError(
            "lower_bound: got None with gate='bounded'; pass the bound the model was trained with, such as -5.0"
        )
    if gate == "softplus" and lower_bound is not None:
        raise ValueError(
            f"lower_bound: got {lower_bound} with gate='softplus', which has no bound; a model trained with the "
            "bounded gate needs gate='bounded', and this one lower_bound=None"
        )
    if gate == "log":
        for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
            if x is not None:
                raise ValueError(
                    f"{name}: given with gate='log', which takes g as it is; pass gate='softplus' or 'bounded'"
                )
        _check_log_gate(g, lower_bound, ids)
        return
    if A_log is not None and (getattr(A_log, "shape", None) != (HV,) or not _is_float(A_log)):
        raise ValueError(f"A_log: got {describe(A_log)}; allowed is a float array [HV] = ({HV},)")
    if dt_bias is not None and (getattr(dt_bias, "shape", None) not in ((HV, K), (HV * K,)) or not _is_float(dt_bias)):
        raise ValueError(f"dt_bias: got {describe(dt_bias)}; allowed is [HV, K] = ({HV}, {K}) or [HV*K] = ({HV * K},)")


def scale_of(scale, K: int) -> float:
    """K**-0.5 for None; a concrete finite number otherwise."""
    if scale is None:
        return K**-0.5
    if isinstance(scale, jax.core.Tracer) or not np.isscalar(scale) and np.ndim(scale):
        raise ValueError(
            f"scale: got {describe(scale)}; allowed is a static number (multiply q by a traced one instead)"
        )
    if not math.isfinite(float(scale)):
        raise ValueError(f"scale: got {scale}; allowed is a finite number")
    return float(scale)


def _check_tokens(q, k, v, g, beta, axes: str):
    """Shapes of the five token arrays; axes is "BTHK", or "BHK" for one token. Returns the sizes B (T) H K HV V."""
    lead, n = ", ".join(axes[:-2]), len(axes)
    if getattr(q, "ndim", None) != n:
        raise ValueError(f"q: got {describe(q)}; allowed is a float array [{lead}, H, K]")
    *head, H, K = q.shape
    if getattr(v, "ndim", None) != n or list(v.shape[:-2]) != head:
        raise ValueError(f"v: got {describe(v)}; allowed is [{lead}, HV, V] with [{lead}] = {tuple(head)} as in q")
    HV, V = v.shape[-2:]
    for name, x, shape, what in (
        ("q", q, (*head, H, K), f"[{lead}, H, K]"),
        ("k", k, (*head, H, K), f"[{lead}, H, K] as in q"),
        ("v", v, (*head, HV, V), f"[{lead}, HV, V]"),
        ("g", g, (*head, HV, K), f"[{lead}, HV, K] with HV of v and K of q"),
        ("beta", beta, (*head, HV), f"[{lead}, HV] with HV of v"),
    ):
        if name == "g" and getattr(x, "shape", None) == (*head, HV):
            raise ValueError(
                f"g: got shape {x.shape}, one decay per head; KDA's is per channel, {what} = {shape}. "
                "Use gated_delta_net for one per head"
            )
        _check_array(name, x, shape, what)
    if H == 0 or HV % H:
        raise ValueError(f"v: got HV = {HV} value heads for H = {H} heads of q and k; allowed is a multiple of H")
    if K == 0 or V == 0:
        raise ValueError(f"q, v: got head sizes K = {K}, V = {V}; allowed is at least 1")
    return (*head, H, K, HV, V)


def _check_array(name, x, shape, what) -> None:
    if getattr(x, "shape", None) != tuple(shape) or not _is_float(x):
        raise ValueError(
            f"{name}: got {describe(x)}; allowed is a float array {what} {'= ' if what else ''}{tuple(shape)}"
        )


def _check_choice(name, value, allowed) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}; allowed is one of {', '.join(map(repr, allowed))}")


def _check_segment_ids(ids, shape, num_segments) -> None:
    if getattr(ids, "shape", None) != shape or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"segment_ids: got {describe(ids)}; allowed is an integer array [B, T] = {shape}")
    if (values := _concrete(ids)) is None:
        return
    valid = values >= 0
    seen = np.maximum.accumulate(np.where(valid, values, -1), axis=1) if values.size else values
    if (bad := np.argwhere(valid & (values < seen))).size:
        b, t = bad[0]
        raise ValueError(
            f"segment_ids: got {values[b, t]} after {seen[b, t]} at row {b}, token {t}; "
            "non-negative ids must not decrease along T"
        )
    if num_segments is not None and values.size and values.max() >= num_segments:
        raise ValueError(f"segment_ids: got {values.max()}; allowed is below num_segments = {num_segments}")


def _check_log_gate(g, lower_bound, ids) -> None:
    if isinstance(g, jax.core.Tracer) or isinstance(ids, jax.core.Tracer) or not g.size:
        return
    with jax.ensure_compile_time_eval():  # concrete arrays closed over by a jitted function are checked as well
        counts = True if ids is None else (ids >= 0)[..., None, None]
        highest = float(jnp.nanmax(jnp.where(counts, g, -jnp.inf)))
        lowest = float(jnp.nanmin(jnp.where(counts, g, 0)))
    if highest > 0:
        raise ValueError(
            f"g: got {highest}; allowed is a log-decay in nats, <= 0 (raw logits need gate='softplus' or 'bounded')"
        )
    if lower_bound is not None and lowest < lower_bound:
        raise ValueError(
            f"g: got {lowest}, below the promised lower_bound = {lower_bound}; drop lower_bound for an unbounded gate"
        )


def _concrete(x):
    return None if isinstance(x, jax.core.Tracer) else np.asarray(x)


def _is_float(x) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def describe(x) -> str:
    """What an error message says an argument is."""
    return f"{x.dtype} of shape {x.shape}" if hasattr(x, "shape") and hasattr(x, "dtype") else repr(x)
