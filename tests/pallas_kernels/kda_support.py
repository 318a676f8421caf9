"""Inputs and comparisons of the KDA tests: every path against the float64 token scan, every gradient on its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import kda, kda_reference
from tests.support import assert_close

# Half the compile time, which is most of these tests; the golden vectors run at the default level, as all on a GPU.
QUICK = {"xla_backend_optimization_level": 0} if os.environ.get("JAX_PLATFORMS") == "cpu" else {}
ARRAYS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
NORMS = {"qk_l2norm": True, "beta_sigmoid": True}
SOFTPLUS = {"gate": "softplus", **NORMS}
BOUNDED = {"gate": "bounded", "lower_bound": -5.0, **NORMS}


class Tokens(NamedTuple):
    """Arguments of kda as float64 numpy arrays; the last three may be None."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    initial_state: np.ndarray | None = None
    A_log: np.ndarray | None = None
    dt_bias: np.ndarray | None = None


def base(seed, B, T, H, K, V, HV=None, h0=True) -> Tokens:
    """The field cases' inputs: unit q and k, normal v, beta = sigmoid(n), g = logsigmoid(n), h0 = 0.1 n."""
    r = np.random.default_rng(seed)
    HV = HV or H
    q, k = unit(r.standard_normal((B, T, H, K))), unit(r.standard_normal((B, T, H, K)))
    v, beta = r.standard_normal((B, T, HV, V)), 1 / (1 + np.exp(-r.standard_normal((B, T, HV))))
    g = -np.log1p(np.exp(-r.standard_normal((B, T, HV, K))))
    return Tokens(q, k, v, g, beta, 0.1 * r.standard_normal((B, HV, K, V)) if h0 else None)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def correlated_keys(seed, shape, spread=0.05):
    """0.9 * normalise(u + spread * n / sqrt(K)) with one direction u for all tokens."""
    r = np.random.default_rng(seed)
    K = shape[-1]
    return 0.9 * unit(unit(r.standard_normal(K)) + spread * r.standard_normal(shape) / np.sqrt(K))


def rounded(tokens: Tokens, dtype) -> Tokens:
    """The values that dtype holds; the state and the gate's parameters stay float32."""
    cast = lambda x, d: None if x is None else np.asarray(jnp.asarray(x, d).astype(jnp.float32), np.float64)  # noqa: E731
    return Tokens(*(cast(x, dtype if i < 5 else jnp.float32) for i, x in enumerate(tokens)))


# Of a TPU with buffers, cores and a random order of parallel steps; what was not written is NaN.
TPU = pltpu.InterpretParams(uninitialized_memory="nan")
PLAIN = True  # the grid as a loop in XLA: quick to run, slow to compile


@contextmanager
def interpreted(interpreter: pltpu.InterpretParams | bool = TPU) -> Iterator[None]:
    """TPU kernels traced inside run on this machine; jit tells the programs of one interpreter from another's."""
    with pltpu.force_tpu_interpret_mode(interpreter):
        try:
            yield
            jax.effects_barrier()  # results may be awaited only later
        finally:
            pltpu.reset_tpu_interpret_mode_state()  # a kernel that raised leaves its memory behind


@cache
def _program(function, options: tuple, gradients: bool):
    """jitted (arrays, ids, do, dS) -> results; cached, so that cases of one shape share a compilation."""

    def loss(arrays, ids, do, dS):
        named = dict(zip(ARRAYS, arrays, strict=True))
        head = [named.pop(n) for n in ARRAYS[:5]]
        out, state = function(*head, segment_ids=ids, **named, **dict(options))
        wide = jnp.promote_types(out.dtype, jnp.float32)
        total = jnp.sum(out.astype(wide) * do.astype(wide)) + jnp.sum(state * dS.astype(state.dtype))
        return total, (out, state)

    if not gradients:
        return jax.jit(lambda *a: (*loss(*a)[1], None), compiler_options=QUICK)
    return jax.jit(
        lambda *a: (lambda value, grads: (*value[1], grads))(*jax.value_and_grad(loss, has_aux=True)(*a)),
        compiler_options=QUICK,
    )


def run(function, tokens: Tokens, dtype, *, ids=None, gradients=True, do=None, dS=None, **options):
    """Dict of output, state and each gradient, float64 numpy. do and dS weigh the loss; random by default."""
    r = np.random.default_rng(99)
    B, _, HV, V = tokens.v.shape
    K = tokens.q.shape[-1]
    states = (B, HV, K, V) if options.get("num_segments") is None else (B, options["num_segments"], HV, K, V)
    do = r.standard_normal(tokens.v.shape) if do is None else do
    dS = r.standard_normal(states) if dS is None else dS
    fine = jnp.float64 if dtype == jnp.float64 else jnp.float32
    with jax.enable_x64(dtype == jnp.float64):
        arrays = [None if x is None else jnp.asarray(x, dtype if i < 5 else fine) for i, x in enumerate(tokens)]
        ids = None if ids is None else jnp.asarray(ids, jnp.int32)
        program = _program(function, tuple(sorted(options.items())), gradients)
        out, state, grads = program(arrays, ids, jnp.asarray(do, fine), jnp.asarray(dS, fine))
    results = {"output": out, "state": state}
    if gradients:
        results |= {f"d{n}": x for n, x in zip(ARRAYS, grads, strict=True) if x is not None}
    return {n: np.asarray(x).astype(np.float64) for n, x in results.items()}


def check(tokens: Tokens, dtype=jnp.float32, forward=None, gradient=None, *, ids=None, gradients=True, **options):
    """kda at dtype against the float64 scan of the same (rounded) values; returns (result, reference)."""
    low = dtype == jnp.bfloat16
    forward = forward or (1e-2 if low else 2e-5)
    gradient = gradient or (2e-2 if low else 2e-4)
    tokens = rounded(tokens, dtype)
    scan_options = {n: x for n, x in options.items() if n not in ("chunk_size", "backend", "do", "dS")}
    weights = {n: options[n] for n in ("do", "dS") if n in options}
    kda_options = {n: x for n, x in options.items() if n not in weights}
    reference = run(kda_reference, tokens, jnp.float64, ids=ids, gradients=gradients, **scan_options, **weights)
    result = run(kda, tokens, dtype, ids=ids, gradients=gradients, **kda_options, **weights)
    assert result.keys() == reference.keys()
    for name, value in result.items():
        assert_close(value, reference[name], forward if name in ("output", "state") else gradient, name)
    return result, reference
