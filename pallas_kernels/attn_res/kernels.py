"""What the kernels of all machines have in common: flat tokens, the custom VJP, vmap and meshes.

A machine's file gives two functions on flat tokens, sources being N arrays `[M, D]` or one buffer `[N, M, D]`:

    forward(static, sources, gain, output_scale, count) -> (mixture [M, D], lse [M], saved)
    backward(static, sources, gain, output_scale, count, saved, mixture_bar [M, D], lse_bar [M], others)
        -> (sources_bar as sources, gain_bar [D], output_scale_bar [D] or None)

with gain = query * key_scale and output_scale `[D]` float32 (or None) and count an int32 scalar or None: all are live.
saved is for the machine to lay out: logits, 1/rms and log-sum-exp of every token, float32 `[M, ...]`. others is None,
or the cotangents that the sources get from elsewhere, laid out as they are: the backward adds its own to them.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from ..varying import same_axes, vary, varying
from .inputs import Inputs

__all__ = ["MAX_SOURCES", "Machine", "Static", "by_token", "common_limits", "mix_by"]

MAX_SOURCES = 64


class Static(NamedTuple):
    eps: float
    passes: bool = False  # the sources are results too


class Machine(NamedTuple):
    forward: Callable
    backward: Callable


def mix_by(machine: Machine, inputs: Inputs, return_lse: bool, return_sources: bool = False):
    """The mix of `inputs` by a machine's kernels, each device working on its own tokens."""
    sources, count = inputs.sources, inputs.count
    if len(sources) == 1 or (isinstance(count, int) and count == 1):
        if inputs.output_scale is None and not return_lse:
            # the softmax over one source is 1, whatever the query
            return (sources[0], sources) if return_sources else sources[0]
    if isinstance(count, int):  # dead rows cost a kernel little, a copy of the others would cost as much as the mix
        count = jnp.int32(count) if count < len(sources) else None
    gain = inputs.query.astype(jnp.float32)
    if inputs.key_scale is not None:
        gain = gain * inputs.key_scale.astype(jnp.float32)
    scale = None if inputs.output_scale is None else inputs.output_scale.astype(jnp.float32)
    run = partial(_on_a_device, machine, Static(inputs.eps, return_sources))
    mixture, lse, *passed = _over_devices(run, sources, gain, scale, count)
    results = (mixture, *([lse] if return_lse else []), *passed)
    return results if len(results) > 1 else mixture


def common_limits(inputs: Inputs, machine: str) -> str | None:
    """Why no kernel can serve these inputs, in a clause; None if one can. machine is "TPU" or "GPU"."""
    first = inputs.sources if inputs.is_buffer else inputs.sources[0]
    if inputs.compute_dtype != jnp.float32 or first.dtype not in (jnp.bfloat16, jnp.float32):
        computed = f"the sources are {first.dtype}, computed in {inputs.compute_dtype}"
        return f"{computed}, and the kernel reads bfloat16 and float32"
    if len(inputs.sources) > MAX_SOURCES:
        return f"there are {len(inputs.sources)} sources and the kernel takes {MAX_SOURCES}"
    if _spec(first)[-1] is not None or (inputs.is_buffer and _spec(first)[0] is not None):
        return "channels or rows of the bank lie over several devices and the kernel sums over them on one"
    mesh = jax.sharding.get_abstract_mesh()
    if auto := [n for n in mesh.axis_names if n in mesh.auto_axes and mesh.shape[n] > 1]:
        return f"mesh axes {auto} are Auto and jax cannot split a {machine} kernel over them"
    return None


def _over_devices(run, sources, gain, scale, count):
    """run on each device's own tokens, where the sources lie on Explicit axes; lse is laid out as the tokens."""
    first = jax.tree.leaves(sources)[0]
    sharding = getattr(jax.typeof(first), "sharding", None)
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return run(*same_axes((sources, gain, scale, count)))
    whole = PartitionSpec()
    tokens = _spec(first)[0 if isinstance(sources, tuple) else 1 : -1]
    arrays = (sources, gain, scale, count)
    laid = PartitionSpec(*tokens, None) if isinstance(sources, tuple) else PartitionSpec(None, *tokens, None)
    specs = (jax.tree.map(lambda _: laid, sources), *(None if x is None else whole for x in arrays[1:]))
    arrays = jax.tree.map(
        lambda x, spec: jax.sharding.reshard(x, jax.NamedSharding(sharding.mesh, spec)), arrays, specs
    )
    out = PartitionSpec(*tokens, None), PartitionSpec(*tokens), *([specs[0]] if run.args[1].passes else [])
    return jax.shard_map(lambda *x: run(*same_axes(x)), in_specs=specs, out_specs=out)(*arrays)


def _spec(x) -> tuple:
    spec = getattr(getattr(jax.typeof(x) if isinstance(x, jax.Array) else x, "sharding", None), "spec", None)
    spec = tuple(spec or ())
    return spec + (None,) * (x.ndim - len(spec))


def _on_a_device(machine, static, sources, gain, scale, count):
    """Tokens of any shape, made flat."""
    first = jax.tree.leaves(sources)[0]
    shape = first.shape if isinstance(sources, tuple) else first.shape[1:]
    if 0 in shape:
        empty = jnp.zeros(shape, first.dtype)
        return empty, jnp.zeros(shape[:-1], jnp.float32), *([sources] if static.passes else [])
    flat = (-1, shape[-1]) if isinstance(sources, tuple) else (len(sources), -1, shape[-1])
    flat_sources = jax.tree.map(lambda x: x.reshape(flat), sources)
    mixture, lse, *passed = _mix(machine, static, flat_sources, gain, scale, count)
    passed = jax.tree.map(lambda x: x.reshape(first.shape), passed)
    return mixture.reshape(shape), lse.reshape(shape[:-1]), *passed


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mix(machine, static, sources, gain, scale, count):
    return _mix_forward(machine, static, sources, gain, scale, count)[0]


def _mix_forward(machine, static, sources, gain, scale, count):
    mixture, lse, saved = by_token(partial(machine.forward, static))(sources, gain, scale, count)
    passed = [sources] if static.passes else []
    return (mixture, lse, *passed), (sources, gain, scale, count, saved)


def _mix_backward(machine, static, residuals, cotangents):
    mixture_bar, lse_bar, *others = cotangents
    call = by_token(partial(machine.backward, static))
    sources_bar, gain_bar, scale_bar = call(*residuals, mixture_bar, lse_bar, others[0] if others else None)
    return sources_bar, gain_bar, scale_bar, None


_mix.defvjp(_mix_forward, _mix_backward)


def by_token(call: Callable) -> Callable:
    """call with a rule for vmap, where Pallas has none of use: the calls one after the other."""
    batched_call = jax.custom_batching.custom_vmap(call)

    def run(*args):
        # custom_vmap forgets over which axes of a shard_map its results vary: as all of its arguments do.
        return jax.tree.map(lambda x: vary(x, varying(args)), batched_call(*args))

    @batched_call.def_vmap
    def rule(n, batched, *args):
        args = jax.tree.map(lambda x, own: x if own else jnp.broadcast_to(x, (n, *x.shape)), args, tuple(batched))
        out = jax.lax.map(lambda one: run(*one), args)
        return out, jax.tree.map(lambda _: True, out)

    return run
