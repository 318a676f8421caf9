"""One chunk of 64 tokens up to the point where the state comes in: shared by the forward and the backward kernel."""

from collections.abc import Generator, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .activations import Options, log_decay, sigmoid
from .factors import TILES, form_factors, level_mask, levels_of, read_level
from .products import CHUNK, LANES, heads_of, iota, pair_rows

__all__ = [
    "START",
    "VALID",
    "TokenRefs",
    "beside",
    "column",
    "gate_inputs",
    "load",
    "prepare",
    "right_blocks",
    "right_halves",
    "store",
    "values_of",
    "width_of",
    "without_states",
]

VALID, START = 1, 2  # a token's flag; 0 is padding, START a valid token that begins a segment inside its chunk


class TokenRefs(NamedTuple):
    """Windows of the inputs: tokens are rows, heads lie side by side in lanes."""

    q: jax.Array  # [C, q heads * K]
    k: jax.Array
    v: jax.Array  # [C, heads * V]
    g: jax.Array  # [C, heads * K]
    beta: jax.Array  # [C, heads]
    rate: jax.Array | None  # [1, heads * K], e^A_log
    bias: jax.Array | None  # [1, heads * K], dt_bias
    flags: jax.Array | None  # [C, 1] int32


def prepare(refs: TokenRefs, columns, scratch, o: Options) -> None:
    """Writes what every head needs of the activations: its factors (see `form_factors`) and its `column`s.

    Reciprocal roots and betas are one number per token and head: one column each of a single array [C, LANES], since a
    column alone would fill as many registers.
    """
    heads = o.heads // o.group
    sums = jnp.zeros((CHUNK, LANES), jnp.float32)
    for h in range(o.heads):
        form_factors(_decay(refs, h, o), scratch.at[h])
        if o.qk_l2norm and h < heads:
            for lane, ref in ((h, refs.q), (heads + h, refs.k)):
                x = load(ref, h, o.K)
                sums = jnp.where(iota(sums.shape, 1) == lane, jnp.sum(x * x, axis=1, keepdims=True), sums)
    beta = refs.beta[...]
    if o.beta_sigmoid:
        beta = sigmoid(beta, o.exact)
    roots = lax.rsqrt(sums + 1e-6)
    if o.flagged:
        valid = refs.flags[...] > 0
        roots, beta = jnp.where(valid, roots, 0.0), jnp.where(valid, beta, 0.0)
    columns[...] = roots
    columns[:, 2 * heads : 2 * heads + o.heads] = beta


def queries_and_keys(refs: TokenRefs, columns, h: int, o: Options) -> tuple[jax.Array, jax.Array]:
    """q (without scale) and k of value head h after their L2 norms, float32 [C, K]."""
    q, k = (load(x, h // o.group, o.K) for x in (refs.q, refs.k))
    if o.flagged:
        valid = refs.flags[...] > 0
        q, k = jnp.where(valid, q, 0.0), jnp.where(valid, k, 0.0)
    return (q * column(columns, "q", h, o), k * column(columns, "k", h, o)) if o.qk_l2norm else (q, k)


def gate_inputs(refs: TokenRefs, h: int, o: Options) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """g [C, K] as the caller passed it, 0 at padding, and the gate's parameters [1, K]."""
    g = load(refs.g, h, o.K)
    if o.flagged:
        g = jnp.where(refs.flags[...] > 0, g, 0.0)
    return g, *(None if x is None else load(x, h, o.K) for x in (refs.rate, refs.bias))


def _decay(refs, h, o):
    """e^g [C, K]: 1 at padding, 0 where a segment begins inside its chunk."""
    decay = jnp.exp(log_decay(*gate_inputs(refs, h, o), o))
    if o.flagged:
        flags = refs.flags[...]
        decay = jnp.where(flags > 0, jnp.where(flags == START, 0.0, decay), 1.0)
    return decay


def column(columns, name: str, h: int, o: Options) -> jax.Array:
    """[C, 1] of value head h: "q" and "k" are the reciprocal roots of L2 norms, "beta" the activated beta."""
    heads = o.heads // o.group
    lane = {"q": h // o.group, "k": heads + h // o.group, "beta": 2 * heads + h}[name]
    return columns[:, lane : lane + 1]


def values_of(refs: TokenRefs, h: int, o: Options) -> jax.Array:
    """v [C, V] of value head h, float32."""
    v = load(refs.v, h, o.V)
    return v if not o.flagged else jnp.where(refs.flags[...] > 0, v, 0.0)


def without_states(refs: TokenRefs, columns, factors, q, k, A, Ak, L, pairs: list[int], o: Options) -> Iterator[None]:
    """The first stage of some pairs: writes q, k [heads, C, K] and A, Ak (if there is a ref), L [pairs, C, LANES]."""
    for p in pairs:
        pair = heads_of(o.heads)[p]
        for h in pair:
            q[h], k[h] = queries_and_keys(refs, columns, h, o)
        of_heads = [[ref.at[h] for h in pair] for ref in (q, k, factors)]
        rows, keys = yield from pair_matrices(*of_heads, o)
        A[p] = o.scale * (rows + diagonal_of(*of_heads[:2]))
        L[p] = beside([column(columns, "beta", h, o) for h in pair]) * keys
        if Ak is not None:
            Ak[p] = keys
        yield


def pair_matrices(q, k, scratch, o: Options) -> Generator[None, None, tuple[jax.Array, jax.Array]]:
    """A and Ak of one or two heads without their diagonals and without scale, [64, 128] each; see chunked.py.

    q and k are lists of refs [C, K] float32 and scratch one of `form_factors`, a ref for each head. Rows and columns
    are multiplied whole below 8 and masked; from 8 on only right halves are rows. Results are kept as blocks of 8 rows.
    """
    blocks = [None] * (2 * CHUNK // 8)  # of q's rows, then of k's
    column = iota((8, LANES), 1) % CHUNK
    for n in levels_of(o.tiled):
        rows, columns = [], []
        for x, y, f in zip(q, k, scratch, strict=True):
            by_row, by_column = read_level(f, n)
            columns.append(y[...] * by_column)
            keys = columns[-1] if by_row is by_column else y[...] * by_row
            rows.append(jnp.concatenate([*right_halves(x[...] * by_row, n), *right_halves(keys, n)], axis=0))
        product = pair_rows(rows, columns, o.exact)
        inner = level_mask(n, (8, LANES), 8) if n in (0, 1, 2) else None
        right = right_blocks(n)
        for i, b in enumerate([*right, *(b + 8 for b in right)]):
            here = product[8 * i : 8 * i + 8]
            if n == TILES:
                left = (column >> 4 == (b % 8) >> 1) & (column < 8 * (b % 8) + iota(column.shape, 0))
            else:
                left = (column >> n) == 2 * ((b % 8) >> (n - 2)) if inner is None else inner
            blocks[b] = jnp.where(left, here, 0.0 if blocks[b] is None else blocks[b])
        if n == 2:  # what was kept so far is right in the block's own columns only
            blocks = [jnp.where(column >> 3 == b % 8, x, 0.0) for b, x in enumerate(blocks)]
        yield
    half = len(blocks) // 2
    return jnp.concatenate(blocks[:half], axis=0), jnp.concatenate(blocks[half:], axis=0)


def right_blocks(n: int) -> list[int]:
    """Which of a chunk's 8 blocks of 8 rows are rows at level n: all below half-size 8, then those in right halves."""
    return [b for b in range(CHUNK // 8) if n < 3 or (b >> (n - 3)) & 1]


def right_halves(x: jax.Array, n: int) -> list[jax.Array]:
    """Those rows of x [C, ...], in pieces as large as they come."""
    return [x] if n < 3 else [x[i : i + (1 << n)] for i in range(1 << n, CHUNK, 2 << n)]


def diagonal_of(q, k) -> jax.Array:
    """The diagonals of a pair's A, over a mask of them: [64, 128] with 0 elsewhere."""
    products = [jnp.sum(x[...] * y[...], axis=1, keepdims=True) for x, y in zip(q, k, strict=True)]
    return jnp.where(on_diagonal(), beside(products), 0.0)


def beside(columns: list[jax.Array]) -> jax.Array:
    """Columns [64, 1] of a pair's heads, each over the lanes of its matrix."""
    return columns[0] if len(columns) == 1 else jnp.where(iota((CHUNK, LANES), 1) < CHUNK, *columns)


def on_diagonal():
    return iota((CHUNK, LANES), 0) == iota((CHUNK, LANES), 1) % CHUNK


def load(ref, h: int, width: int) -> jax.Array:
    """Head h of a window [rows, heads * width] in float32, with zeros up to a whole register."""
    x = ref[:, h * width : (h + 1) * width].astype(jnp.float32)
    short = width_of(width) - width
    return x if not short else jnp.concatenate([x, jnp.zeros((x.shape[0], short), x.dtype)], axis=1)


def store(ref, h: int, width: int, x: jax.Array) -> None:
    """The opposite of `load`, in the ref's dtype."""
    ref[:, h * width : (h + 1) * width] = x[:, :width].astype(ref.dtype)


def width_of(size: int) -> int:
    """Lanes that a head of this size occupies inside a kernel."""
    return max(size, LANES)
