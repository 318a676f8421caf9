"""The sequential half, forward: one program per row and value head walks over its chunks with the state in registers.

The state is kept transposed, S^T [V, K] float32, 64 values per warpgroup. In that orientation the left operand of each
product is what the product before it left in registers, and nothing but the tiles that the copy engine brings passes
through shared memory:

    V'^T = U^T - S^T W^T        O^T = S^T q~^T + V'^T A^T        S^T <- S^T e^{Gn} + V'^T k^

V' enters in two bf16 terms: where keys are nearly parallel it is a small difference that A and k^ multiply.

Few heads and many tokens leave most of the machine idle, so that a sequence may be cut into pieces that are walked at
once (pieces.py finds the state that each begins with).
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .intra import BF16, F32, Options, Terms, fixed
from .registers import CHUNK, SMEM_TILE, SMEM_TILE_F32, WGMMA

__all__ = ["Run", "block", "call", "decayed", "pass_state", "piece_ends", "product", "recompute_states", "two_terms"]


def pass_state(x: Terms, state, slot, o: Options, pieces: int = 1):
    """Output [B, T, HV V] bf16 and S^T after each piece [B, HV, pieces, V, K] float32.

    state is S^T before each piece, of that shape; None is zeros. Or, with slot [B, N], the state of each chunk in runs
    of equal ones, states go in and come out as [B, S, HV, V, K]; a slot without chunks is not written.
    """
    B, HV, T, _ = x.w.shape
    outs = (
        jax.ShapeDtypeStruct((B, T, HV * o.V), BF16),
        jax.ShapeDtypeStruct((B, HV, pieces, o.V, o.K) if slot is None else state.shape, F32),
    )

    def kernel(w, q_in, k_out, a, u, decay, *rest, tiles):
        *given, out, final = rest
        run = Run(T // CHUNK // pieces, *given)

        def chunk(at, w, q_in, k_out, a, u, decay, s):
            n = run.start + at[0]
            s = run.enter(s, n)
            s16 = fixed(s.astype(BF16))
            v_new = u[run.values, :] - product((s16, w.transpose((1, 0))), shape=(64, CHUNK))
            high, low = two_terms(v_new)
            at = a.transpose((1, 0))

            def read_and_write(o_t, s_t):
                """Both products of V' are under way before either is waited for."""
                s_t[...] = fixed(scaled(s, decay, o))
                for left, right in ((s16, q_in.transpose((1, 0))), (high, at), (low, at)):
                    plgpu.wgmma(o_t, left, right)
                for left in (high, low):
                    plgpu.wgmma(s_t, left, k_out)
                tile = tiles.at[run.wg, n & 1]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                read = plgpu.wgmma_accumulator_load(o_t, wait_n=2)
                tile.transpose((1, 0))[...] = fixed(read.astype(BF16))
                plgpu.commit_smem()
                columns = pl.ds(run.h * o.V + run.wg * 64, 64)
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
                block(CHUNK, o.K), block(CHUNK, o.K), block(CHUNK, o.K), block(CHUNK, CHUNK),
                block(o.V, CHUNK, F32), plgpu.BlockSpec((o.K,), lambda n: (n,)),
            ],
            wg_axis="wg",
            num_compute_wgs=o.V // 64,
            compute_context=compute,
        )(
            *(run.own(r, CHUNK) for r in (w, q_in, k_out, a)), run.own(u, o.V), run.own(decay, o.K)
        )  # fmt: skip

    operands = (x.w, x.q_in, x.k_out, x.a, x.u, x.decay, *(y for y in (state, slot) if y is not None))
    tiles = plgpu.SMEM((o.V // 64, 2, CHUNK, 64), BF16, transforms=SMEM_TILE)
    return call(kernel, "kda_state", operands, outs, dict(tiles=tiles), o.V // 64, (HV, B, pieces))


def recompute_states(x: Terms, state, slot, o: Options, pieces: int = 1):
    """For the backward: S^T at the start of each chunk [B, HV, N V, K] and V'^T [B, HV, N V, 64], bf16."""
    B, HV, T, _ = x.w.shape
    N = T // CHUNK
    outs = (
        jax.ShapeDtypeStruct((B, HV, N * o.V, o.K), BF16),
        jax.ShapeDtypeStruct((B, HV, N * o.V, CHUNK), BF16),
    )

    def kernel(w, k_out, u, decay, *rest, start, residual):
        *given, starts, residuals = rest
        run = Run(N // pieces, *given)

        def chunk(at, w, k_out, u, decay, s):
            n = run.start + at[0]
            s = run.enter(s, n)
            rows = pl.ds(n * o.V + run.wg * 64, 64)
            s16 = fixed(s.astype(BF16))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            start[run.wg] = s16
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(start.at[run.wg], starts.at[run.b, run.h, rows])
            v_new = u[run.values, :] - product((s16, w.transpose((1, 0))), shape=(64, CHUNK))
            high, low = two_terms(v_new)
            residual[run.wg] = high
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(residual.at[run.wg], residuals.at[run.b, run.h, rows])
            return decayed(s, decay, o, (high, k_out), (low, k_out))

        def compute(pipeline):
            pipeline(run.first(o))
            plgpu.wait_smem_to_gmem(0)

        _short_pipeline(chunk, run, o, o.V // 64, compute)(
            run.own(w, CHUNK), run.own(k_out, CHUNK), run.own(u, o.V), run.own(decay, o.K)
        )

    operands = (x.w, x.k_out, x.u, x.decay, *(y for y in (state, slot) if y is not None))
    tiles = {
        name: plgpu.SMEM((o.V // 64, 64, width), BF16, transforms=SMEM_TILE)
        for name, width in (("start", o.K), ("residual", CHUNK))
    }
    return call(kernel, "kda_states_again", operands, outs, tiles, o.V // 64, (HV, B, pieces))


def piece_ends(x: Terms, o: Options, pieces: int, *, transition: bool):
    """What each piece makes of its first state S^T: S^T R + E. E [B,HV,pieces,V,K], or with transition R, K rows."""
    B, HV, T, _ = x.w.shape
    rows = o.K if transition else o.V

    def kernel(w, k_out, u, decay, ends):
        run = Run(T // CHUNK // pieces)

        def chunk(_, w, k_out, u, decay, s):
            written = product((fixed(s.astype(BF16)), w.transpose((1, 0))), shape=(64, CHUNK))
            high, low = two_terms(-written if transition else u[run.values, :] - written)
            return decayed(s, decay, o, (high, k_out), (low, k_out))

        def compute(pipeline):
            s = run.first(o)
            if transition:
                i, j = (plgpu.broadcasted_iota(jnp.int32, (64, o.K), d, layout=WGMMA) for d in range(2))
                s = fixed(jnp.where(j - 64 * run.wg == i, 1.0, 0.0))
            ends[run.b, run.h, run.piece, run.values] = pipeline(s)

        _short_pipeline(chunk, run, o, rows // 64, compute)(
            run.own(w, CHUNK), run.own(k_out, CHUNK), run.own(u, o.V), run.own(decay, o.K)
        )

    outs = (jax.ShapeDtypeStruct((B, HV, pieces, rows, o.K), F32),)
    name = "kda_transitions" if transition else "kda_piece_ends"
    return call(kernel, name, (x.w, x.k_out, x.u, x.decay), outs, {}, rows // 64, (HV, B, pieces))[0]


class Run:
    """The chunks of one program, and where their states come from and go to.

    A program has a row b, a value head h and a piece of `length` chunks from `start`; `values` are the rows of S^T of
    this warpgroup. state and slot are refs as in `pass_state`.
    """

    def __init__(self, length, state=None, slot=None):
        self.h, self.b, self.piece, self.wg = (jax.lax.axis_index(i) for i in ("head", "row", "piece", "wg"))
        self.length, self.state, self.slot = length, state, slot
        self.start = self.piece * length
        self.values = pl.ds(self.wg * 64, 64)

    def own(self, ref, rows):
        """The piece's part of ref [B, HV, N * rows, ...]."""
        return ref.at[self.b, self.h, pl.ds(self.start * rows, self.length * rows)]

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


def block(rows, columns, dtype=BF16, at=lambda n: n):
    """Blocks of whole rows in the tiles that wgmma reads; at maps a step to a block."""
    transforms = SMEM_TILE if dtype == BF16 else SMEM_TILE_F32
    return plgpu.BlockSpec((rows, columns), lambda n: (at(n), 0), transforms=transforms)


def product(*pairs, shape):
    """Sum of products, float32; left operands may be registers."""

    def run(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, F32))


def decayed(s, decay, o, *pairs):
    """`scaled` plus products, accumulated in place."""

    def run(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)

    return pl.run_state(run)(plgpu.ACC.init(scaled(s, decay, o)))


def scaled(s, decay, o):
    """s with its columns scaled by decay [K]."""
    d = plgpu.load(decay, layout=WGMMA.reduce(0))
    return s * jax.lax.broadcast_in_dim(d, (64, o.K), [1])


def two_terms(x):
    """x as a sum of two bf16 numbers."""
    high = x.astype(BF16)
    return high, (x - high.astype(F32)).astype(BF16)


def call(kernel, name, operands, outs, scratch, warpgroups, grid):
    """A kernel of computing warpgroups and one that fetches, over (head, row, piece)."""
    return plgpu.kernel(
        kernel,
        out_type=outs,
        scratch_types=scratch,
        grid=grid,
        grid_names=("head", "row", "piece"),
        num_threads=warpgroups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
    )(*operands)


def _short_pipeline(chunk, run, o, warpgroups, compute):
    """Over w, k_out, u and decay."""
    return plgpu.emit_pipeline_warp_specialized(
        chunk,
        grid=(run.length,),
        memory_registers=40,
        in_specs=[
            block(CHUNK, o.K), block(CHUNK, o.K), block(o.V, CHUNK, F32), plgpu.BlockSpec((o.K,), lambda n: (n,)),
        ],
        wg_axis="wg",
        num_compute_wgs=warpgroups,
        compute_context=compute,
    )  # fmt: skip
