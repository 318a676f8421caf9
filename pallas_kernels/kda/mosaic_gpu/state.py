"""The sequential half, forward: one program per row and value head walks over its chunks with the state in registers.

The state is kept transposed, S^T [V, K] float32, 64 values per warpgroup. In that orientation the left operand of each
product is what the product before it left in registers, and nothing but the tiles that the copy engine brings passes
through shared memory:

    R^T = (V^T - S^T k_in^T) beta        V'^T = R^T T^T
    O^T = S^T q~^T + V'^T A^T            S^T <- S^T e^{Gn} + V'^T k^

R, T and V' enter in two bf16 terms: where keys are nearly parallel, R is a small difference, and V' a sum of such.
Where there are multiprocessors to spare, each 64 values have a program of their own, since the tensor cores of one are
busy most of the time.

Few heads and many tokens leave most of the machine idle, so that a sequence may be cut into pieces that are walked at
once (pieces.py finds the state that each begins with).
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .intra import BF16, F32, Options, Terms
from .registers import CHUNK, MULTIPROCESSORS, SMEM_TILE, WGMMA, fixed, product

__all__ = [
    "Run",
    "across",
    "block",
    "call",
    "pass_state",
    "piece_maps",
    "piece_transitions",
    "recompute_states",
    "scaled",
    "two_terms",
    "warpgroups",
]


def pass_state(x: Terms, v, beta, state, slot, o: Options, pieces: int = 1, groups: int = 0):
    """Output [B, T, HV V] bf16, S^T after each piece [B, HV, pieces, V, K] and before each group [B, HV, groups, V, K].

    v [B, T, HV V] bf16, beta [B, HV, T] float32. state is S^T before each piece, of that shape; None is zeros. Or, with
    slot [B, N], the state of each chunk in runs of equal ones, states go in and come out as [B, S, HV, V, K]; a slot
    without chunks is not written. States are float32. groups: a multiple of pieces that divides the number of chunks,
    or 0 for None as the last result.
    """
    B, HV, T = beta.shape
    outs = (
        jax.ShapeDtypeStruct((B, T, HV * o.V), BF16),
        jax.ShapeDtypeStruct((B, HV, pieces, o.V, o.K) if slot is None else state.shape, F32),
    )
    if groups:
        outs += (jax.ShapeDtypeStruct((B, HV, groups, o.V, o.K), F32),)
    given = [y for y in (state, slot) if y is not None]
    wgs = warpgroups(B * HV * pieces, o.V)

    def kernel(k_in, q_in, k_out, a, inverse, v, beta, decay, *rest, tiles):
        out, final, *starts = rest[len(given) :]
        run = Run(wgs, T // CHUNK // pieces, *rest[: len(given)])

        def chunk(at, k_in, q_in, k_out, a, high, low, v, beta, decay, s):
            n = run.start + at[0]
            s = run.enter(s, n)
            if groups:
                of_group = T // CHUNK // groups

                @pl.when(n % of_group == 0)
                def _():
                    starts[0][run.b, run.h, n // of_group, run.values] = s

            s16 = fixed(s.astype(BF16))

            def read_and_write(o_t, s_t):
                """Both products of V' are under way before either is waited for, and O's of S while V' is computed."""

                def read_state():
                    plgpu.wgmma(o_t, s16, q_in.transpose((1, 0)))

                v_new = two_terms(_residual(s16, k_in, (high, low), beta, run.own_columns(v), meanwhile=read_state))
                s_t[...] = fixed(scaled(s, decay))
                for left in v_new:
                    plgpu.wgmma(o_t, left, a.transpose((1, 0)))
                for left in v_new:
                    plgpu.wgmma(s_t, left, k_out)
                tile = tiles.at[run.wg, n & 1]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                read = plgpu.wgmma_accumulator_load(o_t, wait_n=2)
                tile.transpose((1, 0))[...] = fixed(read.astype(BF16))
                plgpu.commit_smem()
                columns = pl.ds(run.h * o.V + run.first_value, 64)
                plgpu.copy_smem_to_gmem(tile, out.at[run.b, pl.ds(n * CHUNK, CHUNK), columns])
                return s_t[...]

            s = pl.run_scoped(read_and_write, plgpu.ACC((64, CHUNK), F32), plgpu.ACC((64, o.K), F32))
            run.leave(s, n, final)
            return s

        def compute(pipeline):
            s = pipeline(run.first(o))
            if slot is None:
                final[run.b, run.h, run.piece, run.values] = s
            plgpu.wait_smem_to_gmem(0)

        plgpu.emit_pipeline_warp_specialized(
            chunk,
            grid=(run.length,),
            memory_registers=40,
            in_specs=[
                *[block(CHUNK, o.K)] * 3, *[block(CHUNK, CHUNK)] * 3, block(CHUNK, 64 * wgs), _numbers(CHUNK),
                _numbers(o.K),
            ],
            wg_axis="wg",
            num_compute_wgs=wgs,
            compute_context=compute,
        )(
            *(run.own(r, CHUNK) for r in (k_in, q_in, k_out, a, inverse.at[0], inverse.at[1])), run.own_values(v, o),
            run.own(beta, CHUNK), run.own(decay, o.K),
        )  # fmt: skip

    operands = (x.k_in, x.q_in, x.k_out, x.a, x.inverse, v, beta, x.decay, *given)
    tiles = plgpu.SMEM((wgs, 2, CHUNK, 64), BF16, transforms=SMEM_TILE)
    grid = (HV, B, pieces, o.V // 64 // wgs)
    out, final, *starts = call(kernel, "kda_state", operands, outs, dict(tiles=tiles), wgs, grid)
    return out, final, *(starts or [None])


def recompute_states(x: Terms, v, beta, state, slot, o: Options, pieces: int = 1):
    """For the backward: S^T at the start of each chunk [B, HV, N V, K] and V'^T [B, HV, N V, 64], bf16."""
    B, HV, T = beta.shape
    N = T // CHUNK
    outs = (
        jax.ShapeDtypeStruct((B, HV, N * o.V, o.K), BF16),
        jax.ShapeDtypeStruct((B, HV, N * o.V, CHUNK), BF16),
    )

    wgs = warpgroups(B * HV * pieces, o.V)

    def kernel(k_in, k_out, inverse, v, beta, decay, *rest, start, residual):
        *given, starts, residuals = rest
        run = Run(wgs, N // pieces, *given)

        def chunk(at, k_in, k_out, high, low, v, beta, decay, s):
            n = run.start + at[0]
            s = run.enter(s, n)
            rows = pl.ds(n * o.V + run.first_value, 64)
            s16 = fixed(s.astype(BF16))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            start[run.wg] = s16
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(start.at[run.wg], starts.at[run.b, run.h, rows])
            v_new = two_terms(_residual(s16, k_in, (high, low), beta, run.own_columns(v)))
            residual[run.wg] = v_new[0]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(residual.at[run.wg], residuals.at[run.b, run.h, rows])
            return decayed(s, decay, *((x, k_out) for x in v_new))

        def compute(pipeline):
            pipeline(run.first(o))
            plgpu.wait_smem_to_gmem(0)

        _short_pipeline(chunk, run, o, compute)(
            *run.own_short(k_in, k_out, inverse), run.own_values(v, o), run.own(beta, CHUNK), run.own(decay, o.K)
        )

    operands = (x.k_in, x.k_out, x.inverse, v, beta, x.decay, *(y for y in (state, slot) if y is not None))
    tiles = {
        name: plgpu.SMEM((wgs, 64, width), BF16, transforms=SMEM_TILE)
        for name, width in (("start", o.K), ("residual", CHUNK))
    }
    return call(kernel, "kda_states_again", operands, outs, tiles, wgs, (HV, B, pieces, o.V // 64 // wgs))


def piece_maps(x: Terms, v, beta, o: Options, pieces: int):
    """What pieces, all but the last, make of their first state S^T: S^T R + E.

    R [B, HV, pieces - 1, K, K], E [B, HV, pieces - 1, V, K] float32.
    """
    return piece_transitions(x, beta, o, pieces, skip=0), _piece_ends(x, v, beta, o, pieces)


def piece_transitions(x: Terms, beta, o: Options, pieces: int, *, skip: int):
    """R as in `piece_maps`, of the pieces from number `skip` on, one fewer than there are."""
    B, HV, T = beta.shape
    wgs = warpgroups(B * HV * (pieces - 1), o.K)

    def kernel(k_in, k_out, inverse, beta, decay, ends):
        run = Run(wgs, T // CHUNK // pieces, skip=skip)

        def chunk(_, k_in, k_out, high, low, beta, decay, s):
            written = two_terms(_residual(fixed(s.astype(BF16)), k_in, (high, low), beta))
            return decayed(s, decay, *((x, k_out) for x in written))

        def compute(pipeline):
            i, j = (plgpu.broadcasted_iota(jnp.int32, (64, o.K), d, layout=WGMMA) for d in range(2))
            s = fixed(jnp.where(j - run.first_value == i, 1.0, 0.0))
            ends[run.b, run.h, run.piece - skip, run.values] = pipeline(s)

        _short_pipeline(chunk, run, o, compute, with_v=False)(
            *run.own_short(k_in, k_out, inverse), run.own(beta, CHUNK), run.own(decay, o.K)
        )

    outs = (jax.ShapeDtypeStruct((B, HV, pieces - 1, o.K, o.K), F32),)
    operands = (x.k_in, x.k_out, x.inverse, beta, x.decay)
    return call(kernel, "kda_transitions", operands, outs, {}, wgs, (HV, B, pieces - 1, o.K // 64 // wgs))[0]


def _piece_ends(x: Terms, v, beta, o: Options, pieces: int):
    B, HV, T = beta.shape
    wgs = warpgroups(B * HV * (pieces - 1), o.V)

    def kernel(k_in, k_out, inverse, v, beta, decay, ends):
        run = Run(wgs, T // CHUNK // pieces)

        def chunk(_, k_in, k_out, high, low, v, beta, decay, s):
            v_new = _residual(fixed(s.astype(BF16)), k_in, (high, low), beta, run.own_columns(v))
            return decayed(s, decay, *((x, k_out) for x in two_terms(v_new)))

        def compute(pipeline):
            ends[run.b, run.h, run.piece, run.values] = pipeline(run.first(o))

        _short_pipeline(chunk, run, o, compute)(
            *run.own_short(k_in, k_out, inverse), run.own_values(v, o), run.own(beta, CHUNK), run.own(decay, o.K)
        )

    outs = (jax.ShapeDtypeStruct((B, HV, pieces - 1, o.V, o.K), F32),)
    operands = (x.k_in, x.k_out, x.inverse, v, beta, x.decay)
    return call(kernel, "kda_piece_ends", operands, outs, {}, wgs, (HV, B, pieces - 1, o.V // 64 // wgs))[0]


class Run:
    """The chunks of one program, and where their states come from and go to.

    A program has a row b, a value head h, a piece of `length` chunks from `start`, and 64 rows of S^T for each of its
    `wgs` warpgroups; `values` are those of this one. state and slot are refs as in `pass_state`; the first `skip`
    pieces have no program.
    """

    def __init__(self, wgs, length, state=None, slot=None, *, skip=0):
        axes = ("head", "row", "piece", "part", "wg")
        self.h, self.b, self.piece, self.part, self.wg = (jax.lax.axis_index(i) for i in axes)
        self.piece, self.wgs = self.piece + skip, wgs
        self.first_value = (self.part * wgs + self.wg) * 64
        self.length, self.state, self.slot = length, state, slot
        self.start = self.piece * length
        self.values = pl.ds(self.first_value, 64)

    def own(self, ref, rows):
        """The piece's part of ref [B, HV, N * rows, ...]."""
        return ref.at[self.b, self.h, pl.ds(self.start * rows, self.length * rows)]

    def own_short(self, k_in, k_out, inverse):
        return [self.own(r, CHUNK) for r in (k_in, k_out, inverse.at[0], inverse.at[1])]

    def own_values(self, ref, o):
        """The same of [B, T, HV V], with the program's values alone."""
        tokens = pl.ds(self.start * CHUNK, self.length * CHUNK)
        return ref.at[self.b, tokens, pl.ds(self.h * o.V + self.part * self.wgs * 64, self.wgs * 64)]

    def own_columns(self, block):
        """This warpgroup's of a block of these."""
        return block.at[:, pl.ds(self.wg * 64, 64)]

    def first(self, o):
        """What the first chunk begins with; with slots `enter` says it."""
        if self.state is None or self.slot is not None:
            return plgpu.layout_cast(jnp.zeros((64, o.K), F32), WGMMA)
        return self._load(self.b, self.h, self.piece, self.values)

    def enter(self, s, n, *, reverse=False):
        """s, or the state of chunk n's slot where the chunk visited before has another."""
        if self.slot is None:
            return s
        own, new = self._edge(n, self.length - 1 if reverse else 0, 1 if reverse else -1)
        return jax.lax.cond(new, lambda _: self._load(self.b, own, self.h, self.values), lambda s: s, s)

    def leave(self, s, n, final, *, reverse=False):
        """Stores s where the chunk visited next has another slot."""
        if self.slot is None:
            return
        own, done = self._edge(n, 0 if reverse else self.length - 1, -1 if reverse else 1)

        @pl.when(done)
        def _():
            final[self.b, own, self.h, self.values] = s

    def _edge(self, n, last, step):
        own = self.slot[self.b, n]
        return own, (n == last) | (own != self.slot[self.b, jnp.where(n == last, n, n + step)])

    def _load(self, *at):
        # Inside a shard_map a load varies over the mesh and what is computed from it does not: one type for the carry.
        return fixed(1.0 * plgpu.load(self.state.at[at], layout=WGMMA, optimized=False))


def block(rows, columns, at=lambda n: n):
    """bf16 blocks of whole rows in the tiles that wgmma reads; at maps a step to a block."""
    return plgpu.BlockSpec((rows, columns), lambda n: (at(n), 0), transforms=SMEM_TILE)


def across(numbers, rows):
    """A vector, one number per column, as `rows` rows."""
    x = plgpu.load(numbers, layout=WGMMA.reduce(0))
    return jax.lax.broadcast_in_dim(x, (rows, *x.shape), [1])


def decayed(s, decay, *pairs):
    """`scaled` plus products, accumulated in place."""

    def run(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)

    return pl.run_state(run)(plgpu.ACC.init(scaled(s, decay)))


def scaled(s, decay):
    """s with its columns scaled by decay [K]."""
    return s * across(decay, 64)


def two_terms(x):
    """x as a sum of two bf16 numbers."""
    high = x.astype(BF16)
    return high, (x - high.astype(F32)).astype(BF16)


def warpgroups(programs, rows):
    """Of a program: one for each 64 rows of S^T, or one alone where as many programs more can run at once."""
    return 1 if programs * (rows // 64) <= MULTIPROCESSORS else rows // 64


def call(kernel, name, operands, outs, scratch, wgs, grid):
    """A kernel of computing warpgroups and one that fetches, over (head, row, piece, part of the values)."""
    return plgpu.kernel(
        kernel,
        out_type=outs,
        scratch_types=scratch,
        grid=grid,
        grid_names=("head", "row", "piece", "part"),
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
    )(*operands)


def _residual(s16, k_in, inverse, beta, v=None, meanwhile=None):
    """V'^T [64, 64] float32 from S^T and tiles; inverse in two terms. Without v that of values that are zero.

    meanwhile as in `product`.
    """
    given, scale = 0.0 if v is None else plgpu.load(v.transpose((1, 0)), layout=WGMMA).astype(F32), across(beta, 64)
    predicted = product((s16, k_in.transpose((1, 0))), meanwhile=meanwhile)
    r_high, r_low = two_terms(fixed((given - predicted) * scale))
    high, low = (x.transpose((1, 0)) for x in inverse)
    return product((r_high, high), (r_low, high), (r_high, low))


def _numbers(count):
    return plgpu.BlockSpec((count,), lambda n: (n,))


def _short_pipeline(chunk, run, o, compute, *, with_v=True):
    """Over k_in, k_out, the inverse's two terms, v (or not), beta and decay."""
    return plgpu.emit_pipeline_warp_specialized(
        chunk,
        grid=(run.length,),
        memory_registers=40,
        in_specs=[
            *[block(CHUNK, o.K)] * 2, *[block(CHUNK, CHUNK)] * 2, *[block(CHUNK, 64 * run.wgs)] * with_v,
            _numbers(CHUNK), _numbers(o.K),
        ],
        wg_axis="wg",
        num_compute_wgs=run.wgs,
        compute_context=compute,
    )  # fmt: skip
