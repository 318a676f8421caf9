"""Cutting a sequence into pieces that are walked at once: what state each begins with.

A piece maps the state it begins with to S^T R + E, and its backward the cotangent it begins with (at its end) to
dS^T R^T + F: E and F come from walking the piece with zeros, R from walking it with the rows of the identity, and the
maps of all pieces are composed in float32. Pieces are thus walked three times, so this pays only where there are
multiprocessors to spare.

The backward walks over the states again, and does so in groups of chunks: the forward has kept what each begins with.
"""

import jax
import jax.numpy as jnp

from .registers import MULTIPROCESSORS

__all__ = ["choose_groups", "choose_pieces", "first_cotangents", "first_states"]

SHORTEST = 48  # chunks; below, by estimate, composing the maps costs more than the walk saves
GROUP = 32  # chunks at least; their state is then 3% of the inputs that are kept for the backward (K = V = 128)


def choose_pieces(programs: int, chunks: int) -> int:
    """Pieces for a number of rows times value heads times 64s of values, a power of two that divides the number of
    chunks."""
    pieces = 1
    while (
        programs * 2 * pieces <= MULTIPROCESSORS and chunks % (2 * pieces) == 0 and chunks // (2 * pieces) >= SHORTEST
    ):
        pieces *= 2
    return pieces if pieces >= 4 else 1


def choose_groups(chunks: int) -> int:
    """Groups for a number of chunks, a power of two that divides it; never fewer than pieces."""
    groups = 1
    while chunks % (2 * groups) == 0 and chunks // (2 * groups) >= GROUP:
        groups *= 2
    return groups


def first_states(transitions, ends, state):
    """S^T before each piece [B, HV, P, V, K], from R [B, HV, P - 1, K, K] and E [B, HV, P - 1, V, K] of all but the
    last, and the first state or None."""
    R, E = _compose(transitions, ends)
    first = jnp.zeros_like(E[:, :, 0]) if state is None else state
    after = E if state is None else E + _matmul(state[:, :, None], R)
    return jnp.concatenate([first[:, :, None], after], axis=2)


def first_cotangents(transitions, ends, dstate):
    """dS^T after each piece from R and F [B, HV, P - 1, V, K] of all but the first, and that after the last piece."""
    turned = lambda x: jnp.flip(x, axis=2)  # noqa: E731
    return turned(first_states(turned(transitions.swapaxes(-1, -2)), turned(ends), dstate))


def _compose(R, E):
    """Maps of the first piece, of the first two, and so on."""

    def then(a, b):
        return _matmul(a[0], b[0]), _matmul(a[1], b[0]) + b[1]

    return jax.lax.associative_scan(then, (R, E), axis=2)


def _matmul(a, b):
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
