"""The gpu marker: skipped with a reason where there is no CUDA device, a failure where one is required."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from undertow.kernels import device

ROOT = Path(__file__).resolve().parents[2]
MARKED = """
import pytest

@pytest.mark.gpu
def test_marked():
    pass

def test_unmarked():
    pass
"""

no_card = pytest.mark.skipif(device.HAS_CUDA, reason="there is a CUDA device here")


def run(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """pytest on a small file beside our conftest."""
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = -ra --strict-markers\nmarkers =\n    gpu: as ours\n"
    )
    (folder / "test_marked.py").write_text(MARKED)
    env = {k: v for k, v in os.environ.items() if k != "UNDERTOW_REQUIRE_GPU"} | environment
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take longer to load than the tests take
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


@no_card
def test_without_a_card_the_marked_are_skipped_with_the_reason(tmp_path: Path) -> None:
    done = run(tmp_path, UNDERTOW_REQUIRE_GPU="0")
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 skipped" in done.stdout
    assert str(device.why_no_cuda()) in done.stdout


@no_card
@pytest.mark.parametrize("how", ["option", "environment"])
def test_where_a_card_is_required_they_fail_and_say_why(tmp_path: Path, how: str) -> None:
    asked = {"option": (["--require-gpu"], {}), "environment": ([], {"UNDERTOW_REQUIRE_GPU": "1"})}
    options, environment = asked[how]
    done = run(tmp_path, *options, **environment)
    assert done.returncode == 1, done.stdout
    assert "1 passed, 1 error" in done.stdout
    assert f"a GPU is required, but {device.why_no_cuda()}" in done.stdout


def test_a_file_that_lacks_a_package_fails_where_a_card_is_required(tmp_path: Path) -> None:
    lacking = 'import pytest\npytest.importorskip("no_such_package")\n'
    (tmp_path / "test_lacking.py").write_text(lacking + MARKED)
    (tmp_path / "test_other.py").write_text(lacking + "def test_it() -> None: ...\n")
    done = run(tmp_path, "--require-gpu", "test_lacking.py")
    assert done.returncode == 2, done.stdout
    assert "a GPU is required" in done.stdout and "no_such_package" in done.stdout
    assert run(tmp_path, "--require-gpu", "test_other.py").returncode == 5, "skipped: nothing for a GPU"
    assert run(tmp_path, "test_lacking.py").returncode == 5


def test_the_reason_names_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")  # before find_spec is replaced, which its modules use
    monkeypatch.setattr(device, "HAS_CUDA", True)
    assert device.why_no_cuda() is None
    monkeypatch.setattr(device, "HAS_CUDA", False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install cupy" in str(device.why_no_cuda())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert "nvidia-smi" in str(device.why_no_cuda())
