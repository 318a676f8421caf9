"""Matrix products with their precision pinned, and pairs of heads that share one 128-lane register.

The MXU multiplies bfloat16 and adds in float32. float32 inputs of kda get Precision.HIGHEST (six passes). For bfloat16
inputs each product states how many bfloat16 terms its operands keep: one (`once`), two on the left (`times_terms`) or
two on both sides without the product of the two remainders (`thrice`, three passes, relative error near 2^-16).
The terms are formed here and not by the compiler, so that an interpreter computes what a TPU computes.

A chunk has C = 64 rows, and a 64-deep contraction fills half of the MXU: the two terms are laid side by side along the
contraction, [high | low] times [b; b], and cost one pass.

A "pair" holds the [64, 64] matrices of two heads side by side, [64, 128].
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

__all__ = [
    "CHUNK",
    "LANES",
    "beside_terms",
    "float_terms",
    "half_of_pair",
    "heads_of",
    "iota",
    "NN",
    "NT",
    "TN",
    "of_pair",
    "once",
    "pair_rows",
    "pair_thrice",
    "terms",
    "thrice",
    "times_terms",
    "transposed_terms",
]

CHUNK = 64
LANES = 128
NN, NT, TN = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))  # which axis of either operand is summed over


def once(a: jax.Array, b: jax.Array, exact: bool, dims=NN) -> jax.Array:
    """a b (dims: NN), a b^T (NT) or a^T b (TN) in float32, with one bfloat16 term of each operand unless exact."""
    if exact:
        return _dot(a, b, dims, lax.Precision.HIGHEST)
    return _dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), dims, lax.Precision.DEFAULT)


def thrice(a: jax.Array, b: jax.Array, exact: bool, dims=NN) -> jax.Array:
    """The same with two terms of each; over 64 rows or lanes in two passes, else in three."""
    if exact:
        return once(a, b, exact, dims)
    (a_high, a_low), (b_high, b_low) = terms(a), terms(b)
    if a.shape[dims[0][0]] == CHUNK:
        wide = once(_chained(a_high, a_low, dims[0]), _chained(b_high, b_high, dims[1]), exact, dims)
    else:
        wide = once(a_high, b_high, exact, dims) + once(a_low, b_high, exact, dims)
    return wide + once(a_high, b_low, exact, dims)


def pair_rows(rows: list[jax.Array], columns: list[jax.Array], exact: bool) -> jax.Array:
    """rows[h] [R, K] times columns[h]^T [K, 64] of one or two heads h, side by side: [R, 128].

    Each head's columns are followed or preceded by zeros, so that the sum of the two products is the pair.
    """
    products = [
        once(x, half_of_pair(y, h, exact), exact, NT) for h, (x, y) in enumerate(zip(rows, columns, strict=True))
    ]
    return products[0] if len(products) == 1 else products[0] + products[1]


def half_of_pair(x: jax.Array, h: int, exact: bool) -> jax.Array:
    """x [64, K] where head h of a pair stands along a contraction over both, zeros where the other does: [128, K]."""
    x = x if exact else x.astype(jnp.bfloat16)
    zero = jnp.zeros_like(x)
    return jnp.concatenate([x, zero] if h == 0 else [zero, x], axis=0)


def pair_thrice(a: jax.Array, b: jax.Array, exact: bool) -> jax.Array:
    """The products of the [R, 64] and [64, 64] matrices of a pair, [R, 128], with two terms of each."""
    if exact:
        return once(a, _block_diagonal(b), exact)
    (a_high, a_low), (b_high, b_low) = float_terms(a), float_terms(b)
    high = once(jnp.concatenate([a_high, a_low], axis=0), _block_diagonal(b_high), exact)
    return high[: a.shape[0]] + high[a.shape[0] :] + once(a_high, _block_diagonal(b_low), exact)


def beside_terms(pair: jax.Array, exact: bool) -> list[jax.Array]:
    """For each head of a pair of A or T, what `times_terms` takes: [high | low] in bfloat16, or the matrix if exact."""
    if exact:
        return [of_pair(pair, h) for h in (0, 1)]
    high, low = float_terms(pair)
    first = iota(pair.shape, 1) < CHUNK
    swap = lambda x: pltpu.roll(x, jnp.int32(CHUNK), 1)  # noqa: E731
    return [x.astype(jnp.bfloat16) for x in (jnp.where(first, high, swap(low)), jnp.where(first, swap(high), low))]


def transposed_terms(pair: jax.Array, exact: bool) -> list[jax.Array]:
    """`beside_terms` of the transposed matrices: the terms are stacked first, and one transposition turns all."""
    rows = pair if exact else jnp.concatenate(terms(pair), axis=0)
    rows = rows.T
    return [rows[:CHUNK], rows[CHUNK:]]


def times_terms(a: jax.Array, b: jax.Array, exact: bool, *, both: bool) -> jax.Array:
    """a, out of `beside_terms`, times b [64, N] with one term of b, or with two if both."""
    if exact:
        return once(a, b, exact)
    high, *low = terms(b) if both else [b.astype(jnp.bfloat16)]
    product = once(a, jnp.concatenate([high, high], axis=0), exact)
    return product + once(a[:, :CHUNK], low[0], exact) if both else product


def terms(x: jax.Array) -> list[jax.Array]:
    """x as bfloat16 [high, low], high + low = x to 16 bits."""
    high = x.astype(jnp.bfloat16)
    return [high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)]


def float_terms(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`terms` as float32, for what is selected or rotated first: older TPUs do neither in bfloat16."""
    high = x.astype(jnp.bfloat16).astype(jnp.float32)
    return high, x - high


def of_pair(pair: jax.Array, h: int) -> jax.Array:
    """The matrix [R, 64] of head h."""
    at = (h % 2) * CHUNK
    return pair[:, at : at + CHUNK]


def heads_of(heads: int) -> list[tuple[int, ...]]:
    """The pairs of so many heads; the last may be single."""
    return [tuple(range(h, min(h + 2, heads))) for h in range(0, heads, 2)]


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def _chained(a, b, axis):
    return jnp.concatenate([a, b], axis=axis[0])


def _block_diagonal(pair):
    """[64, 128] to [128, 128] with the two matrices on the diagonal."""
    first = iota(pair.shape, 1) < CHUNK
    zero = jnp.zeros_like(pair)
    return jnp.concatenate([jnp.where(first, pair, zero), jnp.where(first, zero, pair)], axis=0)


def _dot(a, b, dims, precision):
    return lax.dot_general(a, b, (dims, ((), ())), precision=precision, preferred_element_type=jnp.float32)
