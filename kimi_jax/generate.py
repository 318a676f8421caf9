"""Sampling text: one prefill, then a compiled decode loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .model import KimiLM


def generate(
    model: KimiLM,
    prompt: jax.Array,
    max_new_tokens: int,
    *,
    lengths: jax.Array | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> jax.Array:
    """Continue every row of `prompt` by max_new_tokens ids; the prompt is not repeated in the result.

    Compiles once per shape of prompt and max_new_tokens. Raises ValueError for an argument out of its range.

    Args:
        model: the model.
        prompt: int [B, T], or [T] for one row.
        max_new_tokens: at least 1.
        lengths: int32 [B], the number of valid tokens of each row (left-aligned), None: all.
        temperature: 0 takes the likeliest token (the lowest id of equals).
        top_p: sample from the smallest set of likeliest tokens whose probability reaches top_p.
        seed: a row's sample depends on it and on the row's index, not on the other rows.

    Returns:
        int32 [B, max_new_tokens], or [max_new_tokens] for a prompt [T].
    """
    prompt = jnp.asarray(prompt)
    if prompt.ndim == 1:
        return generate(
            model, prompt[None], max_new_tokens, lengths=lengths, temperature=temperature, top_p=top_p, seed=seed
        )[0]
    if prompt.ndim != 2 or prompt.shape[1] < 1 or not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise ValueError(f"prompt must be integers [B, T] or [T] with T >= 1, got {prompt.dtype}{list(prompt.shape)}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} is not allowed: at least 1")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} is not allowed: 0 (greedy) or above")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} is not allowed: above 0 and at most 1")
    B, T = prompt.shape
    lengths = np.full(B, T, np.int32) if lengths is None else np.asarray(lengths, np.int32)
    if lengths.shape != (B,) or lengths.min() < 1 or lengths.max() > T:
        raise ValueError(f"lengths={lengths.tolist()} is not allowed: {B} numbers from 1 to {T}")
    values = np.asarray(prompt)
    if values.min() < 0 or values.max() >= model.config.vocab_size:
        raise ValueError(f"prompt ids must lie in [0, {model.config.vocab_size}), got {values.min()} to {values.max()}")
    graphdef, state = nnx.split(model)
    greedy = temperature == 0
    return _generate(graphdef, max_new_tokens, greedy, state, prompt, lengths, temperature, top_p, jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _generate(graphdef, max_new_tokens, greedy, state, prompt, lengths, temperature, top_p, key):
    model = nnx.merge(graphdef, state)
    B, T = prompt.shape

    def choose(logits_BV, step):
        if greedy:
            return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, step), row))(jnp.arange(B))
        return jax.vmap(sample, in_axes=(0, 0, None, None))(keys, logits_BV, temperature, top_p)

    cache = model.init_cache(B, T + max_new_tokens)
    logits, cache = model.extend(prompt, cache, lengths=lengths, last_only=True)
    first = choose(logits[:, 0], 0)

    def decode(carry, step):
        ids_B, cache = carry
        logits, cache = model.extend(ids_B[:, None], cache)
        ids_B = choose(logits[:, 0], step)
        return (ids_B, cache), ids_B

    _, rest = jax.lax.scan(decode, (first, cache), jnp.arange(1, max_new_tokens))
    return jnp.concatenate([first[None], rest]).T


def sample(key: jax.Array, logits_V: jax.Array, temperature: float, top_p: float) -> jax.Array:
    """One id, int32, from softmax(logits / temperature) restricted to the likeliest tokens that reach top_p.

    Of tokens with equal probability at the edge of the set, the lower ids are in it.
    """
    logits_V = logits_V.astype(jnp.float32) / temperature
    order = jnp.argsort(-logits_V, stable=True)
    probabilities = jax.nn.softmax(logits_V[order])
    before = jnp.cumsum(probabilities) - probabilities
    # The likeliest token stays whatever rounding does.
    kept = (before < top_p).at[0].set(True)
    return order[jax.random.categorical(key, jnp.where(kept, logits_V[order], -jnp.inf))].astype(jnp.int32)
