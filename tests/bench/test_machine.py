"""What a benchmark reports of the machine: package versions, the commit, the card; and the smallest one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from undertow.bench import machine
from undertow.bench.micro import calls


def test_versions_and_commit_are_of_here(tmp_path: Path) -> None:
    assert machine.versions()["numpy"] == np.__version__
    assert "faiss-gpu-of-no-one" not in machine.versions()
    assert machine.commit(tmp_path) is None


def test_the_librarys_calls_take_time() -> None:
    figures = calls.measure(turns=3, calls=4)
    assert figures["turns"] == 3 and 0 < figures["search_ms"] < 1_000 and 0 < figures["add_ms"] < 1_000


def test_nvidia_smi_is_asked_field_by_field(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = {"name": "NVIDIA H100", "driver_version": "580.1"}
    cases = "".join(f"*--query-gpu={field}\\ *) echo '{value}';; " for field, value in answers.items())
    (tmp_path / "nvidia-smi").write_text(f'#!/bin/sh\ncase "$*" in {cases} *) exit 2;; esac\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert machine.card_now() == {"name": "NVIDIA H100", "driver": "580.1"}
    monkeypatch.setenv("PATH", "")
    assert machine.card_now() == {}
