"""CUDA source compiled by NVRTC, as CuPy does it on a card, and disassembled by tools in Triton's package."""

from __future__ import annotations

import ctypes
import os
import subprocess
from importlib import metadata, util
from pathlib import Path

PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")  # torch brings one of them to a card


def library() -> ctypes.CDLL | None:
    """NVRTC, from a package."""
    for package in PACKAGES:
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        # what NVRTC has built in first, as it looks for that by name
        for part in ("libnvrtc-builtins.so", "libnvrtc.so"):
            held = ctypes.CDLL(next(str(one.locate()) for one in files if one.name.startswith(part)))
        return held
    return None


def tools() -> Path | None:
    """The folder of cuobjdump and nvdisasm."""
    triton = util.find_spec("triton")
    folder = Path(str(triton.origin)).parent / "backends" / "nvidia" / "bin" if triton else None
    return folder if folder and (folder / "cuobjdump").is_file() else None


def compiled(source: str, *options: str) -> tuple[bytes, str]:
    """(machine code, what the compiler says) of a source. AssertionError: it does not compile."""
    nvrtc, program = library(), ctypes.c_void_p()
    assert nvrtc, f"NVRTC is not installed: pip install {PACKAGES[0]}"
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"gate.cu", 0, None, None) == 0
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
    said = _got(nvrtc, "ProgramLog", program).rstrip(b"\0").decode()
    assert not failed, said
    code = _got(nvrtc, "CUBIN", program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code, said


def _got(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    assert getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    held = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, f"nvrtcGet{what}")(program, held) == 0
    return held.raw


def dumped(code: bytes, folder: Path, *options: str) -> str:
    """What cuobjdump says of machine code."""
    (found, file) = tools(), folder / "code.cubin"
    assert found, "cuobjdump is not installed: pip install triton"
    file.write_bytes(code)
    path = {"PATH": f"{found}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [str(found / "cuobjdump"), *options, str(file)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, env=os.environ | path
    ).stdout


def disassembled(code: bytes, kernel: str, folder: Path) -> str:
    """The instructions of a kernel."""
    return dumped(code, folder, "-sass", "-fun", kernel)
