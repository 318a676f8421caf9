"""The three synthetic tasks of Kimi Linear (arXiv 2510.26692, Figure 4), drawn on the device from a key.

    palindrome   random symbols, <sep>, the same symbols backwards; from the first symbol of the copy on, the next one
    mqar         key value pairs, <sep>, keys of the row in any order; at each of these its value
    stack        <push> id element, <pop> id element over 64 stacks; at the id of a pop the element that is on top

The paper says no more than this and the lengths of rows. Ours are the numbers of symbols, keys, values and elements;
that one token in two belongs to a pair of mqar and keys are asked for evenly, with repetition; and that pushes are as
likely as pops and stacks are drawn evenly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

SEPARATOR = 0  # also fills what the last item of a row leaves
SYMBOLS = 64  # of the palindrome
KEYS, VALUES = 1024, 64  # keys of a row are distinct
STACKS, ELEMENTS = 64, 64
VOCABULARY = 1152  # of every model, so that tasks share a compiled program; more than any task has


class Batch(NamedTuple):
    """Both int32 [B, T]. At each position the model answers with the target; there is none where it is -1."""

    tokens: jax.Array
    targets: jax.Array


@dataclass(frozen=True)
class Task:
    """draw(key, batch, length) -> Batch, for rows of at least `shortest` and at most `longest` tokens."""

    draw: Callable[[jax.Array, int, int], Batch]
    shortest: int
    longest: int | None = None


def draw_batch(task: str, key: jax.Array, batch: int, length: int) -> Batch:
    """`batch` independent rows of `length` tokens. task and sizes are static.

    Raises:
      ValueError: an unknown task, or a length that it has no rows of.
    """
    check_task(task, length)
    return TASKS[task].draw(key, batch, length)


def check_task(task: str, length: int) -> None:
    """ValueError unless the task exists and has rows of this length."""
    if task not in TASKS:
        raise ValueError(f"task={task!r} is unknown; allowed: {', '.join(TASKS)}")
    shortest, longest = TASKS[task].shortest, TASKS[task].longest
    if length < shortest or (longest is not None and length > longest):
        most = "" if longest is None else f" and at most {longest}, for its {KEYS} keys"
        raise ValueError(f"length={length} is not allowed: {task} needs at least {shortest}{most}")


def _palindrome(key, batch, length):
    """2n tokens: the last symbol of the copy is only a target."""
    n = length // 2
    symbols_BN = 1 + jax.random.randint(key, (batch, n), 0, SYMBOLS)
    copy_BN = symbols_BN[:, ::-1]
    tokens = jnp.concatenate([symbols_BN, _separators(batch), copy_BN[:, :-1]], axis=1)
    targets = jnp.concatenate([_nothing(batch, n + 1), copy_BN[:, 1:]], axis=1)
    return _filled(tokens, targets, length)


def _mqar(key, batch, length):
    pairs = length // 4
    queries = length - 2 * pairs - 1
    keys_key, values_key, queries_key = jax.random.split(key, 3)
    permute = jax.vmap(lambda key: jax.random.permutation(key, KEYS))
    keys_BP = 1 + permute(jax.random.split(keys_key, batch))[:, :pairs]
    values_BP = 1 + KEYS + jax.random.randint(values_key, (batch, pairs), 0, VALUES)
    asked_BQ = jax.random.randint(queries_key, (batch, queries), 0, pairs)
    queries_BQ, answers_BQ = (jnp.take_along_axis(x, asked_BQ, axis=1) for x in (keys_BP, values_BP))
    context = jnp.stack([keys_BP, values_BP], axis=-1).reshape(batch, 2 * pairs)
    tokens = jnp.concatenate([context, _separators(batch), queries_BQ], axis=1)
    targets = jnp.concatenate([_nothing(batch, 2 * pairs + 1), answers_BQ], axis=1)
    return _filled(tokens, targets, length)


def _stack(key, batch, length):
    """A pop that is drawn for an empty stack becomes a push.

    So a stack is as high as a walk of fair steps +1 and -1 is far from 0: all operations are drawn at once, without
    going through them one after the other.
    """
    operations = length // 3
    steps_key, stacks_key, elements_key = jax.random.split(key, 3)
    steps_BN = 2 * jax.random.bernoulli(steps_key, shape=(batch, operations)).astype(jnp.int32) - 1
    stacks_BN = jax.random.randint(stacks_key, (batch, operations), 0, STACKS)
    pushed_BN = jax.random.randint(elements_key, (batch, operations), 0, ELEMENTS)

    earlier_NN = jnp.tril(jnp.ones((operations, operations), bool), -1)
    same_BNN = earlier_NN & (stacks_BN[:, :, None] == stacks_BN[:, None, :])
    before_BN = jnp.sum(jnp.where(same_BNN, steps_BN[:, None, :], 0), axis=-1)
    height_before_BN, height_BN = jnp.abs(before_BN), jnp.abs(before_BN + steps_BN)
    pushes_BN = height_BN > height_before_BN
    # On top lies what the last push to the present height has put there.
    there_BNN = same_BNN & pushes_BN[:, None, :] & (height_BN[:, None, :] == height_before_BN[:, :, None])
    last_BN = jnp.max(jnp.where(there_BNN, jnp.arange(operations), 0), axis=-1)
    elements_BN = jnp.where(pushes_BN, pushed_BN, jnp.take_along_axis(pushed_BN, last_BN, axis=1))

    element_tokens_BN = 3 + STACKS + elements_BN
    triples = [jnp.where(pushes_BN, 1, 2), 3 + stacks_BN, element_tokens_BN]
    nothing = _nothing(batch, operations)
    answers = [nothing, jnp.where(pushes_BN, -1, element_tokens_BN), nothing]
    tokens, targets = (jnp.stack(x, axis=-1).reshape(batch, 3 * operations) for x in (triples, answers))
    return _filled(tokens, targets, length)


TASKS = {
    "palindrome": Task(_palindrome, shortest=4),
    "mqar": Task(_mqar, shortest=4, longest=4 * KEYS + 3),
    "stack": Task(_stack, shortest=6),
}


def _separators(batch):
    return jnp.full((batch, 1), SEPARATOR, jnp.int32)


def _nothing(batch, n):
    return jnp.full((batch, n), -1, jnp.int32)


def _filled(tokens, targets, length):
    missing = ((0, 0), (0, length - tokens.shape[1]))
    tokens = jnp.pad(tokens.astype(jnp.int32), missing, constant_values=SEPARATOR)
    return Batch(tokens, jnp.pad(targets.astype(jnp.int32), missing, constant_values=-1))
