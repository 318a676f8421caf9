"""What the kernels of all machines have in common: settings, limits, the step's backward."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .chunked import Inputs
from .mesh import rows_are_cut
from .step import step_token

__all__ = [
    "Settings",
    "call_sequence",
    "common_limits",
    "pool_limits",
    "rows_of_vmap",
    "sequence_mode_limits",
    "with_step_gradient",
]


class Settings(NamedTuple):
    """What is static about a sequence, besides shapes."""

    scale: float
    num_segments: int | None
    gate: str
    lower_bound: float | None
    qk_l2norm: bool
    beta_sigmoid: bool


def call_sequence(
    sequence: Callable,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    scale: float,
    initial_state: jax.Array | None,
    segment_ids: jax.Array | None,
    num_segments: int | None,
    activations: tuple,
) -> tuple[jax.Array, jax.Array]:
    """sequence(Settings, Inputs, segment_ids) for validated arguments of `pallas_kernels.kda`."""
    gate, A_log, dt_bias, lower_bound, qk_l2norm, beta_sigmoid = activations
    settings = Settings(scale, num_segments, gate, lower_bound, qk_l2norm, beta_sigmoid)
    return sequence(settings, Inputs(q, k, v, g, beta, A_log, dt_bias, initial_state), segment_ids)


def with_step_gradient(step: Callable) -> Callable:
    """A kernel that takes and returns what `step_token` does, made differentiable.

    Decoding is seldom differentiated: the backward is that of the XLA path, computed anew.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def token(static, arrays, slots):
        return call(step, static, arrays, slots)

    def forward(static, arrays, slots):
        return token(static, arrays, slots), (arrays, slots)

    def backward(static, saved, cotangents):
        arrays, slots = saved
        _, vjp = jax.vjp(lambda a: call(step_token, static, a, slots), arrays)
        return (*vjp(cotangents), None)

    def call(run, static, arrays, slots):
        (scale, gate, *rest), (*tokens, A_log, dt_bias) = static, arrays
        return run(*tokens, scale=scale, slots=slots, activations=(gate, A_log, dt_bias, *rest))

    token.defvjp(forward, backward)

    def run(q, k, v, g, beta, state, *, scale, slots, activations):
        gate, A_log, dt_bias, *rest = activations
        return token((scale, gate, *rest), (q, k, v, g, beta, state, A_log, dt_bias), slots)

    return run


def rows_of_vmap(call: Callable) -> Callable:
    """A step's kernel call(tokens, parameters, slots or None, state) with a rule for vmap where Pallas has none of use.

    The rows of all calls become those of one, and their pools one pool.
    """
    run = jax.custom_batching.custom_vmap(call)

    @run.def_vmap
    def rule(n, batched, *args):
        args = jax.tree.map(lambda x, own: x if own else jnp.broadcast_to(x, (n, *x.shape)), args, tuple(batched))
        if any(batched[1]):  # a call has gate parameters of its own
            return jax.lax.map(lambda one: run(*one), args), (True, True)
        tokens, parameters, slots, state = args
        if slots is not None:
            P = state.shape[1]
            slots = jnp.where((slots >= 0) & (slots < P), slots + jnp.arange(n, dtype=jnp.int32)[:, None] * P, -1)
        tokens, slots, merged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (tokens, slots, state))
        out, new = run(tokens, tuple(x[0] for x in parameters), slots, merged)
        return (out.reshape(n, -1, *out.shape[1:]), new.reshape(state.shape)), (True, True)

    return run


# Each says why a kernel cannot serve a call, in a clause, and None where it can.


def sequence_mode_limits(chunk_size: int, erase: bool) -> str | None:
    if not erase:
        return "the kernel has no mode without the erase step, which linear_attention asks for"
    if chunk_size != 64:
        return f"chunk_size is {chunk_size} and the kernel's chunks have 64 tokens"
    return None


def pool_limits(arrays: tuple, state, slots) -> str | None:
    if slots is not None and any(rows_are_cut(x) for x in (*arrays, slots, state)):
        return "rows or slots lie over several devices and the kernel's rows write to a pool of their own device"
    return None


def common_limits(arrays: tuple, machine: str) -> str | None:
    """Of the dtypes of arrays (None is passed by) and of the mesh in force; machine is "TPU" or "GPU"."""
    for x in arrays:
        if x is not None and x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"an argument is {x.dtype} and the kernel reads float32 and bfloat16"
    mesh = jax.sharding.get_abstract_mesh()
    auto = [n for n in mesh.axis_names if n in mesh.auto_axes and mesh.shape[n] > 1]
    if auto:
        return (
            f"mesh axes {auto} are Auto and jax cannot split a {machine} kernel over them; "
            "wrap the call in pallas_kernels.sharded, which says how batch and heads lie"
        )
    return None
