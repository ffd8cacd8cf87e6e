"""What this machine has: every optional import of `kernels` stands here and nowhere else."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any, Literal

Device = Literal["auto", "cpu", "cuda"]


def _cuda_device_count() -> int:
    """Devices that CuPy can use; 0 where CuPy or a driver is missing."""
    if importlib.util.find_spec("cupy") is None:
        return 0
    try:
        cupy = importlib.import_module("cupy")
        return int(cupy.cuda.runtime.getDeviceCount())
    except (ImportError, RuntimeError):  # installed, but without a usable driver
        return 0


CUDA_DEVICE_COUNT = _cuda_device_count()
HAS_CUDA = CUDA_DEVICE_COUNT > 0


def resolve(device: Device) -> Literal["cpu", "cuda"]:
    """Turn a wish into a device: "auto" is a preference, "cpu" and "cuda" are promises.

    Raises ValueError for an unknown name, and for "cuda" on a machine without CuPy and a CUDA device.
    """
    if device == "auto":
        return "cuda" if HAS_CUDA else "cpu"
    if device == "cuda" and not HAS_CUDA:
        raise ValueError(
            "device 'cuda' was asked for, but CuPy finds no CUDA device. "
            "Install CuPy and a driver that match the card, or use device 'auto' or 'cpu'."
        )
    if device not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}: use 'auto', 'cpu' or 'cuda'")
    return device


def cpu_count() -> int:
    """CPUs that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_faiss() -> Any:
    """The `faiss` module, imported on first use. Raises ImportError that names the cure."""
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise ImportError(
            "top-k search needs FAISS, which is not installed: pip install faiss-cpu"
        ) from error
