"""A fixture for modules whose programs spend their time in the compiler: there it optimises little."""

import jax
import pytest

FLAG = "jax_disable_most_optimizations"


@pytest.fixture(scope="module", autouse=True)
def quick_compile():
    """Also for what a module's tests share."""
    before = jax.config.read(FLAG)
    jax.config.update(FLAG, True)
    yield
    jax.config.update(FLAG, before)
