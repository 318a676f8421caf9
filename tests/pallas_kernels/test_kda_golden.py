"""KDA and its gates against vectors made by independent software (float64 columns; the vectors' own bounds)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import bounded_gate, kda, kda_reference, softplus_gate
from tests.support import GOLDEN, golden

OPS = sorted(p.stem for p in Path(GOLDEN, "kda_ops").glob("*.npz"))
GATES = sorted(p.stem for p in Path(GOLDEN, "gate").glob("*.npz"))
INPUTS = ("q", "k", "v", "g", "beta", "h0")


def max_error(x, ref) -> float:
    x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
    assert x.shape == ref.shape and np.isfinite(x).all()
    return np.abs(x - ref).max() / (np.abs(ref).max() or 1.0)


def run_golden(z, function, dtype):
    """Output, state and gradients of sum(o do) + sum(S dS) under the vectors' names."""
    options = {"scale": float(z["scale"]), "qk_l2norm": "l2_eps" in z}
    state = z["h0"] if "h0" in z else np.zeros_like(z["dS"])
    if "cu_seqlens" in z:
        cu, T = z["cu_seqlens"], z["q"].shape[1]
        options["segment_ids"] = jnp.asarray(np.searchsorted(cu[1:], np.arange(T), side="right")[None], jnp.int32)
        options["num_segments"] = len(cu) - 1
        state = state[None]  # one row holds all sequences
    args = [jnp.asarray(z[n], dtype) for n in INPUTS[:5]] + [jnp.asarray(state, dtype)]
    do, dS = jnp.asarray(z["do"], dtype), jnp.asarray(z["dS"], dtype)

    def loss(*args):
        out, state = function(*args[:5], initial_state=args[5], **options)
        state = state.reshape(dS.shape)
        return jnp.sum(out * do) + jnp.sum(state * dS), (out, state)

    (_, (out, state)), grads = jax.jit(jax.value_and_grad(loss, argnums=range(6), has_aux=True))(*args)
    return {"o": out, "S": state} | {f"d{n}": x for n, x in zip(INPUTS, grads, strict=True)}


@pytest.mark.parametrize("name", OPS)
def test_kda_ops(name):
    z = golden("kda_ops", name)
    expected = {n: z[f"{n}_f64"] for n in ("o", "S", "dq", "dk", "dv", "dg", "dbeta")}
    expected["dh0"] = z["dh0_f64"] if "dh0_f64" in z else z["dh0_of_zero_state_f64"]
    with jax.enable_x64(True):
        exact = run_golden(z, kda_reference, jnp.float64)
    fast = run_golden(z, kda, jnp.float32)
    for n, ref in expected.items():
        assert max_error(exact[n].reshape(ref.shape), ref) <= 1e-10, n
        assert max_error(fast[n].reshape(ref.shape), ref) <= 5e-6, n


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("dtype, bound", [("float32", 5e-6), ("float64", 1e-9)])
def test_gates(name, dtype, bound):
    z = golden("gate", name)

    def loss(x, A_log, dt_bias):
        if name.startswith("softplus"):
            g = softplus_gate(x, A_log, dt_bias)
        else:
            g = bounded_gate(x, A_log, dt_bias, float(z["lower_bound"]))
        return jnp.sum(g * z["dg"].astype(dtype)), g

    with jax.enable_x64(dtype == "float64"):
        given = [n for n in ("x", "A_log", "dt_bias") if n in z]
        args = {n: jnp.asarray(z[n], dtype) for n in given}
        fill = {n: args.get(n) for n in ("x", "A_log", "dt_bias")}
        (_, g), grads = jax.value_and_grad(lambda a: loss(**(fill | a)), has_aux=True)(args)
    assert max_error(g, z["g_f64"]) <= bound
    for n in given:
        assert max_error(grads[n], z[f"d{n}_f64"]) <= bound, n
