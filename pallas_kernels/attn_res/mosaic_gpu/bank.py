"""One row of a bank, put or taken, where only the device knows which: the other rows are neither read nor written.

XLA can only choose among arrays by reading all of them. Rows are copied through registers, by as many small programs
as there is room for.
"""

import math
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .plan import MULTIPROCESSORS
from .rows import THREADS, Rows

__all__ = ["put", "take"]

WIDEST = 8192  # numbers that a program copies at a time
PROGRAMS = 8 * MULTIPROCESSORS


def put(bank, row, index):
    """bank (arrays of row's shape) with row at index, in place; an index outside of it leaves it as it is."""
    refs = [jax.new_ref(_wide(x)) for x in bank]
    _call("bank_put", lambda own, bank, copy: copy(own, bank), refs, index, _wide(row))
    return tuple(jax.freeze(ref).reshape(row.shape) for ref in refs)


def take(bank, index):
    """bank[index], of an index from 0 on; of one beyond the end the last."""
    index = jnp.minimum(index, len(bank) - 1)
    rows = [_wide(x) for x in bank]
    out = jax.new_ref(jax.lax.empty(rows[0].shape, rows[0].dtype))
    _call("bank_take", lambda own, bank, copy: copy(bank, own), rows, index, out)
    return jax.freeze(out).reshape(bank[0].shape)


def _call(name, move: Callable, bank, index, own):
    """move(ref of own, ref of bank[index], copy(source, target)), in all programs."""
    M, width = own.shape
    vector = 16 // own.dtype.itemsize
    rows = Rows(-(-width // (THREADS * vector)) * THREADS * vector, vector, own.dtype)

    def kernel(index_ref, own_ref, *bank_refs):
        program = jax.lax.axis_index("program")

        def copy(source, target):
            def one(n, _):
                m = program + n * PROGRAMS
                rows.store(target.at[m], rows.load_part(source.at[m], 0, width), 0, width)

            jax.lax.fori_loop(0, (M - program + PROGRAMS - 1) // PROGRAMS, one, None)

        for i, ref in enumerate(bank_refs):
            pl.when(index_ref[0] == i)(lambda ref=ref: move(own_ref, ref, copy))

    plgpu.kernel(
        kernel,
        out_type=(),
        grid=(PROGRAMS,),
        grid_names=("program",),
        num_threads=1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name=name,
    )(index.reshape(1), own, *bank)


def _wide(x):
    """x [..., D] as rows of several tokens, where they fit."""
    D = x.shape[-1]
    M = math.prod(x.shape[:-1])
    return x.reshape(-1, D * math.gcd(M, max(1, WIDEST // D)))
