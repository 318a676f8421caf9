"""What threads do in their registers with one token's channels, a row, and with a few numbers per source.

A row [C] lies over a warpgroup: words of `vector` channels, one after the other over its 128 threads. A sum over
channels ends in four numbers, one per warp; they meet in shared memory, from which every thread reads those of all
sources and computes what follows for itself.

Of tokens with few channels four make one row, each of them one warp's. A sum over a token's channels then is that
warp's number, and warps need not meet. Scalars and small arrays that are "in every thread" are those of its own token.
"""

import functools
from typing import NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf, vector

__all__ = [
    "EVERYWHERE", "THREADS", "WARPS", "Rows", "apart", "everywhere", "store_own", "sync", "sync_group",
    "table", "total_of", "warp_number",
]  # fmt: skip

THREADS, WARPS = 128, 4  # of a warpgroup
F32 = jnp.float32

_COPIES = dict(warp_dims=(plgpu.Replicated(WARPS),), lane_dims=(plgpu.Replicated(32),), vector_dim=-1)
EVERYWHERE = plgpu.Layout.TILED(plgpu.Tiling(((1,),)), **_COPIES)  # [N], whole in every thread
_PER_WARP = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS,), (1,))), warp_dims=(-2,), lane_dims=(plgpu.Replicated(32),), vector_dim=-1
)


class Rows(NamedTuple):
    """Operations on rows [channels] of one dtype; float32 where not said."""

    channels: int  # of a warpgroup, a multiple of 128 * vector
    vector: int
    dtype: jnp.dtype  # of the sources
    tokens: int = 1  # of a row: 1 or WARPS

    @property
    def layout(self):
        if self.tokens > 1 and self.channels > THREADS * self.vector:
            return plgpu.Layout.TILED(
                plgpu.Tiling(((self.channels,), (self.channels // WARPS,), (32 * self.vector,), (self.vector,))),
                warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1,
            )  # fmt: skip
        return plgpu.Layout.TILED(
            plgpu.Tiling(((THREADS * self.vector,), (32 * self.vector,), (self.vector,))),
            warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1,
        )  # fmt: skip

    def load(self, ref):
        """In float32."""
        return self.wide(plgpu.load(ref, layout=self.layout, optimized=False))

    def load_vector(self, ref):
        """From ref [channels / tokens] what stands beside each token of a row, in float32."""
        if self.tokens == 1:
            return self.load(ref)
        words = plgpu.Tiling(((32 * self.vector,), (self.vector,)))
        layout = plgpu.Layout.TILED(words, warp_dims=(plgpu.Replicated(WARPS),), lane_dims=(-2,), vector_dim=-1)

        @plgpu.inline_mgpu(arg_types=(layout,), return_type=self._value())
        def beside_each(ctx, x):
            own = self.layout.to_mgpu()
            return _array([*x.registers.flat], own.registers_shape((self.channels,)), own)

        return beside_each(plgpu.load(ref, layout=layout, optimized=False))

    def wide(self, x):
        """x in float32."""
        return self._widen()(x) if x.dtype == jnp.bfloat16 else x

    def load_part(self, ref, first, size):
        """From ref [size] in `dtype`, as `store` writes it: zeros for channels from `size` on."""
        return self._load_part(size)(ref, everywhere(first, (1,)))

    def zeros(self):
        return plgpu.layout_cast(jnp.zeros(self.channels, F32), self.layout)

    def store(self, ref, x, first, size):
        """Into ref [size] from channel `first` on, rounded to its dtype; channels from `size` on are left out."""
        self._store(size, jnp.dtype(ref.dtype))(ref, x.astype(ref.dtype), first)

    def sum_of_products(self, *pairs):
        """Per warp [4]: the sum of each product."""
        return self._sums(len(pairs))(*(x for pair in pairs for x in pair))

    def now(self, x):
        """x, computed here: the compiler would put off a sum, and keep all of its terms, until somebody reads it."""
        return self._now()(x)

    def _value(self, dtype=F32):
        return plgpu.ShapeDtypeStruct((self.channels,), dtype, layout=self.layout)

    @functools.cache  # noqa: B019
    def _widen(self):
        @plgpu.inline_mgpu(arg_types=(self.layout,), return_type=self._value())
        def widen(ctx, x):
            return _array([_widened(r) for r in x.registers.flat], x.registers.shape, x.layout)

        return widen

    @functools.cache  # noqa: B019
    def _sums(self, count):
        per_warp = plgpu.ShapeDtypeStruct((WARPS,), F32, layout=_PER_WARP)

        @plgpu.inline_mgpu(arg_types=(self.layout,) * (2 * count), return_type=(per_warp,) * count)
        def sums(ctx, *rows):
            results = []
            for x, y in zip(rows[::2], rows[1::2], strict=True):
                words = list(zip(x.registers.flat, y.registers.flat, strict=True))
                total = arith.mulf(*words[0])
                for a, b in words[1:]:
                    total = vector.fma(a, b, total)
                results.append(_fold(total))
            step = 1
            while step < 32:  # all sums at each step, so that one need not wait for another
                results = [arith.addf(r, utils.shfl_bfly(r, step)) for r in results]
                step *= 2
            shape = _PER_WARP.to_mgpu().registers_shape((WARPS,))
            one = ir.VectorType.get((1,), ir.F32Type.get())
            return tuple(_array([vector.broadcast(one, r)], shape, _PER_WARP.to_mgpu()) for r in results)

        return sums

    @functools.cache  # noqa: B019
    def _now(self):
        @plgpu.inline_mgpu(arg_types=(self.layout,), return_type=self._value())
        def now(ctx, x):
            f32, words = ir.F32Type.get(), []
            for word in x.registers.flat:
                numbers = [vector.extract(word, [], [i]) for i in range(self.vector)]
                numbers = [llvm.inline_asm(f32, [n], "", "=f,0", has_side_effects=True) for n in numbers]
                words.append(vector.from_elements(word.type, numbers))
            return _array(words, x.registers.shape, x.layout)

        return now

    @functools.cache  # noqa: B019
    def _load_part(self, size):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), EVERYWHERE), return_type=self._value(self.dtype))
        def load_part(ctx, ref, first):
            kind = ir.VectorType.get((self.vector,), ir.MemRefType(ref.type).element_type)
            words = []
            for at, inside in self._places(first, size):
                if inside is None:
                    words.append(vector.load(kind, ref, [at]))
                    continue
                branch = scf.IfOp(inside, [kind], has_else=True)
                with ir.InsertionPoint(branch.then_block):
                    scf.YieldOp([vector.load(kind, ref, [at])])
                with ir.InsertionPoint(branch.else_block):
                    zero = ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(kind.element_type, 0.0))
                    scf.YieldOp([arith.constant(kind, zero)])
                words.append(branch.results[0])
            layout = self.layout.to_mgpu()
            return _array(words, layout.registers_shape((self.channels,)), layout)

        return load_part

    @functools.cache  # noqa: B019
    def _store(self, size, dtype):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), self.layout, EVERYWHERE))
        def store(ctx, ref, x, first):
            for word, (at, inside) in zip(x.registers.flat, self._places(first, size), strict=True):
                if inside is None:
                    vector.store(word, ref, [at])
                    continue
                branch = scf.IfOp(inside)
                with ir.InsertionPoint(branch.then_block):
                    vector.store(word, ref, [at])
                    scf.YieldOp([])

        def call(ref, x, first):
            return store(ref, x, everywhere(first, (1,)))

        return call

    def _places(self, first, size):
        """Of a thread's words in a row of `size`, and whether each is inside (None where all are)."""
        index = ir.IndexType.get()
        [[start]] = first.registers.reshape(1, 1)
        start = arith.index_cast(index, vector.extract(start, [], [0]))
        thread = arith.remui(utils.thread_idx(), utils.c(THREADS, ir.IntegerType.get_signless(32)))
        thread = arith.index_cast(index, thread)
        own, tile = arith.muli(thread, utils.c(self.vector, index)), THREADS * self.vector
        if self.tokens > 1:  # threads of a warp lie together, and so do the words of all warps in `own`
            tile //= WARPS
            warp = arith.divui(thread, utils.c(32, index))
            own = arith.addi(own, arith.muli(warp, utils.c(self.channels // WARPS - tile, index)))
        for j in range(self.channels // (THREADS * self.vector)):
            at = arith.addi(arith.addi(start, own), utils.c(j * tile, index))
            yield (
                at,
                None if size % self.channels == 0 else arith.cmpi(arith.CmpIPredicate.ult, at, utils.c(size, index)),
            )


def everywhere(x, shape):
    """A scalar as [N] in every thread."""
    return plgpu.layout_cast(jnp.broadcast_to(jnp.asarray(x), shape), EVERYWHERE)


def table(ref):
    """ref [N, M], the sum of each row of it [N] in every thread."""
    layout = plgpu.Layout.TILED(plgpu.Tiling(((1, min(4, ref.shape[1])),)), **_COPIES)
    return jnp.sum(plgpu.load(ref, layout=layout, optimized=False), axis=1)


def total_of(ref):
    """The sum of a few numbers."""
    numbers = [ref[i] for i in range(ref.shape[0])]
    return functools.reduce(lambda x, y: x + y, numbers)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _PER_WARP))
def store_own(ctx, ref, per_warp):
    """Of per_warp [4] the warp's own number into ref [1], which is another place for each warp."""
    [word] = per_warp.registers.flat
    vector.store(word, ref, [utils.c(0, ir.IndexType.get())])


def warp_number():
    """Of the warp in its warpgroup, a number that is not the same in all threads."""

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((4,), jnp.int32, layout=EVERYWHERE))
    def number(ctx):
        i32, layout = ir.IntegerType.get_signless(32), EVERYWHERE.to_mgpu()
        warp = arith.remui(arith.divui(utils.thread_idx(), utils.c(32, i32)), utils.c(WARPS, i32))
        one = ir.VectorType.get((1,), i32)
        words = [vector.broadcast(one, x) for x in (warp, *[utils.c(0, i32)] * 3)]
        return _array(words, layout.registers_shape((4,)), layout, is_signed=True)

    return jnp.sum(number())


@plgpu.inline_mgpu()
def sync(ctx):
    """All warpgroups of the program have come here, and see each other's stores."""
    gpu.barrier()


@plgpu.inline_mgpu()
def apart(ctx):
    """Reads below are not moved above: compilers would read all sources at once and run out of registers."""
    utils.warp_barrier()


@plgpu.inline_mgpu()
def sync_group(ctx):
    """`sync` for the threads of one warpgroup."""
    utils.warpgroup_barrier()


def _widened(word):
    """A vector of bf16 as float32, by one instruction per number."""
    [size] = ir.VectorType(word.type).shape
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    pairs = ir.VectorType.get((size // 2,), i32)
    splat = lambda n: arith.constant(pairs, ir.DenseElementsAttr.get_splat(pairs, ir.IntegerAttr.get(i32, n)))  # noqa: E731
    bits = vector.bitcast(pairs, word)
    low, high = arith.shli(bits, splat(16)), arith.andi(bits, splat(-0x10000))
    halves = [vector.bitcast(ir.VectorType.get((size // 2,), f32), x) for x in (low, high)]
    numbers = [vector.extract(halves[i % 2], [], [i // 2]) for i in range(size)]
    return vector.from_elements(ir.VectorType.get((size,), f32), numbers)


def _fold(word):
    """The sum of a vector's numbers, by halves."""
    [size] = ir.VectorType(word.type).shape
    numbers = [vector.extract(word, [], [i]) for i in range(size)]
    while len(numbers) > 1:
        half = len(numbers) // 2
        numbers = [arith.addf(a, b) for a, b in zip(numbers[:half], numbers[half:], strict=True)]
    return numbers[0]


def _array(registers, shape, layout, is_signed=None):
    packed = np.empty(len(registers), dtype=object)
    packed[:] = registers
    return fragments.FragmentedArray(_registers=packed.reshape(shape), _layout=layout, _is_signed=is_signed)
