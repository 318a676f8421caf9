"""One token of KDA on a TPU: each state comes from HBM once and goes back to its place once.

Decoding is bound by memory: a head of K = V = 128 moves 64 KiB of float32 each way for some 110 vector operations. So
the states stay in HBM, and the kernel streams them itself. A unit is G heads of one row, which lie together in HBM;
units pass in order through a ring of VMEM buffers, each updated where it lies:

    reading   unit n + ahead, ..., n + 1
    updating  unit n
    writing   unit n - 1, ..., n - (ring - ahead) + 1, so that unit n + ahead finds its buffer written back

A row without a slot starts no transfer in either direction: that is how it touches nothing, and why the states are not
windows of the grid, of which each is written back whatever its row holds. Live slots differ, so no unit reads what
another writes. The rest (tokens in, output out) are ordinary windows of R rows.

In a state, K runs along sublanes and V along lanes. Both reductions of a step are then sums over sublanes of a state
times a column, all in float32 on the vector unit: there is no matrix product, hence no precision to choose. What costs
most is to make columns [K, V], equal along V, of the decay, k and q: each is its row, repeated and transposed. Keys and
queries in bfloat16 share the two halves of one word, so that two transpositions make three columns, and are scaled (by
their norms, beta and scale) only after they are summed over, since the raw values alone fit a half.

Static cycles per head of K = V = 128, float32 state, bfloat16 tokens, against the 128 KiB of HBM traffic:

    v5e 136 of 240    v5p 136 of 166 (each core)    v6e 94 of 140    TPU7x 96 of 78
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..gates import activate_gate
from ..kernels import rows_of_vmap
from ..reference import beta_of

__all__ = ["step_limits", "tpu_step"]

LANES = 128
HEAD_SIZES = (64, 128, 256)
UNIT_BYTES = 512 * 1024  # of one transfer, long against the latency of starting it
RING_BYTES = 4 * 1024 * 1024
WINDOW_BYTES = 1024 * 1024  # of the tokens and outputs of R rows; the pipeline holds two of each
MOST_LANES = 512 * 256  # of a row's tokens, which are all in VMEM
MOST_ROWS = 65536  # whose slots are in SMEM


def tpu_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    scale: float,
    slots: jax.Array | None,
    activations: tuple,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """Output `[B, HV, V]` in v's dtype and the new state or pool in its own; arguments as `step_token` takes them.

    The state's buffer is updated in place where it is donated. A padded row costs no traffic, writes nothing and gives
    0, whatever it holds; slots past the pool are padding. Not differentiable. `interpret` is that of `pl.pallas_call`.
    Under vmap, the rows and slots of all calls become those of one.

    V = 64 is slow: its states fill half of each register and, at the boundary of jit, XLA may store them transposed (if
    K or HV is a multiple of 128), which costs a copy both ways.

    Raises:
        NotImplementedError: what `step_limits` says.
    """
    gate, A_log, dt_bias, *rest = activations
    if limit := step_limits(q, v, state, k, g, beta, A_log, dt_bias):
        raise NotImplementedError(limit)
    B, P = q.shape[0], state.shape[0]
    if B == 0 or P == 0:
        return jnp.zeros_like(v), state
    if slots is None:  # a state per row is a pool in order
        slots = jnp.arange(B, dtype=jnp.int32)
    else:  # int32, or wider until they are known to fit
        slots = slots.astype(jnp.result_type(slots, jnp.int32))
        slots = jnp.where((slots >= 0) & (slots < P), slots, -1).astype(jnp.int32)
    parameters = () if gate == "log" else (A_log.astype(jnp.float32)[:, None], dt_bias.astype(jnp.float32))
    run = rows_of_vmap(partial(_call, scale=scale, activations=(gate, *rest), interpret=interpret))
    return run((q, k, v, g, beta), parameters, slots, state)


def step_limits(q: jax.Array, v: jax.Array, state: jax.Array, *others: jax.Array | None) -> str | None:
    """Why `tpu_step` cannot serve these arguments of kda_step (others: further arrays, for their dtypes), or None."""
    (B, _, K), (HV, V) = q.shape, v.shape[1:]
    dtypes = [x.dtype for x in (q, v, state, *others) if x is not None]
    odd = [str(d) for d in dtypes if d not in (jnp.float32, jnp.bfloat16)]
    if odd:
        limit, got = "takes float32 and bfloat16 arrays", f"not {odd[0]}"
    elif K not in HEAD_SIZES or V not in HEAD_SIZES:
        limit, got = "has head sizes 64, 128 and 256", f"not K = {K}, V = {V}"
    elif HV * max(K, V, LANES) > MOST_LANES:
        limit, got = f"holds HV * max(K, V, {LANES}) of at most {MOST_LANES}", f"not HV = {HV}, K = {K}, V = {V}"
    elif B > MOST_ROWS:
        limit, got = f"has at most {MOST_ROWS} rows", f"not {B}"
    else:
        return None
    return f"the TPU decode kernel {limit}, {got}"


class _Plan(NamedTuple):
    parts: int  # 2 is one for each core of a chip that has two to share a kernel
    steps: int  # of a part
    rows: int  # R, of a step
    heads: int  # G, of a unit
    ring: int  # buffers
    ahead: int  # units being read
    paired: bool  # q and k share the words of one column


def _plan(tokens, state) -> _Plan:
    q, k, v, g, _ = tokens
    (B, H, K), (HV, V) = q.shape, v.shape[1:]
    token_bytes = max(x.dtype.itemsize for x in (q, k, v, g))
    head = K * max(V, LANES) * state.dtype.itemsize
    heads = max(n for n in range(1, min(16, UNIT_BYTES // head) + 1) if HV % n == 0)
    ring = max(4, min(16, RING_BYTES // (heads * head)))
    padded = [pl.cdiv(n, 16) * 16 * max(d, LANES) for n, d in ((H, K), (H, K), (HV, V), (HV, K), (HV, V))]
    most = max(1, min(8, WINDOW_BYTES // (sum(padded) * token_bytes)))
    parts = min(B, 2)
    rows = pl.cdiv(B, parts * pl.cdiv(B, parts * most))
    paired = q.dtype == k.dtype == jnp.bfloat16
    return _Plan(parts, pl.cdiv(B, parts * rows), rows, heads, ring, ahead=ring // 2, paired=paired)


def _call(tokens, parameters, slots, state, *, scale, activations, interpret):
    """`tpu_step` with slots int32, -1 for padding, and float32 parameters A_log [HV, 1] and dt_bias, or none."""
    q, k, v, g, beta = tokens
    (B, H, K), (HV, V) = q.shape, v.shape[1:]
    plan = _plan(tokens, state)
    groups, tiles = HV // plan.heads, pl.cdiv(B, plan.rows)
    slots = jnp.pad(slots, (0, plan.parts * plan.steps * plan.rows - B), constant_values=-1)

    # Index maps return int32 by type: under enable_x64 a bare 0 would be an int64, which Mosaic refuses.
    def tile(p, t, _):  # the last step may lie past the last tile; it stays there and has no live rows
        return jnp.minimum(p * plan.steps + t, tiles - 1)

    def rows(*shape):
        return pl.BlockSpec((plan.rows, *shape), lambda *i: (tile(*i), jnp.int32(0), jnp.int32(0)))

    whole = [pl.BlockSpec(x.shape, lambda *_: (jnp.int32(0), jnp.int32(0))) for x in parameters]
    in_place = pl.BlockSpec(memory_space=pl.ANY)
    out, new = pl.pallas_call(
        partial(_kernel, plan=plan, tiles=tiles, scale=scale, activations=activations),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(plan.parts, plan.steps),
            in_specs=[rows(H, K), rows(H, K), rows(HV, V), rows(HV, K), rows(1, HV), *whole, in_place],
            out_specs=[rows(HV, V), in_place],
            scratch_shapes=[
                pltpu.VMEM((plan.ring, plan.heads, K, V), state.dtype),
                pltpu.SemaphoreType.DMA((plan.ring,)),
                pltpu.SemaphoreType.DMA((plan.ring,)),
                pltpu.VMEM((groups, (2 if plan.paired else 3) * plan.heads, K), jnp.int32),
                pltpu.VMEM((groups, 4 * plan.heads, V), jnp.float32),
            ],
        ),
        out_shape=(_like(v), _like(state)),
        input_output_aliases={6 + len(parameters): 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=7 * B * HV * K * V,
            bytes_accessed=2 * B * HV * K * V * state.dtype.itemsize + sum(x.nbytes for x in (*tokens, v)),
            transcendentals=B * HV * K,
        ),
        interpret=interpret,
        name="kda_step",
    )(slots, q, k, v, g, beta[:, None, :], *parameters, state)
    return out, new


def _like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


class _Units:
    """The states of one part of the grid, unit by unit; n counts the units of all its rows, live or not."""

    def __init__(self, slots, state, new, ring, reads, writes, plan: _Plan, part):
        self.slots, self.state, self.new, self.plan = slots, state, new, plan
        self.ring, self.reads, self.writes = ring, reads, writes
        self.groups = state.shape[1] // plan.heads
        self.count = plan.steps * plan.rows * self.groups
        self.first_row = part * (plan.steps * plan.rows)

    def live(self, row):
        return self.slots[self.first_row + row] >= 0

    def buffer(self, n):
        return self.ring.at[self._lap(n)]

    def read(self, n):
        return pltpu.make_async_copy(self._place(self.state, n), self.buffer(n), self.reads.at[self._lap(n)])

    def write(self, n):
        return pltpu.make_async_copy(self.buffer(n), self._place(self.new, n), self.writes.at[self._lap(n)])

    def start_reading(self, n):
        """As soon as the unit that had this buffer before is written back."""
        before = n - self.plan.ring

        @pl.when((before >= 0) & self.live(self._row(jnp.maximum(before, 0))))
        def _():
            self.write(before).wait()

        @pl.when(self.live(self._row(n)))
        def _():
            self.read(n).start()

    def begin(self):
        _for(0, min(self.plan.ahead, self.count), self.start_reading)

    def finish(self):
        """Until the last units, for whose buffers no other has waited, are written back."""

        def wait(n):
            @pl.when(self.live(self._row(n)))
            def _():
                self.write(n).wait()

        _for(max(0, self.count - self.plan.ring), self.count, wait)

    def _row(self, n):
        return lax.div(n, jnp.int32(self.groups))

    def _place(self, ref, n):
        group = lax.rem(n, jnp.int32(self.groups))
        return ref.at[self.slots[self.first_row + self._row(n)], pl.ds(group * self.plan.heads, self.plan.heads)]

    def _lap(self, n):
        return lax.rem(n, jnp.int32(self.plan.ring))


def _kernel(slots, q_ref, k_ref, v_ref, g_ref, beta_ref, *refs, plan, tiles, scale, activations):
    gate, lower_bound, qk_l2norm, beta_sigmoid = activations
    *parameters, state, out_ref, new, ring, reads, writes, columns_ref, rows_ref = refs
    part, step, G = pl.program_id(0), pl.program_id(1), plan.heads
    units = _Units(slots, state, new, ring, reads, writes, plan, part)
    pl.when(step == 0)(units.begin)

    def activate(r):
        """Of batch row r, the columns [groups, 2 G or 3 G, K] as words and the rows [groups, 4 G, V] of `_update`."""
        q, k, v, g, beta = (ref[r].astype(jnp.float32) for ref in (q_ref, k_ref, v_ref, g_ref, beta_ref))
        group = v.shape[0] // q.shape[0]
        if gate != "log":
            A_log, dt_bias = parameters
            g = activate_gate(g, A_log[...], dt_bias[...], lower_bound if gate == "bounded" else None)
        beta = beta_of(beta, beta_sigmoid).reshape(-1, 1)
        q_norm, k_norm = (_inverse_norm(x, group) if qk_l2norm else jnp.float32(1) for x in (q, k))
        words = [_bits(jnp.exp(g))]
        if plan.paired:
            words.append(jnp.repeat(_bits(k) | lax.shift_right_logical(_bits(q), jnp.int32(16)), group, axis=0))
        else:
            words += [jnp.repeat(_bits(x), group, axis=0) for x in (k, q)]
        for i, x in enumerate(words):
            columns_ref[:, i * G : (i + 1) * G] = x.reshape(units.groups, G, x.shape[1])
        for i, x in enumerate((v, k_norm, beta * k_norm, scale * q_norm)):
            rows_ref[:, i * G : (i + 1) * G] = jnp.broadcast_to(x, v.shape).reshape(units.groups, G, v.shape[1])

    def row(r):
        t = step * plan.rows + r
        live = units.live(t)

        @pl.when(live)
        def _():
            activate(r)

        def unit(c):
            n = t * units.groups + c

            @pl.when(n + plan.ahead < units.count)
            def _():
                units.start_reading(n + plan.ahead)

            @pl.when(live)
            def _():
                units.read(n).wait()
                _update(units.buffer(n), columns_ref.at[c], rows_ref.at[c], plan.paired)
                units.write(n).start()

        _for(0, units.groups, unit)

        @pl.when(live)
        def _():
            out_ref[r] = rows_ref[:, :G].reshape(out_ref.shape[1:]).astype(out_ref.dtype)

        @pl.when(jnp.logical_not(live) & (part * plan.steps + step < tiles))
        def _():
            out_ref[r] = jnp.zeros(out_ref.shape[1:], out_ref.dtype)

    _for(0, plan.rows, row)
    pl.when(step == plan.steps - 1)(units.finish)


def _update(state_ref, columns_ref, rows_ref, paired):
    """One token for G states [G, K, V]; the outputs take the place of v among the rows.

    Rows: v, and the factors of S^T k, of the write k r^T and of the output, each repeated along V.
    """
    G, K, V = state_ref.shape

    def column(i):  # [K, V] of one row of words
        x = jnp.broadcast_to(columns_ref[i : i + 1], (min(V, LANES), K)).T
        return jnp.concatenate([x] * math.ceil(V / LANES), axis=1)

    def value(bits):
        return lax.bitcast_convert_type(bits, jnp.float32)

    for j in range(G):
        if paired:
            pair = column(G + j)
            k, q = value(pair & jnp.int32(-(1 << 16))), value(pair << 16)
        else:
            k, q = value(column(G + j)), value(column(2 * G + j))
        v, k_in, k_out, q_out = (rows_ref[i * G + j : i * G + j + 1] for i in range(4))
        state = value(column(j)) * state_ref[j].astype(jnp.float32)
        residual = v - k_in * jnp.sum(k * state, axis=0, keepdims=True)
        state = state + k * (k_out * residual)
        state_ref[j] = state.astype(state_ref.dtype)
        rows_ref[j : j + 1] = q_out * jnp.sum(q * state, axis=0, keepdims=True)


def _bits(x):
    return lax.bitcast_convert_type(x, jnp.int32)


def _inverse_norm(x, group):
    """[HV, 1] for x [H, K]; the eps is that of `reference.normalise`."""
    return jnp.repeat(lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + 1e-6), group, axis=0)


def _for(first, last, body):
    lax.fori_loop(jnp.int32(first), jnp.int32(last), lambda i, _: body(i), None)
