"""float32, float16 and bfloat16 arrays: which is which, and conversions that numpy lacks.

numpy has no bfloat16. Here it is the tagged dtype `kdtr.bfloat16` (a field of u2 bits); arrays of
`ml_dtypes.bfloat16` are taken too, without importing that package.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .kdtr import bfloat16

CODES = {"float32": 2, "float16": 3, "bfloat16": 4}
"""KDT_F32, KDT_F16, KDT_BF16"""


def float_name(dtype: Any) -> str | None:
    """ "float32", "float16" or "bfloat16"; None for any other dtype."""
    dtype = np.dtype(dtype)
    if dtype == bfloat16 or (dtype.name == "bfloat16" and dtype.itemsize == 2):
        return "bfloat16"
    return dtype.name if dtype in (np.float32, np.float16) else None


def to_float32(array: Any) -> Any:
    """The same numbers as float32, exactly."""
    if float_name(array.dtype) != "bfloat16":
        return np.asarray(array, np.float32)
    bits = np.ascontiguousarray(array).view(np.uint16)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_float32(array: Any, dtype: Any) -> Any:
    """float32 numbers rounded to nearest even in a float dtype; NaN stays NaN."""
    values = np.ascontiguousarray(array, np.float32)
    if float_name(dtype) != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    rounded = np.where(np.isnan(values), ((bits >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16), rounded)
    return rounded.view(dtype).reshape(values.shape)
