"""The examples run as they stand, against a mock LLM server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ..support.cli import conversation

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def ran(folder: Path, server: str, name: str, *more: str | Path, entered: str = "") -> str:
    """What an example prints."""
    env = os.environ | {"UNDERTOW_ENCODER": "hash:384", "UNDERTOW_LLM_URL": server, "UNDERTOW_DEVICE": "cpu"}
    command = [sys.executable, str(EXAMPLES / name), *map(str, more)]
    done = subprocess.run(
        command, cwd=folder, env=env, input=entered, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    return done.stdout


def test_parquet_to_pandas(tmp_path: Path, server: str) -> None:
    out = ran(tmp_path, server, "parquet_to_pandas.py")
    assert "TableReport(turns=16, new_turns=16" in out
    assert "episode" in out and "2026-05-01" in out


def test_chatbot_in_two_chats_of_one_memory(tmp_path: Path, server: str) -> None:
    assert (
        ran(tmp_path, server, "chatbot.py", "ann", entered="I sail a red boat.\n\n").count("assistant:") == 1
    )
    assert ran(tmp_path, server, "chatbot.py", "ann", entered="Which boat?\n\n").count("assistant:") == 1


def test_multi_tenant_service(tmp_path: Path, server: str) -> None:
    out = ran(tmp_path, server, "multi_tenant_service.py")
    assert "acme finds: ['user: I signed up for the pottery course.']" in out
    assert "globex is refused: This key lacks the scope read" in out


@pytest.mark.rarely
def test_ray_dataset(tmp_path: Path, server: str) -> None:
    pq.write_table(pa.Table.from_pylist(conversation("ann", 12)), tmp_path / "log.parquet")
    out = ran(tmp_path, server, "ray_dataset.py", tmp_path / "log.parquet")
    assert "TableReport(turns=12, new_turns=12" in out
