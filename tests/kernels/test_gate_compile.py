"""gate.cu compiles for the cards it is meant for, and its inner loop stays in registers."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from undertow.kernels.gate.cuda_gate import BLOCK_THREADS, BLOCKS_PER_SM, WARP, Rings, source

REGISTERS_PER_SM = 65_536
# of sm_90, for one block
SHARED_BYTES = 227 << 10


@pytest.fixture
def nvcc(lacking: Callable[[str], NoReturn]) -> str:
    return shutil.which("nvcc") or lacking("nvcc on the PATH, to compile gate.cu")


def compiled(nvcc: str, folder: Path, *options: str) -> str:
    """What the compiler says about gate.cu; an error of it is an AssertionError."""
    (folder / "gate.cu").write_text(source())
    command = [nvcc, "-std=c++17", *options, str(folder / "gate.cu"), "-o", str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dim", [64, 72, 384, 1024])
def test_it_compiles_without_spills_and_fills_the_card(
    arch: str, dim: int, nvcc: str, tmp_path: Path
) -> None:
    options = ("-cubin", f"-arch={arch}", f"-DDIM={dim}", "-Xptxas", "-v", "-Werror", "all-warnings")
    report = compiled(nvcc, tmp_path, *options)
    assert {"scan", "tally", "merge"} <= set(re.findall(r"Compiling entry function '(\w+)'", report))
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spills and set(spills) == {("0", "0", "0")}
    registers = max(int(count) for count in re.findall(r"Used (\d+) registers", report))
    assert registers * BLOCK_THREADS * BLOCKS_PER_SM <= REGISTERS_PER_SM


@pytest.mark.parametrize(("dim", "warps", "stages"), [(8, 16, 3), (64, 16, 3), (384, 8, 1), (768, 4, 1)])
def test_with_rings_it_fits_a_multiprocessor_of_sm_90(
    dim: int, warps: int, stages: int, nvcc: str, tmp_path: Path
) -> None:
    rings = Rings.fitting(dim, SHARED_BYTES)
    assert rings and (rings.warps, rings.stages) == (warps, stages)
    assert rings.shared_bytes == warps * stages * (32 * 2 * dim + 8) <= SHARED_BYTES
    options = ("-cubin", "-arch=sm_90", f"-DDIM={dim}", *rings.options, "-Xptxas", "-v")
    report = compiled(nvcc, tmp_path, *options)
    assert set(re.findall(r"(\d+) bytes spill", report)) == {"0"}
    registers = max(int(count) for count in re.findall(r"Used (\d+) registers", report))
    assert registers * rings.warps * WARP <= REGISTERS_PER_SM
    assert Rings.fitting(1024, SHARED_BYTES) is None, "four warps do not fit"


def test_the_scan_keeps_many_loads_on_their_way(nvcc: str, tmp_path: Path) -> None:
    """At least 12 loads of 16 bytes a lane are issued before the first product waits for one."""
    if (cuobjdump := shutil.which("cuobjdump")) is None or shutil.which("nvdisasm") is None:
        pytest.skip("cuobjdump and nvdisasm are not on the PATH: machine code is not looked at")
    compiled(nvcc, tmp_path, "-cubin", "-arch=sm_90", "-DDIM=384")
    command = [cuobjdump, "-sass", "-fun", "scan", str(tmp_path / "out")]
    code = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert code[: code.index("HMMA")].count("LDG.E.128") >= 12


def test_it_needs_no_header() -> None:
    """CuPy compiles it by NVRTC, which sees no header of the host's."""
    assert "#include" not in source()
