"""Numbers over the depth of a model: what its sites read, how large outputs and the loss's gradients there are."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kimi_jax.configs import ModelConfig
from kimi_jax.layers.residuals import DepthMix, DepthState, make_residual
from kimi_jax.model import KimiLM, lm_loss

ROWS = 8  # of validation text


def depth_profile(model: KimiLM, tokens: jax.Array, segment_ids: jax.Array | None = None) -> dict[str, Any]:
    """Numbers over the depth of a model on tokens int [B, T], means over all of its tokens.

    Returns:
        {"loss": nats per token, "output_rms": [sub-layers], "output_largest": [sub-layers], the largest magnitude,
        "output_kurtosis": [sub-layers], of all numbers of an output, 3 for normal ones, "gradient_rms": [sub-layers],
        of the mean loss with respect to each output, "weights": per site a list over its sources (the embedding or
        oldest block first, the growing one last), or None where the site weighs nothing or in another way than softmax
        over normalised keys}. The last site is the output's.

    Raises:
        NotImplementedError: for scan_layers, whose sites are not seen one by one.
    """
    graphdef, state = nnx.split(model)
    return make_depth_profile(graphdef, model.config)(state, tokens, segment_ids)


@functools.lru_cache(maxsize=1)
def make_depth_profile(graphdef: nnx.GraphDef, config: ModelConfig) -> Callable[..., dict[str, Any]]:
    """profile(state, tokens, segment_ids=None): `depth_profile` of the model of this nnx.State, compiled once and
    for runs one after the other that differ in their seed.

    Raises NotImplementedError as `depth_profile` does.
    """
    if config.scan_layers:
        raise NotImplementedError("scan_layers=True: the sites of scanned layers cannot be read; train without it")
    # Of a model in two phases too: the same function, whose sites all read bank and sum.
    residual = make_residual(config.residual, config.block_size, config.depth_streams)

    @jax.jit
    def run(state: nnx.State, tokens: jax.Array, segment_ids: jax.Array | None):
        def loss(nudges):
            own = nnx.merge(graphdef, state)
            probe = own.residual = own.layers.residual = _Probe(residual, nudges)
            own.layers.remat = "none"  # what is recorded may not be a tracer of a checkpoint's inside
            for layer in own.layers.lead:
                layer.residual = probe
            return lm_loss(own, tokens, segment_ids)[0], (probe.outputs, probe.weights)

        zeros = [jnp.zeros((*tokens.shape, config.hidden_size), config.dtype)] * (2 * config.num_layers)
        (found, (outputs, weights)), gradients = jax.value_and_grad(loss, has_aux=True)(zeros)
        return found, outputs, [_rms(x) for x in gradients], weights

    def profile(state: nnx.State, tokens: jax.Array, segment_ids: jax.Array | None = None) -> dict[str, Any]:
        found, outputs, gradients, weights = jax.device_get(run(state, tokens, segment_ids))
        return {
            "loss": float(found),
            **{f"output_{name}": [float(x[name]) for x in outputs] for name in ("rms", "largest", "kurtosis")},
            "gradient_rms": [float(x) for x in gradients],
            "weights": [None if w is None else [float(x) for x in w] for w in weights],
        }

    return profile


def as_matrix(weights: Sequence[Sequence[float] | None]) -> np.ndarray:
    """The weights of a profile as [sites, sources], NaN where a site has no such source."""
    matrix = np.full((len(weights), max(len(w) for w in weights if w is not None)), np.nan)
    for row, found in zip(matrix, weights, strict=True):
        if found is not None:
            row[: len(found)] = found
    return matrix


class _Probe:
    """A residual that remembers what passes by. Zeros are added to outputs, and the loss differentiated by them."""

    def __init__(self, residual, nudges: Sequence[jax.Array]):
        self.residual, self.nudges = residual, nudges
        self.outputs, self.weights = [], []

    def __getattr__(self, name):
        return getattr(self.residual, name)

    def read(self, state, site, norm):
        self.weights.append(_mean_weights(state, site) if isinstance(site, DepthMix) else None)
        return self.residual.read(state, site, norm)

    def mix(self, state, site):
        self.weights.append(_mean_weights(state, site) if isinstance(site, DepthMix) else None)
        return self.residual.mix(state, site)

    def add(self, state, output, site=None):
        self.outputs.append({"rms": _rms(output), **_outliers(output)})
        return self.residual.add(state, output + self.nudges[state.depth], site)


def _mean_weights(state: DepthState, site: DepthMix) -> jax.Array:
    """[sources], as attn_res weighs them."""
    sources = [x.astype(jnp.float32) for x in (*state.bank, state.sum)]
    gain = site.query[...] * site.key_scale[...]
    scores = [jnp.sum(x * gain, axis=-1) * jax.lax.rsqrt(jnp.mean(x * x, axis=-1) + site.eps) for x in sources]
    weights = jax.nn.softmax(jnp.stack(scores), axis=0)
    return jnp.mean(weights, axis=tuple(range(1, weights.ndim)))


def _rms(x):
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))


def _outliers(x):
    x = x.astype(jnp.float32)
    centred = x - jnp.mean(x)
    return {"largest": jnp.max(jnp.abs(x)), "kurtosis": jnp.mean(centred**4) / jnp.mean(centred**2) ** 2}
