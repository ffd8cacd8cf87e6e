"""The steps of the kit for a rented machine: whatever becomes of one, the next is run, in time."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

KIT = Path(__file__).resolve().parents[2] / "bench" / "gpu" / "kit"
SCRIPT = """
folder=none all_seconds=60
. {steps}
step fails 5 bash -c 'echo one; exit 3'
step hangs {limit} sleep 600
step works 5 echo three
finish
"""


def run(folder: Path, limit: int = 1, **environment: str) -> tuple[str, str]:
    """What the script prints, and its log, the only file of its output."""
    script = folder / "some.sh"
    script.write_text(SCRIPT.format(steps=KIT / "steps.sh", limit=limit))
    env = os.environ | {"OUT": str(folder / "out"), "KIT_SITE": str(folder / "site")} | environment
    done = subprocess.run(
        ["bash", str(script)], cwd=folder, env=env, capture_output=True, text=True, timeout=60
    )
    assert [path.name for path in (folder / "out").iterdir()] == ["some.log"]
    return done.stdout, (folder / "out" / "some.log").read_text()


def test_a_step_that_fails_or_hangs_costs_no_other_its_turn(tmp_path: Path) -> None:
    printed, log = run(tmp_path)
    table = [line.split()[:3] for line in printed.splitlines()[-3:]]
    assert table == [["fails", "exit", "3"], ["hangs", "exit", "124"], ["works", "exit", "0"]]
    assert "one\n" in log and "three\n" in log and log.endswith(printed[printed.index("==> steps") :])


def test_all_steps_together_have_a_limit(tmp_path: Path) -> None:
    printed, _ = run(tmp_path, limit=500, KIT_SECONDS="14")
    given = re.search(r"==> hangs \(at most (\d+) s\)", printed)
    assert given is not None and int(given[1]) <= 9
    assert "hangs          exit 124" in printed and "works          not run" in printed


def test_one_step_alone(tmp_path: Path) -> None:
    printed, _ = run(tmp_path, STEPS="works")
    assert printed.split("==> steps\n")[1].split()[:3] == ["works", "exit", "0"]


@pytest.mark.parametrize("script", ["kit.sh", "kit/kernels.sh", "kit/engine.sh", "kit/steps.sh"])
def test_the_scripts_are_bash(script: str) -> None:
    done = subprocess.run(["bash", "-n", str(KIT.parent / script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
