"""The chunkwise algorithm of KDA in XLA: the portable fast path, forward and hand-written backward.

This page is the description of the algorithm that every backend shares (KDA, section 3.2, in our own factorisation).

Per value head and chunk of C rows, with G the running sum of g from the chunk's first row and Gn its last value:

    Ak_ij = sum_d k_id k_jd e^{G_i - G_j}  (i > j)           L = diag(beta) Ak         T = (I + L)^-1
    A_ij  = sum_d q_id k_jd e^{G_i - G_j}  (i >= j)          q carries the scale
    k_in = k e^G,  q_in = q e^G,  k_out = k e^{Gn - G}
    W = T (beta k_in),  U = T (beta v)                       what the chunk reads of the old state, and writes
    V' = U - W S                                             the residuals, S the state at the chunk's start
    O = q_in S + A V'
    S+ = e^{Gn} S + k_out^T V'  =  e^{Gn} S - X S + D        with X = k_out^T W and D = k_out^T U

Only the last line is sequential, and written with X [K, K] and D [K, V] it is a single matmul per chunk; everything
else is a batch of matmuls over all chunks of a group. The decay e^{Gn} stays apart from X, in float32: rounded
together with X to fewer bits it would shrink a state that forgets slowly a little more with each chunk.
No exponent is computed as the difference the formulas show: `decay.py` says how, and why any gate is safe.
Without the erase step (linear attention) T is the identity and W, X vanish.

Backward, for cotangents dO of the output and E of the state after the chunk (E = dS+), chunks last to first:

    dS = e^{Gn} E - X^T E + (q_in^T dO - W^T A^T dO)         sequential; after the first chunk it is d initial_state
    dV' = A^T dO + k_out E                                   from here on all chunks at once
    dA = dO V'^T,   dq_in = dO S^T,   dk_out = V' E^T,   dGn = e^{Gn} sum_v S E
    [Z, Y] = T^T [-dV' S^T, dV']                             dL = -(Z W^T + Y U^T), since dT T^T = dW W^T + dU U^T
    dv = beta Y,   dk_in = beta Z,   dbeta = sum Z k_in + sum Y v + sum_j dL Ak

and the exponents' cotangents are products such as k_in dk_in, gathered over the same sums that formed them.

Memory: a scan over groups keeps the inputs and one state per group; the backward recomputes a group before it
differentiates it. Activations (gate, L2 norm, sigmoid) happen inside the group, so no activated copy is stored.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .decay import decay_exponents, decay_exponents_vjp, matmul, pair_products, pair_products_vjp, unit_lower_inverse
from .gates import activate_gate, activate_gate_vjp
from .layout import Layout, count_chunks, fetch, plan, put_back
from .mesh import repeat_heads, vary, varying
from .reference import compute_dtype, normalise

__all__ = ["chunked_kda"]

# Elements of one [tokens, HV, max(K, V)] array of a group: about 15 such float32 arrays live at once.
GROUP_ELEMENTS = {"cpu": 1 << 18, "other": 1 << 25}


class Settings(NamedTuple):
    """What is static: everything that decides the traced program besides shapes."""

    scale: float
    num_segments: int | None
    gate: str
    lower_bound: float | None
    qk_l2norm: bool
    beta_sigmoid: bool
    erase: bool
    chunk: int
    group_chunks: int
    precision: jax.lax.Precision
    exact: bool  # none of q, k and v is narrower than float32


class Inputs(NamedTuple):
    q: jax.Array  # [B, T, H, K]
    k: jax.Array
    v: jax.Array  # [B, T, HV, V]
    g: jax.Array  # [B, T, HV, K]
    beta: jax.Array  # [B, T, HV]
    A_log: jax.Array | None  # [HV]
    dt_bias: jax.Array | None  # [HV, K]
    initial_state: jax.Array | None  # [B, S, HV, K, V], S = 1 without num_segments


def chunked_kda(q, k, v, g, beta, *, scale, initial_state, segment_ids, num_segments, activations, erase, chunk_size):
    """Output `[B,T,HV,V]` in v's dtype and the final state, for validated arguments of `pallas_kernels.kda`."""
    gate, A_log, dt_bias, lower_bound, qk_l2norm, beta_sigmoid = activations
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    chunk = min(chunk_size, max(16, 1 << (T - 1).bit_length()))
    chunks = count_chunks(T, num_segments, chunk)
    limit = GROUP_ELEMENTS["cpu" if jax.default_backend() == "cpu" else "other"]
    most = max(1, limit // (B * HV * chunk * max(K, V)))
    groups = -(-chunks // most)
    exact = all(x.dtype in (jnp.float32, jnp.float64) for x in (q, k, v))
    settings = Settings(
        scale, num_segments, gate, lower_bound, qk_l2norm, beta_sigmoid, erase, chunk, -(-chunks // groups),
        # HIGH is three bf16 passes on a TPU and TF32 on a GPU. One bf16 pass would do for random keys, but leaves
        # 1.4e-2 on nearly parallel ones (measured on an H200), over the budget of 1e-2.
        jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.HIGH, exact,
    )  # fmt: skip
    if initial_state is not None and num_segments is None:
        initial_state = initial_state[:, None]
    inputs = Inputs(q, k, v, g, beta, A_log, dt_bias, initial_state)
    out, state = _chunked(settings, inputs, segment_ids)
    return out, state if num_segments else state[:, 0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(settings: Settings, inputs: Inputs, segment_ids):
    out, state, _ = _forward(settings, inputs, segment_ids)
    return out, state


def _chunked_fwd(settings, inputs, segment_ids):
    out, state, carries = _forward(settings, inputs, segment_ids)
    return (out, state), (inputs, segment_ids, carries)


def _forward(settings, inputs, segment_ids):
    """Output, final state, and the state that each group begins with [groups, B, HV, K, V]."""
    B, T = inputs.q.shape[:2]
    layout, groups = plan(segment_ids, B, T, settings.num_segments, settings.chunk, settings.group_chunks)

    def group(pool, n):
        p = _prepare(settings, inputs, layout, n)
        c = _chunk_terms(settings, p)
        slots = _slots(settings, layout, n)
        pool, starts = _pass_state(settings, c, pool, slots)
        _, out = _outputs(settings, p, c, starts)
        return pool, (_unchunk(out.astype(inputs.v.dtype)), starts[0])

    pool, (out, carries) = _scan_groups(group, _initial_pool(settings, inputs), groups)
    return put_back(_join(out), layout, T), pool, carries


def _chunked_bwd(settings, saved, cotangents):
    inputs, segment_ids, carries = saved
    dout, dstate = cotangents
    B, T = inputs.q.shape[:2]
    layout, groups = plan(segment_ids, B, T, settings.num_segments, settings.chunk, settings.group_chunks)
    first_pool = _initial_pool(settings, inputs)

    def group(carry, n):
        dpool, dA_log, ddt_bias = carry
        p = _prepare(settings, inputs, layout, n)
        c = _chunk_terms(settings, p)
        slots = _slots(settings, layout, n)
        pool = _write_slot(first_pool, None if slots is None else slots[0], carries[n])
        _, starts = _pass_state(settings, c, pool, slots)
        residuals, _ = _outputs(settings, p, c, starts)
        do = _chunk(_fetch_group(settings, dout, layout, n).astype(p.v.dtype), settings.chunk)
        dpool, d = _chunk_terms_vjp(settings, p, c, starts, residuals, do, dpool, slots)
        d, dA, db = _prepare_vjp(settings, inputs, layout, n, d)
        return (dpool, *jax.tree.map(jnp.add, (dA_log, ddt_bias), (dA, db))), d

    dtype = first_pool.dtype
    dA_log, ddt_bias = (None if x is None else jnp.zeros_like(x, dtype) for x in (inputs.A_log, inputs.dt_bias))
    carry = jax.tree.map(lambda x: vary(x, varying(inputs.g)), (dstate.astype(dtype), dA_log, ddt_bias))
    (dpool, dA_log, ddt_bias), d = _scan_groups(group, carry, groups, reverse=True)
    dq, dk, dv, dg, dbeta = (put_back(_join(x), layout, T) for x in d)
    rest = ((dA_log, inputs.A_log), (ddt_bias, inputs.dt_bias), (dpool, inputs.initial_state))
    return Inputs(dq, dk, dv, dg, dbeta, *(None if x is None else d.astype(x.dtype) for d, x in rest)), None


_chunked.defvjp(_chunked_fwd, _chunked_bwd)


# --- Groups, slots and layouts -----------------------------------------------------------------------------------


def _scan_groups(body, carry, groups, reverse=False):
    if groups == 1:
        carry, ys = body(carry, 0)
        return carry, jax.tree.map(lambda y: y[None], ys)
    return jax.lax.scan(body, carry, jnp.arange(groups), reverse=reverse)


def _initial_pool(settings, inputs):
    """States [B, S, HV, K, V] before the first token, in the compute dtype."""
    dtype = compute_dtype(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.initial_state)
    if inputs.initial_state is not None:
        return inputs.initial_state.astype(dtype)
    # Zeros like an outer product, so that they are placed on a mesh as g and v are; compiled, no product is left.
    zeros = jnp.zeros_like(inputs.g[:, 0, :, :, None] * inputs.v[:, 0, :, None, :], dtype)
    zeros = vary(zeros, varying(inputs.g))
    return jnp.repeat(zeros[:, None], settings.num_segments or 1, axis=1)


def _slots(settings, layout, n):
    """Slot of each chunk of group n, [N, B]; None when there is a single slot."""
    if layout.slot is None:
        return None
    return jax.lax.dynamic_slice_in_dim(layout.slot, n * settings.group_chunks, settings.group_chunks, axis=1).T


def _read_slot(pool, slot):
    if slot is None:
        return pool[:, 0]
    return jax.vmap(lambda p, s: jax.lax.dynamic_index_in_dim(p, s, keepdims=False))(pool, slot)


def _write_slot(pool, slot, state):
    if slot is None:
        return state[:, None]
    return jax.vmap(lambda p, s, x: jax.lax.dynamic_update_index_in_dim(p, x, s, 0))(pool, slot, state)


def _fetch_group(settings, x, layout, n):
    size = settings.group_chunks * settings.chunk
    return fetch(x, layout, n * size, size)


def _chunk(x, chunk):
    """[B, N*C, HV, X] to [N, B, HV, C, X]: chunks lead, for the scan over them."""
    B, T, *rest = x.shape
    return jnp.moveaxis(x.reshape(B, T // chunk, chunk, *rest), (1, 2), (0, 3))


def _unchunk(x):
    """[N, B, HV, C, X] to [B, N*C, HV, X]."""
    x = jnp.moveaxis(x, (0, 3), (1, 2))
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _join(x):
    """[groups, B, tokens, ...] to [B, positions, ...]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


# --- Activations -------------------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """A group in the compute dtype, chunked: q, k [N,B,HV,C,K] (q scaled), v, g and beta [N,B,HV,C,1]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


def _raw(settings, inputs, layout: Layout, n) -> Inputs:
    """The raw inputs of group n, chunked, in the compute dtype, 0 at padding; the gate's parameters to broadcast."""
    dtype = compute_dtype(*inputs[:5], inputs.initial_state)
    tokens = (*inputs[:4], inputs.beta[..., None])
    tokens = (_chunk(_fetch_group(settings, x, layout, n), settings.chunk).astype(dtype) for x in tokens)
    if settings.gate == "log":
        return Inputs(*tokens, None, None, None)
    return Inputs(*tokens, inputs.A_log[:, None, None], inputs.dt_bias[:, None, :], None)


def _prepare(settings, inputs, layout: Layout, n) -> Prepared:
    q, k, v, g, beta, A_log, dt_bias, _ = _raw(settings, inputs, layout, n)
    if settings.qk_l2norm:
        q, k = normalise(q), normalise(k)
    if settings.gate != "log":
        g = activate_gate(g, A_log, dt_bias, settings.lower_bound)
    if settings.beta_sigmoid:
        beta = jax.nn.sigmoid(beta)
    valid, starts = _masks(settings, layout, n)
    # Below `forget` a step's factor is 0 anyway, and small sums stay exact; a later segment begins by forgetting.
    forget = -110.0 if g.dtype == jnp.float32 else -750.0
    g = jnp.where(starts, forget, jnp.where(valid, jnp.maximum(g, forget), 0))
    beta = jnp.where(valid, beta, 0)
    group = v.shape[2] // q.shape[2]
    q, k = (repeat_heads(x, group, axis=2) for x in (q, k))
    return Prepared(settings.scale * q, k, v, g, beta)


def _prepare_vjp(settings, inputs, layout, n, d: Prepared):
    """Cotangents of the raw inputs of group n, in their layout and dtypes, and those of A_log and dt_bias."""
    raw = _raw(settings, inputs, layout, n)
    dq, dk, dv, dg, dbeta = d
    H = raw.q.shape[2]
    if dq.shape[2] != H:  # grouped values: a q/k head serves HV // H value heads
        dq, dk = (x.reshape(*x.shape[:2], H, -1, *x.shape[3:]).sum(axis=3) for x in (dq, dk))
    dq = settings.scale * dq
    if settings.qk_l2norm:
        dq, dk = _normalise_vjp(raw.q, dq), _normalise_vjp(raw.k, dk)
    if settings.beta_sigmoid:
        beta = jax.nn.sigmoid(raw.beta)
        dbeta = dbeta * beta * (1 - beta)
    valid, starts = _masks(settings, layout, n)
    dg = jnp.where(valid & ~starts, dg, 0)
    dA = db = None
    if settings.gate != "log":
        dg, dA, db = activate_gate_vjp(raw.g, raw.A_log, raw.dt_bias, settings.lower_bound, dg)
        dA, db = dA.reshape(inputs.A_log.shape), db.reshape(inputs.dt_bias.shape)
    *d, dbeta = (_unchunk(x.astype(r.dtype)) for x, r in zip((dq, dk, dv, dg, dbeta), inputs[:5], strict=True))
    return (*d, dbeta[..., 0]), dA, db


def _masks(settings, layout, n):
    """valid and starts of group n, [N, B, 1, C, 1]."""
    size = settings.group_chunks * settings.chunk
    masks = (jax.lax.dynamic_slice_in_dim(m, n * size, size, axis=1) for m in (layout.valid, layout.starts))
    return tuple(_chunk(m[:, :, None, None], settings.chunk) for m in masks)


def _normalise_vjp(x, dy):
    r = jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
    y = x * r
    return r * (dy - y * jnp.sum(y * dy, axis=-1, keepdims=True))


# --- Chunks ------------------------------------------------------------------------------------------------------


class Terms(NamedTuple):
    """What a chunk needs besides the state; names as at the top. Without erase the last four are None."""

    factors: list  # exponentials of the levels, each [N,B,HV,C,K]
    decay_in: jax.Array  # e^G
    decay_out: jax.Array  # e^{Gn - G}
    decay: jax.Array  # e^{Gn}, [N,B,HV,K,1]
    A: jax.Array
    U: jax.Array
    D: jax.Array
    Ak: jax.Array | None
    T: jax.Array | None
    W: jax.Array | None
    X: jax.Array | None


def _chunk_terms(settings, p: Prepared) -> Terms:
    dot = partial(matmul, precision=settings.precision)
    levels, prefix, suffix = decay_exponents(p.g)
    factors = [jnp.exp(x) for x in levels]
    decay_in, decay_out = jnp.exp(prefix), jnp.exp(suffix)
    decay = jnp.swapaxes(decay_in[..., -1:, :], -1, -2)
    k_out = p.k * decay_out
    products = pair_products([p.q, p.k] if settings.erase else [p.q], p.k, factors, settings.precision)
    A = products[0] + jnp.eye(settings.chunk, dtype=p.q.dtype) * jnp.sum(p.q * p.k, axis=-1, keepdims=True)
    if not settings.erase:
        U = p.beta * p.v
        return Terms(factors, decay_in, decay_out, decay, A, U, dot(k_out, U, ta=True), None, None, None, None)
    Ak = products[1]
    T = unit_lower_inverse(p.beta * Ak, settings.precision)
    K = p.k.shape[-1]
    WU = dot(T, p.beta * jnp.concatenate([p.k * decay_in, p.v], axis=-1))
    XD = dot(k_out, WU, ta=True)
    W, U, X, D = WU[..., :K], WU[..., K:], XD[..., :K], XD[..., K:]
    return Terms(factors, decay_in, decay_out, decay, A, U, D, Ak, T, W, X)


def _pass_state(settings, c: Terms, pool, slots):
    """The sequential half: the pool after the group, and the state at the start of each chunk [N,B,HV,K,V]."""

    def step(pool, xs):
        decay, X, D, slot = xs
        start = _read_slot(pool, slot)
        end = decay * start + D
        if settings.erase:
            end = end - matmul(X, start, settings.precision)
        return _write_slot(pool, slot, end), start

    return jax.lax.scan(step, pool, (c.decay, c.X, c.D, slots))


def _outputs(settings, p: Prepared, c: Terms, starts):
    """The residuals V' (U itself without erase) and the output, both [N,B,HV,C,V]."""
    dot = partial(matmul, precision=settings.precision)
    q_in = p.q * c.decay_in
    if not settings.erase:
        return c.U, dot(q_in, starts) + dot(c.A, c.U)
    read = dot(jnp.concatenate([c.W, q_in], axis=-2), starts)
    residuals = c.U - read[..., : settings.chunk, :]
    return residuals, read[..., settings.chunk :, :] + dot(c.A, residuals)


def _chunk_terms_vjp(settings, p: Prepared, c: Terms, starts, residuals, do, dpool, slots):
    """The pool's cotangent before the group, and the cotangents of p."""
    dot = partial(matmul, precision=settings.precision)
    pairs_vjp = partial(
        pair_products_vjp, precision=settings.precision, dtype=p.k.dtype if settings.exact else jnp.bfloat16
    )
    C, K = p.k.shape[-2:]
    q_in, k_in, k_out = p.q * c.decay_in, p.k * c.decay_in, p.k * c.decay_out
    Ado = dot(c.A, do, ta=True)
    if settings.erase:
        dstart = dot(jnp.concatenate([q_in, -c.W], axis=-2), jnp.concatenate([do, Ado], axis=-2), ta=True)
    else:
        dstart = dot(q_in, do, ta=True)

    def step(dpool, xs):
        decay, X, dstart, slot = xs
        dend = _read_slot(dpool, slot)
        d = decay * dend + dstart
        if settings.erase:
            d = d - matmul(X, dend, settings.precision, ta=True)
        return _write_slot(dpool, slot, d), dend

    dpool, dends = jax.lax.scan(step, dpool, (c.decay, c.X, dstart, slots), reverse=True)

    dresiduals = Ado + dot(k_out, dends)
    dA = dot(do, residuals, tb=True)
    dk_out = dot(residuals, dends, tb=True)
    dtotal = jnp.swapaxes(c.decay * jnp.sum(starts * dends, axis=-1, keepdims=True), -1, -2)
    if settings.erase:
        from_start = dot(jnp.concatenate([-dresiduals, do], axis=-2), starts, tb=True)
        dW, dq_in = from_start[..., :C, :], from_start[..., C:, :]
        ZY = dot(c.T, jnp.concatenate([dW, dresiduals], axis=-1), ta=True)
        dL = -dot(ZY, jnp.concatenate([c.W, c.U], axis=-1), tb=True)
        dL = jnp.where(jnp.tri(C, k=-1, dtype=bool), dL, 0)
        Z, Y = ZY[..., :K], ZY[..., K:]
        dk_in = p.beta * Z
        dbeta = sum(jnp.sum(x, axis=-1, keepdims=True) for x in (Z * k_in, Y * p.v, dL * c.Ak))
        drows, dk, dlevels = pairs_vjp([p.q, p.k], p.k, c.factors, [dA, p.beta * dL])
        dk = dk + drows[1] + dk_in * c.decay_in
        dprefix = dk_in * k_in + dq_in * q_in
    else:
        dq_in, Y = dot(do, starts, tb=True), dresiduals
        dbeta = jnp.sum(Y * p.v, axis=-1, keepdims=True)
        drows, dk, dlevels = pairs_vjp([p.q], p.k, c.factors, [dA])
        dprefix = dq_in * q_in
    diagonal = jnp.sum(do * residuals, axis=-1, keepdims=True)
    dq = drows[0] + dq_in * c.decay_in + diagonal * p.k
    dk = dk + dk_out * c.decay_out + diagonal * p.q
    dg = decay_exponents_vjp(dlevels, dprefix, dk_out * k_out, dtotal)
    # Fused into one kernel with the activations' backward, the sums above run at a fraction of a GPU's bandwidth.
    return dpool, jax.lax.optimization_barrier(Prepared(dq, dk, p.beta * Y, dg, dbeta))
