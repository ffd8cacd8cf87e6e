"""NumPy arrays by the type of their values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Uint8s = NDArray[np.uint8]
Uint16s = NDArray[np.uint16]
Uint32s = NDArray[np.uint32]
Float16s = NDArray[np.float16]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Bytes = Uint8s
# the bits of fp16 values
Halves = Uint16s
