"""How the arrays of a call are cut into windows, and how states enter and leave: shared by both kernels.

The grid is (rows, blocks of heads, chunks). The chunk axis is sequential: states are carried in scratch from one step
to the next. Token arrays are [B, T, heads * width], whose window of 64 tokens and some heads is one rectangle and
needs no transposition. `at` maps a step of the chunk axis to a chunk, so that the backward can run from last to first.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..mesh import vary, varying
from .activations import Options
from .chunk import TokenRefs, width_of
from .products import CHUNK

__all__ = [
    "Arrays",
    "beta_spec",
    "call",
    "chunk_states",
    "load_states",
    "slot_edges",
    "state_spec",
    "store_states",
    "take_tokens",
    "token_specs",
    "tokens",
]


ZERO = np.int32(0)  # for index maps: under enable_x64 a bare 0 would be an int64, which Mosaic refuses
VMEM_LIMIT = 48 << 20  # of 64 MiB and more on every generation served; the defaults are 16 and 32


class Arrays(NamedTuple):
    """Operands of either kernel. HB is options.heads; T is any length, NT the number of chunks."""

    q: jax.Array  # [B, T, H * K]
    k: jax.Array
    v: jax.Array  # [B, T, HV * V]
    g: jax.Array  # [B, T, HV * K]
    beta: jax.Array  # [B, HV / HB, T, HB] float32
    rate: jax.Array | None  # [1, HV * K] float32
    bias: jax.Array | None
    flags: jax.Array | None  # [B, NT * C, 1] int32
    slot: jax.Array | None  # [B, NT] int32, the state of each chunk
    state: jax.Array | None  # [B, (S,) HV, K, V] float32


def token_specs(x: Arrays, o: Options, at: Callable) -> list[pl.BlockSpec]:
    """Windows of the first eight arrays of x, in order, without those that are absent."""
    ratio = o.heads // o.group  # q/k heads of a program
    block = x.q.shape[2] // o.K // ratio  # blocks of q/k heads
    shared = x.beta.shape[1] // block  # programs that read the same block
    qk = pl.BlockSpec((None, CHUNK, ratio * o.K), lambda b, h, c, *_: (b, at(c), h // jnp.int32(shared)))
    row = pl.BlockSpec((1, o.heads * o.K), lambda b, h, c, *_: (ZERO, h))
    specs = [qk, qk, tokens(o.heads * o.V, at), tokens(o.heads * o.K, at), beta_spec(o, at)]
    specs += [row] * (0 if x.rate is None else 2)
    if x.flags is not None:
        specs.append(pl.BlockSpec((None, CHUNK, 1), lambda b, h, c, *_: (b, at(c), ZERO)))
    return specs


def tokens(width: int, at: Callable) -> pl.BlockSpec:
    """Windows of [B, T, blocks * width]."""
    return pl.BlockSpec((None, CHUNK, width), lambda b, h, c, *_: (b, at(c), h))


def beta_spec(o: Options, at: Callable) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, CHUNK, o.heads), lambda b, h, c, *_: (b, h, at(c), ZERO))


def chunk_states(o: Options, at: Callable) -> pl.BlockSpec:
    """Windows of [B, NT, HV, K, V]."""
    return pl.BlockSpec((None, None, o.heads, o.K, o.V), lambda b, h, c, *_: (b, at(c), h, ZERO, ZERO))


def state_spec(o: Options, at: Callable) -> pl.BlockSpec:
    """The state of a row and, with slots, of the segment that a chunk belongs to: visited in one run of steps each."""
    if o.slots is None:
        return pl.BlockSpec((None, o.heads, o.K, o.V), lambda b, h, c: (b, h, ZERO, ZERO))
    return pl.BlockSpec((None, None, o.heads, o.K, o.V), lambda b, h, c, slot: (b, slot[b, at(c)], h, ZERO, ZERO))


def call(kernel, name, x: Arrays, o: Options, grid, operands, in_specs, out_specs, out_shape, scratch, aliases):
    """pallas_call with the slots, if there are any, ahead of the operands."""
    prefetch = [] if o.slots is None else [x.slot]
    axes = frozenset().union(*(varying(a) for a in operands))  # inside shard_map: of flags and the like, too
    prefetch, operands = ([vary(a, axes) for a in arrays] for arrays in (prefetch, operands))
    kind = jax.typeof(operands[0]).manual_axis_type
    out_shape = [jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=kind) for s in out_shape]
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(prefetch), grid=grid, in_specs=in_specs, out_specs=out_specs, scratch_shapes=scratch
    )
    return pl.pallas_call(
        kernel,
        name=name,
        grid_spec=spec,
        out_shape=out_shape,
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
    )(*prefetch, *operands)


def take_tokens(refs, present: list[bool]) -> tuple[TokenRefs, tuple]:
    """The windows of the token arrays by name, None where present says so, and the refs after them."""
    refs = list(refs)
    named = [refs.pop(0) if there else None for there in present[:8]]
    return TokenRefs(*named), tuple(refs)


def slot_edges(slot_ref, reverse: bool) -> tuple[jax.Array, jax.Array]:
    """Whether this step is the first, and the last, of the run of chunks that share a state."""
    b, c, n = pl.program_id(0), pl.program_id(2), pl.num_programs(2)
    first, last = c == 0, c == n - 1
    if slot_ref is None:
        return first, last
    at = (lambda i: n - 1 - i) if reverse else (lambda i: i)
    slot = lambda i: slot_ref[b, at(jnp.clip(i, 0, n - 1))]  # noqa: E731
    return first | (slot(c - 1) != slot(c)), last | (slot(c + 1) != slot(c))


def load_states(scratch, window, o: Options) -> None:
    """States into scratch [heads, K, V], widened by zeros; zeros if there are none."""
    if window is None or width_of(o.K) != o.K or width_of(o.V) != o.V:
        scratch[...] = jnp.zeros_like(scratch)
    if window is not None:
        scratch[:, : o.K, : o.V] = window[...].astype(jnp.float32)


def store_states(window, scratch, o: Options) -> None:
    window[...] = scratch[:, : o.K, : o.V].astype(window.dtype)
