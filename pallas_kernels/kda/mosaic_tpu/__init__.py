"""KDA as Pallas kernels for TPU (v5e, v5p, v6e, TPU7x): forward, backward and the one-token step.

sequence.py is the way in and holds the custom VJP; forward.py and backward.py are the kernels, chunk.py, factors.py,
inverse.py, activations.py and products.py what they are made of, order.py and grid.py how their work and their arrays
are laid out; step.py is the decode kernel. The algorithm is described in chunked.py and decay.py, what differs here in
each file's head.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp

from ..chunked import Inputs
from ..mesh import rows_are_cut
from ..step import step_token
from .sequence import Settings, sequence
from .step import step_limits, tpu_step

__all__ = ["sequence_limits", "target", "tpu_sequence", "tpu_step_limits", "tpu_token"]


def tpu_sequence(q, k, v, g, beta, *, scale, initial_state, segment_ids, num_segments, activations):
    """Output `[B,T,HV,V]` in v's dtype and the final state, for validated arguments of `pallas_kernels.kda`."""
    gate, A_log, dt_bias, lower_bound, qk_l2norm, beta_sigmoid = activations
    settings = Settings(scale, num_segments, gate, lower_bound, qk_l2norm, beta_sigmoid)
    return sequence(settings, Inputs(q, k, v, g, beta, A_log, dt_bias, initial_state), segment_ids)


def tpu_token(q, k, v, g, beta, state, *, scale, slots, activations):
    """Output `[B,HV,V]` and the new state or pool, for validated arguments of `pallas_kernels.kda_step`.

    Decoding is seldom differentiated: the backward is that of the XLA path, computed anew.
    """
    gate, A_log, dt_bias, *rest = activations
    return _token((scale, gate, *rest), (q, k, v, g, beta, state, A_log, dt_bias), slots)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token(static, arrays, slots):
    return _call_step(tpu_step, static, arrays, slots)


def _token_fwd(static, arrays, slots):
    return _token(static, arrays, slots), (arrays, slots)


def _token_bwd(static, saved, cotangents):
    arrays, slots = saved
    _, vjp = jax.vjp(lambda a: _call_step(step_token, static, a, slots), arrays)
    return (*vjp(cotangents), None)


_token.defvjp(_token_fwd, _token_bwd)


def _call_step(run, static, arrays, slots):
    (scale, gate, *rest), (*tokens, A_log, dt_bias) = static, arrays
    return run(*tokens, scale=scale, slots=slots, activations=(gate, A_log, dt_bias, *rest))


def sequence_limits(arrays, *, chunk_size: int, erase: bool, kind: str | None) -> str | None:
    """Why these kernels cannot serve a sequence, in a clause; None if they can. arrays begin with q, k, v.

    kind is the device's, such as "TPU v5 lite"; None leaves the generation open.
    """
    K, V = arrays[0].shape[-1], arrays[2].shape[-1]
    if not erase:
        return "the kernel has no mode without the erase step, which linear_attention asks for"
    if chunk_size != 64:
        return f"chunk_size is {chunk_size} and the kernel's chunks have 64 tokens"
    if max(K, V) > 256:
        return f"head sizes are K = {K}, V = {V} and the kernel holds states up to 256 x 256"
    return _common_limits(arrays, kind)


def tpu_step_limits(arrays, state, slots, *, kind: str | None) -> str | None:
    """`sequence_limits` for one token."""
    q, k, v, *others = arrays
    if slots is not None and any(rows_are_cut(x) for x in (*arrays, slots, state)):
        return "rows or slots lie over several devices and the kernel's rows write to a pool of their own device"
    return step_limits(q, v, state, k, *others) or _common_limits((*arrays, state), kind)


def target(platform: str | None) -> tuple[str, str | None]:
    """(platform, device kind) that a call is for: the one asked about, else the abstract mesh's, else this machine's.

    A kind that is not known, as for a platform asked about, is None.
    """
    if platform is not None:
        return platform, None
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.platform or ("tpu" if "tpu" in device.device_kind.lower() else "gpu"), device.device_kind
    return jax.default_backend(), jax.devices()[0].device_kind


def _common_limits(arrays, kind):
    for x in arrays:
        if x is not None and x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"an argument is {x.dtype} and the kernel reads float32 and bfloat16"
    if kind is not None and re.search(r"TPU v[234]\b", kind):
        return f"the device is a {kind} and the kernel is built for v5e, v5p, v6e and TPU7x"
    mesh = jax.sharding.get_abstract_mesh()
    auto = [n for n in mesh.axis_names if n in mesh.auto_axes and mesh.shape[n] > 1]
    if auto:
        return (
            f"mesh axes {auto} are Auto and jax cannot split a TPU kernel over them; "
            "wrap the call in pallas_kernels.sharded, which says how batch and heads lie"
        )
    return None
