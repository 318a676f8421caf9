"""Programs of this size spend their time in the compiler, so here it optimises little."""

import jax
import pytest

FLAG = "jax_disable_most_optimizations"


@pytest.fixture(autouse=True)
def quick_compile():
    before = jax.config.read(FLAG)
    jax.config.update(FLAG, True)
    yield
    jax.config.update(FLAG, before)
