"""What a layer refuses as its cache. A cache of other sizes could be read as if it were one of its own."""

from collections.abc import Sequence

import jax.numpy as jnp


def check_cache(cache, expected, any_float: Sequence[str] = ()) -> None:
    """ValueError, naming the field, unless `cache` has the kind, shapes and dtypes of `expected` (maybe abstract).

    Fields in any_float may be of any float type.
    """
    kind = type(expected).__name__
    if type(cache) is not type(expected):
        raise ValueError(f"cache is a {type(cache).__name__}, this layer's is a {kind}: it is of another model")
    for name, got, allowed in zip(expected._fields, cache, expected, strict=True):
        right_dtype = got.dtype == allowed.dtype or (name in any_float and jnp.issubdtype(got.dtype, jnp.floating))
        if got.shape != allowed.shape or not right_dtype:
            dtype = "a float type" if name in any_float else allowed.dtype
            raise ValueError(
                f"cache.{name} is {got.dtype}{list(got.shape)}, this layer's {kind} has {dtype}{list(allowed.shape)}: "
                "it is of another batch size, model or layout"
            )
