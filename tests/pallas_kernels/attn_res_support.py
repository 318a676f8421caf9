"""What the tests of attn_res share: problems, and all results and gradients of one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attn_res import attn_res


class Problem(NamedTuple):
    sources: np.ndarray  # [N, ..., D]
    query: np.ndarray
    key_scale: np.ndarray
    output_scale: np.ndarray
    cotangent: np.ndarray  # [..., D]
    lse_cotangent: np.ndarray  # [...]


def make_problem(n: int, tokens=(2, 5), dim=24, seed=0, spread=1.0) -> Problem:
    r = np.random.default_rng(seed)
    scale = np.exp(spread * r.normal(size=(n, *tokens, 1)))
    return Problem(
        sources=r.normal(size=(n, *tokens, dim)) * scale,
        query=r.normal(size=dim) * 0.5,
        key_scale=1 + 0.3 * r.normal(size=dim),
        output_scale=1 + 0.3 * r.normal(size=dim),
        cotangent=r.normal(size=(*tokens, dim)),
        lse_cotangent=r.normal(size=tokens),
    )


def as_form(sources, form: str):
    return tuple(sources) if form == "sequence" else jnp.asarray(sources)


def value_and_grads(
    problem: Problem, dtype, form="sequence", backend="xla", norm=False, vectors=jnp.float32, passes=0, **kw
):
    """(mixture, lse, {argument: gradient}) for a loss that uses both outputs; and the first `passes` sources, as they
    are returned."""
    args = {
        "sources": as_form(jnp.asarray(problem.sources, dtype), form),
        "query": jnp.asarray(problem.query, vectors),
        "key_scale": jnp.asarray(problem.key_scale, vectors),
    }
    if norm:
        args["output_scale"] = jnp.asarray(problem.output_scale, vectors)

    def loss(args):
        mixture, lse, *passed = attn_res(**args, return_lse=True, return_sources=passes > 0, backend=backend, **kw)
        total = jnp.sum(mixture * problem.cotangent) + jnp.sum(lse * problem.lse_cotangent)
        for i in range(passes):
            total += (-1) ** i * jnp.sum(passed[0][i] * problem.cotangent)
        return total, (mixture, lse)

    (_, (mixture, lse)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(args)
    if form == "sequence":
        grads["sources"] = jnp.stack(grads["sources"])
    return mixture, lse, grads
