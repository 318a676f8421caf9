"""One token of KDA on a Hopper GPU: each state comes from HBM once and goes back to its place once.

Decoding is bound by memory: a head of K = V = 128 moves 64 KiB of float32 each way for some 130,000 operations. So a
program is one warpgroup that holds its part of a state, all K rows of 64 columns, in registers: a thread reads words of
four values, 16 of them before it waits for any, and writes each where it read it. Programs are small (32 KiB of
float32) and share nothing, so that of the four on each SM some keep the memory busy while others compute or end; a call
too small to fill the GPU cuts the columns in half once more.

No column meets another in a step, and both of its sums run over K; warps lie along columns, so that the sums are
inside a warp. With S' = diag(exp g) S, the decayed state,

    w   = beta (v - S'^T k)              what is written
    S   = S' + k w^T
    out = S'^T q + (q . k) w             which is S^T q, but both sums are of S' and need not wait for one another

all in float32 on the ordinary units: there is no matrix product, hence no precision to choose. The vectors along K are
activated while the state is on its way, whole in every warp, and reach the threads that hold their rows through shared
memory.

The state is a jax Ref: that is how a Pallas kernel for GPU updates an array in place, where its caller donates it.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..kernels import rows_of_vmap
from ..mesh import varying

__all__ = ["gpu_step", "gpu_step_limits"]

HEAD_SIZES = (64, 128)
COLUMNS = 64  # of a program, or half of them
FILLED = 132  # programs, one on each SM
WORD = 4  # values of a row that a thread reads at once

_F32 = jnp.float32


def gpu_step(
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

    The state's buffer is updated in place where it is donated, but for one that varies over the axes of a shard_map
    with check_vma, whose Refs jax refuses there: then the new states are a buffer of their own, and a pool is written
    by XLA. A padded row costs no traffic, writes nothing and gives 0, whatever it holds; slots past the pool are
    padding. Not differentiable. Under vmap, the rows and slots of all calls become those of one. `interpret` is that of
    `pl.kernel`, a `plgpu.InterpretGPUParams`.

    Raises:
        NotImplementedError: what `gpu_step_limits` says.
    """
    gate, A_log, dt_bias, *rest = activations
    if limit := gpu_step_limits(q, v, state, k, g, beta, A_log, dt_bias):
        raise NotImplementedError(limit)
    B, P = q.shape[0], state.shape[0]
    if B == 0 or P == 0:
        return jnp.zeros_like(v), state
    if slots is not None and slots.dtype != jnp.int32:
        slots = slots.astype(jnp.result_type(slots, jnp.int32))
        slots = jnp.where((slots >= 0) & (slots < P), slots, -1).astype(jnp.int32)
    parameters = () if gate == "log" else (A_log.astype(_F32), dt_bias.astype(_F32))
    run = rows_of_vmap(partial(_call, scale=scale, activations=(gate, *rest), interpret=interpret))
    return run((q, k, v, g, beta), parameters, slots, state)


def gpu_step_limits(q: jax.Array, v: jax.Array, state: jax.Array, *others: jax.Array | None) -> str | None:
    """Why `gpu_step` cannot serve these arguments of kda_step (others: further arrays, for their dtypes), or None."""
    K, V = q.shape[-1], v.shape[-1]
    dtypes = [x.dtype for x in (q, v, state, *others) if x is not None]
    odd = [str(d) for d in dtypes if d not in (jnp.float32, jnp.bfloat16)]
    if odd:
        return f"the GPU decode kernel takes float32 and bfloat16 arrays, not {odd[0]}"
    if K not in HEAD_SIZES or V not in HEAD_SIZES:
        return f"the GPU decode kernel has head sizes 64 and 128, not K = {K}, V = {V}"
    return None


def _call(tokens, parameters, slots, state, *, scale, activations, interpret):
    """`gpu_step` with int32 slots and float32 parameters A_log [HV] and dt_bias [HV, K], or none."""
    v = tokens[2]
    (B, HV, V), P = v.shape, state.shape[0]
    columns = _columns(B * HV, V)
    in_place = not varying(state)
    out_type = [_like(v)] if in_place else [_like(v), _like(state, (B, *state.shape[1:]))]

    def kernel(*refs):
        token_refs, refs = refs[: len(tokens)], refs[len(tokens) :]
        parameter_refs, refs = refs[: len(parameters)], refs[len(parameters) :]
        *slot_ref, state_ref, out_ref = refs if in_place else refs[:-1]
        unit, slabs = lax.axis_index("unit"), V // columns
        row, head = unit // (HV * slabs), unit // slabs % HV
        slab = pl.ds(unit % slabs * columns, columns)
        token = _Token(token_refs, parameter_refs, row, head, scale, activations)
        out_ref = out_ref.at[row, head, slab]
        if slots is None:
            slot, live = row, True
        else:
            slot = slot_ref[0][row]
            live = (slot >= 0) & (slot < P)

        @pl.when(live)
        def _():
            old = state_ref.at[slot, head, :, slab]
            new = old if in_place else refs[-1].at[row, head, :, slab]
            _update(token, slab, old, new, out_ref)

        if slots is not None:

            @pl.when(jnp.logical_not(live))
            def _():
                _, _, along_columns = _layouts(state.shape[2], columns)
                out_ref[...] = plgpu.layout_cast(jnp.zeros(out_ref.shape, v.dtype), along_columns)

    run = pl.kernel(
        kernel,
        out_type=out_type,
        mesh=plgpu.Mesh(grid=(B * HV * (V // columns),), grid_names=("unit",)),
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
        name="kda_step",
    )
    inputs = (*tokens, *parameters, *(() if slots is None else (slots,)))
    if in_place:
        states = jax.new_ref(state)
        (out,) = run(*inputs, states)
        return out, jax.freeze(states)
    out, new = run(*inputs, state)
    if slots is None:
        return out, new
    return out, state.at[jnp.where(slots >= 0, slots, P)].set(new, mode="drop")


def _like(x, shape=None):
    return jax.ShapeDtypeStruct(shape or x.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def _columns(states, V):
    """Of a program, for a call of so many states [K, V]."""
    return COLUMNS if states * (V // COLUMNS) >= FILLED else COLUMNS // 2


def _update(token, slab, old, new, out):
    """One token for the part of a state [K, columns] in old, written to new, which may be old; out [columns]."""
    shape = old.shape
    tile, along_rows, along_columns = _layouts(*shape)
    down = lambda x: lax.broadcast_in_dim(x, shape, [0])  # noqa: E731
    across = lambda x: lax.broadcast_in_dim(x, shape, [1])  # noqa: E731
    state = _load(old, tile)
    v, beta = token.along_columns(slab, along_columns)
    _issue()
    vectors = token.along_keys()
    q_dot_k = jnp.sum(vectors[0] * vectors[1])

    def update(*shared):
        for ref, x in zip(shared, vectors, strict=True):
            ref[...] = x
        q, k, decay = (down(_load(ref, along_rows)) for ref in shared)
        decayed = state * decay
        write = beta * (v - jnp.sum(decayed * k, axis=0))
        out[...] = (jnp.sum(decayed * q, axis=0) + q_dot_k * write).astype(out.dtype)
        new[...] = (decayed + k * across(write)).astype(new.dtype)

    pl.run_scoped(update, *[plgpu.SMEM(x.shape, _F32) for x in vectors])


class _Token:
    """One row and value head of the inputs."""

    def __init__(self, tokens, parameters, row, head, scale, activations):
        self.tokens, self.parameters, self.row, self.head = tokens, parameters, row, head
        self.scale, self.activations = scale, activations

    def along_columns(self, slab, layout):
        """v [columns] and beta, float32."""
        _, _, v, _, beta = self.tokens
        beta = beta[self.row, self.head].astype(_F32)
        return _load(v.at[self.row, self.head, slab], layout), _sigmoid(beta) if self.activations[3] else beta

    def along_keys(self):
        """q and k, normalised and q scaled, and the decay: [K] float32, whole in every warp."""
        q, k, v, g, _ = self.tokens
        gate, lower_bound, qk_l2norm, _ = self.activations
        layout = _along_keys(q.shape[-1])
        source = self.head // (v.shape[1] // q.shape[1])
        q, k, g = (_load(x.at[self.row, h], layout) for x, h in ((q, source), (k, source), (g, self.head)))
        q_scale = self.scale
        if qk_l2norm:
            q_scale, k = q_scale * _inverse_norm(q), k * _inverse_norm(k)
        if gate != "log":
            A_log, dt_bias = self.parameters
            rate = jnp.minimum(jnp.exp(A_log[self.head]), 1e-6 * jnp.finfo(_F32).max)  # as in gates.py
            y = g + _load(dt_bias.at[self.head], layout)
            g = -rate * _softplus(y) if gate == "softplus" else lower_bound * _sigmoid(rate * y)
        return q * q_scale, k, jnp.exp(g)


def _layouts(K, columns):
    """Of [K, columns] values of a state, and of vectors along its rows and along its columns, over a warpgroup.

    The four warps lie along columns, and so do as many lanes as the columns of a warp have words; the others along K.
    """
    width = columns // 4
    rows = 32 * WORD // width
    tiling = plgpu.Tiling(((rows, columns), (rows, width), (WORD,)))
    tile = plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)
    return tile, tile.reduce(1), tile.reduce(0)


@plgpu.inline_mgpu()
def _issue(ctx):
    """The reads above are on their way before any below: the assembler moves none of them past a barrier of threads.

    Left to itself, it would wait for the token before it asked for the state. The barrier waits for no read to return.
    """
    utils.warpgroup_barrier()


def _along_keys(K):
    """Of [K] values, once in each of the four warps, so that sums over them need no other warp."""
    tiling = plgpu.Tiling(((K,), (K // 32,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1)


def _load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False).astype(_F32)


def _inverse_norm(x):
    """A number for x [K]; the eps is that of `reference.normalise`."""
    return lax.rsqrt(jnp.sum(x * x) + 1e-6)


def _sigmoid(x):
    return 1.0 / (1.0 + jnp.exp(-x))


def _softplus(y):
    """log(1 + e^y); of a small e^y by its series, since 1 + e^y would round it and the rate may be large."""
    e = jnp.exp(jnp.minimum(y, 20.0))
    series = e * (1 - e * (1 / 2 - e * (1 / 3 - e * (1 / 4 - e / 5))))
    return jnp.where(y > 20.0, y, jnp.where(e < 1 / 16, series, jnp.log(1.0 + e)))
