"""How a call is cut into blocks of tokens, and what lies in VMEM."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .tiles import LANES, over_rows

__all__ = ["ZERO", "Plan", "call", "make_plan", "read_count", "source_operands", "tokens", "whole"]

ZERO = np.int32(0)  # for index maps: under enable_x64 a bare 0 would be an int64, which Mosaic refuses
VMEM_LIMIT = 48 << 20  # of 64 MiB and more on every generation served; the defaults are 16 and 32
WANTED = 24 << 20  # of all blocks together: 64 tokens of 9 sources of 7168 channels
MOST = 128
PAIRED = 32768  # channels of all sources of a token, up to which two register tiles at a time are not too much code


class Plan(NamedTuple):
    sources: int  # N
    tokens: int  # M
    dim: int  # D
    dtype: jnp.dtype
    rows: int  # of one register tile
    block: int  # tokens of a step
    counted: bool
    scaled: bool

    @property
    def steps(self) -> int:
        return -(-self.tokens // self.block)

    def over_tiles(self, step, body: Callable) -> None:
        """body(rows) for every register tile of a step that has tokens."""
        if self.tokens % self.block == 0:
            tiles = self.block // self.rows
        else:
            left = np.int32(self.tokens + self.rows - 1) - step * np.int32(self.block)
            tiles = jnp.minimum(np.int32(self.block // self.rows), left // np.int32(self.rows))
        over_rows(self.rows, tiles, body, pairs=self.sources * self.dim <= PAIRED)

    @property
    def ragged(self) -> bool:
        """Whether a register tile has rows past the last token, whose memory may hold anything."""
        return self.tokens % self.rows != 0


def make_plan(sources, scaled: bool, counted: bool, *, backward: bool, adds: bool = False) -> Plan | None:
    """The plan of a call on flat tokens; None if not even the smallest block fits. Arrays may be shapes.

    adds: the backward adds the sources' gradients to arrays that are there.
    """
    N = len(sources) if isinstance(sources, tuple) else sources.shape[0]
    *tokens, dim = sources[0].shape if isinstance(sources, tuple) else sources.shape[1:]
    dtype = jax.tree.leaves(sources)[0].dtype
    rows = 32 // dtype.itemsize  # 8 of float32, 16 of bfloat16
    M = int(np.prod(tokens, dtype=np.int64))
    arrays = (1 + backward + adds) * N + 1
    plan = Plan(N, M, dim, dtype, rows, rows, counted, scaled)
    if _vmem(plan, arrays, backward) > VMEM_LIMIT - (2 << 20):
        return None
    for block in (b for b in (MOST, 64, 32, 16, 8) if b > rows):
        bigger = plan._replace(block=block)
        bound = WANTED if block > 32 else VMEM_LIMIT - (8 << 20)  # with few tokens a step's latency shows
        if block < 2 * M and _vmem(bigger, arrays, backward) <= bound:
            return bigger
    return plan


def _vmem(p: Plan, arrays: int, backward: bool) -> int:
    """Bytes of windows, two of each, of so many arrays [M, D], and of scratch."""
    width = -(-p.dim // LANES) * LANES
    windows = p.block * width * p.dtype.itemsize * arrays
    tables = p.block * LANES * 4
    scratch = tables * (p.sources * (1 if backward else 2) + 8)
    wide = p.block * width * 4 * p.scaled * (2 if backward else 1)
    return 2 * windows + 4 * tables + scratch + wide + 8 * width * 4 * 8


def whole(rows: int, width: int) -> pl.BlockSpec:
    """A window that stays."""
    return pl.BlockSpec((rows, width), lambda *_: (ZERO, ZERO))


def tokens(p: Plan, width: int, step_of: Callable) -> pl.BlockSpec:
    """Windows of [M, width]. step_of gives the block of tokens from the grid's indices."""
    return pl.BlockSpec((p.block, width), lambda *at: (step_of(*at), ZERO))


def source_operands(p: Plan, sources, step_of: Callable) -> tuple[list[jax.Array], list[pl.BlockSpec]]:
    """N operands and their windows [block, D]; a buffer is given N times, and its rows are windows of it.

    The window of a dead row stays where it is, at the first tokens of the row or of the buffer, and so is fetched once
    and not at every step.
    """

    def at(i, *grid):
        if not p.counted:
            return np.int32(i), step_of(*grid)
        live = np.int32(i) < grid[-1][0]
        row = jnp.where(live, np.int32(i), ZERO) if buffer else np.int32(i)
        return row, jnp.where(live, step_of(*grid), ZERO)

    buffer = not isinstance(sources, tuple)
    operands = [sources] * p.sources if buffer else list(sources)
    specs = []
    for i in range(p.sources):
        if buffer:
            specs.append(pl.BlockSpec((None, p.block, p.dim), lambda *grid, i=i: (*at(i, *grid), ZERO)))
        else:
            specs.append(pl.BlockSpec((p.block, p.dim), lambda *grid, i=i: (at(i, *grid)[1], ZERO)))
    return operands, specs


def read_count(p: Plan, refs) -> tuple[jax.Array | None, tuple]:
    """The number of live sources, or None where all are, and the refs after it."""
    return (refs[0][0], refs[1:]) if p.counted else (None, refs)


def call(
    kernel, name, p: Plan, grid, semantics, count, operands, in_specs, out_shape, out_specs, scratch, aliases=None
):
    """pallas_call with the count, if there is one, ahead of the operands, also in aliases' numbers."""
    prefetch = [count.astype(jnp.int32).reshape(1)] if p.counted else []
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
        input_output_aliases=aliases or {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=VMEM_LIMIT),
    )(*prefetch, *operands)
