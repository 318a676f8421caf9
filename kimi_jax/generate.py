"""Sampling text: a prompt goes in piece by piece, then tokens come out one by one.

Nothing is compiled per length. Pieces of a prompt and the cache are padded to a few sizes, and the number of steps is
no constant of the compiled loop, so that another prompt or max_new_tokens mostly finds its programs ready.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .cache import Cache
from .model import KimiLM
from .sharding import constrain

if TYPE_CHECKING:
    from .snapshots import PrefixCache

LONGEST_PIECE = 2048  # tokens of a prompt at once: the activations of a piece take memory for each of them
STEPS_PER_CALL = 16


def generate(
    model: KimiLM,
    prompt: jax.Array,
    max_new_tokens: int,
    *,
    lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    prefixes: "PrefixCache | None" = None,
) -> jax.Array:
    """Continue every row of `prompt` by max_new_tokens ids; the prompt is not repeated in the result.

    Raises ValueError for an argument out of its range. Works under a mesh set by jax.set_mesh.

    Args:
        model: the model.
        prompt: int [B, T], or [T] for one row.
        max_new_tokens: at least 1.
        lengths: int32 [B], the number of valid tokens of each row (left-aligned), None: all.
        segment_ids: int32 [B, T], for padding elsewhere, such as on the left: negative where a token is padding.
        temperature: 0 takes the likeliest token (the lowest id of equals).
        top_p: sample from the smallest set of likeliest tokens whose probability reaches top_p.
        seed: a row's sample depends on it and on the row's index, not on the other rows.
        stop_ids: a row that has produced one of them has ended and repeats it; when all have, nothing more is computed.
        prefixes: of this model; what a prompt begins with is computed once for all calls.

    Returns:
        int32 [B, max_new_tokens], or [max_new_tokens] for a prompt [T].
    """
    prompt = np.asarray(prompt)
    options: dict[str, Any] = dict(
        temperature=temperature, top_p=top_p, seed=seed, stop_ids=stop_ids, prefixes=prefixes
    )
    if prompt.ndim == 1:
        options |= dict(lengths=lengths, segment_ids=None if segment_ids is None else np.asarray(segment_ids)[None])
        return generate(model, prompt[None], max_new_tokens, **options)[0]
    pieces = stream(model, prompt, max_new_tokens, lengths=lengths, segment_ids=segment_ids, **options)
    new_ids = np.concatenate(list(pieces), axis=1)
    return jnp.asarray(np.pad(new_ids, ((0, 0), (0, max_new_tokens - new_ids.shape[1])), mode="edge"))


def stream(
    model: KimiLM,
    prompt: jax.Array,
    max_new_tokens: int,
    *,
    lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    prefixes: "PrefixCache | None" = None,
) -> Iterator[np.ndarray]:
    """What `generate` returns for a prompt [B, T], as pieces int32 [B, n] as soon as they are there: first one token.

    Takes generate's arguments, and refuses them before the first piece is asked for. Ends when all rows have ended.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} is not allowed: at least 1")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} is not allowed: 0 (greedy) or above")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} is not allowed: above 0 and at most 1")
    vocabulary = model.config.vocab_size
    stops = np.asarray(sorted(stop_ids), np.int32)
    if stops.size and (stops[0] < 0 or stops[-1] >= vocabulary):
        raise ValueError(f"stop_ids={list(stop_ids)} is not allowed: ids in [0, {vocabulary})")
    if prefixes is not None and prefixes.model is not model:
        raise ValueError("prefixes is of another model: make a PrefixCache of this one")
    tokens, lengths = _left_aligned(np.asarray(prompt), lengths, segment_ids)
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ValueError(f"prompt ids must lie in [0, {vocabulary}), got {tokens.min()} to {tokens.max()}")
    choice = dict(greedy=temperature == 0, temperature=temperature, top_p=top_p, key=jax.random.key(seed))
    return _stream(model, tokens.astype(np.int32), lengths, max_new_tokens, stops, choice, prefixes)


def prefill(model: KimiLM, tokens: np.ndarray, lengths: np.ndarray, cache: Cache) -> tuple[jax.Array, Cache]:
    """(logits [B, vocab] after each row's last token, the cache) for prompts of any length, in pieces of few shapes.

    tokens: int [B, T]; lengths: [B], at least 1. The cache is donated.
    """
    logits = None
    for start in range(0, int(lengths.max()), LONGEST_PIECE):
        piece = tokens[:, start : min(start + LONGEST_PIECE, int(lengths.max()))]
        size = min(padded_length(piece.shape[1]), LONGEST_PIECE)
        piece = np.pad(piece, ((0, 0), (0, size - piece.shape[1])))
        in_piece = np.clip(lengths - start, 0, size)
        logits, cache = append_piece(model, piece, in_piece, cache, logits)
    return logits, cache


def append_piece(
    model: KimiLM, piece: np.ndarray, lengths: np.ndarray, cache: Cache, logits: jax.Array | None
) -> tuple[jax.Array, Cache]:
    """(logits [B, vocab], cache) after one piece int32 [B, T] of prompts, of which lengths [B] tokens count.

    logits: those of the piece before or None; a row without tokens in this piece keeps them. The cache is donated.
    """
    if logits is None:
        wide = jnp.promote_types(model.config.dtype, jnp.float32)
        logits = constrain(jnp.zeros((len(piece), model.config.vocab_size), wide), "batch", "vocab")
    return _append(*nnx.split(model), piece, np.asarray(lengths, np.int32), cache, logits)


def padded_length(n: int) -> int:
    """The next of 16, 20, 24, 28, 32, 40, 48, 56, 64, 80 ...: a quarter of a power of two apart."""
    step = 1 << max((n - 1).bit_length() - 3, 2)
    return max(-(-n // step) * step, 16)


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


def _stream(model, tokens, lengths, max_new_tokens, stops, choice, prefixes):
    graphdef, state = nnx.split(model)
    room = padded_length(int(lengths.max()) + max_new_tokens)
    if prefixes is None:
        logits, cache = prefill(model, tokens, lengths, model.init_cache(len(tokens), room))
    else:
        logits, cache, _ = prefixes.prefill(tokens, room, lengths=lengths)
    ids_B, ended_B = _first(logits, stops, **choice)
    yield np.asarray(ids_B)[:, None]
    done = 1
    while done < max_new_tokens and not (stops.size and np.asarray(ended_B).all()):
        count = min(STEPS_PER_CALL, max_new_tokens - done)
        ids_B, ended_B, cache, new_ids, steps = _steps(
            graphdef, state, ids_B, ended_B, cache, np.int32(done), np.int32(count), stops, **choice
        )
        done += count
        yield np.asarray(new_ids)[:, : int(steps)]


@functools.partial(jax.jit, static_argnums=0, donate_argnames="cache")
def _append(graphdef, state, tokens, lengths, cache, logits):
    new, cache = nnx.merge(graphdef, state).extend(tokens, cache, lengths=lengths, last_only=True)
    return jnp.where((lengths > 0)[:, None], new[:, 0], logits), cache


@functools.partial(jax.jit, static_argnames="greedy")
def _first(logits_BV, stops, **choice):
    ids_B = _choose(logits_BV, 0, **choice)
    return ids_B, jnp.isin(ids_B, stops)


@functools.partial(jax.jit, static_argnums=0, static_argnames="greedy", donate_argnames="cache")
def _steps(graphdef, state, ids_B, ended_B, cache, done, count, stops, **choice):
    """At most STEPS_PER_CALL tokens: (last ids, rows that have ended, cache, the ids, how many columns of them)."""
    model = nnx.merge(graphdef, state)
    new_ids = jnp.zeros((STEPS_PER_CALL, *ids_B.shape), jnp.int32)

    def go_on(carry):
        step, _, ended_B, _, _ = carry
        return (step < count) & ~jnp.all(ended_B)

    def step_once(carry):
        step, ids_B, ended_B, cache, new_ids = carry
        logits, cache = model.extend(ids_B[:, None], cache)
        chosen_B = _choose(logits[:, 0], done + step, **choice)
        ids_B = jnp.where(ended_B, ids_B, chosen_B)
        return step + 1, ids_B, ended_B | jnp.isin(ids_B, stops), cache, new_ids.at[step].set(ids_B)

    carry = jnp.int32(0), ids_B, ended_B, cache, new_ids
    steps, ids_B, ended_B, cache, new_ids = jax.lax.while_loop(go_on, step_once, carry)
    return ids_B, ended_B, cache, new_ids.T, steps


def _choose(logits_BV, step, *, greedy, temperature, top_p, key):
    """One id per row, on every device."""
    logits_BV = constrain(logits_BV, None, None)
    if greedy:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    rows = jnp.arange(logits_BV.shape[0])
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, step), row))(rows)
    return jax.vmap(sample, in_axes=(0, 0, None, None))(keys, logits_BV, temperature, top_p)


def _left_aligned(prompt, lengths, segment_ids):
    """The prompts without what is padding, at the front of each row, and their lengths; ValueError for bad ones."""
    if prompt.ndim != 2 or prompt.size < 1 or not np.issubdtype(prompt.dtype, np.integer):
        raise ValueError(f"prompt must be integers [B, T] or [T] with T >= 1, got {prompt.dtype}{list(prompt.shape)}")
    B, T = prompt.shape
    lengths = np.full(B, T, np.int32) if lengths is None else np.asarray(lengths, np.int32)
    if lengths.shape != (B,) or lengths.min() < 1 or lengths.max() > T:
        raise ValueError(f"lengths={lengths.tolist()} is not allowed: {B} numbers from 1 to {T}")
    if segment_ids is None:
        return prompt, lengths
    segment_ids = np.asarray(segment_ids)
    if segment_ids.shape != (B, T):
        raise ValueError(f"segment_ids must have the shape of prompt {prompt.shape}, got {segment_ids.shape}")
    counts = (np.arange(T) < lengths[:, None]) & (segment_ids >= 0)
    lengths = counts.sum(axis=1, dtype=np.int32)
    if lengths.min() < 1:
        raise ValueError(f"segment_ids leaves no token in row {int(lengths.argmin())}: at least 1 must not be negative")
    if any(len(np.unique(ids[kept])) > 1 for ids, kept in zip(segment_ids, counts, strict=True)):
        raise ValueError("segment_ids may only mark padding, got rows of several non-negative ids")
    aligned = np.zeros_like(prompt)
    for row, kept in enumerate(counts):
        aligned[row, : lengths[row]] = prompt[row, kept]
    return aligned, lengths
