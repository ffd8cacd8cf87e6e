"""The gate on a CUDA device: planned on the host, executed by gate.cu on torch's current stream.

Needs CuPy, which compiles gate.cu for the GPU on first use and caches the result. All memory is allocated by
torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from undertow.kernels.arena.arena import Arena
from undertow.kernels.arena.row_codes import code_bytes, codes_of
from undertow.kernels.arena.tensors import check_tensor, to_tensor
from undertow.kernels.arena.vector_checks import Vectors, check_form
from undertow.kernels.error_bounds import CODE_SLACK, tensor_core_slack
from undertow.kernels.gate.gate import GateReadings, Probes
from undertow.kernels.gate.plan import GateHits, Plan, TaskLimits
from undertow.kernels.gate.planned_gate import PlannedGate

_SOURCES = ("scores.cu", "gate.cu")

# as in gate.cu
WARP = 32
ABREAST = 8
STEP_ROWS = 32
BLOCK_THREADS = 128
BLOCKS_PER_SM = 4

# Tasks per warp: enough that the last ones to finish leave the GPU idle only briefly.
_TASKS_PER_WARP = 8
# One task for each of the four schedulers of an SM, which runs 16 warps.
_ENOUGH_OF_WARPS = 1 / 4


def source() -> str:
    """The kernels' text, for the compiler."""
    return "".join(Path(__file__).with_name(name).read_text() for name in _SOURCES)


def _struct(*fields: str) -> np.dtype[Any]:
    return np.dtype([(name, np.float64 if name == "slack" else np.int64) for name in fields])


# structs of gate.cu, passed by value; pointers are int64
_PLAN = _struct(
    "queries",
    *(name.removeprefix("probe_").removeprefix("group_") for name in Plan._fields[1:]),
    *("row", "code", "codes", "probes", "groups", "tasks", "slack"),
)
_CELLS = _struct("count", "size", "scores", "rows", "next_task")
_FOUND = _struct("count", "kept", "starts", "rows", "scores")


class Kernels(Protocol):
    """The kernels of gate.cu, compiled for one vector dimension."""

    warps: int  # the number that the device runs at a time

    def launch(self, kernel: str, warps: int, *structs: NDArray[Any]) -> None:
        """Queue a kernel with at least `warps` warps on torch's current stream; structs go by value."""


@dataclass(frozen=True)
class Rings:
    """How the scan keeps rows in shared memory, one block a multiprocessor; see "rings" in gate.cu."""

    warps: int
    stages: int  # steps of each warp that are on their way or being scored
    shared_bytes: int

    @classmethod
    def fitting(cls, scored_bytes: int, shared_bytes: int) -> Rings | None:
        """For rows of which `scored_bytes` are scored: as many warps as fit, then as many stages.

        None for vectors so wide that four warps do not fit.

        On an H100 eight warps with one stage beat four with two: while one scores, others wait for rows.
        """
        step_bytes = STEP_ROWS * scored_bytes + 8  # with a barrier
        warps = min(shared_bytes // step_bytes // 4 * 4, 16)  # the same number for each scheduler
        if warps == 0:
            return None
        stages = min(shared_bytes // (warps * step_bytes), 3)
        return cls(warps, stages, warps * stages * step_bytes)


def scored_bytes(dim: int, coded: bool) -> int:
    """Bytes that the first pass reads of a row."""
    return code_bytes(dim) if coded else -(-dim // 8) * 16


def options_of(dim: int, rings: Rings | None, coded: bool) -> tuple[str, ...]:
    """For the compiler."""
    ringed = (f"-DRING_WARPS={rings.warps}", f"-DRING_STAGES={rings.stages}") if rings else ()
    return f"-DDIM={dim}", *ringed, *(["-DCODES"] if coded else [])


class CupyKernels:
    """Compiled by NVRTC for torch's current device: with rings from compute capability 9.0 on."""

    def __init__(self, dim: int, coded: bool) -> None:
        self._cupy = importlib.import_module("cupy")
        card = self._cupy.cuda.Device(torch.cuda.current_device())
        bulk_copies = int(card.compute_capability) >= 90
        shared_bytes = card.attributes["MaxSharedMemoryPerBlockOptin"]
        rings = Rings.fitting(scored_bytes(dim, coded), shared_bytes) if bulk_copies else None
        module = self._cupy.RawModule(code=source(), options=options_of(dim, rings, coded))
        self._functions = {name: module.get_function(name) for name in ("scan", "tally", "merge")}
        self._forms = dict.fromkeys(self._functions, (BLOCK_THREADS // WARP, 0))
        blocks = card.attributes["MultiProcessorCount"] * (1 if rings else BLOCKS_PER_SM)
        if rings:
            self._functions["scan"].max_dynamic_shared_size_bytes = rings.shared_bytes
            self._forms["scan"] = (rings.warps, rings.shared_bytes)
        self.warps = int(blocks) * self._forms["scan"][0]

    def launch(self, kernel: str, warps: int, *structs: NDArray[Any]) -> None:
        in_block, shared_bytes = self._forms[kernel]
        blocks = -(-warps // in_block)
        # As plain bytes: CuPy describes every field of a struct anew, which takes longer than the launch.
        values = [struct.view(f"V{struct.itemsize}") for struct in structs]
        with self._cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
            self._functions[kernel]((blocks,), (in_block * WARP,), values, shared_mem=shared_bytes)


@cache
def _cupy_kernels(dim: int, device: int, coded: bool) -> CupyKernels:
    return CupyKernels(dim, coded)


@dataclass(frozen=True)
class PreparedLaunch:
    """One batch on the device, which can be launched repeatedly. Valid until the arena changes."""

    probes: Probes
    plan: NDArray[Any]  # structs of gate.cu
    cells: NDArray[Any]
    found: NDArray[Any]
    counted: torch.Tensor  # int64 [3 p + 1]: starts, count, kept
    rows: torch.Tensor  # int64, room for all lists
    scores: torch.Tensor  # float64
    memory: tuple[torch.Tensor, ...]  # other memory that the structs point to
    scanned_bytes: int  # bytes of the rows, or codes, that the first pass reads, each counted once


class CudaGate(PlannedGate):
    """Three kernels over rows on the device. Results return as compact lists.

    `read` is `prepare`, `launch` and `collect`, in parts if the batch would take too much space. `launch`
    alone neither copies nor synchronises, so that CUDA events can time it.
    """

    def __init__(self, arena: Arena, kernels: Kernels | None = None) -> None:
        super().__init__(arena)
        self._device = torch.device(arena.device)
        self._coded = arena.code_places is not None
        self._kernels = kernels or _cupy_kernels(arena.dim, torch.cuda.current_device(), self._coded)

    def _cut(self) -> TaskLimits:
        warps = self._kernels.warps
        return TaskLimits(
            tasks=warps * _TASKS_PER_WARP,
            least_work=STEP_ROWS,
            abreast=ABREAST,
            step_rows=STEP_ROWS,
            enough=max(int(warps * _ENOUGH_OF_WARPS), 1),
        )

    def _run(self, probes: Probes, plan: Plan) -> GateReadings:
        prepared = self._prepare(probes, plan)
        self.launch(prepared)
        return self.collect(prepared)

    def prepare(self, **asked: Any) -> PreparedLaunch:
        """Check, plan and upload one batch, with the arguments of `read`. It is not split."""
        probes = self._check(**asked)
        return self._prepare(probes, self._plan(probes, self._cut()))

    def launch(self, prepared: PreparedLaunch) -> None:
        """Queue the kernels of a batch on torch's current stream."""
        plan, cells, found = prepared.plan, prepared.cells, prepared.found
        count = int(plan["probes"])
        if count == 0:
            return
        # An empty grid is an error, and segments without rows have no tasks.
        self._kernels.launch("scan", max(1, min(self._kernels.warps, int(plan["tasks"]))), plan, cells)
        self._kernels.launch("tally", count, plan, cells, found)
        starts, kept = prepared.counted[: count + 1], prepared.counted[2 * count + 1 :]
        torch.cumsum(kept, 0, out=starts[1:])
        self._kernels.launch("merge", count, plan, cells, found)

    def collect(self, prepared: PreparedLaunch) -> GateReadings:
        """Wait for a launched batch. Returns its readings."""
        count = int(prepared.plan["probes"])
        if count == 0:  # nothing was launched
            counted = np.zeros(1, np.int64)
        else:
            (counted,) = _to_host(prepared.counted[: 2 * count + 1])
        starts = counted[: count + 1]
        rows, scores = _to_host(prepared.rows[: starts[-1]], prepared.scores[: starts[-1]])
        return self._readings(prepared.probes, GateHits(counted[count + 1 :], starts, rows, scores))

    def _admit(self, queries: Vectors) -> torch.Tensor:
        """The queries as float16 on the device, in the layout of the arena's rows."""
        if isinstance(queries, torch.Tensor):
            if queries.device.type != self._device.type:
                raise ValueError(f"queries are on {queries.device}, and the arena is on {self._device}")
            held = queries
        else:
            check_form(queries, self.arena.dim)
            held = to_tensor(queries).to(self._device, non_blocking=True)
        check_tensor(held, self.arena.dim)
        padding = self.arena.row_bytes // 2 - self.arena.dim
        held = (torch.nn.functional.pad(held, (0, padding)) if padding else held).contiguous()
        return held if held.data_ptr() % 16 == 0 else held.clone()

    def _prepare(self, probes: Probes, plan: Plan) -> PreparedLaunch:
        table, addresses = self._upload(plan)
        count, cells, room = len(plan.probe_place), int(plan.probe_cell[-1]), int(plan.probe_list[-1])
        listed = int(plan.probe_k.sum())
        counted, cell_counts, cell_rows, rows = (
            torch.empty(size, dtype=torch.int64, device=self._device)
            for size in (3 * count + 1, 2 * cells, room, listed)
        )
        cell_scores, scores = (
            torch.empty(size, dtype=torch.float64, device=self._device) for size in (room, listed)
        )
        next_task = torch.zeros(1, dtype=torch.int64, device=self._device)
        at, starts = cell_counts.data_ptr(), counted.data_ptr()
        places = self.arena.code_places
        codes = [] if places is None else [codes_of(probes.queries[:, : self.arena.dim])]
        coded = (0, 0, 0) if places is None else (*places, codes[0].data_ptr())
        slack = CODE_SLACK if self._coded else tensor_core_slack(self.arena.dim)
        sizes = (count, len(plan.group_rows), int(plan.group_task[-1]), slack)
        return PreparedLaunch(
            probes,
            np.array((probes.queries.data_ptr(), *addresses, *coded, *sizes), _PLAN),
            np.array(
                (at, at + 8 * cells, cell_scores.data_ptr(), cell_rows.data_ptr(), next_task.data_ptr()),
                _CELLS,
            ),
            np.array(
                (
                    starts + 8 * (count + 1),
                    starts + 8 * (2 * count + 1),
                    starts,
                    rows.data_ptr(),
                    scores.data_ptr(),
                ),
                _FOUND,
            ),
            counted,
            rows,
            scores,
            (table, cell_counts, cell_scores, cell_rows, next_task, *codes),
            int(plan.group_rows.sum()) * scored_bytes(self.arena.dim, self._coded),
        )

    def _table(self, size: int) -> NDArray[np.int64]:
        return _host_buffer(size, torch.int64, self._device).numpy()

    def _upload(self, plan: Plan) -> tuple[torch.Tensor, list[int]]:
        """The plan's table on the device, and the address of each of its arrays there."""
        table = torch.from_numpy(plan.table).to(self._device, non_blocking=True)
        moved = table.data_ptr() - plan.table.ctypes.data
        return table, [column.ctypes.data + moved for column in plan[1:]]


def _host_buffer(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory, pinned for a CUDA device."""
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


def _to_host(*tensors: torch.Tensor) -> list[NDArray[Any]]:
    """Copies of the tensors on the host, after synchronising with earlier work."""
    copies = [_host_buffer(len(tensor), tensor.dtype, tensor.device) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    if tensors[0].device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return [copy.numpy() for copy in copies]
