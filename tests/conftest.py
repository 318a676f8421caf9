"""Every test runs on the CPU with eight fake devices, so that meshes can be tested on any machine.

But for those marked gpu, asked for by `pytest -m gpu`: jax then takes the GPU, if there is one.
"""

import os
import sys

if any("gpu" in pair for pair in zip(sys.argv, sys.argv[1:], strict=False) if "-m" in pair):
    os.environ.setdefault("JAX_PLATFORMS", "")  # whatever there is, also in the processes of pytest-xdist
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()

import pytest  # noqa: E402  (after the environment is set)

MAPS = "/proc/self/maps"
MOST_MAPS = 30_000  # Linux gives a process 65,530; XLA's CPU compiler ends it with a segmentation fault beyond


@pytest.fixture(autouse=True)
def forget_programs_when_there_are_many():
    """Every compiled program holds mappings of memory, and a worker compiles thousands in one run of the suite."""
    yield
    if os.path.exists(MAPS):
        with open(MAPS, "rb") as maps:
            many = sum(1 for _ in maps) > MOST_MAPS
        if many:
            import jax

            jax.clear_caches()
