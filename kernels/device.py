"""The devices and optional packages of this machine. All optional imports of `kernels` are in this file."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any, Literal

Device = Literal["auto", "cpu", "cuda"]


def _cuda_device_count() -> int:
    """The number of devices that CuPy can use; 0 without CuPy or a driver."""
    if importlib.util.find_spec("cupy") is None:
        return 0
    try:
        return int(importlib.import_module("cupy").cuda.runtime.getDeviceCount())
    except (ImportError, RuntimeError):  # installed, but without a usable driver
        return 0


def _torch_sees_a_card() -> bool:
    return bool(importlib.import_module("torch").cuda.is_available())


CUDA_DEVICE_COUNT = _cuda_device_count()
# CuPy compiles and launches, torch holds the memory: both must see the GPU.
HAS_CUDA = CUDA_DEVICE_COUNT > 0 and _torch_sees_a_card()


def why_no_cuda() -> str | None:
    """Why CuPy or torch cannot use a GPU here, with the cure; None if both can."""
    if HAS_CUDA:
        return None
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: pip install cupy-cuda13x (or cupy-cuda12x)"
    if CUDA_DEVICE_COUNT == 0:
        if _torch_sees_a_card():
            return "torch finds a CUDA device and CuPy none: install the CuPy of torch's CUDA version"
        return "CuPy finds no CUDA device: look at nvidia-smi for the driver and the card"
    torch = importlib.import_module("torch")
    missing = f"CuPy finds a CUDA device and torch {torch.__version__} none"
    if torch.version.cuda is None:
        return f"{missing}, as it is a build for CPUs: install a CUDA build of torch"
    return f"{missing}: it is built for CUDA {torch.version.cuda}; nvidia-smi says which the driver supports"


def resolve(device: Device) -> Literal["cpu", "cuda"]:
    """The device for a setting: "auto" is a preference, "cpu" and "cuda" are promises.

    Raises ValueError for an unknown name, and for "cuda" if CuPy or torch finds no CUDA device.
    """
    if device == "auto":
        return "cuda" if HAS_CUDA else "cpu"
    if device == "cuda" and not HAS_CUDA:
        raise ValueError(f"device 'cuda' was asked for, but {why_no_cuda()}; or use device 'auto' or 'cpu'")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}: use 'auto', 'cpu' or 'cuda'")
    return device


def cpu_count() -> int:
    """The number of CPUs that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def nvtx_ranges() -> Any | None:
    """`torch.cuda.nvtx`, whose `range_push` and `range_pop` name ranges for nsys; None without CUDA."""
    if not HAS_CUDA:
        return None
    return importlib.import_module("torch.cuda.nvtx")


def why_no_triton(device: str) -> str | None:
    """Why Triton cannot run kernels on tensors of `device`, "cpu" or "cuda"; None if it can.

    On the CPU its interpreter runs them, slowly, if TRITON_INTERPRET was set before the first import.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    triton = importlib.import_module("triton")
    if not hasattr(triton, "knobs"):
        return f"Triton {triton.__version__} is too old: pip install --upgrade triton"
    interprets = bool(triton.knobs.runtime.interpret)
    if interprets != (device == "cpu"):
        return f"Triton {'interprets' if interprets else 'compiles for CUDA'}, which is not for {device!r}"
    return None if interprets else _why_no_launchers(triton.knobs.build)


def _why_no_launchers(build: Any) -> str | None:
    """What Triton lacks to compile the C code that launches a kernel; `build`: its settings."""
    if not (build.impl or build.cc or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler for its launchers: install gcc"
    folders = (sysconfig.get_paths()["include"], sysconfig.get_paths("posix_prefix")["include"])
    if not any(Path(folder, "Python.h").is_file() for folder in folders):
        return "Triton finds no Python.h for its launchers: install python3-dev"
    return None


@cache
def load_faiss_gpu() -> Any | None:
    """The `faiss` module, prepared for torch tensors on a device; None without FAISS's GPU part.

    Raises RuntimeError if the GPU part is installed without its CUDA libraries.
    """
    if importlib.util.find_spec("faiss") is None:
        return None
    faiss = importlib.import_module("faiss")
    if not hasattr(faiss, "StandardGpuResources") or faiss.get_num_gpus() == 0:
        return None
    # This import makes faiss.knn_gpu accept tensors and use torch's stream.
    importlib.import_module("faiss.contrib.torch_utils")
    return faiss
