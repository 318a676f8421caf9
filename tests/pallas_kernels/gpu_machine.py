"""Mosaic GPU kernels as plain Python, on numpy arrays: one program after the other, a thread for each warpgroup.

That shows where everything is read and written and what is computed, not how threads overlap; but a copy to global
memory takes place as late as the kernel's waits allow, and nothing may be stored to twice.
"""

import functools
import itertools
import threading
from types import SimpleNamespace

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np

__all__ = ["Machine", "multiply"]

BF16 = jnp.bfloat16


class Ref:
    """An array as kernels see it: at[] is a part of it, [] a value. With `once` nothing is stored to twice."""

    def __init__(self, array, once=False):
        self.array, self.once, self.dtype, self.shape = array, once, array.dtype, array.shape

    @property
    def at(self):
        return _Parts(self)

    def transpose(self, axes):
        return Ref(self.array.transpose(axes), self.once)

    def __getitem__(self, at):
        return self.at[at].array.copy()

    def __setitem__(self, at, value):
        part = self.at[at]
        assert value.shape == part.shape and value.dtype == part.dtype
        assert not self.once or np.isnan(part.array).all(), "stored to twice"
        part.array[...] = value


class _Parts:
    def __init__(self, ref):
        self.ref = ref

    def __getitem__(self, at):
        at = at if isinstance(at, tuple) else (at,)
        parts = tuple(map(_within, at, self.ref.shape))
        if all(part is not ... for part in parts):
            parts += (...,)  # a single number is a view too, and can be written to
        return Ref(self.ref.array[parts], self.ref.once)


def _within(i, size):
    """A part of an axis; numpy would cut what reaches beyond it."""
    if i is Ellipsis or i == slice(None):
        return i
    first, count = (int(i.start), i.size) if isinstance(i, pl.Slice) else (int(i), 1)
    assert 0 <= first and first + count <= size, f"{first} to {first + count} of {size}"
    return slice(first, first + count) if isinstance(i, pl.Slice) else first


class Accumulator(Ref):
    def __init__(self, shape, dtype):
        super().__init__(np.zeros(shape, dtype))

    @classmethod
    def init(cls, value):
        acc = cls(value.shape, value.dtype)
        acc[...] = value
        return acc


class Barrier:
    """Waits for so many copies. There is one use of each."""

    def __init__(self, num_arrivals, num_barriers=1):
        self.at = [self] if num_barriers == 1 else [Barrier(num_arrivals) for _ in range(num_barriers)]
        self.num_arrivals, self.missing, self.complete = num_arrivals, num_arrivals, threading.Event()

    def arrive(self):  # by one warpgroup alone
        self.missing -= 1
        if self.missing == 0:
            self.complete.set()

    def wait(self):
        assert self.complete.wait(timeout=60), "copies that never came"


class Machine:
    """What the kernels of a sequence use of jax, Pallas, Mosaic GPU and registers.py; `replace` puts it in place."""

    def __init__(self):
        self.own = threading.local()  # of a warpgroup: index by axis, and copies that have not been waited for
        lax = SimpleNamespace(
            axis_index=lambda name: self.own.index[name],
            broadcast_in_dim=jax.lax.broadcast_in_dim,
            cond=lambda true, yes, no, x: yes(x) if true else no(x),
            fori_loop=lambda first, end, body, carry: functools.reduce(
                lambda c, i: body(i, c), range(first, end), carry
            ),
            rsqrt=jax.lax.rsqrt,
        )
        self.jax = SimpleNamespace(lax=lax, tree=jax.tree, ShapeDtypeStruct=jax.ShapeDtypeStruct)
        self.pl = SimpleNamespace(
            ds=pl.ds,
            run_scoped=lambda body, *refs: body(*refs),
            run_state=lambda body: lambda ref: (body(ref), ref.array)[1],
            when=lambda true: lambda body: body() if true else None,
        )
        self.plgpu = SimpleNamespace(
            ACC=Accumulator,
            Barrier=Barrier,
            RefUnion=lambda *members: members,
            BlockSpec=lambda shape, at, transforms=None: (shape, at),
            CompilerParams=lambda **_: None,
            SMEM=lambda shape, dtype, transforms=None: jax.ShapeDtypeStruct(shape, dtype),
            broadcasted_iota=lambda dtype, shape, axis, layout: jax.lax.broadcasted_iota(dtype, shape, axis),
            barrier_wait=lambda barrier: barrier.wait(),
            commit_smem=lambda: None,
            copy_gmem_to_smem=lambda source, target, barrier: (target.__setitem__(..., source[...]), barrier.arrive()),
            copy_smem_to_gmem=lambda source, target: self.own.copies.append((source, target)),
            emit_pipeline_warp_specialized=self.pipeline,
            kernel=self.kernel,
            layout_cast=lambda x, layout: x,
            load=lambda ref, layout, optimized=True: ref[...],
            wait_smem_to_gmem=self.wait,
            wgmma=self.wgmma,
            wgmma_accumulator_load=lambda acc, wait_n: acc[...],
        )

    def replace(self, monkeypatch, *modules):
        own = {
            "jax": self.jax,
            "pl": self.pl,
            "plgpu": self.plgpu,
            "blocks": lambda layout: tuple(i // 16 for i in np.indices((64, 64))),
            "fixed": lambda x, layout=None: x,
            "over_tokens": lambda x, layout: jnp.broadcast_to(x[None], (64, x.shape[0])),
            "running_sums": _running_sums,
            "sync_program": lambda: self.meeting.wait(),
            "per_token": lambda x, layout: jnp.broadcast_to(x[:, None], (64, 64)),
            "sync": lambda: None,
            "tile_products": _tile_products,
            "walk": _walk,
            "warp_sums": lambda x: x.reshape(4, 16, 64).sum(1),
            "warp_sync": lambda: None,
            "widen": lambda x, layout: x.astype(jnp.float32),
        }
        for module, name in itertools.product(modules, own):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, own[name])

    def kernel(self, body, *, out_type, scratch_types, grid, grid_names, num_threads=1, thread_name="wg", **_):
        def call(*operands):
            operands = [x if isinstance(x, Ref) else Ref(np.asarray(x)) for x in operands]
            outs = [_empty(like, once=True) for like in out_type]
            for at in itertools.product(*map(range, grid)):
                scratch = {name: _empty(like) for name, like in scratch_types.items()}
                # All but the one that fetches, where the kernel's pipeline has such.
                count = num_threads - ("arrived" not in scratch)
                self.meeting, errors = threading.Barrier(count, timeout=60), []
                run = functools.partial(self._warpgroup, body, [*operands, *outs], scratch, errors)
                axes = dict(zip(grid_names, at, strict=True))
                threads = [threading.Thread(target=run, args=(axes | {thread_name: i},)) for i in range(count)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                if errors:
                    raise errors[0]
            return [ref.array for ref in outs]

        return call

    def _warpgroup(self, body, refs, scratch, errors, index):
        self.own.index, self.own.copies = index, []
        try:
            body(*refs, **scratch)
            assert not self.own.copies, "not waited for"
        except BaseException as error:
            errors.append(error)
            self.meeting.abort()

    def pipeline(self, body, *, grid, in_specs, compute_context, **_):
        def run(*refs):
            def walk(carry):
                for n in range(*grid):
                    blocks = [
                        ref.at[tuple(pl.ds(i * size, size) for i, size in zip(at(n), shape, strict=True))]
                        for ref, (shape, at) in zip(refs, in_specs, strict=True)
                    ]
                    carry = body((n,), *blocks, carry)
                return carry

            compute_context(walk)

        return run

    def wait(self, n, wait_read_only=False):
        while len(self.own.copies) > n:
            source, target = self.own.copies.pop(0)
            target[...] = source[...]

    def wgmma(self, acc, a, b):
        a, b = (x.array if isinstance(x, Ref) else np.asarray(x) for x in (a, b))
        assert a.dtype == b.dtype and a.dtype in (BF16, np.float16) and a.shape[0] % 64 == 0
        acc.array += multiply(a.astype(np.float32), b.astype(np.float32))


def _empty(like, once=False):
    """A Ref that holds NaN; for the members of a union several, of one memory; or a new barrier."""
    if isinstance(like, list):
        return [_empty(x) for x in like]
    if isinstance(like, Barrier):
        return type(like)(like.num_arrivals, len(like.at))
    if not isinstance(like, tuple):
        return Ref(np.full(like.shape, np.nan, like.dtype), once)
    sizes = [int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in like]
    memory = np.full(max(sizes), 0xFF, np.uint8)  # NaN in every dtype
    return tuple(Ref(memory[:size].view(x.dtype).reshape(x.shape)) for x, size in zip(like, sizes, strict=True))


def _tile_products(x, y, accumulator=None):
    x, y = (np.asarray(z, np.float32).reshape(4, 16, -1) for z in (x, y))
    products = multiply(x, y.mT).reshape(64, 16)
    return jnp.asarray(products if accumulator is None else products + accumulator)


def _walk(a):
    """Slowly: every factor is the product of the decays that the docstring of registers.walk says."""
    a = np.asarray(a, np.float32).reshape(4, 16, 64)
    rows = lambda first, end: a[:, first:end].prod(axis=1)  # noqa: E731
    levels = []
    for half in (1, 2, 4, 8):
        ends = [(r // half * half, r + 1) if r // half % 2 else (r + 1, (r // half + 1) * half) for r in range(16)]
        levels.append(np.stack([rows(*e) for e in ends], axis=1))
    down, up = (
        np.stack([rows(*e(r)) for r in range(16)], axis=1) for e in (lambda r: (0, r + 1), lambda r: (r + 1, 16))
    )
    return (*(x.reshape(64, 64) for x in (*levels, down, up)), down[:, -1])


def _running_sums(x, y):
    x, y = (np.asarray(z).reshape(4, 16, 64) for z in (x, y))
    below, above = x[:, ::-1].cumsum(axis=1)[:, ::-1], y.cumsum(axis=1) - y
    return (below + above).reshape(64, 64), x.sum(axis=1), y.sum(axis=1)


def multiply(a, b):
    """a @ b by blocks that are too small for BLAS to take threads, which get in each other's way on a busy machine."""
    rows, middle, columns = ([slice(i, i + 64) for i in range(0, n, 64)] for n in (*a.shape[-2:], b.shape[-1]))
    entry = lambda i, j: sum(a[..., i, k] @ b[..., k, j] for k in middle)  # noqa: E731
    return np.concatenate([np.concatenate([entry(i, j) for j in columns], axis=-1) for i in rows], axis=-2)
