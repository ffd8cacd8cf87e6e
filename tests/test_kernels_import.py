"""Our folder `kernels/` must not pass for Hugging Face's package of that name (design: no __init__.py).

transformers imports `kernels` where it finds it. With the repository root first on the path, as in a
Ray worker started from a checkout, a regular package of ours would be taken for it and break the import.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CHECK = """
from importlib.metadata import packages_distributions

import transformers.modeling_utils as m
from transformers.utils import import_utils

installed = any(d != "undertow" for d in packages_distributions().get("kernels", []))
assert import_utils.is_kernels_available() == installed, "our folder was taken for the package"
"""

PROBE = (
    """
import sys
assert sys.path[0] == sys.argv[1], sys.path
"""
    + CHECK
    + "print(m.PreTrainedModel.__name__)"
)


def environment(home: Path) -> dict[str, str]:
    """The root on PYTHONPATH; nothing is to be fetched, or written into the user's home."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HOME": str(home)}


def test_the_folder_at_the_root_is_no_regular_package() -> None:
    assert (ROOT / "kernels" / "gate.py").exists()
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("how", ["sys.path", "PYTHONPATH"])
def test_transformers_imports_with_the_root_first_on_the_path(how: str, tmp_path: Path) -> None:
    env = environment(tmp_path)
    if how == "PYTHONPATH":
        preamble = "import sys; sys.path.pop(0)\n"  # "-c" puts the working directory first
    else:
        del env["PYTHONPATH"]
        preamble = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    command = [sys.executable, "-c", preamble + PROBE, str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2_000:]
    assert done.stdout.strip() == "PreTrainedModel"


RAY_PROBE = f"""
import sys

import ray

ROOT = sys.argv[1]


@ray.remote(num_cpus=1)
class Worker:
    def load(self, check):
        assert ROOT in sys.path, sys.path  # Ray puts the driver's folder and PYTHONPATH there
        sys.path.remove(ROOT)
        sys.path.insert(0, ROOT)
        found = {{}}
        exec(check, found)
        from undertow.kernels.arena import Arena
        return found["m"].PreTrainedModel.__name__, Arena(8).dim


ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
print(*ray.get(Worker.remote().load.remote({CHECK!r}), timeout=240))
ray.shutdown()
"""


def test_transformers_imports_in_a_ray_actor_with_the_root_on_its_path(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'undertow[cluster]'")
    script = tmp_path / "driver.py"
    script.write_text(RAY_PROBE)
    env = {**environment(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(script), str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2_000:]
    assert done.stdout.split()[-2:] == ["PreTrainedModel", "8"], done.stdout
