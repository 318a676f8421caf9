"""How the sources of one token after the other come into shared memory, and the loops over both."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .plan import Plan
from .rows import EVERYWHERE, WARPS, apart, store_own, sync, sync_group, table, total_of, warp_number

__all__ = ["IN_BOUNDS", "Piece", "Ring", "call", "four", "in_rows", "table_shape", "vectors_in_rows"]

# One plain copy of a whole row, for which no tensor map is made.
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
UNROLLED = 16  # sources, up to which loops over them are written out
GIVEN_UNROLLED = 9  # likewise of loops that write to memory: each source's text takes half a second to lower
SIGN_OF_LIFE = 8  # numbers of a dead source that are fetched, and never read: its barrier turns as all others do


class Ring:
    """The tokens of one program: numbers program, program + programs, ...

    Pieces of a token's sources are visited in a fixed order, `passes` times over if there are several. The sources of a
    visit are fetched `together` at a time, as an item: item n of the program lies in rows together * (n % slots) and on
    of `ring` [slots * together, padded], once barrier n % slots of `arrived` has turned. sources are refs [M, D], or
    one ref [N, M, D]; of them count[0] are live, or all. Where one piece holds all sources, each an item, the dead ones
    are none. Where a row is four tokens, M counts rows, D is the width of one, `place` says which of the four is the
    thread's own, and `number(m)` which of all tokens.

    loops: no loop over sources is written out. Of a count's the written ones look at the dead too.
    """

    def __init__(
        self, plan: Plan, sources: Sequence, count, ring, arrived, *, N: int, D: int, passes: int, loops: bool = False
    ):
        self.plan, self.sources, self.ring, self.arrived, self.N, self.D = plan, sources, ring, arrived, N, D
        bounds = [(first, min(first + plan.piece, N)) for first in range(0, N, plan.piece)]
        self.in_pieces = len(bounds) > 1
        self.unrolled, self.given_unrolled = (0, 0) if loops else (UNROLLED, GIVEN_UNROLLED)
        self.visits = bounds * (passes if self.in_pieces else 1)
        items = [-(-(end - first) // plan.together) for first, end in self.visits]
        self.first_items = [sum(items[:i]) for i in range(len(items) + 1)]
        self.program, self.group = jax.lax.axis_index("program"), jax.lax.axis_index("group")
        self.M, self.is_buffer = sources[0].shape[-2], len(sources[0].shape) == 3
        self.tokens = (self.M - self.program + plan.programs - 1) // plan.programs
        self.live = None if count is None else jnp.clip(count[0], 0, N)
        self.by_live = self.live is not None and not self.in_pieces and plan.together == 1
        self.items = jnp.maximum(self.live, 1) if self.by_live else self.first_items[-1]  # of a token
        self.leads = self.group == 0
        self.place = 0 if plan.tokens == 1 else warp_number()
        self.first_channel = self.group * plan.rows.channels
        self.channels = pl.ds(self.first_channel, plan.rows.channels)
        self.warps = pl.ds(self.group * WARPS, WARPS)

    def begin(self, *others):
        """Fetches the first items. others are further rows [n, padded]."""
        if self.plan.padded > self.D:  # channels beyond D shall add nothing to a sum
            for ref in (self.ring, *others):
                for i in range(ref.shape[0]):
                    ref[i, self.channels] = self.plan.rows.zeros().astype(ref.dtype)
            plgpu.commit_smem()
            sync()
        if not self.by_live:
            for item in range(self.plan.slots):
                self._fetch(0, item)
            return

        def token(t, _):
            for i in range(self.N):
                pl.when(t * self.items + i < self.plan.slots)(partial(self._fetch_live, t, i))

        jax.lax.fori_loop(0, (self.plan.slots + self.items - 1) // self.items, token, None)

    def each_token(self, body: Callable, carry):
        """body(t, m, carry) for the program's token number t, which is token m of all."""
        return jax.lax.fori_loop(0, self.tokens, lambda t, carry: body(t, self.token(t), carry), carry)

    def token(self, t):
        return self.program + t * self.plan.programs

    def number(self, m):
        return m if self.plan.tokens == 1 else m * self.plan.tokens + self.place

    def meet(self, of_a_group: bool = False):
        """All threads that share a token have come here, and see each other's stores."""
        (apart if self.plan.tokens > 1 else sync_group if of_a_group else sync)()

    def vectors(self, refs) -> Callable:
        """Of refs as long as a token, number i as a row: kept in registers, unless a thread has so many of a token's
        channels that it rather reads them anew."""
        rows, keep = self.plan.rows, self.plan.tokens == 1
        kept = [rows.load_vector(ref.at[self.channels]) for ref in refs if keep]
        return lambda i: kept[i] if keep else rows.load_vector(refs[i])

    def put(self, ref, i, per_warp):
        """Source i's numbers, of all warps, into ref [four(N), warps], or [tokens, four(N)]: see `table_shape`."""
        if self.plan.tokens == 1:
            ref[i, self.warps] = per_warp
        else:
            store_own(ref.at[self.place, pl.ds(i, 1)], per_warp)

    def table(self, ref, size: int):
        """What was put there for the first `size` sources [size], summed over a token's warps, in every thread."""
        if self.plan.tokens == 1:
            return table(ref.at[pl.ds(0, size)])
        return plgpu.load(ref.at[self.place, pl.ds(0, size)], layout=EVERYWHERE, optimized=False)

    def put_total(self, ref, per_warp):
        """The numbers of all warps into ref [warps]."""
        if self.plan.tokens == 1:
            ref[self.warps] = per_warp
        else:
            store_own(ref.at[pl.ds(self.place, 1)], per_warp)

    def total_of(self, ref):
        """Of ref [warps] the sum over a token's warps."""
        return total_of(ref) if self.plan.tokens == 1 else ref[self.place]

    def each_piece(self, t, number: int, body: Callable, carry):
        """Pass `number` over token t: body(piece, carry) for each piece, which is left behind if there are several."""
        pieces = -(-self.N // self.plan.piece)
        for p in range(pieces):
            piece = Piece(self, t, number * pieces + p if self.in_pieces else 0, not number or self.in_pieces)
            carry = body(piece, carry)
            if self.in_pieces:
                self.leave(piece)
        return carry

    def leave_token(self, t):
        """After the last pass: nobody reads any more what the next token will write."""
        if self.in_pieces:
            return
        self.leave(Piece(self, t, 0, False))

    def leave(self, piece: "Piece"):
        sync()
        if not self.by_live:
            for item in range(*self.first_items[piece.visit : piece.visit + 2]):
                self._fetch(piece.t, self.plan.slots + item)
            return
        # Into the places of this token come the items that are `slots` later: of every live source one.
        full, rest = self.plan.slots // self.items, self.plan.slots % self.items
        for i in range(self.N):
            self._fetch_live(piece.t + jnp.where(i < rest, full + 1, full), i)

    def _fetch_live(self, t, i):
        """Source i of token t, if there are such."""
        m, slot = self.token(t), self.slot(t, i)

        @pl.when(self.leads & (i < self.live) & (m < self.M))
        def _():
            channels = pl.ds(0, self.D)
            source = self.place_of(self.sources, i, m).at[channels]
            target = self.ring.at[slot, channels]
            plgpu.copy_gmem_to_smem(source, target, self.arrived.at[slot], oob_mode=IN_BOUNDS)

    def place_of(self, refs, i, m):
        """Source i of token m, in refs laid out as the sources."""
        return (refs[0].at[i] if self.is_buffer else refs[i]).at[m]

    def at_place_of(self, refs, i, m, use: Callable):
        """use(place_of(refs, i, m)), for an i that need not be known."""
        if self.is_buffer or isinstance(i, int):
            return use(self.place_of(refs, i, m))
        return jax.lax.switch(i, [lambda ref=ref: use(ref.at[m]) for ref in refs])

    def are_live(self, first: int = 0, count: int | None = None):
        """Of `four(count)` sources from `first` on, in every thread."""
        count = self.N if count is None else count
        i = plgpu.broadcasted_iota(jnp.int32, (four(count),), 0, layout=EVERYWHERE)
        end = self.N if self.live is None else self.live
        return (i + first < end) & (i < count)

    def slot(self, t, item):
        return (t * self.items + item) % self.plan.slots

    def _fetch(self, t, item):
        """Item number `item`, a Python int, from token t on."""
        later, own = divmod(item, self.first_items[-1])
        visit = next(v for v in range(len(self.visits)) if own < self.first_items[v + 1])
        first, end = self.visits[visit]
        m, slot = self.token(t + later), self.slot(t, item)

        def copy(place, i, size):
            part, row = pl.ds(0, size), slot * self.plan.together + place
            source = self.place_of(self.sources, i, m).at[part]
            plgpu.copy_gmem_to_smem(source, self.ring.at[row, part], self.arrived.at[slot], oob_mode=IN_BOUNDS)

        def row(place):
            i, sign = first + (own - self.first_items[visit]) * self.plan.together + place, min(SIGN_OF_LIFE, self.D)
            if i >= end:
                copy(place, 0, sign)
            elif self.live is None:
                copy(place, i, self.D)
            else:
                pl.when(i < self.live)(lambda: copy(place, i, self.D))
                pl.when(i >= self.live)(lambda: copy(place, i, sign))

        @pl.when(self.leads & (m < self.M))
        def _():
            for place in range(self.plan.together):
                row(place)


class Piece:
    """Sources first to end - 1 of token t; fresh: nobody has waited for them yet."""

    def __init__(self, ring: Ring, t, visit: int, fresh: bool):
        self.ring, self.t, self.visit, self.fresh = ring, t, visit, fresh
        self.first, self.end = ring.visits[visit]
        self.size = self.end - self.first
        self.live = None if ring.live is None else jnp.clip(ring.live, self.first, self.end)

    def each(self, body: Callable, carry=None, after: int = 0):
        """body(i, carry) for the live sources, but for the first `after`. A fresh piece's are waited for.

        Without a carry body may also be called for others, whose rows hold anything.
        """

        def with_wait(i, carry):
            if self.fresh:
                self._wait_for(i)
            return body(i, carry)

        first = self.first + after
        plan = self.ring.plan
        unrolled = self.ring.N <= self.ring.unrolled and (self.live is None or not plan.one_by_one)
        if unrolled:
            for i in range(first, self.end):
                if self.live is None or carry is None:  # all at once is faster than as many as are live
                    carry = with_wait(i, carry)
                    continue
                if self.fresh:
                    self._wait_for(i)
                carry = jax.lax.cond(i < self.live, partial(body, i), lambda carry: carry, carry)
        else:
            carry = jax.lax.fori_loop(first, self.end if self.live is None else self.live, with_wait, carry)
        if (
            self.fresh and self.live is not None and not (unrolled or self.ring.by_live)
        ):  # a barrier is waited for at every turn
            reached = (self.live - self.first + plan.together - 1) // plan.together
            items = -(-self.size // plan.together)
            jax.lax.fori_loop(reached, items, lambda item, _: self._wait(item), None)
        self.fresh = False
        return carry

    def all(self, alive: Callable, dead: Callable, carry):
        """alive(i, carry) for the live sources, dead(i, carry) for the others."""

        def body(i, carry):
            if self.fresh:
                self._wait_for(i)
            if self.live is None:
                return alive(i, carry)
            return jax.lax.cond(i < self.live, lambda c: alive(i, c), lambda c: dead(i, c), carry)

        if self.ring.N > self.ring.given_unrolled:
            carry = jax.lax.fori_loop(self.first, self.end, body, carry)
        else:
            for i in range(self.first, self.end):
                carry = body(i, carry)
        self.fresh = False
        return carry

    def row(self, i):
        """Source i, float32: the warpgroup's channels."""
        item, place = self._place(i)
        row = self.ring.slot(self.t, self.ring.first_items[self.visit] + item) * self.ring.plan.together + place
        return self.ring.plan.rows.load(self.ring.ring.at[row, self.ring.channels])

    def _place(self, i):
        """Source i's item, and its place there."""
        return (i - self.first) // self.ring.plan.together, (i - self.first) % self.ring.plan.together

    def _wait_for(self, i):
        item, place = self._place(i)
        if self.ring.by_live:
            pl.when(i < self.ring.live)(lambda: self._wait(item))
        elif isinstance(i, int):
            if place == 0:
                self._wait(item)
        elif self.ring.plan.together == 1:
            self._wait(item)
        else:
            pl.when(place == 0)(lambda: self._wait(item))

    def _wait(self, item):
        plgpu.barrier_wait(self.ring.arrived.at[self.ring.slot(self.t, self.ring.first_items[self.visit] + item)])


def table_shape(plan: Plan, size: int) -> tuple[int, int]:
    """Of shared memory for one number per source and warp."""
    return (size, WARPS * plan.groups) if plan.tokens == 1 else (plan.tokens, size)


def in_rows(plan: Plan, tree):
    """Arrays [..., M, D] as the kernels' rows."""
    t = plan.tokens
    return jax.tree.map(lambda x: x.reshape(*x.shape[:-2], x.shape[-2] // t, x.shape[-1] * t), tree)


def vectors_in_rows(plan: Plan, vectors):
    """Arrays [D] as long as a token in shared memory."""
    return [jnp.pad(x, (0, plan.padded // plan.tokens - x.size)) for x in vectors]


def four(n: int) -> int:
    """n, or the next multiple of 4: 16 bytes of float32."""
    return -(-n // 4) * 4


def call(kernel: Callable, name: str, operands, outs, scratch, plan: Plan):
    return plgpu.kernel(
        kernel,
        out_type=outs,
        scratch_types=scratch,
        grid=(plan.programs,),
        grid_names=("program",),
        num_threads=plan.groups,
        thread_name="group",
        # Threads meet where `sync` and `sync_group` say, and not at every access to shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name=name,
    )(*operands)
