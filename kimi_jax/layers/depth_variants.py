"""Other ways to weigh the sources of a depth mixture: the ablations of AttnRes (Table 4), depth heads, added mixtures.

A site has n sources v_0 (the embedding) .. v_{n-1} (the newest), as residuals.py hands them out. Attention Residuals
give each the weight softmax_i(query . RMSNorm(v_i)) and read h = sum_i weight_i v_i. `Weighing` says what differs:

    weights      "softmax"; "softmax1": exp(s_i) / (1 + sum_j exp(s_j)), so that a site may read nothing (arXiv
                 2605.17887, where tokens' null evidence from attention over the sequence also enters; how it does is
                 not published, and not built here); "sigmoid": of each score on its own, the weights sum to anything;
                 "static": softmax of learned scalars, one per source, whatever the input (query and keys are gone);
                 "dense_former": the learned scalars themselves
    key_norm     False: scores against the raw sources, without RMSNorm and its gain
    query        "parameter": one vector per site; "hidden": W RMSNorm(v_{n-1}), with a D x D matrix per site. The
                 newest source is the hidden state here, since all sites have it at hand, scanned or not; its norm has
                 no gain (W has it) and stays without key_norm, so that W need not follow the growth of the stream
    heads        query and channels in that many groups, each with a softmax of its own (MHAR, arXiv 2607.27230). The
                 keys' mean square is taken over all D channels, as without heads: groups share the key and split the
                 score, no parameter is added and heads=1 is the plain mixture
    window       of the sources only the embedding and that many of the newest

`VariantMix(adds=True)` is the site of Delta Attention Residuals: h = sum_i v_i + sum_i weight_i v_i.

At step 0 query, W and static scalars are zero, those of "dense_former" one. Every weight is then the same c > 0 (1/n,
1/(n + 1), 1/2 or 1), so h = c sum_i v_i: the plain residual stream times a constant, or times 1 + c where it is added,
and the norm that follows takes the constant out. That needs all sources: a window that has left one out reads another
sum, and has no such identity.

Plain jax.numpy, float32 inside (float64 for float64 sources), the result rounded once to the sources' dtype. The
backward pass recomputes, so that no float32 copies of sources are kept.
"""

import dataclasses
from functools import partial, reduce
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from kimi_jax.sharding import project

from .norms import rms_norm
from .parameters import at_least_float32, ones

if TYPE_CHECKING:
    from .residuals import DepthState


@dataclasses.dataclass(frozen=True)
class Weighing:
    """What of Attention Residuals a site does otherwise; see the top of the file. ModelConfig checks the values."""

    weights: str = "softmax"
    key_norm: bool = True
    query: str = "parameter"
    heads: int = 1
    window: int | None = None

    @property
    def has_scores(self) -> bool:
        """Whether queries meet keys, or each source has a scalar of its own."""
        return self.weights in ("softmax", "softmax1", "sigmoid")


class VariantMix(nnx.Module):
    """The parameters of one site under a `Weighing`.

    Attributes:
        query: [D], or with query="hidden"
        query_proj: [D, D], applied to the newest source.
        key_scale: [D], the gain of the keys' norm; absent without key_norm.
        scalars: [sources], instead of all these where nothing is scored. Every site has as many as the deepest of the
            model, so that sites can be stacked for a scan; those of sources that are yet to come get no gradient.
    """

    def __init__(self, dim: int, weighing: Weighing, *, sources: int, adds: bool, eps: float, param_dtype=jnp.float32):
        if dim % weighing.heads:
            raise ValueError(f"heads={weighing.heads} is not allowed: a divisor of dim={dim}")
        self.weighing, self.adds, self.eps = weighing, adds, eps
        if not weighing.has_scores:
            first = jnp.ones if weighing.weights == "dense_former" else jnp.zeros
            self.scalars = nnx.Param(first(sources, param_dtype), axes=(None,))
            return
        if weighing.query == "hidden":
            self.query_proj = nnx.Param(jnp.zeros((dim, dim), param_dtype), axes=("embed", None))
        else:
            self.query = nnx.Param(jnp.zeros(dim, param_dtype), axes=(None,))
        if weighing.key_norm:
            self.key_scale = ones(dim, param_dtype)

    def __call__(self, state: "DepthState") -> jax.Array:
        """What a sub-layer reads [..., D], in the dtype of the sources."""
        gain = self.key_scale[...] if self.weighing.has_scores and self.weighing.key_norm else None
        sources = (*state.bank, state.sum)
        return _mixture(self.weighing, self.adds, self.eps, sources, state.count, self._scoring(state.sum), gain)

    def _scoring(self, newest):
        """What scores the sources: a query [D] or [..., D], or the scalars."""
        if not self.weighing.has_scores:
            return self.scalars[...]
        if self.weighing.query == "parameter":
            return self.query[...]
        hidden = rms_norm(newest, jnp.ones(newest.shape[-1], newest.dtype), self.eps, newest.dtype)
        return project(hidden, self.query_proj, ("batch",) + (None,) * (newest.ndim - 1))


@partial(jax.checkpoint, static_argnums=(0, 1, 2))
def _mixture(weighing, adds, eps, sources, count, scoring, gain):
    """The mixture of sources: rows of the bank, of which the first `count` are live (None: all), then the newest."""
    newest, bank_rows = sources[-1], len(sources) - 1
    shape, dtype = newest.shape, at_least_float32(newest.dtype)
    last = bank_rows if count is None else count  # places count live sources only: the newest follows the live rows
    places = (*range(bank_rows), last)
    live = [count is None or place < last for place in places[:-1]] + [True]
    read = [alive & _in_window(weighing.window, place, last) for alive, place in zip(live, places, strict=True)]

    # Channels as [heads, channels of a head]. Dead rows may hold anything, so they are replaced before any arithmetic.
    by_head = (*shape[:-1], weighing.heads, shape[-1] // weighing.heads)
    values = [_select(alive, v.astype(dtype), 0).reshape(by_head) for alive, v in zip(live, sources, strict=True)]

    chosen = [i for i, reads in enumerate(read) if reads is not False]
    if weighing.has_scores:
        scoring = scoring if gain is None else scoring.astype(dtype) * gain.astype(dtype)
        scoring = scoring.astype(dtype).reshape(*scoring.shape[:-1], *by_head[-2:])
        scores = [_score(values[i], scoring, eps if weighing.key_norm else None) for i in chosen]
    else:
        scores = [scoring.astype(dtype)[places[i]] for i in chosen]
    if weighing.weights in ("softmax", "softmax1", "static"):
        masked = [_select(read[i], score, -jnp.inf) for i, score in zip(chosen, scores, strict=True)]
        null = [jnp.zeros_like(scores[0])] if weighing.weights == "softmax1" else []
        weights = jax.nn.softmax(jnp.stack(masked + null), axis=0)[: len(masked)]
    else:
        squash = jax.nn.sigmoid if weighing.weights == "sigmoid" else lambda score: score
        weights = [_select(read[i], squash(score), 0) for i, score in zip(chosen, scores, strict=True)]

    terms = [weight * values[i] for i, weight in zip(chosen, weights, strict=True)]
    terms += values if adds else []
    return reduce(jnp.add, terms).reshape(shape).astype(newest.dtype)


def _score(value, query, eps):
    """[..., heads, 1] of value [..., heads, C]; eps None: against the value itself."""
    score = jnp.sum(value * query, axis=-1, keepdims=True)
    if eps is None:
        return score
    return score * jax.lax.rsqrt(jnp.mean(value * value, axis=(-2, -1), keepdims=True) + eps)


def _in_window(window, place, last):
    return True if window is None or isinstance(place, int) and place == 0 else place > last - window


def _select(condition, x, other):
    """jnp.where that leaves x alone where the condition is known."""
    return x if condition is True else jnp.where(condition, x, other)
