"""What sequences are given on every path, XLA, TPU and Hopper: the inputs of field cases, and checks that all meet."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels import kda_reference
from tests.pallas_kernels import kda_support
from tests.pallas_kernels.kda_support import Tokens, base, correlated_keys, rounded
from tests.support import BF16_FORWARD, BF16_GRADIENT, assert_close

OF_TOKENS = ("output", "dq", "dk", "dv", "dg", "dbeta")  # results that have an axis of tokens
EXTREME_LOGITS = [0, 1e-8, -1e-8, 20, -20, 88.5, -88.5, 104, -104, 1e4, -1e4, 3e38, -3e38]


def same_bits(results: dict, others: dict):
    assert results.keys() == others.keys()
    for name, value in results.items():
        np.testing.assert_array_equal(value, others[name], err_msg=name)


# --- Inputs ------------------------------------------------------------------------------------------------------


def gated(tokens: Tokens, g) -> Tokens:
    return tokens._replace(g=np.broadcast_to(np.asarray(g, np.float64), tokens.g.shape).copy())


def fast_beside_slow(tokens: Tokens, fast=-20.0) -> Tokens:
    """KN02: every other channel forgets fast."""
    return gated(tokens, np.where(np.arange(tokens.g.shape[-1]) % 2, -0.01, fast))


def spiked(tokens: Tokens, spike=-200.0) -> Tokens:
    """KN02: one token forgets what the others keep."""
    g = np.full((tokens.g.shape[1], 1, 1), -0.02)
    g[70] = spike
    return gated(tokens, g)


class Resets(NamedTuple):
    name: str
    probability: float
    per_channel: bool


RESETS = [Resets("token", 0.5, False), Resets("channel", 0.1, True)]


def reset(tokens: Tokens, case: Resets) -> Tokens:
    """KN03: decays that forget everything, in all channels or in some."""
    shape = (*tokens.g.shape[:2], 1, tokens.g.shape[-1] if case.per_channel else 1)
    return gated(tokens, np.where(np.random.default_rng(8).random(shape) < case.probability, -1000.0, -0.05))


def nearly_parallel(tokens: Tokens, seed=4) -> Tokens:
    """KN04: keys close to one direction, written in full and hardly forgotten."""
    g = -np.random.default_rng(4).uniform(0.0121, 0.0341, tokens.g.shape)
    return gated(tokens._replace(k=correlated_keys(seed, tokens.k.shape), beta=np.ones_like(tokens.beta)), g)


def one_key(tokens: Tokens) -> Tokens:
    """KN04 and KN05: the first token's in all of them."""
    return tokens._replace(k=np.broadcast_to(tokens.k[:, :1], tokens.k.shape).copy())


def written(tokens: Tokens, beta: float) -> Tokens:
    return tokens._replace(beta=np.full_like(tokens.beta, beta))


def orthogonal(tokens: Tokens) -> Tokens:
    """GR02: keys that are forgotten before they come again; nothing depends on the gates."""
    _, T, H, K = tokens.k.shape
    eye = np.tile(np.eye(K), (T // K, 1))[None, :, None, :].repeat(H, axis=2)
    return gated(tokens._replace(q=eye, k=eye, initial_state=np.zeros_like(tokens.initial_state)), -5.0)


def from_end_to_end(tokens: Tokens) -> Tokens:
    """SV01: gates driven to both ends of those bounded by -5."""
    return gated(tokens, -5 / (1 + np.exp(-12 * np.random.default_rng(1).standard_normal(tokens.g.shape))))


def poisoned(tokens: Tokens, where, value) -> Tokens:
    """where [B, T] or [B, 1] among the tokens."""
    spread = lambda x: where.reshape(*where.shape, *[1] * (x.ndim - 2))  # noqa: E731
    return Tokens(*(np.where(spread(x), value, x) for x in tokens[:5]), *tokens[5:])


class Fused(NamedTuple):
    name: str
    options: dict
    dtype: type = jnp.bfloat16
    packed: bool = False
    H: int = 1


def raw(case: Fused, K: int, packing) -> tuple[Tokens, dict]:
    """Two rows of logits with HV = 2, rounded to the case's dtype, and the keywords of their call.

    packing [2, T] are segment_ids, for a packed case.
    """
    r = np.random.default_rng(7)
    tokens = base(7, *packing.shape, case.H, K, K, HV=2)
    if "num_segments" in case.options:
        tokens = tokens._replace(initial_state=0.1 * r.standard_normal((2, 4, 2, K, K)))
    if "qk_l2norm" in case.options:
        tokens = tokens._replace(q=3 * tokens.q, k=2 * tokens.k, beta=r.standard_normal(tokens.beta.shape))
    if "gate" in case.options:
        tokens = tokens._replace(g=2 * r.standard_normal(tokens.g.shape))
        tokens = tokens._replace(A_log=np.log1p(np.arange(2)), dt_bias=r.standard_normal((2, K)))
    return rounded(tokens, case.dtype), {"dtype": case.dtype, "ids": packing if case.packed else None, **case.options}


# --- Checks: of `kda_support.check` or `kda_support.run` with a backend ------------------------------------------


def check_poisoned_padding_changes_nothing(run: Callable, tokens: Tokens, ids, **keywords):
    """Whatever the padding holds, and its own results are zeros."""
    clean = run(tokens, ids=ids, **keywords)
    for poison in (np.nan, 1e30, np.inf):
        same_bits(run(poisoned(tokens, ids < 0, poison), ids=ids, **keywords), clean)
    for name in OF_TOKENS:
        assert not clean[name][ids < 0].any(), name


def check_untouched_slots_are_exact(check: Callable):
    """5 of 8 segments have tokens; the others pass their state and its cotangent to the bit."""
    tokens = base(31, 1, 100, 2, 64, 64)
    ids = np.repeat([1, 2, -1, 4, 5, 7], [5, 64, 3, 1, 20, 7])[None]
    states = np.random.default_rng(3).standard_normal((1, 8, 2, 64, 64)).astype(np.float32).astype(np.float64)
    dS = np.random.default_rng(4).standard_normal(states.shape).astype(np.float32)
    result, _ = check(tokens._replace(initial_state=states), ids=ids, num_segments=8, dS=dS)
    for absent in (0, 3, 6):
        np.testing.assert_array_equal(result["state"][:, absent], states[:, absent])
        np.testing.assert_array_equal(result["dinitial_state"][:, absent], dS[:, absent])
    for name in OF_TOKENS:
        assert not result[name][ids < 0].any(), name


def check_segments_without_a_state(check: Callable):
    """With a row that is padding alone; a segment without tokens ends in zeros."""
    ids = np.stack([np.where(np.arange(70) < 30, 0, 2), np.full(70, -1)])
    result, _ = check(base(33, 2, 70, 1, 64, 64, HV=2, h0=False), ids=ids, num_segments=3)
    assert not result["state"][0, 1].any() and not result["state"][1].any()
    assert all(not value[1].any() for value in result.values())


def check_a_later_token_changes_no_earlier_output(run: Callable, tokens: Tokens, at, lowest=-np.inf):
    """To the bit: no rounding anchor lies in the future. Gates stay above lowest."""
    before = run(tokens, gradients=False)["output"]
    for t in at:
        changed = Tokens(*(None if x is None else x.copy() for x in tokens))
        for x in changed[:5]:
            x[:, t] *= 1e3
        after = run(changed._replace(g=np.maximum(changed.g, lowest)), gradients=False)["output"]
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).any()


def check_float32_gates_beside_bfloat16_tokens(function: Callable, tokens: Tokens, **options):
    """g, beta and the state in float32 are not rounded on the way."""

    def mixed(q, k, v, g, beta, **options):
        return function(*(x.astype(jnp.bfloat16) for x in (q, k, v)), g, beta, **options)

    tokens = tokens._replace(**{n: getattr(rounded(tokens, jnp.bfloat16), n) for n in "qkv"})
    tokens = rounded(tokens, jnp.float32)
    result = kda_support.run(mixed, tokens, jnp.float32, **options)
    reference = kda_support.run(kda_reference, tokens, jnp.float64, **options)
    for name, value in result.items():
        assert_close(value, reference[name], BF16_FORWARD if name in ("output", "state") else BF16_GRADIENT, name)
