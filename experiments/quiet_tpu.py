"""Keeps libtpu silent on machines without a TPU."""

import glob
import os

SINGLE_HOST = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_SKIP_MDS_QUERY": "1",
}


def quiet_missing_tpu() -> None:
    """Call before jax is imported. Changes nothing where a TPU is present or JAX_PLATFORMS is set.

    libtpu (installed for its compiler: ahead-of-time tests need no TPU) looks for a chip as soon as jax lists its
    devices. On a machine without one it prints several lines of warnings and errors, because it cannot find out
    which host of which slice it runs on. Telling it what a single host would be makes the search end quietly: it
    still finds no chip, and jax goes on to the GPUs or the CPU as before.
    """
    if "JAX_PLATFORMS" in os.environ or glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"):
        return
    for name, value in SINGLE_HOST.items():
        os.environ.setdefault(name, value)
