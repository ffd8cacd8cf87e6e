"""gate.cu compiles for the cards it is meant for, and its machine code is as intended."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from undertow.kernels.gate.cuda_gate import (
    BLOCK_THREADS,
    BLOCKS_PER_SM,
    WARP,
    Rings,
    options_of,
    scored_bytes,
    source,
)

from ..support.kernels import nvrtc

REGISTERS_PER_SM = 65_536
# of sm_90, for one block
SHARED_BYTES = 227 << 10


@pytest.fixture
def packages(lacking: Callable[[str], NoReturn]) -> None:
    if nvrtc.library() is None or nvrtc.tools() is None:
        lacking("NVRTC and Triton, from packages, to compile gate.cu")


def compiled(arch: str, dim: int, rings: Rings | None = None, coded: bool = False) -> tuple[bytes, int]:
    """(machine code, most registers of a thread). AssertionError: a warning, or spilled registers."""
    code, said = nvrtc.compiled(source(), f"-arch={arch}", "-Xptxas=-v", *options_of(dim, rings, coded))
    assert "warning" not in said, said
    assert {"scan", "tally", "merge"} <= set(re.findall(r"Compiling entry function '(\w+)'", said))
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert spills and set(spills) == {("0", "0", "0")}
    return code, max(int(count) for count in re.findall(r"Used (\d+) registers", said))


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("arch", "coded", "dim"),
    [
        *itertools.product(("sm_80", "sm_90", "sm_100"), (False,), (64, 72, 384, 1024)),
        *itertools.product(("sm_80", "sm_90"), (True,), (64, 72, 384, 1024)),
        ("sm_100", True, 2048),  # rings do not fit
    ],
)
def test_it_compiles_without_spills_and_fills_the_card(arch: str, coded: bool, dim: int) -> None:
    assert compiled(arch, dim, coded=coded)[1] * BLOCK_THREADS * BLOCKS_PER_SM <= REGISTERS_PER_SM


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize(
    ("dim", "coded", "warps", "stages"),
    [
        *[(8, False, 16, 3), (64, False, 16, 3), (384, False, 8, 1), (768, False, 4, 1)],
        *[(64, True, 16, 3), (384, True, 16, 1), (1024, True, 4, 1)],
    ],
)
def test_with_rings_it_fits_a_multiprocessor(
    arch: str, dim: int, coded: bool, warps: int, stages: int
) -> None:
    rings = Rings.fitting(scored_bytes(dim, coded), SHARED_BYTES)
    assert rings and (rings.warps, rings.stages) == (warps, stages)
    assert rings.shared_bytes == warps * stages * (32 * scored_bytes(dim, coded) + 8) <= SHARED_BYTES
    assert compiled(arch, dim, rings, coded)[1] * rings.warps * WARP <= REGISTERS_PER_SM
    assert Rings.fitting(scored_bytes(1024, False), SHARED_BYTES) is None, "four warps do not fit"


@pytest.mark.usefixtures("packages")
def test_the_scan_keeps_many_loads_on_their_way(tmp_path: Path) -> None:
    """At least 12 loads of 16 bytes a lane are issued before the first product waits for one."""
    scan = nvrtc.disassembled(compiled("sm_90", 384)[0], "scan", tmp_path)
    assert scan[: scan.index("HMMA")].count("LDG.E.128") >= 12
    assert "UBLKCP" not in scan, "no bulk copies where no rings were asked for"


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(("coded", "product"), [(False, "HMMA.16816.F32"), (True, "IMMA.16832.S8.S8")])
def test_with_rings_rows_come_by_bulk_copies_and_go_to_the_tensor_cores(
    coded: bool, product: str, tmp_path: Path
) -> None:
    """The copy engine brings rows to shared memory and reports to a barrier; lanes load queries alone."""
    rings = Rings.fitting(scored_bytes(384, coded), SHARED_BYTES)
    assert rings
    scan = nvrtc.disassembled(compiled("sm_90", 384, rings, coded)[0], "scan", tmp_path)
    before = scan[scan.index("UBLKCP") : scan.index(product)]
    assert "SYNCS.ARRIVE" in scan and "SYNCS.PHASECHK" in before
    assert before.count("LDS.128") >= 6 and before.count("LDG.E.128") <= 3


def test_it_needs_no_header() -> None:
    """CuPy compiles it by NVRTC, which sees no header of the host's."""
    assert "#include" not in source()
