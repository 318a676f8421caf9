"""What a warpgroup does inside its registers: two layouts of a tile of 64 tokens, and operations on them.

Everything is cut into tiles of [64, 64]: 64 tokens (rows) by 64 channels, or 64 tokens by 64 tokens. Warp w of the four
owns rows 16 w to 16 w + 15 in both layouts, so that a 16-row tile of the decay (decay.py) is the business of one warp:

* WALK: a lane owns two columns and all 16 rows of its warp. Products along the tokens are plain multiplications of one
  register by the next; sums over channels are dear.
* WGMMA: the layout of the tensor cores' accumulators and of their left operands in registers.

A tile changes its layout through shared memory. The functions decorated with inline_mgpu write Mosaic GPU's own
operations, where Pallas has none: it cannot index the rows of a value in registers, nor give each warp of an
`mma` an operand of its own.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

__all__ = [
    "CHUNK",
    "MULTIPROCESSORS",
    "SMEM_TILE",
    "SMEM_TILE_F32",
    "TILE",
    "WALK",
    "WGMMA",
    "blocks",
    "by_block",
    "fixed",
    "over_tokens",
    "per_token",
    "product",
    "running_sums",
    "sync",
    "sync_program",
    "tile_indices",
    "tile_products",
    "walk",
    "warp_sums",
    "warp_sync",
    "widen",
]

CHUNK, TILE = 64, 16
MULTIPROCESSORS = 132  # of an H100 or H200
WGMMA = plgpu.Layout.WGMMA
WALK = plgpu.Layout.TILED(plgpu.Tiling(((64, 64), (16, 64), (2,))), warp_dims=(-5,), lane_dims=(-2,), vector_dim=-1)
# What wgmma and the copy engine read: 8 rows of 128 bytes, swizzled.
SMEM_TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # 16-bit types
SMEM_TILE_F32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))

_TOTALS = plgpu.Layout.WG_STRIDED((4, 64), 2)  # one row per warp, the same columns per lane as WALK
_F32 = jnp.float32


def value(layout, shape, dtype=_F32):
    return plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)


def over_tokens(x, layout):
    """A vector [C], one number per column, as rows of [64, C]."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, (CHUNK, x.shape[0]), [1]), layout)


def per_token(x, layout):
    """A vector [64], one number per row, as columns of [64, 64]."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, (CHUNK, CHUNK), [0]), layout)


def fixed(x, layout=WGMMA):
    """x with its layout said: the compiler searches for layouts, and long kernels are more than it can search."""
    return plgpu.layout_cast(x, layout)


def product(*pairs, shape=(CHUNK, 64), meanwhile=None):
    """Sum of products, float32; left operands may be registers. meanwhile starts one other, not waited for here."""

    def run(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        if meanwhile is None:
            return acc[...]
        meanwhile()
        return plgpu.wgmma_accumulator_load(acc, wait_n=1)

    return pl.run_scoped(run, plgpu.ACC(shape, _F32))


@plgpu.inline_mgpu(arg_types=(WALK,), return_type=(*[value(WALK, (CHUNK, CHUNK))] * 6, value(_TOTALS, (4, 64))))
def walk(ctx, a):
    """Factors of decays a within each 16-row tile: those of the levels 1, 2, 4, 8 (decay.py), the inclusive products
    from the tile's first row and the exclusive ones to its last, and the product of the tile [4, 64].

    Of the level with half-size m, rows in right halves hold the product from the half's first row to their own, rows
    in left halves that of the rows after them in their half.
    """
    shape = a.registers.shape
    down = list(a.registers.flat)
    one = arith.constant(
        down[0].type, ir.DenseElementsAttr.get_splat(down[0].type, ir.FloatAttr.get(ir.F32Type.get(), 1.0))
    )
    up = [one] * TILE
    times = lambda x, y: y if x is one else arith.mulf(x, y)  # noqa: E731
    levels = []
    half = 1
    while half < TILE:
        levels.append([down[r] if r // half % 2 else up[r] for r in range(TILE)])
        total = [down[b * half + half - 1] for b in range(TILE // half)]
        right = [bool(r // half % 2) for r in range(TILE)]
        down = [times(down[r], total[r // half - 1]) if right[r] else down[r] for r in range(TILE)]
        up = [up[r] if right[r] else times(up[r], total[r // half + 1]) for r in range(TILE)]
        half *= 2
    pack = lambda rows: array(rows, shape, a.layout)  # noqa: E731
    last = array([down[-1]], (1,), _TOTALS.to_mgpu())
    return (*(pack(rows) for rows in levels), pack(down), pack(up), last)


@plgpu.inline_mgpu(arg_types=(WALK, WALK), return_type=(value(WALK, (CHUNK, CHUNK)), *[value(_TOTALS, (4, 64))] * 2))
def running_sums(ctx, x, y):
    """Within each 16-row tile the inclusive sums of x to its last row plus the exclusive ones of y from its first, and
    the sums over the tile of x and of y [4, 64]."""
    below, above = list(x.registers.flat), list(y.registers.flat)
    for r in reversed(range(TILE - 1)):
        below[r] = arith.addf(below[r], below[r + 1])
    for r in range(1, TILE):
        above[r] = arith.addf(above[r - 1], above[r])
    sums = [below[0], *[arith.addf(below[r], above[r - 1]) for r in range(1, TILE)]]
    total = lambda z: array([z], (1,), _TOTALS.to_mgpu())  # noqa: E731
    return array(sums, x.registers.shape, x.layout), total(below[0]), total(above[-1])


@plgpu.inline_mgpu(arg_types=(WALK,), return_type=value(_TOTALS, (4, 64)))
def warp_sums(ctx, x):
    """Sums over each warp's 16 rows [4, 64].

    What is left to add is for whoever reads them. jnp.sum over the rows would do it in a scratch that the warpgroups of
    a program share, and nothing keeps one from writing there before another has read.
    """
    return array([functools.reduce(arith.addf, x.registers.flat)], (1,), _TOTALS.to_mgpu())


def widen(x, layout):
    """bf16 [64, 64] as float32: by one instruction per number, where a cast takes up to two."""

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=value(layout, x.shape))
    def cast(ctx, x):
        return array([widened(utils.bitcast(r, _word())) for r in x.registers.flat], x.registers.shape, x.layout)

    return cast(x)


def widened(word):
    """The two bf16 numbers in a word as a vector of float32."""
    high = ir.IntegerAttr.get(_word(), -0x10000)
    halves = arith.shli(word, utils.c(16, _word())), arith.andi(word, arith.constant(_word(), high))
    f32 = ir.F32Type.get()
    return vector.from_elements(ir.VectorType.get((2,), f32), [utils.bitcast(x, f32) for x in halves])


def _word():
    return ir.IntegerType.get_signless(32)


@plgpu.inline_mgpu()
def sync(ctx):
    """Lets a warpgroup's warps see each other's ordinary stores, where the compiler is told not to by itself."""
    utils.warpgroup_barrier()


@plgpu.inline_mgpu()
def sync_program(ctx):
    """`sync` for all warpgroups of a program."""
    gpu.barrier()


@plgpu.inline_mgpu()
def warp_sync(ctx):
    """Orders what the lanes of each warp read and write in shared memory, among themselves."""
    utils.warp_barrier()


def tile_products(x, y, accumulator=None):
    """Each warp's 16 rows of x times the transpose of its 16 rows of y [64, 64], fp16, WGMMA layout: [64, 16] float32.

    Row i of the result belongs to column 16 (i // 16) + j.
    """
    if accumulator is None:
        return _products(x, y)
    return _products_onto(x, y, accumulator)


def _tile_products(ctx, x, y, accumulator=None):
    word, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    x, y = ([[utils.bitcast(r, word) for r in pair] for pair in z.registers.reshape(-1, 2)] for z in (x, y))
    if accumulator is None:
        sums = [[utils.c(0.0, f32)] * 4 for _ in range(2)]
    else:
        tiles = accumulator.registers.reshape(2, 2)
        sums = [[vector.extract(tiles[n, r], [], [c]) for r in range(2) for c in range(2)] for n in range(2)]
    struct = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
    for step in range(len(x) // 2):
        left, right = x[2 * step : 2 * step + 2], y[2 * step : 2 * step + 2]
        for n in range(2):  # rows 0 to 7 and 8 to 15 of y
            result = llvm.inline_asm(
                struct,
                [left[0][0], left[0][1], left[1][0], left[1][1], right[0][n], right[1][n], *sums[n]],
                "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
                " {$0,$1,$2,$3},{$4,$5,$6,$7},{$8,$9},{$10,$11,$12,$13};",
                "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            )
            sums[n] = [llvm.extractvalue(f32, result, [i]) for i in range(4)]
    pair = ir.VectorType.get((2,), f32)
    registers = [vector.from_elements(pair, sums[n][2 * r : 2 * r + 2]) for n in range(2) for r in range(2)]
    layout = WGMMA.to_mgpu()
    return array(registers, layout.registers_shape((CHUNK, TILE)), layout)


_products = plgpu.inline_mgpu(arg_types=(WGMMA, WGMMA), return_type=value(WGMMA, (CHUNK, TILE)))(_tile_products)
_products_onto = plgpu.inline_mgpu(arg_types=(WGMMA,) * 3, return_type=value(WGMMA, (CHUNK, TILE)))(_tile_products)


def blocks(layout):
    """(row // 16, column // 16) over [64, 64], int32, without arithmetic: the warp, and a constant per register."""

    @plgpu.inline_mgpu(arg_types=(), return_type=(value(layout, (CHUNK, CHUNK), jnp.int32),) * 2)
    def indices(ctx):
        own = layout.to_mgpu()
        shape = own.registers_shape((CHUNK, CHUNK))
        integer = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), integer)
        splat = lambda x: vector.broadcast(pair, x)  # noqa: E731
        warp = arith.remui(utils.warp_idx(sync=False), utils.c(4, integer))
        rows = [splat(warp)] * int(np.prod(shape))
        if layout is WGMMA:  # registers: 8 columns, then two halves of 8 rows
            columns = [splat(utils.c(i // 2 * 8 // TILE, integer)) for i in range(len(rows))]
        else:
            lane = arith.remui(utils.thread_idx(), utils.c(32, integer))
            columns = [splat(arith.divui(lane, utils.c(TILE // 2, integer)))] * len(rows)
        return tuple(array(x, shape, own, signed=True) for x in (rows, columns))

    return indices()


def tile_indices():
    """Row and column within the tiles of [64, 16]."""
    i, j = (plgpu.broadcasted_iota(jnp.int32, (CHUNK, TILE), d, layout=WGMMA) for d in range(2))
    return i & (TILE - 1), j


def by_block(warp, values):
    """values[w] in the rows of warp w; None is 1."""
    values = [1.0 if x is None else x for x in values]
    low = jnp.where(warp == 0, values[0], values[1])
    return jnp.where(warp < 2, low, jnp.where(warp == 2, values[2], values[3]))


def array(registers, shape, layout, signed=None):
    packed = np.empty(len(registers), dtype=object)
    packed[:] = registers
    return fragments.FragmentedArray(_registers=packed.reshape(shape), _layout=layout, _is_signed=signed)
