"""MXFP4 weights (OCP microscaling; K3's routed experts): 4-bit floats in runs of 32 that share a power of two.

A weight [out, in] is stored as two arrays of bytes: `packed` [out, in / 2], two codes a byte along `in`, the earlier
one in the low half, and `scale` [out, in / 32], a biased exponent. A code is a sign and one of eight magnitudes (e2m1).
Every decoded value is exact in bfloat16.
"""

import numpy as np

RUN = 32  # values that share a scale
BIAS = 127  # of the exponent
NAN = 255  # the scale byte that stands for no number

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])
_BOTH = np.stack([_VALUES[np.arange(256) & 15], _VALUES[np.arange(256) >> 4]], axis=-1)  # the two values of a byte


def decode(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """uint8 [out, in / 2] and uint8 [out, in / 32] -> float32 [out, in].

    A scale byte of 255 makes its run NaN; of 253 and 254 the largest values are beyond float32 and become infinite.
    """
    rows = packed.shape[0]
    with np.errstate(over="ignore"):
        runs = np.ldexp(_BOTH[packed].reshape(rows, -1, RUN), scale.astype(np.int32)[..., None] - BIAS)
    runs[scale == NAN] = np.nan
    return runs.reshape(rows, -1)


def encode(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float [out, in] -> (packed, scale), in C order, that decode to the same values, signs of zero included.

    Any weight that came out of `decode` has such a pair; the scale may be another than the one it came from. Raises
    ValueError if a run of 32 has none, that is, if the values are not MXFP4 numbers; nothing is rounded.
    """
    rows, columns = values.shape
    if columns % RUN:
        raise ValueError(f"{columns} columns are no multiple of {RUN}")
    runs = np.ascontiguousarray(values, np.float32).reshape(rows, -1, RUN)  # else the results are not in C order either
    largest = np.abs(runs).max(axis=-1)
    # The largest magnitude of a run becomes 4 or 6: what was a code of a larger scale still is one, twice as far up.
    exponent = np.clip(np.frexp(largest)[1] - 3, -BIAS, NAN - 1 - BIAS)
    scaled = np.ldexp(runs, -exponent[..., None])
    code = np.searchsorted(MAGNITUDES, np.abs(scaled)).clip(max=len(MAGNITUDES) - 1)
    if not (MAGNITUDES[code] == np.abs(scaled)).all():
        raise ValueError("the values are not all MXFP4 numbers")
    code = (code + 8 * np.signbit(scaled)).astype(np.uint8).reshape(rows, columns)
    return code[:, ::2] | code[:, 1::2] << 4, (exponent + BIAS).astype(np.uint8)
