"""A stack of layers: which of them repeat, how they run (unrolled or scanned), and what the backward pass recomputes.

Layers that repeat with a period (K3: twelve layers from one bank row to the next) are stored as one group with stacked
parameters and scanned, so that compile time does not grow with depth. Layers before and after stay as they are.

Of the choices of `remat`,

* "none" keeps everything;
* "layer" keeps the running sum at every layer and recomputes inside it;
* "dots" is "layer", but keeps the results of matrix products too;
* "block" keeps the running sum at every AttnRes block (unrolled) or scanned group and recomputes inside it.

Under TwoPhaseAttnRes the layers of a block stay together, so that "layer" means the same as "block".

With "layer" and "block" the bank of AttnRes is kept once, not per layer: unrolled, every layer refers to the same
arrays; scanned, the backward pass reads the final bank, of which the bank at any depth is a prefix (see
`_scan_with_recompute`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .residuals import BlockAttnRes, DepthState


class StackCache(NamedTuple):
    """The decode caches of a stack: one per layer before and after the groups, stacked [groups, ...] per position in
    between."""

    lead: tuple
    groups: tuple
    tail: tuple


class Repetition(NamedTuple):
    """`count` groups of `period` layers, the first of which starts at layer `lead`. count 0: nothing repeats."""

    lead: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.lead + self.period * self.count


def find_repetition(kinds: Sequence, unit: int = 1) -> Repetition:
    """The repetition in a sequence of layer descriptions that leaves the fewest layers to compile.

    It begins after a multiple of `unit` layers, and repeats multiples of it.
    """
    n = len(kinds)
    best, best_cost = Repetition(n, 0, 0), n
    for period in range(unit, n // 2 + 1, unit):
        for lead in range(0, n - 2 * period + 1, unit):
            count = 1
            while kinds[lead : lead + period] == kinds[lead + count * period : lead + (count + 1) * period]:
                count += 1
            cost = n - (count - 1) * period
            if count > 1 and cost < best_cost:
                best, best_cost = Repetition(lead, period, count), cost
    return best


class LayerStack(nnx.Module):
    """Layers made by make_layer(index, rngs), called as layer(state, ids, cache, lengths) -> (state, cache, load)."""

    def __init__(
        self,
        make_layer: Callable[[int, nnx.Rngs], nnx.Module],
        kinds: Sequence,
        residual: BlockAttnRes,
        *,
        scan: bool,
        remat: str,
        rngs: nnx.Rngs,
    ):
        n = len(kinds)
        self.num_layers, self.residual, self.remat = n, residual, remat
        unit = residual.block_size // 2 if residual.whole_blocks else 1
        self.repetition = rep = find_repetition(kinds, unit) if scan else Repetition(n, 0, 0)
        key = rngs.params()

        def make(index, place):  # parameters are drawn by a layer's place, whether it is one of a group or not
            return make_layer(index, nnx.Rngs(jax.random.fold_in(key, place)))

        self.lead = nnx.List([make(index, index) for index in range(rep.lead)])
        self.group = nnx.List()  # the layers of one period, each with the parameters of all groups stacked
        if rep.count:

            @nnx.vmap
            def make_groups(start):
                return nnx.List([make(rep.lead + offset, start + offset) for offset in range(rep.period)])

            self.group = make_groups(rep.lead + rep.period * jnp.arange(rep.count))
        self.tail = nnx.List([make(index, index) for index in range(rep.end, n)])

    def __call__(
        self,
        state: DepthState,
        ids: jax.Array | None,
        caches: StackCache | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[DepthState, StackCache | None, jax.Array | None]:
        """(state after all layers, caches, router loads or None). ValueError for caches of other layers."""
        self._check_caches(caches)
        lead, groups, tail = (None, None, None) if caches is None else caches
        state, lead, loads = self._run(self.lead, state, ids, lead, lengths)
        loads = [load[None] for load in loads]
        if self.group:
            state, groups, group_loads = self._run_groups(state, ids, groups, lengths)
            loads += group_loads
        state, tail, tail_loads = self._run(self.tail, state, ids, tail, lengths)
        loads += [load[None] for load in tail_loads]
        caches = None if caches is None else StackCache(lead, groups, tail)
        loads = jnp.concatenate(loads) if loads else None
        return state, caches, loads

    def layer(self, index: int) -> nnx.Module:
        """One layer by index. Of a scanned group this is a copy: writing to it changes nothing."""
        layer, group = self.locate(index)
        if group is None:
            return layer
        graphdef, params = nnx.split(layer)
        return nnx.merge(graphdef, jax.tree.map(lambda x: x[group], params))

    def locate(self, index: int) -> tuple[nnx.Module, int | None]:
        """(the module that holds a layer's parameters, its row of those that are stacked, or None if none are)."""
        rep = self.repetition
        if not 0 <= index < self.num_layers:
            raise ValueError(f"layer {index} is not allowed: 0 to {self.num_layers - 1}")
        if index < rep.lead:
            return self.lead[index], None
        if index >= rep.end:
            return self.tail[index - rep.end], None
        group, offset = divmod(index - rep.lead, rep.period)
        return self.group[offset], group

    def init_cache(self, make_cache: Callable[[nnx.Module], object]) -> StackCache:
        """make_cache(layer) for every layer."""

        def make_stacked(layer):
            return jax.tree.map(lambda x: jnp.stack([x] * self.repetition.count), make_cache(layer))

        return StackCache(
            lead=tuple(map(make_cache, self.lead)),
            groups=tuple(map(make_stacked, self.group)),
            tail=tuple(map(make_cache, self.tail)),
        )

    def update_caches(
        self, update: Callable[[nnx.Module, object, object], object], caches: StackCache, others: StackCache
    ) -> StackCache:
        """update(layer, cache, other) for every layer; `others` holds any tree per layer, for groups stacked."""
        self._check_caches(caches)
        graphdefs, params = zip(*map(nnx.split, self.group), strict=True) if self.group else ((), ())

        def each(layers, caches, others):
            return tuple(map(update, layers, caches, others))

        def step(groups, params_and_others):
            params, others, group = params_and_others
            new = each(_merge(graphdefs, params), [_pick(cache, group) for cache in groups], others)
            return tuple(_put(cache, group, layer_new) for cache, layer_new in zip(groups, new, strict=True)), None

        numbers = jnp.arange(self.repetition.count)
        groups = jax.lax.scan(step, caches.groups, (params, others.groups, numbers))[0]
        return StackCache(each(self.lead, caches.lead, others.lead), groups, each(self.tail, caches.tail, others.tail))

    def _check_caches(self, caches):
        if caches is None:
            return
        groups = {leaf.shape[0] for cache in caches.groups for leaf in jax.tree.leaves(cache)}
        got = len(caches.lead), len(caches.groups), len(caches.tail), groups
        own = len(self.lead), len(self.group), len(self.tail), {self.repetition.count} if self.group else set()
        if got != own:
            raise ValueError(
                f"the cache is of another model: layers before, in, after the repeated group and groups are {got}, "
                f"this model has {own}"
            )

    def _run(self, layers, state, ids, caches, lengths):
        """Layers one after the other -> (state, caches, the loads [E] of those that have experts)."""
        if caches is not None:  # decoding: no backward pass
            state, caches, loads = _call_layers(self.residual, layers, state, ids, caches, lengths)
            return state, caches, loads
        loads = []
        for piece in self._pieces(layers, state.depth):
            graphdefs, params = zip(*map(nnx.split, piece), strict=True)

            def call(params, state, ids, graphdefs=graphdefs):
                state, _, loads = _call_layers(self.residual, _merge(graphdefs, params), state, ids)
                return state, loads

            if self.remat != "none":
                call = jax.checkpoint(call, policy=_policy(self.remat))
            state, piece_loads = call(params, state, ids)
            loads += piece_loads
        return state, None, loads

    def _pieces(self, layers, depth: int) -> list[list[nnx.Module]]:
        """The layers cut into what is recomputed together; `depth` counts the sub-layers before them."""
        pieces = []
        for offset, layer in enumerate(layers):
            sublayer = depth + 2 * offset
            opens = self.residual.opens_block(sublayer) or self.residual.opens_block(sublayer + 1)
            if not pieces or opens or (self.remat != "block" and not self.residual.whole_blocks):
                pieces.append([])
            pieces[-1].append(layer)
        return pieces

    def _run_groups(self, state, ids, caches, lengths):
        rep, residual = self.repetition, self.residual
        graphdefs, params = zip(*map(nnx.split, self.group), strict=True)
        state = residual.before_scan(state, depth=2 * rep.end)
        if caches is None and self.remat in ("layer", "block"):
            whole = self.remat == "block" or residual.whole_blocks
            pieces = [slice(0, rep.period)] if whole else [slice(i, i + 1) for i in range(rep.period)]
            state, loads = _scan_with_recompute(residual, graphdefs, pieces, params, state, ids)
        else:
            # Caches are carried: what a scan takes in and puts out are two arrays, so each call would copy them whole.
            def step(carry, params_and_group):
                (state, caches), (params, group) = carry, params_and_group
                before = state.depth
                picked = None if caches is None else tuple(_pick(cache, group) for cache in caches)
                state, new, loads = self._run(_merge(graphdefs, params), state, ids, picked, lengths)
                if caches is not None:
                    caches = tuple(_put(cache, group, layer_new) for cache, layer_new in zip(caches, new, strict=True))
                return (dataclasses.replace(state, depth=before), caches), loads  # the carry keeps its type

            (state, caches), loads = jax.lax.scan(step, (state, caches), (params, jnp.arange(rep.count)))
        if loads:  # per position [groups, E] -> in layer order
            loads = [jnp.stack(loads, axis=1).reshape(-1, loads[0].shape[-1])]
        return residual.after_scan(state, depth=2 * rep.end), caches, loads


def _call_layers(residual, layers, state, ids, caches=None, lengths=None):
    new_caches, loads = [], []
    for index, layer in enumerate(layers):
        state = residual.enter(state, layers[index:])
        state, cache, load = layer(state, ids, None if caches is None else caches[index], lengths)
        new_caches.append(cache)
        loads += [] if load is None else [load]
    return state, tuple(new_caches), loads


def _pick(cache, group):
    """One layer's cache of those stacked [groups, ...]. A kind that is better not sliced has a `pick` of its own."""
    if hasattr(cache, "pick"):
        return cache.pick(group)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, group, keepdims=False), cache)


def _put(cache, group, new):
    """The stacked caches with one layer's replaced."""
    if hasattr(cache, "put"):
        return cache.put(group, new)
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, group, 0), cache, new)


def _merge(graphdefs, params):
    return [nnx.merge(graphdef, layer_params) for graphdef, layer_params in zip(graphdefs, params, strict=True)]


def _policy(remat: str):
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None


def _scan_with_recompute(residual, graphdefs, pieces, params, state, ids):
    """Scan over groups, keeping for the backward pass the running sum before each piece and the final bank, once.

    Differentiating jax.lax.scan would keep the whole bank for every group, because it is part of the carry. But the
    bank only grows at its end, and rows that are not live yet take no part and get no gradient: so the final bank,
    with the count of that depth, stands in for the bank before every piece.

    graphdefs, params: of the layers of a group, parameters stacked over groups. pieces: slices of a group's layers that
    are recomputed together.
    """

    def run_piece(piece, params, bank, sum_, count, ids, replayed=False):
        before = DepthState(bank, sum_, count, state.depth + 2 * piece.start, replayed)
        after, _, loads = _call_layers(residual, _merge(graphdefs[piece], params), before, ids)
        return after.bank, after.sum, after.count, loads

    def forward(params, bank, sum_, count, ids):
        def step(carry, params):
            kept, all_loads = [], []
            for piece in pieces:
                bank, sum_, count = carry
                kept.append((sum_, count))
                *carry, loads = run_piece(piece, params[piece], bank, sum_, count, ids)
                all_loads += loads
            return tuple(carry), (kept, all_loads)

        (bank, sum_, count), (kept, loads) = jax.lax.scan(step, (bank, sum_, count), params)
        return (bank, sum_, count, loads), (params, bank, kept, ids)

    @jax.custom_vjp
    def run(params, bank, sum_, count, ids):
        return forward(params, bank, sum_, count, ids)[0]

    def backward(residuals, cotangents):
        params, final_bank, kept, ids = residuals
        bank_bar, sum_bar, _, _ = cotangents  # loads are counts and have no gradient

        def step(bars, params_and_kept):
            params, kept = params_and_kept
            kept, params_bar = list(kept), ()
            for i in reversed(range(len(pieces))):
                bars, piece_bar = pull_back(pieces[i], params, *kept[i], bars)
                # All of them before anything of the piece before, its recomputation too: else the cotangents of the
                # bank, or of matrices, may wait, and with them all that they need; and two pieces need room at a time.
                # What is recomputed waits for its count, where there is one: a sum would be copied. (At 0 it is that of
                # the last piece, which is done.)
                sum_, count = kept[i - 1]
                first = sum_ if count is None else count
                bars, piece_bar, first = jax.lax.optimization_barrier((bars, piece_bar, first))
                kept[i - 1] = (first, None) if count is None else (sum_, first)
                params_bar = piece_bar + params_bar
            return bars, params_bar

        def pull_back(piece, params, sum_, count, bars):
            def call(params, bank, sum_):
                return run_piece(piece, params, bank, sum_, count, ids, replayed=True)[:2]

            piece_bar, *bars = jax.vjp(call, params[piece], final_bank, sum_)[1](bars)
            return tuple(bars), piece_bar

        (bank_bar, sum_bar), params_bar = jax.lax.scan(step, (bank_bar, sum_bar), (params, kept), reverse=True)
        return params_bar, bank_bar, sum_bar, None, None

    run.defvjp(forward, backward)
    bank, sum_, count, loads = run(params, state.bank, state.sum, state.count, ids)
    return DepthState(bank, sum_, count, state.depth), loads
