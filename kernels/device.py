"""What this machine has: every optional import of `kernels` stands here and nowhere else."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from functools import cache
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


def why_no_cuda() -> str | None:
    """In words, why the device kernels cannot run here, and the cure; None where they can."""
    if HAS_CUDA:
        return None
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: pip install cupy-cuda13x (or cupy-cuda12x)"
    return "CuPy finds no CUDA device: look at nvidia-smi for the driver and the card"


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
            "this top-k search needs FAISS, which is not installed: pip install faiss-cpu"
        ) from error


@cache
def load_faiss_gpu() -> Any | None:
    """The `faiss` module, ready for torch tensors on a device; None without FAISS's GPU part.

    Raises RuntimeError where the GPU part is installed without the CUDA libraries that it needs.
    """
    if importlib.util.find_spec("faiss") is None:
        return None
    faiss = importlib.import_module("faiss")
    if not hasattr(faiss, "StandardGpuResources") or faiss.get_num_gpus() == 0:
        return None
    # its import teaches faiss.knn_gpu to take tensors and torch's stream
    importlib.import_module("faiss.contrib.torch_utils")
    return faiss
