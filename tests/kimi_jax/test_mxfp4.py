"""K3's four-bit weights against those of another implementation, and back again."""

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.mxfp4 import decode, encode
from tests.support import golden


def test_mxfp4_is_as_published_and_exact():
    arrays = golden("layer_ops", "mxfp4")
    values = decode(arrays["packed"], arrays["scale"])
    np.testing.assert_array_equal(values, arrays["dequantised"])
    np.testing.assert_array_equal(values, values.astype(jnp.bfloat16))
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (40, 48), np.uint8)
    packed[0], packed[1], packed[2, :16] = 0, 0x88, 0x91  # zeros of either sign, codes that are all small
    scale = rng.integers(1, 250, (40, 3), np.uint8)
    scale[2], scale[3] = 0, 252  # the ends of what float32 can hold
    values = decode(packed, scale)
    assert decode(*encode(values)).tobytes() == values.tobytes()
    assert decode(*encode(np.asfortranarray(values))).tobytes() == values.tobytes()
    assert all(part.flags.c_contiguous for part in encode(np.asfortranarray(values)))
    assert np.isnan(decode(packed, np.full_like(scale, 255))).all()
    values[5, 7] *= 1.25
    with pytest.raises(ValueError, match="not all MXFP4"):
        encode(values)
    with pytest.raises(ValueError, match="multiple of 32"):
        encode(values[:, :40])
