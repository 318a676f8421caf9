"""The synthetic tasks against plain loops over tokens that solve them."""

import jax
import numpy as np
import pytest

from experiments import synthetic_tasks
from experiments.synthetic_tasks import ELEMENTS, KEYS, STACKS, SYMBOLS, TASKS, VALUES, VOCABULARY, draw_batch

LENGTHS = {"palindrome": (4, 65), "mqar": (4, 403), "stack": (6, 97)}


draw = jax.jit(draw_batch, static_argnums=(0, 2, 3))


def rows(task, length, batch=8, seed=0):
    return jax.tree.map(np.asarray, draw(task, jax.random.key(seed), batch, length))


@pytest.mark.parametrize("task, length", [(task, length) for task, lengths in LENGTHS.items() for length in lengths])
def test_rows_are_those_of_the_task(task, length):
    batch = rows(task, length)
    assert batch.tokens.shape == batch.targets.shape == (8, length)
    assert batch.tokens.dtype == batch.targets.dtype == np.int32
    assert batch.tokens.min() >= 0 and batch.tokens.max() < VOCABULARY and batch.targets.max() < VOCABULARY
    assert (batch.targets >= 0).any() or length == 6
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        assert {"palindrome": palindrome, "mqar": mqar, "stack": stack}[task](tokens) == targets


def palindrome(tokens):
    n = len(tokens) // 2
    symbols = tokens[:n]
    assert all(1 <= s <= SYMBOLS for s in symbols) and tokens[n] == 0
    copy = symbols[::-1]
    assert tokens[n + 1 : 2 * n] == copy[:-1] and tokens[2 * n :] == [0] * (len(tokens) - 2 * n)
    return [-1] * (n + 1) + copy[1:] + [-1] * (len(tokens) - 2 * n)


def mqar(tokens):
    n = len(tokens) // 4
    keys, values, queries = tokens[0 : 2 * n : 2], tokens[1 : 2 * n : 2], tokens[2 * n + 1 :]
    assert len({*keys}) == n and all(1 <= k <= KEYS for k in keys)
    assert all(KEYS < v <= KEYS + VALUES for v in values) and tokens[2 * n] == 0
    memory = dict(zip(keys, values, strict=True))
    return [-1] * (2 * n + 1) + [memory[q] for q in queries]


def stack(tokens):
    stacks, targets = {}, []
    for i in range(0, len(tokens) - 2, 3):
        operation, name, element = tokens[i : i + 3]
        assert 3 <= name < 3 + STACKS and 3 + STACKS <= element < 3 + STACKS + ELEMENTS
        if operation == 1:
            stacks.setdefault(name, []).append(element)
            targets += [-1, -1, -1]
        else:
            assert operation == 2
            targets += [-1, stacks[name].pop(), -1]
    rest = len(tokens) % 3
    assert tokens[len(tokens) - rest :] == [0] * rest
    return targets + [-1] * rest


def test_pushes_and_pops_are_drawn_evenly():
    """A walk of 200 operations on 64 stacks; and deep stacks do occur, or recalling the last push would be enough."""
    operations = rows("stack", 600, batch=64).tokens.reshape(64, 200, 3)
    pops = (operations[..., 0] == 2).mean()
    assert 0.25 < pops < 0.40  # below a half, as pops of empty stacks become pushes
    counts = np.bincount(operations[..., 1].ravel() - 3, minlength=STACKS)
    assert counts.min() > 0.7 * counts.mean() and counts.max() < 1.3 * counts.mean()
    last_push_answers = deeper = 0
    for row in operations:
        tops, heights = {}, {}
        for operation, name, element in row.tolist():
            heights[name] = heights.get(name, 0) + (1 if operation == 1 else -1)
            if operation == 1:
                tops[name] = element
            else:
                last_push_answers += tops[name] == element
                deeper += heights[name] > 0
    assert deeper > 500 and last_push_answers < (operations[..., 0] == 2).sum()


def test_rows_and_keys_differ():
    for task in TASKS:
        length = LENGTHS[task][-1]
        first, again, other = (rows(task, length, 8, seed).tokens for seed in (0, 0, 1))
        assert (first == again).all() and (first != other).any()
        assert len({row.tobytes() for row in first}) == 8


def test_bad_tasks_and_lengths_are_refused():
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="task='copy' is unknown; allowed: palindrome, mqar, stack"):
        draw_batch("copy", key, 1, 64)
    for task, length in (("palindrome", 3), ("mqar", 3), ("stack", 5), ("mqar", 4 * KEYS + 4)):
        with pytest.raises(ValueError, match=f"length={length} is not allowed: {task} needs"):
            draw_batch(task, key, 1, length)
    jax.eval_shape(lambda: draw_batch("mqar", key, 1, 4 * KEYS + 3))  # the longest has a key for each pair
    assert 1 + max(synthetic_tasks.KEYS + VALUES, 2 + STACKS + ELEMENTS, SYMBOLS) <= VOCABULARY
