"""The GPU's walks over a sequence cut into pieces, how the pieces are composed, and what a chunk's backward makes of
the walks' results, against float64.

The kernels' own code runs here as plain Python (gpu_machine.py).
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda.mosaic_gpu import chunk_backward as of_chunks
from pallas_kernels.kda.mosaic_gpu import registers, state, state_backward
from pallas_kernels.kda.mosaic_gpu.intra import Options, Terms
from pallas_kernels.kda.mosaic_gpu.pieces import (
    GROUP,
    SHORTEST,
    choose_groups,
    choose_pieces,
    first_cotangents,
    first_states,
)
from pallas_kernels.kda.mosaic_gpu.registers import MULTIPROCESSORS
from pallas_kernels.kda.mosaic_gpu.state import pass_state, piece_maps, piece_transitions, recompute_states
from pallas_kernels.kda.mosaic_gpu.state_backward import pass_state_backward
from tests.pallas_kernels.gpu_machine import Machine, multiply
from tests.support import BF16_FORWARD, BF16_GRADIENT, assert_close

BF16, F32 = jnp.bfloat16, jnp.float32


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    Machine().replace(monkeypatch, of_chunks, registers, state, state_backward)


# --- The same in float64 -----------------------------------------------------------------------------------------


B, HV, N, K, V = 2, 3, 8, 128, 192  # several warpgroups each, and no two alike
OPTIONS = Options(1.0, "log", None, False, K, V)


def numbers(seed, *shape, dtype=F32, size=1.0):
    return (size * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def terms() -> Terms:
    """No chunk, head or row is like another."""
    tokens = lambda seed, width, size=0.1: numbers(seed, B, HV, 64 * N, width, dtype=BF16, size=size)  # noqa: E731
    inverse = np.stack([tokens(4, 64), tokens(5, 64, 1e-3)])
    return Terms(*(tokens(i, K) for i in range(3)), tokens(3, 64), inverse, np.exp(-np.abs(numbers(6, B, HV, N * K))))


X, VALUES, DOUT = terms(), *(numbers(i, B, 64 * N, HV * V, dtype=BF16) for i in (10, 8))
BETA = np.abs(numbers(11, B, HV, 64 * N))
KIN, Q, KOUT, A = (x.astype(np.float64).reshape(B, HV, N, 64, -1) for x in X[:4])
T = X.inverse.astype(np.float64).sum(0).reshape(B, HV, N, 64, 64)
DECAY = X.decay.astype(np.float64).reshape(B, HV, N, 1, K)
VT, DO = (x.astype(np.float64).reshape(B, N, 64, HV, V).transpose(0, 3, 1, 4, 2) for x in (VALUES, DOUT))  # [V, 64]
# V' = U - W S, as chunked.py has it
W = T @ (BETA.reshape(B, HV, N, 64, 1) * KIN)
U = (VT * BETA.reshape(B, HV, N, 1, 64)) @ T.mT


def forward(enter, u=U):
    """S^T before and after each chunk [B, HV, N, V, K], V'^T [B, HV, N, V, 64] and the output [B, T, HV V].

    enter(n, s) is what chunk n begins with where the chunk before ends with s.
    """
    s, results = np.zeros((B, HV, u.shape[3], K)), []
    for n in range(N):
        before = enter(n, s)
        residual = u[:, :, n] - multiply(before, W[:, :, n].mT)
        out = multiply(before, Q[:, :, n].mT) + multiply(residual, A[:, :, n].mT)
        s = before * DECAY[:, :, n] + multiply(residual, KOUT[:, :, n])
        results.append((before, s, residual, out))
    before, after, residuals, out = (np.stack(x, axis=2) for x in zip(*results, strict=True))
    return before, after, residuals, out.transpose(0, 2, 4, 1, 3).reshape(B, 64 * N, -1)


def backward(enter):
    """dS^T after and before each chunk, and P [B, T, HV V]; enter(n, ds) as in forward, from the last chunk to the
    first."""
    ds, results = np.zeros((B, HV, V, K)), []
    for n in reversed(range(N)):
        after = enter(n, ds)
        dresidual = multiply(DO[:, :, n], A[:, :, n]) + multiply(after, KOUT[:, :, n].mT)
        ds = after * DECAY[:, :, n] + multiply(DO[:, :, n], Q[:, :, n]) - multiply(dresidual, W[:, :, n])
        results.append((after, ds, multiply(dresidual, T[:, :, n])))
    after, before, p = (np.stack(x[::-1], axis=2) for x in zip(*results, strict=True))
    return after, before, p.transpose(0, 2, 4, 1, 3).reshape(B, 64 * N, -1)


def check(tolerance, **pairs):
    """Results of the kernels against those in float64, whatever the axes are folded to."""
    for name, (got, expected) in pairs.items():
        assert_close(np.asarray(got, np.float64).reshape(expected.shape), expected, tolerance, name)


def crowd(monkeypatch, crowded):
    """No multiprocessors to spare: a program has all values of its head, and not 64 of them."""
    if crowded:
        monkeypatch.setattr(state, "MULTIPROCESSORS", 0)


# --- Tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [True, False], ids=["states", "zeros"])
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_pieces_begin_with_states_of_their_own(pieces, given, monkeypatch):
    crowd(monkeypatch, given)
    length, states = N // pieces, numbers(7, B, HV, pieces, V, K) * given
    before, after, residuals, out = forward(lambda n, s: s if n % length else states[:, :, n // length])
    first = states if given else None
    got, final, nothing = pass_state(X, VALUES, BETA, first, None, OPTIONS, pieces)
    starts, again = recompute_states(X, VALUES, BETA, first, None, OPTIONS, pieces)
    assert nothing is None
    check(BF16_FORWARD, output=(got, out), states=(final, after[:, :, length - 1 :: length]))
    check(BF16_FORWARD, states_before_chunks=(starts, before), residuals=(again, residuals))


@pytest.mark.parametrize("given", [True, False], ids=["cotangents", "zeros"])
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_pieces_end_with_cotangents_of_their_own(pieces, given, monkeypatch):
    crowd(monkeypatch, given)
    length, dstates = N // pieces, numbers(9, B, HV, pieces, V, K) * given
    after, before, p = backward(lambda n, ds: ds if (n + 1) % length else dstates[:, :, n // length])
    last = dstates if given else None
    ends, got, first = pass_state_backward(X, BETA, DOUT, last, None, OPTIONS, pieces)
    check(BF16_GRADIENT, cotangents=(ends, after), p=(got, p), first=(first, before[:, :, ::length]))
    *nothing, again = pass_state_backward(X, BETA, DOUT, last, None, OPTIONS, pieces, keep=False)
    assert nothing == [None, None] and again.shape[2] == pieces - 1
    if not given:  # as they are for the pieces' maps
        np.testing.assert_array_equal(again, first[:, :, 1:])


@pytest.mark.parametrize("pieces, groups", [(1, 2), (1, 8), (2, 2), (2, 4)])
def test_groups_begin_with_what_the_walk_has_kept(pieces, groups):
    length, states = N // pieces, numbers(7, B, HV, pieces, V, K)
    before, _, residuals, _ = forward(lambda n, s: s if n % length else states[:, :, n // length])
    *_, kept = pass_state(X, VALUES, BETA, states, None, OPTIONS, pieces, groups)
    check(BF16_FORWARD, kept=(kept, before[:, :, :: N // groups]))
    starts, again = recompute_states(X, VALUES, BETA, kept, None, OPTIONS, groups)
    check(BF16_FORWARD, states_before_chunks=(starts, before), residuals=(again, residuals))


@pytest.mark.parametrize("pieces", [2, 4])
def test_pieces_begin_with_what_the_whole_walk_passes_on(pieces, monkeypatch):
    """Through their maps, as in sequence.py, without and with a first state and a last cotangent."""
    crowd(monkeypatch, pieces == 4)
    length = N // pieces
    R, E = piece_maps(X, VALUES, BETA, OPTIONS, pieces)
    later = piece_transitions(X, BETA, OPTIONS, pieces, skip=1)
    *_, F = pass_state_backward(X, BETA, DOUT, None, None, OPTIONS, pieces, keep=False)
    _, after, *_ = forward(lambda n, s: s if n % length else s * 0 + np.eye(K), np.zeros((B, HV, N, K, 64)))
    transitions = after[:, :, length - 1 :: length]
    check(BF16_FORWARD, transitions=(R, transitions[:, :, :-1]), of_later_pieces=(later, transitions[:, :, 1:]))
    for given in (True, False):
        state, dstate = numbers(7, B, HV, V, K), numbers(9, B, HV, V, K)
        before, *_ = forward(lambda n, s: s if n else state * given)  # noqa: B023
        after, *_ = backward(lambda n, ds: ds if n < N - 1 else dstate * given)  # noqa: B023
        first, last = (
            first_states(R, E, state if given else None),
            first_cotangents(later, F, dstate if given else None),
        )
        check(BF16_FORWARD, first=(first, before[:, :, ::length]))
        check(BF16_GRADIENT, last=(last, after[:, :, length - 1 :: length]))


def test_states_of_slots():
    """Runs of chunks with states of their own; nothing is written for a slot without chunks."""
    slot = np.array([[0, 0, 0, 2, 2, 1, 1, 1], [3, 1, 1, 1, 1, 1, 1, 0]])
    states, dstates = numbers(7, B, 4, HV, V, K), numbers(9, B, 4, HV, V, K)
    edge = np.ones((B, N + 1), bool)
    edge[:, 1:-1] = slot[:, 1:] != slot[:, :-1]
    own = lambda x, n, new, s: np.where(new[:, None, None, None], x[np.arange(B), slot[:, n]], s)  # noqa: E731
    before, after, residuals, out = forward(lambda n, s: own(states, n, edge[:, n], s))
    got, final, _ = pass_state(X, VALUES, BETA, states, slot, OPTIONS)
    starts, again = recompute_states(X, VALUES, BETA, states, slot, OPTIONS)
    check(BF16_FORWARD, output=(got, out), states_before_chunks=(starts, before), residuals=(again, residuals))
    dafter, dbefore, p = backward(lambda n, ds: own(dstates, n, edge[:, n + 1], ds))
    ends, again, first = pass_state_backward(X, BETA, DOUT, dstates, jnp.asarray(slot), OPTIONS)
    check(BF16_GRADIENT, cotangents=(ends, dafter), p=(again, p))
    for b, s in np.ndindex(B, 4):
        chunks = np.flatnonzero(slot[b] == s)
        if len(chunks):
            check(BF16_FORWARD, state=(final[b, s], after[b, :, chunks[-1]]))
            check(BF16_GRADIENT, cotangent=(first[b, s], dbefore[b, :, chunks[0]]))
        else:
            assert np.isnan(final[b, s]).all() and (first[b, s] == dstates[b, s]).all()


def test_what_a_chunk_makes_of_states_and_residuals():
    """The formulas of state_backward.py, of one random state, residual and cotangent each."""
    states, dstates = (numbers(i, B, HV, N, V, K, dtype=BF16) for i in (12, 13))
    residuals, p = numbers(14, B, HV, N, V, 64, dtype=BF16), numbers(15, B, 64 * N, HV * V, dtype=BF16)
    fold = lambda x: x.reshape(B, HV, N * V, -1)  # noqa: E731
    got = of_chunks.chunk_backward(
        VALUES, BETA, X.decay, fold(states), fold(residuals), fold(dstates), p, DOUT, OPTIONS
    )
    S, dS, R = (x.astype(np.float64) for x in (states, dstates, residuals))
    P, do, v = (x.astype(np.float64).reshape(B, N, 64, HV, V).transpose(0, 3, 1, 2, 4) for x in (p, DOUT, VALUES))
    beta = BETA.reshape(B, HV, N, 64)
    tokens = lambda x: x.transpose(0, 2, 3, 1, 4).reshape(B, 64 * N, -1)  # noqa: E731
    check(BF16_FORWARD, dv=(got.dv, tokens(beta[..., None] * P)), dq_in=(got.dq_in, do @ S), ps=(got.ps, P @ S))
    check(BF16_FORWARD, dk_out=(got.dk_out, R.mT @ dS), da=(got.da, do @ R), m=(got.m, P @ R))
    total = (DECAY[..., 0, :] * (S * dS).sum(axis=3)).reshape(B, HV, N, K)
    check(1e-5, dtotal=(np.asarray(got.dtotal).reshape(B, HV, N, 4, K).sum(axis=3), total))
    check(1e-5, dbeta=(np.asarray(got.dbeta).sum(axis=0), (P * v).sum(axis=-1)))


@pytest.mark.parametrize("given", [True, False], ids=["state", "zeros"])
@pytest.mark.parametrize("pieces", [2, 3, 8])
def test_maps_of_pieces_are_composed_like_a_scan(pieces, given):
    r = np.random.default_rng(pieces)
    R = r.standard_normal((2, 3, pieces - 1, 4, 4))
    E, s = r.standard_normal((2, 3, pieces - 1, 5, 4)), r.standard_normal((2, 3, 5, 4))
    with jax.enable_x64(True):
        states = first_states(*map(jnp.asarray, (R, E)), jnp.asarray(s) if given else None)
        cotangents = first_cotangents(*map(jnp.asarray, (R, E)), jnp.asarray(s) if given else None)
    now = s * given
    for p in range(pieces):
        assert_close(states[:, :, p], now, 1e-13, f"piece {p}")
        now = now @ R[:, :, p] + E[:, :, p] if p < pieces - 1 else now
    now = s * given
    for p in reversed(range(pieces)):
        assert_close(cotangents[:, :, p], now, 1e-13, f"piece {p}")
        now = now @ R[:, :, p - 1].mT + E[:, :, p - 1] if p else now


def test_as_many_pieces_as_keep_the_machine_busy():
    def allowed(programs, chunks, pieces):
        return programs * pieces <= MULTIPROCESSORS and chunks % pieces == 0 and chunks // pieces >= SHORTEST

    for programs, chunks in itertools.product((1, 7, 16, 33, 34, 132, 999), (1, 48, 191, 192, 200, 2048, 4095)):
        most = max((p for p in (4, 8, 16, 32, 64, 128) if allowed(programs, chunks, p)), default=1)
        assert choose_pieces(programs, chunks) == most, (programs, chunks)
    assert choose_pieces(16, 2048) == 8 and choose_pieces(34, 2048) == 1 and choose_pieces(1, 192) == 4


def test_groups_are_finer_than_pieces():
    for chunks in (1, 32, 63, 64, 96, 128, 200, 1024, 4095, 4096):
        groups = choose_groups(chunks)
        assert chunks % groups == 0 and (groups == 1 or chunks // groups >= GROUP)
        assert chunks % (2 * groups) or chunks // (2 * groups) < GROUP
        assert all(groups % choose_pieces(programs, chunks) == 0 for programs in (1, 4, 33))
