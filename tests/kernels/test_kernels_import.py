"""How `kernels/` is imported: not by others in place of their own, and with little else installed.

Our folder must not pass for Hugging Face's package of that name (design: no __init__.py): transformers
imports `kernels` where it finds it. With the repository root first on the path, as in a Ray worker
started from a checkout, a regular package of ours would be taken for it and break the import.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

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
    assert (ROOT / "kernels" / "device.py").exists()
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
        from undertow.kernels.arena.arena import Arena
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


BARE = """
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

ABSENT = {"numba", "llvmlite", "faiss", "cupy", "lance", "pyarrow", "ray", "transformers"}


class Without(MetaPathFinder):
    # another finder, which does not find what is to be absent

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else self.finder.find_spec(name, path, target)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import importlib

# These need numba, which a machine with a GPU may lack.
CPU_ONLY = {"compiled_rows", "slab_pool", "host_memory", "cpu_gate"}
folder = Path(sys.argv[1], "kernels")
for file in sorted(folder.rglob("*.py")):
    if file.stem not in CPU_ONLY:
        parts = file.relative_to(folder).with_suffix("").parts
        importlib.import_module(".".join(("undertow", "kernels", *parts)))

import numpy as np
import torch
from undertow.kernels.arena.arena import Arena
from undertow.kernels.device import HAS_CUDA, load_faiss
from undertow.kernels.arena.device_memory import DeviceMemory
from undertow.kernels.gate.gate import Gate
from undertow.kernels.topk.ivf import IvfIndex
from undertow.kernels.topk.topk import top_k, top_k_many

assert not HAS_CUDA
assert not ABSENT & sys.modules.keys()
arena = Arena(4, DeviceMemory(4, "cpu", 1 << 16))
segment = arena.new_segment()
axes = np.eye(4, dtype=np.float16)
arena.extend(np.full(4, segment), axes, live=True)
arena.extend([segment], torch.from_numpy(axes[:1] * np.float16(0.5)), live=True)
print(top_k(arena, segment, axes[:1], 2)[1].tolist(), top_k_many(arena, [segment], axes[3:], 1)[1].tolist())
print(IvfIndex(arena, segment, Gate(arena)).search(axes[1:2], 1)[1].tolist())
read = Gate(arena).read(
    queries=axes[:1], turn_segments=[segment], episode_segments=[-1], visible=[5], theta=[0.4], k=[9]
)
print(read.rows.tolist(), read.scores.tolist())
try:
    load_faiss()
except ImportError as error:
    print(error)
try:
    Arena(4)
except ImportError as error:
    print("host:", error.name in ABSENT)
"""


def test_with_torch_and_numpy_alone_a_device_arena_works() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(ROOT)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    assert done.stdout.splitlines() == [
        "[[0, 4]] [[3]]",
        "[[1]]",
        "[0, 4] [1.0, 0.5]",
        "this top-k search needs FAISS, which is not installed: pip install faiss-cpu",
        "host: True",
    ]
