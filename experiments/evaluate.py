"""Evaluation in bits per byte, the one measure that different tokenizers share."""

import functools
import math
from collections.abc import Callable, Iterable

import jax
import numpy as np
from flax import nnx

from experiments.input_pipeline import Batch
from kimi_jax.model import lm_loss


def make_evaluate(graphdef: nnx.GraphDef, put: Callable[[Batch], Batch]) -> Callable[..., float]:
    """evaluate(state, batches, bytes_per_token) -> bits per byte over all targets of the batches.

    state: the model's nnx.State. put: lays a batch out on the devices.
    """

    sums = _sums(graphdef)

    def evaluate(state: nnx.State, batches: Iterable[Batch], bytes_per_token: float) -> float:
        nats, targets = np.sum([[float(x) for x in sums(state, put(batch))] for batch in batches], axis=0)
        return bits_per_byte(nats / targets, bytes_per_token)

    return evaluate


@functools.lru_cache(maxsize=1)  # runs one after the other that differ in their seed share the program
def _sums(graphdef: nnx.GraphDef) -> Callable[[nnx.State, Batch], tuple[jax.Array, jax.Array]]:
    @jax.jit
    def sums(state: nnx.State, batch: Batch) -> tuple[jax.Array, jax.Array]:
        loss, aux = lm_loss(nnx.merge(graphdef, state), batch.tokens, batch.segment_ids)
        return loss * aux.tokens, aux.tokens

    return sums


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """A loss per token as bits per byte of text."""
    return nats_per_token / math.log(2) / bytes_per_token
