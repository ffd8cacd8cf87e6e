"""Checks the machine, the encoder, the store and the LLM server, and reports in words."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import sys
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from undertow.engine.base.model import UndertowError
from undertow.engine.encoders.model_files import BF16_UNITS
from undertow.engine.storage.location import Location

if TYPE_CHECKING:
    from undertow.engine.base.config import Settings

PACKAGES = ("torch", "transformers", "sentence-transformers", "pylance", "numba", "openai")
FAISS_PACKAGES = ("faiss-cpu", "faiss-gpu", "faiss-gpu-cuvs")  # one of them: all are the module `faiss`
VECTOR_UNITS = {"avx512f": "AVX512", "avx2": "AVX2"}
LOW_DISK_BYTES = 2 << 30


class Finding(NamedTuple):
    """One check. `ok` False asks for attention; `needed`: Undertow cannot work without it."""

    what: str
    ok: bool
    text: str
    needed: bool = False


def examine(settings: Settings, store: Location | None) -> list[Finding]:
    """Every check in order; none raises or changes anything. The encoder and the server are tried out."""
    return [
        _python(),
        *_packages(),
        _faiss(),
        _cpu(),
        *_gpu(settings),
        _encoder(settings),
        *([] if store is None else _store(settings, store)),
        _server(settings),
    ]


def _python() -> Finding:
    found = platform.python_version()
    ok = sys.version_info >= (3, 11)
    return Finding("python", ok, f"{found} on {platform.system()} {platform.machine()}", needed=True)


def _installed(name: str) -> str | None:
    """The version of a package; None: it is not installed."""
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def _packages() -> list[Finding]:
    found = {name: _installed(name) for name in PACKAGES}
    return [
        Finding(name, number is not None, number or f"is not installed: pip install {name}", needed=True)
        for name, number in found.items()
    ]


def _cpu() -> Finding:
    cores = f"{len(os.sched_getaffinity(0)) if sys.platform == 'linux' else os.cpu_count()} cores"
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return Finding("cpu", True, f"{cores}; its instruction sets cannot be read here")
    if unit := next((name for flag, name in BF16_UNITS.items() if flag in flags), None):
        return Finding("cpu", True, f"{cores}, {unit}: the encoder runs in bf16")
    vector = next((name for flag, name in VECTOR_UNITS.items() if flag in flags), None)
    if vector is None:
        return Finding("cpu", False, f"{cores}, no AVX2: the encoder runs in fp32 and is slow")
    missing = " or ".join(BF16_UNITS.values())
    return Finding("cpu", True, f"{cores}, {vector}, no {missing}: the encoder runs in fp32")


def _faiss() -> Finding:
    found = {name: number for name in FAISS_PACKAGES if (number := _installed(name))}
    text = ", ".join(f"{name} {number}" for name, number in found.items())
    if not found:
        return Finding("faiss", False, "is not installed: pip install faiss-cpu", needed=True)
    if len(found) > 1:
        cure = f"they overwrite each other's files: pip uninstall {' '.join(found)}, then install one of them"
        return Finding("faiss", False, f"{text}: {cure}")
    return Finding("faiss", True, text)


def _gpu(settings: Settings) -> list[Finding]:
    """The GPU, its search library, and the division of its memory; one finding where there is no GPU."""
    from undertow.kernels.device import CUDA_DEVICE_COUNT, why_no_cuda

    if why := why_no_cuda():
        if settings.device == "cuda":
            return [Finding("gpu", False, f"the device setting is cuda, but {why}", needed=True)]
        return [Finding("gpu", True, f"{why}: everything runs on the CPU")]
    if settings.device == "cpu":
        return [Finding("gpu", True, f"{CUDA_DEVICE_COUNT} CUDA devices, unused: the device setting is cpu")]
    import torch

    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    memory = f"{_gib(free_bytes)} of {_gib(total_bytes)} GiB free"
    versions = f"torch for CUDA {torch.version.cuda}, driver for CUDA {_driver_cuda()}"
    return [
        Finding("gpu", True, f"{card.name}, {memory}; {versions}"),
        _faiss_gpu(),
        _division(settings, free_bytes, total_bytes),
    ]


def _driver_cuda() -> str:
    """The newest CUDA that the driver supports."""
    number = import_module("cupy").cuda.runtime.driverGetVersion()
    return f"{number // 1000}.{number % 1000 // 10}"


def _faiss_gpu() -> Finding:
    from undertow.kernels.device import load_faiss_gpu

    try:
        found = load_faiss_gpu()
    except (RuntimeError, ImportError) as error:
        return Finding("gpu search", False, f"FAISS's GPU part does not load: {error}", needed=True)
    if found is None:
        text = "by torch: the installed FAISS has no GPU part (docs/gpu.md says how to install faiss-gpu)"
        return Finding("gpu search", True, text)
    return Finding("gpu search", True, "by faiss-gpu")


def _division(settings: Settings, free_bytes: int, total_bytes: int) -> Finding:
    """The division that an engine would make at its start, while this process uses no GPU memory."""
    shares = settings.shares
    try:
        arena = shares.arena_bytes(total_bytes, free_bytes)
    except UndertowError as error:
        return Finding("gpu memory", False, str(error), needed=True)
    encoder, llm = (_gib(share * total_bytes) for share in (shares.encoder, shares.llm))
    text = f"arena {_gib(arena)}, encoder {encoder}, LLM server {llm} GiB (UNDERTOW_CARD_SHARES)"
    return Finding("gpu memory", True, text)


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f}"


def _encoder(settings: Settings) -> Finding:
    from undertow.engine.encoders.factory import make_encoder

    try:
        encoder = make_encoder(settings)
        encoder.encode(["a first sentence"])
    except (UndertowError, ValueError, OSError, ImportError) as error:
        return Finding("encoder", False, str(error), needed=True)
    made = encoder.fingerprint
    return Finding("encoder", True, f"{made.model}, {made.dim} dimensions, {made.dtype} on {made.device}")


def _store(settings: Settings, store: Location) -> list[Finding]:
    from undertow.engine.encoders.base import Fingerprint
    from undertow.engine.storage.store_info import StoreError, read_info

    try:
        info = read_info(store)
        made_by = Fingerprint.stored(info.encoder).model
        same = made_by == settings.encoder
        cure = "" if same else f"; give --encoder {made_by} or set UNDERTOW_ENCODER"
        finding = Finding("store", same, f"format {info.format_version}, encoder {made_by}{cure}")
    except StoreError as error:
        finding = Finding("store", False, str(error), needed=True)
    if store.folder is None:
        return [finding]
    folder = next(p for p in (store.folder, *store.folder.parents) if p.is_dir())
    writable = os.access(folder, os.W_OK)
    text = f"{folder} can{'' if writable else 'not'} be written"
    free_bytes = shutil.disk_usage(folder).free
    ok = free_bytes >= LOW_DISK_BYTES
    return [
        finding,
        Finding("store folder", writable, text, needed=True),
        _rights(store.folder),
        Finding("disk", ok, f"{_gib(free_bytes)} GiB free" + ("" if ok else ": free some")),
    ]


def _rights(folder: Path) -> Finding:
    """Whether other users of this machine can read what is in a store's folder."""
    try:
        shared = _is_shared(folder) and sorted(path.name for path in folder.iterdir() if _is_shared(path))
    except OSError as error:
        return Finding("store rights", True, f"cannot be read: {error.strerror}")
    if not shared:
        return Finding("store rights", True, "other users cannot read its files")
    return Finding("store rights", False, f"other users can read {shared[0]} in it: chmod -R go-rwx {folder}")


def _is_shared(path: Path) -> bool:
    """Whether its group, or everybody, may read or enter it."""
    return bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))


def _server(settings: Settings) -> Finding:
    if settings.llm_url is None:
        text = "none is set: turns are stored and searchable, consolidation waits. Give --llm URL"
        return Finding("llm server", False, text)
    from undertow.engine.llm.client import BadReply, OpenAILLM
    from undertow.prompts.builders import ShownTurn, direct_prompt

    try:
        with OpenAILLM(settings) as llm:
            health = llm.healthy()
            if health.ok:  # a first prompt shows what the server refuses of requests
                prompt = direct_prompt([ShownTurn(1, "2026-01-05", "Ann: I have a sailing boat.")], [])
                llm.submit(prompt, tenant="doctor").result(settings.llm_timeout_s)
                health = llm.healthy()
    except (TimeoutError, BadReply) as error:
        return Finding(
            "llm server", False, f"{health.text}. A prompt failed: {str(error) or 'no reply in time'}"
        )
    except (UndertowError, ValueError) as error:
        return Finding("llm server", False, str(error), needed=True)
    return Finding("llm server", health.ok, health.text, needed=True)
