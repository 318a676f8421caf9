"""What every KDA function returns."""

from typing import NamedTuple

import jax

__all__ = ["KDAResult"]


class KDAResult(NamedTuple):
    """output `[B, T, HV, V]` (no T for one step) in v's dtype, and the state after the last token."""

    output: jax.Array
    state: jax.Array
