"""From the public arrays [B, T, H, K] to the kernels' flat ones and back, with the backward attached.

Here shapes are made to fit: head sizes are padded with zeros to 64, 128 or 256, packed segments with states of their
own are moved to chunk boundaries (layout.py), and heads are dealt to programs.
"""

from functools import partial

import jax
import jax.numpy as jnp

from ..chunked import Inputs
from ..kernels import Settings
from ..layout import Layout, fetch, plan, put_back
from ..mesh import repeat_heads
from .activations import Options
from .backward import backward
from .chunk import START, VALID
from .forward import forward
from .grid import Arrays
from .products import CHUNK

__all__ = ["heads_per_program", "sequence"]

SIZES = (64, 128, 256)
# Of 128 x 128. With twice as many the backward is 10% faster on v6e and no faster on v5e, and compiles twice as long.
FORWARD_HEADS, BACKWARD_HEADS = 16, 8


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sequence(settings: Settings, inputs: Inputs, segment_ids: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, HV, V] in v's dtype and the final state in float32; states have an axis of segments or none."""
    return _forward(settings, inputs, segment_ids, save=False)[:2]


def _sequence_fwd(settings, inputs, segment_ids):
    out, state, saved = _forward(settings, inputs, segment_ids, save=True)
    return (out, state), (inputs, segment_ids, saved)


def _forward(settings, inputs, segment_ids, save):
    options, arrays, layout = _arrange(settings, inputs, segment_ids, FORWARD_HEADS)
    out, state, saved = _for_vmap(partial(forward, o=options, save=save))(arrays)
    return _restore(out, inputs.v, options, layout), state[..., : inputs.q.shape[3], : inputs.v.shape[3]], saved


def _sequence_bwd(settings, residuals, cotangents):
    inputs, segment_ids, saved = residuals
    dout, dstate = cotangents
    options, arrays, layout = _arrange(settings, inputs, segment_ids, BACKWARD_HEADS)
    dstate = _widen(dstate.astype(jnp.float32), options)
    dq, dk, dv, dg, dbeta, dstate, *sums = _for_vmap(partial(backward, o=options))(
        arrays, _flat(dout, options.V, layout), saved, dstate
    )
    restore = partial(_restore, options=options, layout=layout)
    dbeta = jnp.moveaxis(dbeta, 1, 2).reshape(*dbeta.shape[:1], dbeta.shape[2], -1, 1)
    d = Inputs(
        restore(_sum_parts(dq, inputs.q, options), inputs.q),
        restore(_sum_parts(dk, inputs.k, options), inputs.k),
        restore(dv, inputs.v),
        restore(dg, inputs.g),
        restore(dbeta, inputs.beta[..., None])[..., 0],
        None, None, None,
    )  # fmt: skip
    if inputs.initial_state is not None:
        *_, K, V = inputs.initial_state.shape
        d = d._replace(initial_state=dstate[..., :K, :V].astype(inputs.initial_state.dtype))
    if settings.gate != "log":
        HV, K = inputs.g.shape[2:]
        dA, db = (jnp.sum(s, axis=(0, 1)).reshape(HV, -1)[:, :K] for s in sums)
        d = d._replace(A_log=dA.sum(axis=1).astype(inputs.A_log.dtype), dt_bias=db.astype(inputs.dt_bias.dtype))
    return d, None


sequence.defvjp(_sequence_fwd, _sequence_bwd)


def _for_vmap(kernel):
    """kernel(Arrays, *arrays with rows) with a rule for vmap: the rows of all calls become those of one."""
    run = jax.custom_batching.custom_vmap(kernel)

    @run.def_vmap
    def rule(n, batched, arrays: Arrays, *others):
        arguments = (arrays, *others)
        if batched[0].rate or batched[0].bias:  # each call has gate parameters of its own
            spread = jax.tree.map(
                lambda x, own: x if own else jnp.broadcast_to(x, (n, *x.shape)), arguments, tuple(batched)
            )
            out = jax.lax.map(lambda one: run(*one), spread)
        else:
            shared = arrays.rate, arrays.bias
            arguments = (arrays._replace(rate=None, bias=None), *others)
            owners = (batched[0]._replace(rate=None, bias=None), *batched[1:])
            rows = lambda x, own: (x if own else jnp.broadcast_to(x, (n, *x.shape))).reshape(-1, *x.shape[1 + own :])  # noqa: E731
            merged, *others = jax.tree.map(rows, arguments, owners)
            out = run(merged._replace(rate=shared[0], bias=shared[1]), *others)
            out = jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return run


def heads_per_program(H: int, HV: int, K: int, V: int, most: int) -> tuple[int, int] | None:
    """Value heads of a program and how many of them read one q/k head; None if q and k must be repeated first.

    Windows must be whole registers of 128 lanes or the whole array, and a program holds whole groups or a part of one.
    K and V are of SIZES. Few heads leave the units idle, so that for 13 or 17 heads more than `most` are taken.
    """
    ratio, room = HV // H, 128 * 128 / (max(K, 128) * max(V, 128))
    most, limit = max(1, int(most * room)), int(24 * room)

    def fits(heads):
        group = min(ratio, heads)
        lanes = (heads // group * K) % 128 == 0 and (heads * K) % 128 == 0 and (heads * V) % 128 == 0
        return HV % heads == 0 and not (heads % ratio and ratio % heads) and (lanes or heads == HV)

    few = [n for n in range(1, min(most, HV) + 1) if fits(n)]
    many = [n for n in range(most + 1, min(limit, HV) + 1) if fits(n)]
    heads = many[0] if many and (not few or few[-1] < 4) else few[-1] if few else None
    return None if heads is None else (heads, min(ratio, heads))


def _arrange(settings, inputs, segment_ids, most) -> tuple[Options, Arrays, Layout | None]:
    q, k, v, g, beta, A_log, dt_bias, state = inputs
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    size = {"K": _size_for(K), "V": _size_for(V)}
    deal = partial(heads_per_program, HV=HV, most=most)
    if deal(H, **size) is None and deal(HV, **size) is None:
        size = {n: max(128, x) for n, x in size.items()}  # 64 lanes per head and an odd number of heads
    if (dealt := deal(H, **size)) is None:
        q, k = (repeat_heads(x, HV // H, axis=2) for x in (q, k))
        dealt = deal(HV, **size)
    heads, group = dealt
    layout, flags, slot = _plan(settings, segment_ids, B, T)
    exact = all(x.dtype == jnp.float32 for x in (q, k, v))
    starts = segment_ids is not None and settings.num_segments is None  # segments may begin inside chunks
    tiled = settings.lower_bound is not None and settings.lower_bound >= -5 and not exact and not starts
    options = Options(
        settings.scale, settings.gate, settings.lower_bound, settings.qk_l2norm, settings.beta_sigmoid, exact, tiled,
        size["K"], size["V"], heads, group, flags is not None, settings.num_segments,
    )  # fmt: skip
    if state is None and options.slots is not None:
        state = jnp.zeros((B, options.slots, HV, K, V), jnp.float32)
    rate = bias = None
    if settings.gate != "log":
        # As in gates.py the rate stays finite, also times a cotangent.
        rate = jnp.minimum(jnp.exp(A_log.astype(jnp.float32)), 1e-6 * jnp.finfo(jnp.float32).max)
        rate, bias = (_row(x, options.K) for x in (jnp.broadcast_to(rate[:, None], (HV, K)), dt_bias))
    beta = _flat(beta[..., None].astype(jnp.float32), 1, layout)
    beta = jnp.moveaxis(beta.reshape(B, beta.shape[1], HV // heads, heads), 2, 1)
    arrays = Arrays(
        _flat(q, options.K, layout), _flat(k, options.K, layout), _flat(v, options.V, layout),
        _flat(g, options.K, layout), beta, rate, bias, flags, slot, None if state is None else _widen(state, options),
    )  # fmt: skip
    return options, arrays, layout


def _plan(settings, segment_ids, B, T):
    """Layout (None: tokens stay where they are), flags [B, NT * C, 1] and slot [B, NT]; see Arrays."""
    if segment_ids is None and T % CHUNK == 0:
        return None, None, None
    layout, _ = plan(segment_ids, B, T, settings.num_segments, CHUNK, 1)
    flags = jnp.where(layout.valid, jnp.where(layout.starts, START, VALID), 0).astype(jnp.int32)[..., None]
    return (layout if settings.num_segments else None), flags, layout.slot


def _flat(x, width, layout):
    """[B, T, H, X] to [B, T or moved tokens, H * width]."""
    if layout is not None:
        x = fetch(x, layout, 0, layout.valid.shape[1])
    B, T, H, X = x.shape
    if X != width:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - X)))
    return x.reshape(B, T, H * width)


def _restore(x, like, options, layout):
    """[B, tokens, H * width] to the shape and dtype of like [B, T, H, X]."""
    B, T, H, X = like.shape
    x = x.reshape(*x.shape[:2], H, -1)[..., :X]
    if layout is not None:
        x = put_back(x, layout, T)
    return x.astype(like.dtype)


def _sum_parts(x, like, options):
    """[B, T, parts * K], a part per value head or per program that reads a q/k head of like, summed to like's heads."""
    B, T, H = like.shape[0], x.shape[1], like.shape[2]
    parts = x.shape[2] // (H * options.K)
    if parts == 1:
        return x
    x = x.reshape(B, T, H, parts, options.K).astype(jnp.float32).sum(axis=3)
    return x.reshape(B, T, H * options.K)


def _widen(state, options):
    *lead, K, V = state.shape
    pad = ((0, 0),) * len(lead) + ((0, options.K - K), (0, options.V - V))
    return jnp.pad(state, pad) if (K, V) != (options.K, options.V) else state


def _row(x, width):
    return jnp.pad(x.astype(jnp.float32), ((0, 0), (0, width - x.shape[1]))).reshape(1, -1)


def _size_for(n: int) -> int:
    return next(s for s in SIZES if s >= n)
