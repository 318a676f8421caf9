"""Everything of a chunk that does not depend on the state: one warpgroup per chunk and value head.

From raw q, k, gate and beta to what state.py walks over: the decayed q~ = q e^G, k_in = k e^G and k^ = k e^{Gn - G},
the products A, the decay e^{Gn} of the chunk and T = (I + L)^-1. The W and U of chunked.py are not formed: the walk
has time to spare for V' = T beta (V - k_in S), which this kernel has not for T beta k_in and T beta V.

Decayed products are anchored at boundaries between a key's row and the query's, and the factors on both sides are
products of decays, one exp per gate: any gate is right, -inf included, and no exponent is formed that is not a sum of
gates. Within a tile of 16 rows the boundaries are those of the tree of halves of decay.py. For keys of an earlier tile
it is the first row of the query's own: the row's factor is the product from there, the key's the one from its row to
there, so that there are three sets of keys, for tiles one, two and three apart. A tile belongs to a warp, whose tensor
cores take all of these products out of its registers. Channels are taken 64 at a time.

Tiles mostly stay with the warp that wrote them, so that barriers are placed by hand: a warp's where lanes exchange, a
warpgroup's where warps do (totals, tiles before a row's own, right operands of wgmma). Shared memory is written over
and over, so that two programs share a multiprocessor; what a name in the kernel lies on is said where it is allocated.

16-bit operands: q and k are brought to rows of norm (or of largest entry) 1 and multiplied in fp16, whose 11 bits of
mantissa keep nearly parallel keys apart (field case KN04). T leaves in two bf16 terms: where keys are parallel, V' is
a small difference.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .gate import log2_gate, read_bias
from .registers import (
    CHUNK,
    SMEM_TILE,
    SMEM_TILE_F32,
    TILE,
    WALK,
    WGMMA,
    blocks,
    by_block,
    fixed,
    over_tokens,
    per_token,
    product,
    sync,
    tile_indices,
    tile_products,
    walk,
    warp_sync,
    widen,
)

__all__ = ["Options", "Terms", "intra"]

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


class Options(NamedTuple):
    """What is static about a call, besides shapes."""

    scale: float
    gate: str
    lower_bound: float | None
    qk_l2norm: bool
    K: int
    V: int


class Terms(NamedTuple):
    """Of N chunks, T = 64 N."""

    k_in: jax.Array  # [B, HV, T, K] bf16: k e^G
    q_in: jax.Array  # [B, HV, T, K] bf16: scale q e^G
    k_out: jax.Array  # [B, HV, T, K] bf16: k e^{Gn - G}
    a: jax.Array  # [B, HV, T, 64] bf16
    inverse: jax.Array  # [2, B, HV, T, 64] bf16: T = (I + L)^-1 in two terms
    decay: jax.Array  # [B, HV, N K] float32: e^{Gn}


def intra(q, k, g, beta, rate, bias, o: Options) -> Terms:
    """q, k [B,T,H K] bf16; g [B,T,HV K]; beta [B,HV,T], rate [HV], bias [HV,K] float32; 64 divides T."""
    (B, HV, T), H = beta.shape, q.shape[2] // o.K
    N, nk = T // CHUNK, o.K // 64
    token = lambda w: jax.ShapeDtypeStruct((B, HV, T, w), BF16)  # noqa: E731
    out = Terms(
        token(o.K), token(o.K), token(o.K), token(CHUNK),
        jax.ShapeDtypeStruct((2, B, HV, T, CHUNK), BF16), jax.ShapeDtypeStruct((B, HV, N * o.K), F32),
    )  # fmt: skip
    tiles = lambda n, dtype=BF16: plgpu.SMEM((n, CHUNK, 64), dtype, transforms=SMEM_TILE)  # noqa: E731
    scratch = dict(
        q=plgpu.RefUnion(tiles(nk), tiles(nk, F16)),
        k=plgpu.RefUnion(tiles(nk), tiles(nk, F16)),
        # A tile's totals lie where the tile of k e^G will be written at the end of the same turn.
        kin=plgpu.RefUnion(tiles(nk), plgpu.SMEM((8 * nk, 4, 64), F32)),
        level=plgpu.RefUnion(plgpu.SMEM((4 * CHUNK, 64), F16, transforms=SMEM_TILE), tiles(4)),
        arrived=[plgpu.Barrier(num_arrivals=n) for n in (nk, nk, nk, 2)],
    )
    # A tile's products wait where its gates were: all that is alive does not fit in the registers. numbers are beta,
    # twice, since two loads of one slice become one, of one layout; and norms, where q and k have any.
    numbers = plgpu.SMEM((2 if o.qk_l2norm else 5, CHUNK), F32)
    if g.dtype == BF16:
        scratch |= dict(g=plgpu.RefUnion(tiles(nk), tiles(nk, F16)), more=tiles(1, F16), numbers=numbers)
    else:
        gates = plgpu.SMEM((nk, CHUNK, 64), F32, transforms=SMEM_TILE_F32)
        scratch["g"] = plgpu.RefUnion(gates, tiles(2 * nk, F16), tiles(2 * nk), plgpu.SMEM((34, CHUNK), F32))
        if nk == 1 or not o.qk_l2norm:  # else there is room in g, and none beside it
            scratch["numbers"] = numbers
    outputs, tree = jax.tree.flatten(out)
    results = plgpu.kernel(
        partial(_kernel, o=o, group=HV // H),
        out_type=outputs,
        scratch_types=scratch,
        grid=(N, HV, B),
        grid_names=("chunk", "head", "row"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        kernel_name="kda_intra",
    )(q, k, g, beta, rate, bias)
    return jax.tree.unflatten(tree, results)


def _kernel(q_hbm, k_hbm, g_hbm, beta_hbm, rate_hbm, bias_hbm, *outs, o, group,
            q, k, g, kin, level, arrived, more=None, numbers=None):  # fmt: skip
    kin_hbm, qin_hbm, kout_hbm, a_hbm, inverse_hbm, decay_hbm = outs
    n, h, b = (jax.lax.axis_index(x) for x in ("chunk", "head", "row"))
    nk = o.K // 64
    rows = pl.ds(n * CHUNK, CHUNK)
    (q_raw, q_unit), (k_raw, k_unit), (k_in, totals) = q, k, kin
    if more is None:  # a gate in float32 leaves two tiles' room
        g_raw, halves, t_low, in_g = g
        down_of, up_of = lambda i: halves.at[2 * i], lambda i: halves.at[2 * i + 1]
    else:
        g_raw, halves = g
        t_low, down_of, up_of = g_raw, lambda i: halves.at[i], lambda i: more.at[0]
    betas = in_g.at[pl.ds(32, 2)] if numbers is None else numbers.at[pl.ds(0, 2)]  # in g after up_of(0)
    stack, wide = level
    half = [stack.at[pl.ds(CHUNK * j, CHUNK)] for j in range(4)]

    for i in range(nk):
        columns = pl.ds(h // group * o.K + 64 * i, 64)
        plgpu.copy_gmem_to_smem(q_hbm.at[b, rows, columns], q_raw.at[i], arrived[0])
        plgpu.copy_gmem_to_smem(k_hbm.at[b, rows, columns], k_raw.at[i], arrived[1])
        plgpu.copy_gmem_to_smem(g_hbm.at[b, rows, pl.ds(h * o.K + 64 * i, 64)], g_raw.at[i], arrived[2])

    def fetch_betas():
        for j in range(2):
            plgpu.copy_gmem_to_smem(beta_hbm.at[b, h, rows], betas.at[j], arrived[3])

    if numbers is not None:
        fetch_betas()
    rate = rate_hbm[h] if o.gate != "log" else None
    bias = read_bias(bias_hbm, h, 0, o)  # here and below long before it is used
    plgpu.barrier_wait(arrived[0])
    normalise_rows(q_raw, q_unit, numbers, 0, o)
    plgpu.barrier_wait(arrived[1])
    normalise_rows(k_raw, k_unit, numbers, 1, o)
    plgpu.barrier_wait(arrived[2])

    # Decayed products and the decayed q and k.
    warp, column = blocks(WGMMA)
    row_warp, _ = blocks(WALK)

    def channels(i, carry):
        """64 channels of all. near: sums [64, 16] of q and of k with the keys 0 to 3 tiles before a row's own."""
        near, diagonal, bias = carry
        near = [list(sums) for sums in near]
        a = plgpu.load(g_raw.at[i], layout=WALK)
        a = log2_gate(widen(a, WALK) if a.dtype == BF16 else a, rate, bias, o)
        *factors, down, up, total = walk(fixed(jnp.exp2(a), WALK))
        totals[8 * i] = total
        for j, f in enumerate(factors):
            half[j][...] = f.astype(F16)
        sync()
        if numbers is None:
            pl.when(i == nk - 1)(fetch_betas)
        down_of(i)[...], up_of(i)[...] = down.astype(F16), up.astype(F16)
        qw, kw = (plgpu.load(x.at[i], layout=WGMMA) for x in (q_unit, k_unit))
        diagonal = tile_products(qw, kw, diagonal)
        for j in range(4):
            f = plgpu.load(half[j], layout=WGMMA)
            kf = kw * f
            add_level(near, j, tile_products(qw * f, kf), tile_products(kf, kf))
        t = [plgpu.load(totals.at[8 * i, j], layout=WALK.reduce(0)) for j in range(4)]
        decay_hbm[b, h, pl.ds(n * o.K + 64 * i, 64)] = t[0] * t[1] * t[2] * t[3]
        t = [over_tokens(x, WALK) for x in t]
        at = partial(by_block, row_warp)
        warp_sync()
        ks, up = plgpu.load(k_unit.at[i], layout=WALK), plgpu.load(up_of(i), layout=WALK)
        far = up * at([t[1], t[2], None, None]).astype(F16)
        half[1][...] = ks * up
        half[2][...] = ks * far
        half[3][...] = ks * (far * t[2].astype(F16))
        sync()
        f = plgpu.load(down_of(i), layout=WGMMA)
        left = [fixed(x * f) for x in (qw, kw)]
        for distance in (1, 2, 3):
            # A warp finds the tile `distance` before its own that many tiles up the stack; there may be none.
            right = plgpu.load(stack.at[pl.ds(CHUNK * distance - TILE * distance, CHUNK)], layout=WGMMA)
            for sums, x in zip(near, left, strict=True):
                sums[distance] = tile_products(x, right, sums[distance])
        down = plgpu.load(down_of(i), layout=WALK).astype(F32) * at([None, t[0], t[0] * t[1], t[0] * t[1] * t[2]])
        up = up.astype(F32) * at([t[1] * t[2] * t[3], t[2] * t[3], t[3], None])
        qs, ks = plgpu.load(q_unit.at[i], layout=WALK).astype(F32), ks.astype(F32)
        if not o.qk_l2norm:
            qs, ks = (
                x * per_token(plgpu.load(numbers.at[2 + j], layout=WALK.reduce(1)), WALK)
                for j, x in enumerate((qs, ks))
            )
        bias = read_bias(bias_hbm, h, jnp.minimum(i + 1, nk - 1), o)
        warp_sync()
        q_raw[i], k_raw[i], k_in[i] = (qs * down).astype(BF16), (ks * up).astype(BF16), (ks * down).astype(BF16)
        plgpu.commit_smem()
        columns = pl.ds(64 * i, 64)
        plgpu.copy_smem_to_gmem(q_raw.at[i], qin_hbm.at[b, h, rows, columns])
        plgpu.copy_smem_to_gmem(k_raw.at[i], kout_hbm.at[b, h, rows, columns])
        plgpu.copy_smem_to_gmem(k_in.at[i], kin_hbm.at[b, h, rows, columns])
        return near, diagonal, bias

    zero = fixed(jnp.zeros((CHUNK, TILE), F32))
    # A loop, and not its turns written out: the compiler would work on both at once, in more registers than there are.
    near, diagonal, _ = jax.lax.fori_loop(0, nk, channels, ([[zero] * 4] * 2, zero, bias))
    plgpu.barrier_wait(arrived[3])
    down_beta = fixed(per_token(plgpu.load(betas.at[0], layout=WGMMA.reduce(1)), WGMMA))
    across_beta = fixed(over_tokens(plgpu.load(betas.at[1], layout=WGMMA.reduce(0)), WGMMA))
    i, j = tile_indices()
    near[0][0] = near[0][0] + jnp.where(i == j, diagonal, 0.0)
    A, Ak = (whole(sums, warp) for sums in near)
    if not o.qk_l2norm:
        qn, kn = (per_token(plgpu.load(numbers.at[2 + j], layout=WGMMA.reduce(1)), WGMMA) for j in range(2))
        across = over_tokens(plgpu.load(numbers.at[4], layout=WGMMA.reduce(0)), WGMMA)
        A, Ak = A * qn * across, Ak * kn * across
    wide[2] = A.astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(wide.at[2], a_hbm.at[b, h, rows])
    T = inverse_of(Ak, down_beta, across_beta, half, warp, column)
    high = T.astype(BF16)
    wide[3], t_low[0] = high, (T - high.astype(F32)).astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(wide.at[3], inverse_hbm.at[0, b, h, rows])
    plgpu.copy_smem_to_gmem(t_low.at[0], inverse_hbm.at[1, b, h, rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def add_level(near, n, *products):
    """Adds to near[.][0] those entries of the products [64, 16] that belong to level 2^n; of k's in both triangles."""
    lower, upper = tile_level(1 << n)
    for sums, mask, found in zip(near, (lower, lower | upper), products, strict=True):
        chosen = jnp.where(mask, found, 0.0)
        sums[0] = fixed(sums[0] + chosen)


def whole(near, warp):
    """[64, 64] from the products [64, 16] of each row with the tiles 0, 1, 2 and 3 before its own."""
    w = warp[:, :TILE]
    strips = []
    for j in range(4):
        strip = jnp.where(w == j, near[0], 0.0)
        for distance in range(1, 4 - j):
            strip = jnp.where(w == j + distance, near[distance], strip)
        strips.append(fixed(strip))
    return fixed(jnp.concatenate(strips, axis=1))


def tile_level(size):
    """Masks over tiles [64, 16]: rows of right halves against columns of the left half beside them, and the reverse."""
    i, j = tile_indices()
    level = ((i ^ j) >= size) & ((i ^ j) < 2 * size)
    return level & (i > j), level & (i < j)


def _own_tile(x, warp):
    """The diagonal tiles [64, 16] of x [64, 64]."""
    tiles = [x[:, j * TILE : (j + 1) * TILE] for j in range(4)]
    w = warp[:, :TILE]
    return jnp.where(w < 2, jnp.where(w == 0, tiles[0], tiles[1]), jnp.where(w == 2, tiles[2], tiles[3]))


def normalise_rows(raw, unit, numbers, which, o):
    """Rows of raw [nk,64,64] to unit in fp16: L2-normalised and q scaled, or divided by their largest entry.

    In the second case numbers, from row 2, say by how much: q's times scale, k's, and these once more.
    """
    x = [widen(plgpu.load(raw.at[i], layout=WGMMA), WGMMA) for i in range(o.K // 64)]
    if o.qk_l2norm:
        squares = x[0] * x[0]
        for y in x[1:]:
            squares = squares + y * y
        r = jax.lax.rsqrt(jnp.sum(squares, axis=1) + 1e-6)
        r = r * o.scale if which == 0 else r
    else:
        largest = jnp.abs(x[0])
        for y in x[1:]:
            largest = jnp.maximum(largest, jnp.abs(y))
        largest = jnp.maximum(jnp.max(largest, axis=1), 1e-30)
        numbers[2 + which] = largest * o.scale if which == 0 else largest
        if which == 1:
            numbers[4] = largest  # to be read in another layout: two loads of one slice would become one
        r = 1.0 / largest
    warp_sync()
    for i, y in enumerate(x):
        unit[i] = fixed((y * per_token(r, WGMMA)).astype(F16))
    warp_sync()


def inverse_of(Ak, down_beta, across_beta, scratch, warp, column):
    """(I + L)^-1 of L = beta times the strictly lower Ak [64, 64]: nested merges, as in decay.py.

    Ak must be symmetric inside the 16-row tiles. There everything stays in a warp's registers: a product's right
    operand is held as its transpose, so the inverse is carried along with its transpose. scratch: two fp16 tiles.
    """
    L = fixed(Ak * down_beta)
    # L and its transpose, each right in its own triangle.
    lower, upper = fixed(_own_tile(L, warp)), fixed(_own_tile(Ak * across_beta, warp))
    i, j = tile_indices()
    eye = jnp.where(i == j, 1.0, 0.0)
    below, above = tile_level(1)
    T, Tt = fixed(eye - jnp.where(below, lower, 0.0)), fixed(eye - jnp.where(above, upper, 0.0))
    for size in (2, 4, 8):
        below, above = tile_level(size)
        off, off_t = jnp.where(below, lower, 0.0), jnp.where(above, upper, 0.0)
        off, off_t, t, tt = (fixed(x.astype(F16)) for x in (off, off_t, T, Tt))
        xt = fixed(tile_products(tt, off).astype(F16))  # (L T)^T = T^T L^T
        T, Tt = fixed(T - tile_products(t, xt)), fixed(Tt - tile_products(xt, t))
    T = fixed(jnp.where(warp == column, jnp.concatenate([T] * 4, axis=1), 0.0))
    for size in (16, 32):
        mask = (((warp & 1) == 1) & (column == warp - 1)) if size == 16 else ((warp >= 2) & (column < 2))
        t = fixed(T.astype(F16))
        scratch[0][...] = t
        plgpu.commit_smem()
        off = fixed(jnp.where(mask, L, 0.0).astype(F16))
        scratch[1][...] = fixed(product((off, scratch[0])).astype(F16))
        plgpu.commit_smem()
        T = fixed(T - product((t, scratch[1])))
    return T
