"""What the tests share: the error measure of the design's budget, the golden vectors and a look into jaxprs."""

from pathlib import Path

import jax
import numpy as np

GOLDEN = Path(__file__).parent / "golden"

# The error budget: relL2 against a float64 scan.
F32_FORWARD, F32_GRADIENT = 2e-5, 2e-4
RESET_FORWARD, RESET_GRADIENT = 5e-4, 2e-3  # where single steps of the gate fall below -50
BF16_FORWARD, BF16_GRADIENT = 1e-2, 2e-2


def rel_l2(x, ref) -> float:
    """|x - ref| / max(|ref|, 1e-6 sqrt(size)), in float64."""
    x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
    assert x.shape == ref.shape, f"shapes differ: {x.shape} against {ref.shape}"
    if ref.size == 0:
        return 0.0
    return float(np.linalg.norm(x - ref) / max(np.linalg.norm(ref), 1e-6 * np.sqrt(ref.size)))


def assert_close(x, ref, tol: float, name: str = "value") -> None:
    """Fail unless x is finite, has the shape of ref and a relL2 of at most tol."""
    x = np.asarray(x, np.float64)
    assert np.isfinite(x).all(), f"{name}: {np.count_nonzero(~np.isfinite(x))} of {x.size} values are not finite"
    error = rel_l2(x, ref)
    assert error <= tol, f"{name}: relL2 {error:.3g} is over {tol:.3g}"


def golden(folder: str, name: str) -> dict[str, np.ndarray]:
    """The arrays of tests/golden/<folder>/<name>.npz."""
    with np.load(GOLDEN / folder / f"{name}.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def equations(jaxpr):
    """All equations of a jaxpr and of the jaxprs inside it."""
    for e in jaxpr.eqns:
        yield e
        for p in jax.tree.leaves(e.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(p, "jaxpr", p)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
