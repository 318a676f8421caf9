"""A bank of a fixed number of rows that grows at its end, as a scan over layers carries it.

Public name: `attn_res_put`.
"""

import importlib
from functools import partial, reduce
from types import ModuleType

import jax
import jax.numpy as jnp

from ..varying import varying
from . import backend_of
from .kernels import by_token

__all__ = ["attn_res_put"]


def attn_res_put(bank, row, count, *, replayed: bool = False) -> tuple[jax.Array, ...]:
    """The bank with one more live row, to be mixed by `attn_res` with a count of one more.

    Args:
      bank: a sequence of N arrays of one shape `[..., D]` and dtype; its first `count` rows are live.
      row: `[..., D]`, of that dtype.
      count: int32 scalar, from 0 to N - 1. N or more is no place: the bank stays as it is, and what row gets as its
        cotangent means nothing.
      replayed: the bank, from which a forward pass is made again, has the row and all later ones already. Nothing is
        written, and row gets the cotangent of its place.

    Only rows below `count` get a cotangent; in the places of the others lies anything, as nobody can have read them.
    On Hopper and TPU nothing but the new row is written, where `attn_res` takes its kernels and the arrays lie on one
    device; elsewhere the whole bank is, since XLA cannot tell before which row it will be.

    Raises ValueError for a row that is not as those of the bank.
    """
    if wrong := [x for x in bank if (x.shape, x.dtype) != (row.shape, row.dtype)]:
        raise ValueError(f"row is {row.dtype}{list(row.shape)}, the bank's are {wrong[0].dtype}{list(wrong[0].shape)}")
    return _put(replayed, tuple(bank), row, count)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _put(replayed, bank, row, count):
    if replayed:
        return bank
    if kernels := _kernels(bank):
        return by_token(kernels.put)(bank, row, count)
    return tuple(jnp.where(count == i, row, old) for i, old in enumerate(bank))


def _put_forward(replayed, bank, row, count):
    return _put(replayed, bank, row, count), count


def _put_backward(replayed, count, bank_bar):
    # The old row's cotangent is 0, but to clear it would read and write the whole bank.
    if kernels := _kernels(bank_bar):
        return bank_bar, by_token(kernels.take)(bank_bar, count), None
    row_bar = reduce(jnp.add, [jnp.where(count == i, bar, 0) for i, bar in enumerate(bank_bar)])
    return bank_bar, row_bar, None


_put.defvjp(_put_forward, _put_backward)


def _kernels(bank) -> ModuleType | None:
    """The machine's file with `put` and `take`; None: by XLA."""
    one_device = jax.sharding.get_abstract_mesh().size <= 1 and not varying(bank)  # 0: there is none
    if not one_device or not bank[0].size:
        return None
    backend = backend_of(bank, jax.ShapeDtypeStruct(bank[0].shape[-1:], jnp.float32))
    return importlib.import_module(f".{backend}.bank", __package__) if backend.startswith("mosaic") else None
