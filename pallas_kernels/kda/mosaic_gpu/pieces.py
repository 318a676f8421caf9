"""Cutting a sequence into pieces that are walked at once: what state each begins with.

A piece maps the state it begins with to S^T R + E, and its backward the cotangent it begins with (at its end) to
dS^T R^T + F: E and F come from walking the piece with zeros, R from walking it with the rows of the identity, and the
maps of all pieces are composed in float32. Every piece is thus walked three times, so this pays only where there are
multiprocessors to spare.
"""

import jax
import jax.numpy as jnp

__all__ = ["choose_pieces", "first_cotangents", "first_states"]

PROGRAMS = 132  # multiprocessors of an H100 or H200
SHORTEST = 48  # chunks; below, by estimate, composing the maps costs more than the walk saves


def choose_pieces(programs: int, chunks: int) -> int:
    """Pieces for a number of rows times value heads, a power of two that divides the number of chunks."""
    pieces = 1
    while programs * 2 * pieces <= PROGRAMS and chunks % (2 * pieces) == 0 and chunks // (2 * pieces) >= SHORTEST:
        pieces *= 2
    return pieces if pieces >= 4 else 1


def first_states(transitions, ends, state):
    """S^T before each piece [B, HV, P, V, K] from R [B, HV, P, K, K], E [B, HV, P, V, K] and the first one or None."""
    R, E = _compose(transitions, ends)
    first = jnp.zeros_like(E[:, :, 0]) if state is None else state
    after = E if state is None else E + _matmul(state[:, :, None], R)
    return jnp.concatenate([first[:, :, None], after[:, :, :-1]], axis=2)


def first_cotangents(transitions, ends, dstate):
    """dS^T after each piece from the same R, F [B, HV, P, V, K] and that after the last piece [B, HV, V, K]."""
    turned = lambda x: jnp.flip(x, axis=2)  # noqa: E731
    return turned(first_states(turned(transitions.swapaxes(-1, -2)), turned(ends), dstate))


def _compose(R, E):
    """Maps of the first piece, of the first two, and so on."""

    def then(a, b):
        return _matmul(a[0], b[0]), _matmul(a[1], b[0]) + b[1]

    return jax.lax.associative_scan(then, (R, E), axis=2)


def _matmul(a, b):
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
