"""The machine that a call is for, and the choice among backends that every operation makes alike."""

import functools
import logging
import re
from collections.abc import Callable
from typing import NamedTuple

import jax

__all__ = ["BACKENDS", "KERNELS", "PLATFORMS", "Target", "choose", "hopper_limits", "tpu_limits"]

BACKENDS = ("auto", "reference", "xla", "mosaic_tpu", "mosaic_gpu")
PLATFORMS = (None, "cpu", "gpu", "cuda", "rocm", "tpu")
KERNELS = {"tpu": "mosaic_tpu", "gpu": "mosaic_gpu", "cuda": "mosaic_gpu"}  # by platform


class Target(NamedTuple):
    """The machine that a call is for; what is not known of it, as for a platform asked about, is None."""

    platform: str
    kind: str | None = None  # such as "TPU v5 lite" or "NVIDIA H200"
    compute_capability: str | None = None  # of an NVIDIA GPU that is there, such as "9.0"


def choose(
    operation: str, backend: str, limits: Callable[[str, Target], str | None], platform: str | None = None
) -> str:
    """The backend that runs. limits(kernels, machine) says why those kernels cannot serve the call there, or None.

    Raises NotImplementedError for kernels that are named and cannot serve the call.
    """
    machine = _target(platform)
    native = KERNELS.get(machine.platform)
    if backend in KERNELS.values():  # those of another machine may be named, to be interpreted or compiled ahead
        if limit := limits(backend, machine if backend == native else Target(machine.platform)):
            raise NotImplementedError(f"backend {backend!r}: {limit}; backend='xla' serves every call on every device")
        return backend
    if backend != "auto":
        return backend
    if native is None:
        return "xla"
    if limit := limits(native, machine):
        say_once(f"{operation} falls back to the XLA path: {limit}")
        return "xla"
    return native


def hopper_limits(machine: Target) -> str | None:
    """Why a Mosaic GPU kernel cannot run there, in a clause; None if it can."""
    hopper = machine.compute_capability in (None, "9.0")
    if machine.compute_capability is None and machine.kind is not None:
        hopper = re.search(r"\bG?H(100|200|20|800)\b", machine.kind) is not None
    if not hopper:
        capability = f" of compute capability {machine.compute_capability}" if machine.compute_capability else ""
        return f"the device is a {machine.kind}{capability} and the kernel is built for Hopper (9.0: H100, H200)"
    return without_mosaic_gpu()


def tpu_limits(machine: Target) -> str | None:
    """Why a Mosaic TPU kernel cannot run there, in a clause; None if it can."""
    if machine.kind is not None and re.search(r"TPU v[234]\b", machine.kind):
        return f"the device is a {machine.kind} and the kernel is built for v5e, v5p, v6e and TPU7x"
    return None


@functools.cache
def without_mosaic_gpu() -> str | None:
    try:
        import jax.experimental.pallas.mosaic_gpu  # noqa: F401
    except ImportError as error:
        return f"this jax comes without Mosaic GPU ({error})"
    return None


@functools.cache
def say_once(message: str) -> None:
    logging.getLogger("absl").warning(message)


def _target(platform: str | None) -> Target:
    """The platform asked about, else the abstract mesh's device, else this machine's."""
    if platform is not None:
        return Target(platform)
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return Target(device.platform or ("tpu" if "tpu" in device.device_kind.lower() else "gpu"), device.device_kind)
    device = jax.devices()[0]
    return Target(jax.default_backend(), device.device_kind, getattr(device, "compute_capability", None))
