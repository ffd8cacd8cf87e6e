"""What the doctor says of the card, with a card made up where there is none."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from undertow.kernels import device

pytest.importorskip("pydantic_settings", reason="the engine's packages are not installed")

from undertow.engine.base.config import Settings
from undertow.serving import doctor

GIB = 1 << 30
ON_A_CARD = ("gpu", "gpu search", "gpu memory")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An 80 GiB card with 78 GiB free."""
    monkeypatch.setattr(device, "HAS_CUDA", True)
    monkeypatch.setattr(device, "CUDA_DEVICE_COUNT", 1)
    monkeypatch.setattr(device, "load_faiss_gpu", lambda: None)
    monkeypatch.setattr(doctor, "_driver_cuda", lambda: "13.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="A Card"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (78 * GIB, 80 * GIB))
    return monkeypatch


def gpu(settings: Settings) -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in doctor._gpu(settings)}


def test_a_card_is_reported_with_its_search_and_its_division(card: pytest.MonkeyPatch) -> None:
    found = gpu(Settings(card_shares="llm=0.5,arena=0.25,encoder=0.1"))
    assert tuple(found) == ON_A_CARD
    assert all(finding.ok for finding in found.values())
    assert "A Card, 78.0 of 80.0 GiB free" in found["gpu"].text
    assert "driver for CUDA 13.0" in found["gpu"].text
    assert "by torch" in found["gpu search"].text
    assert "arena 20.0, encoder 8.0, LLM server 40.0 GiB" in found["gpu memory"].text
    card.setattr(device, "load_faiss_gpu", lambda: object())
    assert gpu(Settings())["gpu search"].text == "by faiss-gpu"


def test_a_full_card_and_a_library_that_does_not_load_ask_for_attention(card: pytest.MonkeyPatch) -> None:
    card.setattr(torch.cuda, "mem_get_info", lambda: (10 * GIB, 80 * GIB))
    card.setattr(device, "load_faiss_gpu", Mock(side_effect=RuntimeError("libcublas.so.12 is missing")))
    found = gpu(Settings())
    memory, search = found["gpu memory"], found["gpu search"]
    assert (memory.ok, memory.needed, "UNDERTOW_CARD_SHARES" in memory.text) == (False, True, True)
    assert (search.ok, "libcublas.so.12" in search.text) == (False, True)


def test_a_card_that_torch_does_not_see_is_refused_only_where_it_was_asked_for(
    card: pytest.MonkeyPatch,
) -> None:
    card.setattr(device, "HAS_CUDA", False)
    card.setattr(torch.cuda, "is_available", lambda: False)
    card.setattr(torch.version, "cuda", None)
    card.setattr("importlib.util.find_spec", lambda name: object())
    (only,) = doctor._gpu(Settings())
    assert (only.ok, only.needed) == (True, False)
    assert "install a CUDA build of torch: everything runs on the CPU" in only.text
    (only,) = doctor._gpu(Settings(device="cuda"))
    assert (only.ok, only.needed, "install a CUDA build of torch" in only.text) == (False, True, True)


def test_a_card_that_the_settings_exclude_is_reported_as_unused(card: pytest.MonkeyPatch) -> None:
    (only,) = doctor._gpu(Settings(device="cpu"))
    assert (only.ok, "unused" in only.text) == (True, True)


@pytest.mark.gpu
def test_on_this_card() -> None:
    found = gpu(Settings())
    assert tuple(found) == ON_A_CARD
    assert "GiB free" in found["gpu"].text


@pytest.mark.parametrize(
    ("installed", "ok", "says"),
    [
        (["faiss-cpu"], True, "faiss-cpu 1"),
        (["faiss-gpu"], True, "faiss-gpu 1"),
        ([], False, "pip install faiss-cpu"),
        (["faiss-cpu", "faiss-gpu"], False, "overwrite each other"),
    ],
)
def test_exactly_one_faiss_package_is_fine(
    monkeypatch: pytest.MonkeyPatch, installed: list[str], ok: bool, says: str
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(doctor, "version", version)
    found = doctor._faiss()
    assert (found.ok, says in found.text) == (ok, True)


@pytest.mark.parametrize(
    ("cupy_devices", "torch_cuda", "torch_sees", "says"),
    [
        (0, "13.0", False, "CuPy finds no CUDA device"),
        (0, "13.0", True, "torch finds a CUDA device and CuPy none"),
        (1, None, False, "a build for CPUs"),
        (1, "13.0", False, "it is built for CUDA 13.0"),
    ],
)
def test_the_reason_says_which_of_cupy_and_torch_sees_no_card(
    monkeypatch: pytest.MonkeyPatch, cupy_devices: int, torch_cuda: str | None, torch_sees: bool, says: str
) -> None:
    monkeypatch.setattr(device, "HAS_CUDA", False)
    monkeypatch.setattr(device, "CUDA_DEVICE_COUNT", cupy_devices)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_sees)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    assert says in str(device.why_no_cuda())
    with pytest.raises(ValueError, match=says):
        device.resolve("cuda")


def test_a_store_that_others_can_read_is_reported(tmp_path: Path) -> None:
    store, info = tmp_path / "store", tmp_path / "store" / "store.json"
    assert doctor._rights(store).ok, "there is none yet"
    store.mkdir(0o755)
    info.touch(0o600)
    assert doctor._rights(store).ok
    info.chmod(0o640)
    found = doctor._rights(store)
    assert not found.ok and f"can read store.json in it: chmod -R go-rwx {store}" in found.text
    store.chmod(0o700)
    assert doctor._rights(store).ok
