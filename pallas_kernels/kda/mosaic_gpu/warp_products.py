"""The backward through the tree of halves (decay.py), each warp for its own 16 rows, out of tiles in shared memory.

At the level of half-size m, with f its factors and rows i of right halves, columns j of the left ones beside them,

    x_i += f_i sum_j a_ij (f_j k_j)
    p_i += f_i sum_j m_ij (f_j k_j)
    y_j += f_j sum_i a_ij (f_i q_i) + m_ij (f_i r_i)

The products are `mma`s and not `wgmma`s, which give all warps of a warpgroup one right operand: here each has its own,
at the levels below 16 its own 16 tokens and above those of the warps across the boundary. A warp reads their fragments
itself: of a and m blocks of 16 x 16 as left operands (4 words), of f, k, q and r 16 tokens by 16 channels as right
ones (per 8 channels 2 words, each of two tokens in one channel).

f k, f q and f r enter without error, as the sum of two bf16 numbers, unless the second underflows. So sums over the
pairs cancel to float32: k_j y_j takes away what q_i x_i and r_i p_i add.

x, p and y are [64, 64] float32 in WGMMA layout; everything else is a bf16 tile [64, 64] laid out as SMEM_TILE.
"""

import functools

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, nvvm, vector

from .registers import CHUNK, SMEM_TILE, TILE, WGMMA, array, value, widened

__all__ = ["add_inner_level", "add_outer_level", "diagonal_blocks"]

_BF16_TILE = plgpu.RefType(SMEM_TILE)
_SUMS = (value(WGMMA, (CHUNK, CHUNK)),) * 3


def add_inner_level(sums, factors, operands, cotangents, *, half):
    """(x, p, y) with the level of half-size 1, 2, 4 or 8; operands (k, q, r), cotangents (a, m)."""
    return _level(_inner_level, half)(*sums, factors, *operands, *cotangents)


def add_outer_level(sums, factors, operands, cotangents, *, half):
    """The same at half-size 16 or 32, where a warp is in a right half or in a left one."""
    return _level(_outer_level, half)(*sums, factors, *operands, *cotangents)


@plgpu.inline_mgpu(arg_types=(_BF16_TILE,), return_type=value(WGMMA, (CHUNK, TILE), jnp.bfloat16))
def diagonal_blocks(ctx, tile):
    """The warps' own blocks of a tile, [64, 16] in WGMMA layout."""
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    words = _load(utils.memref_ptr(tile), _warp(), _warp(), transposed=False)
    layout = WGMMA.to_mgpu()
    return array([utils.bitcast(w, pair) for w in words], layout.registers_shape((CHUNK, TILE)), layout)


@functools.cache
def _level(products_of, half):
    """products_of(half, factors, operands, cotangents) is a function of which 16 channels, and that one of which 8 of
    them (a slice of their words) and of f's words there. It gives, for each of x, p and y and for rows 0 and 8 of the
    warp, the word of f and the products to be multiplied and added, or None."""

    @plgpu.inline_mgpu(arg_types=(*[WGMMA] * 3, *[_BF16_TILE] * 6), return_type=_SUMS)
    def add(ctx, x, p, y, *tiles):
        # Each barrier keeps compilers from reading ahead of it: they would for all columns and levels, and run out of
        # registers.
        nvvm.bar_warp_sync(_int(-1))
        factors, k, q, r, a, m = (utils.memref_ptr(z) for z in tiles)
        columns_of = products_of(half, factors, (k, q, r), (a, m))
        old = [z.registers.reshape(8, 2) for z in (x, p, y)]
        new = [[], [], []]
        for c in range(8):
            nvvm.bar_warp_sync(_int(-1))
            if c % 2 == 0:
                f = _load(factors, _warp(), _int(c // 2), transposed=False)
                products = columns_of(_int(c // 2))
            two = slice(c % 2 * 2, c % 2 * 2 + 2)
            for n, o, results in zip(new, old, products(two, f[two]), strict=True):
                for z, terms in zip(o[c], results, strict=True):
                    n.append(z if terms is None else math.fma(widened(terms[0]), terms[1], z))
        return tuple(array(n, x.registers.shape, x.layout) for n in new)

    return add


def _inner_level(half, factors, operands, cotangents):
    warp = _warp()
    a, m = (_load(z, warp, warp, transposed=False) for z in cotangents)
    at, mt = (_load(z, warp, warp, transposed=True) for z in cotangents)
    step = _step_of_8(a, m, at, mt) if half == 8 else _step_below_8(half, a, m, at, mt)

    def columns_of(column):
        fs, *tokens = (_load(z, warp, column, transposed=True, by_columns=True) for z in (factors, *operands))

        def products(two, f):
            return [
                [None if z is None else (word, z) for word, z in zip(f, results, strict=True)]
                for results in step(fs[two], *(z[two] for z in tokens))
            ]

        return products

    return columns_of


def _step_below_8(half, *blocks):
    """Pairs lie in diagonal blocks of 8 x 8."""
    lower, upper = _inner_masks(half)
    zero = _hidden_zero()
    signed = []
    for b, mask in zip(blocks, (lower, lower, upper, upper), strict=True):
        masked = [arith.andi(w, z) for w, z in zip(b, (mask, zero, zero, mask), strict=True)]
        signed.append(([_negative(w) for w in masked], masked))
    a, m, at, mt = signed
    # Eight rows of a and the same of m, once for each of the two terms of their eight tokens.
    rows = [[b[sign][i] for sign in range(2) for b in (a, m)] for i in (0, 3)]

    def step(fs, ks, qs, rs):
        (k0, k1), (q0, q1), (r0, r1) = (_exact_products(z, fs) for z in (ks, qs, rs))
        of_rows = [_mma([(r, z)]) for r, z in zip(rows, (k0, k1), strict=True)]
        partner = _mma([(b[t], (z0[t], z1[t])) for b, z0, z1 in ((at, q0, q1), (mt, r0, r1)) for t in range(2)])
        return [r[0] for r in of_rows], [r[1] for r in of_rows], partner

    return step


def _step_of_8(a, m, at, mt):
    """Rows 8 to 15 are in right halves and rows 0 to 7 in left ones, and the products of both fill one block."""
    zero = _hidden_zero()
    blocks = []
    for b, bt in ((a, at), (m, mt)):
        block = [arith.andi(b[0], zero), b[1], bt[2], arith.andi(b[3], zero)]
        blocks.append(([_negative(w) for w in block], block))

    def step(fs, ks, qs, rs):
        k0, q1, r1 = (_exact_products(z[i : i + 1], fs[i : i + 1])[0] for z, i in ((ks, 0), (qs, 1), (rs, 1)))
        of_a, of_m = (_mma([(b[t], (k0[t], z[t])) for t in range(2)]) for b, z in zip(blocks, (q1, r1), strict=True))
        return [None, of_a[1]], [None, of_m[1]], [arith.addf(of_a[0], of_m[0]), None]

    return step


def _inner_masks(half):
    """What of the words of an 8 x 8 diagonal block is in right halves' rows and left ones' columns, and the reverse."""
    lane = _lane()
    i, j = arith.shrui(lane, _int(2)), arith.muli(arith.andi(lane, _int(3)), _int(2))  # a word: columns j and j + 1
    if half == 1:
        pair = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(i, _int(-2)), j)
        odd = _any_bit(i, 1)
        masks = [arith.select(odd, _int(0xFFFF), _int(0)), arith.select(odd, _int(0), _int(-0x10000))]
    else:
        differ = arith.xori(i, j)
        near = arith.cmpi(arith.CmpIPredicate.ult, arith.andi(differ, _int(-2)), _int(2 * half))
        pair = arith.andi(near, _any_bit(differ, half))
        masks = [arith.select(_any_bit(z, half), _int(-1), _int(0)) for z in (i, j)]
    return [arith.select(pair, z, _int(0)) for z in masks]


def _hidden_zero():
    """A zero that compilers do not know: a left operand with known zeros is put together anew for each product."""
    return arith.shrui(utils.warp_idx(sync=True), _int(16))


def _outer_level(half, factors, operands, cotangents):
    k, *others = operands
    warp = _warp()
    met = [arith.xori(warp, _int(d)) for d in ((1,) if half == 16 else (2, 3))]
    right = _any_bit(warp, half // 16)
    right_rows = arith.select(right, _int(-1), _int(0))
    left_rows = arith.xori(right_rows, _int(-1))
    # In a right half blocks as they are, by k of the left half; in a left one transposed, by q and r of the right one.
    tokens = [arith.select(right, k, z) for z in others]
    blocks = []
    for z in cotangents:
        of_z = []
        for w in met:
            words = zip(_load(z, warp, w, transposed=False), _load(z, w, warp, transposed=True), strict=True)
            block = [arith.select(right, *pair) for pair in words]
            of_z.append(([_negative(x) for x in block], block))
        blocks.append(of_z)

    def columns_of(column):
        load = functools.partial(_load, column_block=column, transposed=True, by_columns=True)
        words = [[load(z, w) for z in (factors, *tokens)] for w in met]

        def products(two, f):
            results = []
            for n, of_z in enumerate(blocks):
                terms = []
                for block, (fs, *zs) in zip(of_z, words, strict=True):
                    z0, z1 = _exact_products(zs[n][two], fs[two])
                    terms += [(block[t], (z0[t], z1[t])) for t in range(2)]
                results.append(_mma(terms))
            of_a, of_m = results
            both = [arith.addf(x, y) for x, y in zip(of_a, of_m, strict=True)]
            on_right, on_left = ([arith.andi(word, rows) for word in f] for rows in (right_rows, left_rows))
            return [list(zip(*z, strict=True)) for z in ((on_right, of_a), (on_right, of_m), (on_left, both))]

        return products

    return columns_of


def _exact_products(x, f):
    """Per word (h, l) with x f = l - h exactly: h is minus the rounded product."""
    results = []
    for a, b in zip(x, f, strict=True):
        minus = _asm("mul.rn.bf16x2 $0, $1, $2;", a, _negative(b))
        results.append((minus, _asm("fma.rn.bf16x2 $0, $1, $2, $3;", a, b, minus)))
    return results


def _mma(operands):
    """Sum of the products of left (4 words) and right (2 words) operands: rows 0 and 8, two columns each."""
    f32 = ir.F32Type.get()
    sums = [utils.c(0.0, f32)] * 4
    for left, right in operands:
        result = llvm.inline_asm(
            ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>"),
            [*left, *right, *sums],
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
            " {$0,$1,$2,$3},{$4,$5,$6,$7},{$8,$9},{$10,$11,$12,$13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        )
        sums = [llvm.extractvalue(f32, result, [i]) for i in range(4)]
    return [vector.from_elements(ir.VectorType.get((2,), f32), sums[i : i + 2]) for i in (0, 2)]


def _load(tile, row_block, column_block, *, transposed, by_columns=False):
    """One ldmatrix of the four 8 x 8 quarters of a 16 x 16 block, the upper and lower one of its left side first;
    transposed, each of them and, unless by_columns, their order too."""
    lane = _lane()
    row = arith.remui(lane, _int(8))  # of each quarter; rows of 128 bytes are swizzled in groups of 8
    first, second = (arith.andi(arith.shrui(lane, _int(3 + i)), _int(1)) for i in range(2))
    rows, columns = (second, first) if transposed and not by_columns else (first, second)
    row = _sum(arith.muli(row_block, _int(16)), arith.muli(rows, _int(8)), row)
    group = arith.xori(_sum(arith.muli(column_block, _int(2)), columns), arith.remui(lane, _int(8)))
    offset = arith.addi(arith.muli(row, _int(128)), arith.muli(group, _int(16)))
    words = nvvm.ldmatrix(
        utils.getelementptr(tile, [offset], ir.IntegerType.get_signless(8)),
        num=4,
        layout=nvvm.MMALayout.col if transposed else nvvm.MMALayout.row,
        shape=ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"),
        elt_type=nvvm.LdStMatrixEltType.B16,
    )
    return [llvm.extractvalue(offset.type, words, [i]) for i in range(4)]


def _warp():
    return arith.remui(utils.warp_idx(sync=False), _int(4))


def _lane():
    return arith.remui(utils.thread_idx(), _int(32))


def _negative(word):
    """Minus two bf16 numbers."""
    return arith.xori(word, _int(-0x7FFF8000))


def _any_bit(x, bits):
    return arith.cmpi(arith.CmpIPredicate.ne, arith.andi(x, _int(bits)), _int(0))


def _int(i):
    return utils.c(i, ir.IntegerType.get_signless(32))


def _sum(*terms):
    return functools.reduce(arith.addi, terms)


def _asm(text, *operands):
    word = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(word, list(operands), text, ",".join(["=r"] + ["r"] * len(operands)))
