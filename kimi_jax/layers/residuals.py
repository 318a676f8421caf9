"""How sub-layers are joined along the depth: a running sum, or attention over earlier outputs (AttnRes, sections 3-4).

One state machine serves all kinds. It holds finished sums, the "bank", and the sum that is still growing:

    start   bank empty, sum = the token embedding
    mix     what the next sub-layer reads: softmax attention over the bank and the sum (with an empty bank: the sum);
            read does that and the sub-layer's PreNorm in one pass over the sources
    add     of a sub-layer's output: at the first sub-layer of a block the sum joins the bank and the output starts a
            new one; otherwise the output is added to it

    StandardResidual    one block without end and no attention: h + f(h)
    FullAttnRes         every sub-layer is a block of its own: each reads a mixture of all earlier outputs
    BlockAttnRes        blocks of `block_size` SUB-LAYERS (K3's configuration counts transformer layers: half of that)
    TwoPhaseAttnRes     the same, computed block by block: finished blocks are mixed ahead for all sites of the next one
    DeltaAttnRes        as FullAttnRes, but the mixture is added to the plain stream instead of taking its place
    DeltaBlock          likewise as BlockAttnRes
    HyperConnections    mHC: no bank; the sum is several streams (hyper_connections.py)

The embedding is a bank row of its own and part of no block's sum. The mixture itself is never added back.
Sub-layer outputs are raw: mix -> PreNorm -> sub-layer -> add. Before the final norm stands one more mix, but with Delta
the plain stream and with mHC the streams' mean.

Sites that do not weigh as Attention Residuals do (sigmoid, depth heads, ...) have their parameters and mathematics in
depth_variants.py; `make_site` chooses.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import reduce

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import attn_res, attn_res_ahead, attn_res_merge, attn_res_put

from .depth_variants import VariantMix, Weighing
from .hyper_connections import HyperConnection, merge_streams, split_streams
from .norms import RMSNorm
from .parameters import at_least_float32, ones


class DepthMix(nnx.Module):
    """The parameters of one site: a query, zero at first (all sources weigh the same), and the keys' norm weight."""

    def __init__(self, dim: int, *, eps: float, param_dtype=jnp.float32, backend: str = "auto"):
        self.eps = eps
        # A named kernel would refuse what "auto" leaves to XLA, such as Auto axes; the reference stacks the sources.
        self.backend = "xla" if backend in ("reference", "xla") else "auto"
        self.query = nnx.Param(jnp.zeros(dim, param_dtype), axes=(None,))
        self.key_scale = ones(dim, param_dtype)

    def __call__(self, state: "DepthState") -> jax.Array:
        """The mixture [..., dim] of bank and sum, in their dtype; scores and softmax are at least float32."""
        sources, count = _sources(state)
        return self._mix(sources, count)

    def read(self, state: "DepthState", norm: RMSNorm) -> tuple[jax.Array, "DepthState"]:
        """norm of the mixture, in one pass with it, and the state that hands the sources on to the next site.

        ValueError for a norm of another eps than the site's.
        """
        if norm.eps != self.eps:
            raise ValueError(f"the norm has eps={norm.eps}, which must be the site's {self.eps}")
        sources, count = _sources(state)
        x, sources = self._mix(sources, count, output_scale=norm.weight[...], return_sources=True)
        bank, sum_ = (sources[:-1], sources[-1]) if state.count is None else (sources[1:], sources[0])
        return x.astype(norm.dtype), dataclasses.replace(state, bank=bank, sum=sum_)

    @staticmethod
    def ahead(sites: Sequence["DepthMix"], bank: tuple[jax.Array, ...], count: jax.Array | None):
        """([(mixture, log-sum-exp) of the first `count` rows of the bank, or all, for each site], the bank to go on
        from)."""
        if not sites:
            return [], bank
        vectors = [site.query[...] for site in sites], [site.key_scale[...] for site in sites]
        return attn_res_ahead(bank, *vectors, count=count, eps=sites[0].eps, backend=sites[0].backend)

    def merge(self, mixture: jax.Array, lse: jax.Array, source: jax.Array, norm: RMSNorm) -> jax.Array:
        """norm of the mixture of what was mixed ahead for this site and of one more source."""
        vectors = self.query[...], self.key_scale[...]
        x = attn_res_merge(mixture, lse, source, *vectors, output_scale=norm.weight[...], eps=self.eps)
        return x.astype(norm.dtype)

    def _mix(self, sources, count, **options):
        vectors = self.query[...], self.key_scale[...]
        return attn_res(sources, *vectors, count=count, eps=self.eps, backend=self.backend, **options)


def _sources(state: "DepthState"):
    """Those of attn_res, and their count."""
    if state.count is None:
        return (*state.bank, state.sum), None
    return (state.sum, *state.bank), state.count + 1


Site = DepthMix | VariantMix | HyperConnection


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DepthState:
    """What travels through the depth. A value, never changed in place: recomputing a layer cannot append twice.

    Attributes:
        bank: rows [..., D]. Rows stay arrays of their own, under a scan too: no copies are made as the bank grows, and
            in the backward pass every row has one cotangent, to which the sites add in turn.
        sum: [..., D], the block that still grows; of mHC the streams [..., m, D].
        count: under a scan over layers the bank has all its rows from the start, the first `count` of them live.
        depth: the number of sub-layers added so far, known while tracing.
        replayed: the bank is a later one: rows that are to be added are there already.
        ahead: of TwoPhaseAttnRes alone: (mixture [..., D], log-sum-exp [...]) of the bank for each site of this block
            that is still to come.
        fresh: likewise: the sum is in the bank already, and the next output begins a new one.
    """

    bank: tuple[jax.Array, ...]
    sum: jax.Array
    count: jax.Array | None = None
    depth: int = dataclasses.field(default=0, metadata=dict(static=True))
    replayed: bool = dataclasses.field(default=False, metadata=dict(static=True))
    ahead: tuple[tuple[jax.Array, jax.Array | None], ...] = ()
    fresh: bool = dataclasses.field(default=False, metadata=dict(static=True))


@dataclasses.dataclass(frozen=True)
class BlockAttnRes:
    """Blocks of block_size sub-layers; the last one takes what is left. ValueError unless it is 1 or even."""

    block_size: int

    def __post_init__(self):
        if self.block_size != 1 and (self.block_size < 1 or self.block_size % 2):
            raise ValueError(f"block_size={self.block_size} sub-layers is not allowed: 1 or an even number")

    has_mixes = True
    whole_blocks = False  # layers of one block must be called one after the other, the first by way of `enter`

    def start(self, embedding: jax.Array) -> DepthState:
        return DepthState(bank=(), sum=embedding)

    def enter(self, state: DepthState, layers: Sequence[nnx.Module]) -> DepthState:
        """The state before the first of these layers, which are those to come; layer.sites are its two sites."""
        return state

    def has_site(self, sublayer: int, depth: int) -> bool:
        """Whether parameters stand before this sub-layer (0-based) of `depth`, or at `depth` before the final norm."""
        return sublayer > 0  # the first one has a single source, the embedding: nothing to weigh

    def mix(self, state: DepthState, site: Site | None) -> jax.Array:
        """What the next sub-layer reads. site None: a single source, which needs no weights."""
        return state.sum if site is None else site(state)

    def read(self, state: DepthState, site: Site | None, norm: RMSNorm) -> tuple[jax.Array, DepthState]:
        """norm(mix(state, site)), which the next sub-layer works on, and the state to go on from: the same values."""
        if isinstance(site, DepthMix):
            return site.read(state, norm)
        return norm(self.mix(state, site)), state

    def opens_block(self, sublayer: int) -> bool:
        """Whether the sum is banked when this sub-layer (0-based) adds its output."""
        return sublayer % self.block_size == 0

    def bank_rows(self, sublayers: int) -> int:
        """Rows of the bank after that many sub-layers, the embedding included. The final mix has one source more."""
        return math.ceil(sublayers / self.block_size)

    def add(self, state: DepthState, output: jax.Array, site: Site | None = None) -> DepthState:
        """The state with one more output, of the sub-layer that has read through this site."""
        depth = state.depth + 1
        if not self.opens_block(state.depth):
            return dataclasses.replace(state, sum=state.sum + output, depth=depth)
        if state.count is None:
            return DepthState((*state.bank, state.sum), output, depth=depth)
        bank = attn_res_put(state.bank, state.sum, state.count, replayed=state.replayed)
        return dataclasses.replace(state, bank=bank, sum=output, count=state.count + 1, depth=depth)

    def before_scan(self, state: DepthState, depth: int) -> DepthState:
        """The same state, with room for the rows that there will be after `depth` sub-layers in all."""
        rows, live = self.bank_rows(depth), len(state.bank)
        if not rows:
            return state
        bank = state.bank + (jnp.zeros_like(state.sum),) * (rows - live)
        return dataclasses.replace(state, bank=bank, count=jnp.int32(live))

    def after_scan(self, state: DepthState, depth: int) -> DepthState:
        """With all of these rows live, after `depth` sub-layers in all."""
        return DepthState(state.bank, state.sum, depth=depth)


@dataclasses.dataclass(frozen=True)
class TwoPhaseAttnRes(BlockAttnRes):
    """BlockAttnRes by the two-phase schedule: the same function, exact to rounding (AttnRes, section 4).

    Where a block begins the sum joins the bank at once, and the bank is mixed for all sites of the block. Those are
    kept, one row each, until their sites merge them with what the block has added so far. ValueError for a block_size
    of 1, whose every site begins a block.
    """

    whole_blocks = True

    def __post_init__(self):
        super().__post_init__()
        if self.block_size == 1:
            raise ValueError(
                "block_size=1 is not allowed in two phases: blocks of two sub-layers and more share a phase"
            )

    def enter(self, state: DepthState, layers: Sequence[nnx.Module]) -> DepthState:
        if not self.opens_block(state.depth):
            return state
        sites = [site for layer in layers[: self.block_size // 2] for site in layer.sites]
        if state.count is None:
            bank, count = (*state.bank, state.sum), None
        else:
            bank, count = attn_res_put(state.bank, state.sum, state.count, replayed=state.replayed), state.count + 1
        found, bank = DepthMix.ahead([site for site in sites if site is not None], bank, count)
        found = iter(found)
        # The first site of all has none: its one source is the embedding.
        ahead = tuple((state.sum, None) if site is None else next(found) for site in sites)
        return dataclasses.replace(state, bank=bank, count=count, ahead=ahead, fresh=True)

    def read(self, state: DepthState, site: Site | None, norm: RMSNorm) -> tuple[jax.Array, DepthState]:
        (mixture, lse), *rest = state.ahead
        x = norm(mixture) if state.fresh else site.merge(mixture, lse, state.sum, norm)
        return x, dataclasses.replace(state, ahead=tuple(rest))

    def add(self, state: DepthState, output: jax.Array, site: Site | None = None) -> DepthState:
        total = output if state.fresh else state.sum + output
        return dataclasses.replace(state, sum=total, depth=state.depth + 1, fresh=False)


@dataclasses.dataclass(frozen=True)
class FullAttnRes(BlockAttnRes):
    """Every sub-layer output is a source."""

    block_size: int = dataclasses.field(default=1, init=False)


@dataclasses.dataclass(frozen=True)
class StandardResidual(BlockAttnRes):
    """h + f(h): nothing is banked and sites have no parameters."""

    block_size: int = dataclasses.field(default=1, init=False)
    has_mixes = False

    def has_site(self, sublayer: int, depth: int) -> bool:
        return False

    def opens_block(self, sublayer: int) -> bool:
        return False

    def bank_rows(self, sublayers: int) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class DeltaBlock(BlockAttnRes):
    """Delta Attention Residuals (arXiv 2605.18855) over blocks: h = stream + sum_i weight_i Delta_i.

    The stream is the plain residual's: the embedding and all outputs so far. Delta_i are the embedding, what each
    finished block has changed, and what the growing one has changed so far. Those add up to the stream, so it needs no
    place in the state: h = sum_i (1 + weight_i) Delta_i, the stream never rounded between layers.

    At step 0 the zero query makes h = stream + stream / n for n sources: the PreNorm baseline, since the norm takes the
    factor out and the output reads the stream itself. It is why the growing block is a source (without it the mean
    would lack the newest outputs; the paper's text leaves it open), and no gain has to start at zero: such a gain would
    take the query's first gradient away, here it has one. Before the first sub-layer the mixture is the embedding
    itself, again only a factor, and has no parameters.
    """

    def has_site(self, sublayer: int, depth: int) -> bool:
        return 0 < sublayer < depth

    def mix(self, state: DepthState, site: Site | None) -> jax.Array:
        """What the next sub-layer reads. site None: the stream."""
        if site is not None:
            return site(state)
        dtype = at_least_float32(state.sum.dtype)
        return reduce(jnp.add, [row.astype(dtype) for row in (*state.bank, state.sum)]).astype(state.sum.dtype)


@dataclasses.dataclass(frozen=True)
class DeltaAttnRes(DeltaBlock):
    """Every sub-layer output is a source."""

    block_size: int = dataclasses.field(default=1, init=False)


@dataclasses.dataclass(frozen=True)
class HyperConnections(StandardResidual):
    """mHC with that many streams: nothing is banked, and every sub-layer has a site, the first one too."""

    streams: int
    has_mixes = True

    def __post_init__(self):
        if self.streams < 2:
            raise ValueError(f"streams={self.streams} is not allowed: at least 2 (one stream is the plain residual)")

    def start(self, embedding: jax.Array) -> DepthState:
        return DepthState(bank=(), sum=split_streams(embedding, self.streams))

    def has_site(self, sublayer: int, depth: int) -> bool:
        return sublayer < depth

    def mix(self, state: DepthState, site: Site | None) -> jax.Array:
        """What the next sub-layer reads. site None: the mean of the streams."""
        return merge_streams(state.sum) if site is None else site.read(state.sum)

    def add(self, state: DepthState, output: jax.Array, site: Site | None = None) -> DepthState:
        return dataclasses.replace(state, sum=site.write(state.sum, output), depth=state.depth + 1)


def make_residual(kind: str, block_size: int, streams: int = 4, two_phase: bool = False) -> BlockAttnRes:
    """By the names of ModelConfig.residual; block_size matters to the kinds with blocks alone, streams to "mhc", and
    two_phase to "block_attn_res"."""
    kinds = {
        "standard": StandardResidual,
        "full_attn_res": FullAttnRes,
        "block_attn_res": lambda: (TwoPhaseAttnRes if two_phase else BlockAttnRes)(block_size),
        "delta_attn_res": DeltaAttnRes,
        "delta_block": lambda: DeltaBlock(block_size),
        "mhc": lambda: HyperConnections(streams=streams),
    }
    if kind not in kinds:
        raise ValueError(f"residual={kind!r} is not allowed: one of {tuple(kinds)}")
    return kinds[kind]()


def make_site(
    residual: BlockAttnRes,
    dim: int,
    *,
    weighing: Weighing,
    depth: int,
    eps: float,
    rngs: nnx.Rngs,
    param_dtype=jnp.float32,
    backend: str = "auto",
) -> Site:
    """The parameters of one site of a model of `depth` sub-layers. Attention Residuals proper have `attn_res`, without
    kernels where `backend` is "xla" or "reference"."""
    if isinstance(residual, HyperConnections):
        return HyperConnection(dim, residual.streams, eps=eps, rngs=rngs, param_dtype=param_dtype)
    adds = isinstance(residual, DeltaBlock)
    if weighing == Weighing() and not adds:
        return DepthMix(dim, eps=eps, param_dtype=param_dtype, backend=backend)
    sources = residual.bank_rows(depth) + 1
    return VariantMix(dim, weighing, sources=sources, adds=adds, eps=eps, param_dtype=param_dtype)
