"""One row of a bank, put or taken, where only the device knows which: one copy in HBM, the other rows stay untouched.

XLA can only choose among arrays by reading all of them.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

__all__ = ["put", "take"]


def put(bank, row, index):
    """bank (arrays of row's shape) with row at index, in place; an index outside of it leaves it as it is."""

    def kernel(index, row, *refs):
        *results, arrived = refs[len(bank) :]
        _copy_one(index, [(row, result) for result in results], arrived)

    in_place = {2 + i: i for i in range(len(bank))}  # operands behind index and row
    return tuple(_call(kernel, "bank_put", index, (row, *bank), bank, in_place))


def take(bank, index):
    """bank[index], of an index from 0 on; of one beyond the end the last."""

    def kernel(index, *refs):
        *rows, result, arrived = refs
        _copy_one(index, [(row, result) for row in rows], arrived)

    return _call(kernel, "bank_take", jnp.minimum(index, len(bank) - 1), bank, bank[:1], {})[0]


def _copy_one(index, pairs, arrived):
    """From the first to the second of the pair of that index, if there is one."""
    for i, (source, target) in enumerate(pairs):

        @pl.when(index[0] == np.int32(i))
        def _(source=source, target=target):
            copy = pltpu.make_async_copy(source, target, arrived)
            copy.start()
            copy.wait()


def _call(kernel: Callable, name: str, index, operands, results, aliases: Mapping[int, int]):
    """kernel on whole arrays in HBM; the results are as those named."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        name=name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[anywhere] * len(operands),
            out_specs=[anywhere] * len(results),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
        input_output_aliases=aliases,
    )(index.astype(jnp.int32).reshape(1), *operands)
