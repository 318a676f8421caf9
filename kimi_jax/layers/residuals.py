"""How sub-layers are joined along the depth: a running sum, or attention over earlier outputs (AttnRes, sections 3-4).

One state machine serves all three kinds. It holds finished sums, the "bank", and the sum that is still growing:

    start   bank empty, sum = the token embedding
    mix     what the next sub-layer reads: softmax attention over the bank and the sum (with an empty bank: the sum)
    add     of a sub-layer's output: at the first sub-layer of a block the sum joins the bank and the output starts a
            new one; otherwise the output is added to it

    StandardResidual    one block without end and no attention: h + f(h)
    FullAttnRes         every sub-layer is a block of its own: each reads a mixture of all earlier outputs
    BlockAttnRes        blocks of `block_size` SUB-LAYERS (K3's configuration counts transformer layers: half of that)

The embedding is a bank row of its own and part of no block's sum. The mixture itself is never added back.
Sub-layer outputs are raw: mix -> PreNorm -> sub-layer -> add. Before the final norm stands one more mix.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import attn_res

from .parameters import at_least_float32, ones


class DepthMix(nnx.Module):
    """The parameters of one site: a query, zero at first (all sources weigh the same), and the keys' norm weight."""

    def __init__(self, dim: int, *, eps: float, param_dtype=jnp.float32):
        self.eps = eps
        self.query = nnx.Param(jnp.zeros(dim, param_dtype), axes=(None,))
        self.key_scale = ones(dim, param_dtype)

    def __call__(self, state: "DepthState") -> jax.Array:
        """The mixture [..., dim] of bank and sum, in their dtype; scores and softmax are at least float32."""
        query, key_scale = self.query[...], self.key_scale[...]
        if state.count is None:
            return attn_res((*state.bank, state.sum), query, key_scale, eps=self.eps)
        # In two phases, since the bank is one buffer here and the sum is not in it.
        banked, lse = attn_res(state.bank, query, key_scale, count=state.count, eps=self.eps, return_lse=True)
        _, logit = attn_res((state.sum,), query, key_scale, eps=self.eps, return_lse=True)
        share = jax.nn.sigmoid(logit - lse)[..., None]
        wide = at_least_float32(banked.dtype)
        return (banked.astype(wide) * (1 - share) + state.sum.astype(wide) * share).astype(banked.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DepthState:
    """What travels through the depth. A value, never changed in place: recomputing a layer cannot append twice.

    bank: a tuple of arrays [..., D] (no copies are made as it grows), or under a scan over layers one buffer
      [rows, ..., D] of which the first `count` rows are live.
    sum: [..., D]. depth: the number of sub-layers added so far, known while tracing.
    """

    bank: tuple[jax.Array, ...] | jax.Array
    sum: jax.Array
    count: jax.Array | None = None
    depth: int = dataclasses.field(default=0, metadata=dict(static=True))


@dataclasses.dataclass(frozen=True)
class BlockAttnRes:
    """Blocks of block_size sub-layers; the last one takes what is left. ValueError unless it is 1 or even."""

    block_size: int

    def __post_init__(self):
        if self.block_size != 1 and (self.block_size < 1 or self.block_size % 2):
            raise ValueError(f"block_size={self.block_size} sub-layers is not allowed: 1 or an even number")

    has_mixes = True

    def start(self, embedding: jax.Array) -> DepthState:
        return DepthState(bank=(), sum=embedding)

    def mix(self, state: DepthState, site: DepthMix | None) -> jax.Array:
        """What the next sub-layer reads. site None: a single source, which needs no weights."""
        return state.sum if site is None else site(state)

    def opens_block(self, sublayer: int) -> bool:
        """Whether the sum is banked when this sub-layer (0-based) adds its output."""
        return sublayer % self.block_size == 0

    def bank_rows(self, sublayers: int) -> int:
        """Rows of the bank after that many sub-layers, the embedding included. The final mix has one source more."""
        return math.ceil(sublayers / self.block_size)

    def add(self, state: DepthState, output: jax.Array) -> DepthState:
        depth = state.depth + 1
        if not self.opens_block(state.depth):
            return dataclasses.replace(state, sum=state.sum + output, depth=depth)
        if state.count is None:
            return DepthState((*state.bank, state.sum), output, depth=depth)
        bank = jax.lax.dynamic_update_index_in_dim(state.bank, state.sum, state.count, axis=0)
        return DepthState(bank, output, state.count + 1, depth)

    def to_buffer(self, state: DepthState, rows: int) -> DepthState:
        """The same state with the bank as one buffer of that many rows, for a scan over layers."""
        if not rows:
            return state
        pad = [jnp.zeros_like(state.sum)] * (rows - len(state.bank))
        return dataclasses.replace(state, bank=jnp.stack([*state.bank, *pad]), count=jnp.int32(len(state.bank)))

    def from_buffer(self, state: DepthState, depth: int) -> DepthState:
        """Back to a tuple, after `depth` sub-layers in all."""
        bank = tuple(state.bank[row] for row in range(self.bank_rows(depth)))
        return DepthState(bank, state.sum, depth=depth)


@dataclasses.dataclass(frozen=True)
class FullAttnRes(BlockAttnRes):
    """Every sub-layer output is a source."""

    block_size: int = dataclasses.field(default=1, init=False)


@dataclasses.dataclass(frozen=True)
class StandardResidual(BlockAttnRes):
    """h + f(h): nothing is banked and sites have no parameters."""

    block_size: int = dataclasses.field(default=1, init=False)
    has_mixes = False

    def opens_block(self, sublayer: int) -> bool:
        return False

    def bank_rows(self, sublayers: int) -> int:
        return 0


def make_residual(kind: str, block_size: int) -> BlockAttnRes:
    """By the names of ModelConfig.residual; block_size matters to "block_attn_res" alone."""
    kinds = {
        "standard": StandardResidual,
        "full_attn_res": FullAttnRes,
        "block_attn_res": lambda: BlockAttnRes(block_size),
    }
    if kind not in kinds:
        raise ValueError(f"residual={kind!r} is not allowed: one of {tuple(kinds)}")
    return kinds[kind]()
