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

PROBE = """
import sys
from importlib.metadata import packages_distributions

assert sys.path[0] == sys.argv[1], sys.path

import transformers.modeling_utils as m
from transformers.utils import import_utils

installed = any(d != "undertow" for d in packages_distributions().get("kernels", []))
assert import_utils.is_kernels_available() == installed, "our folder was taken for the package"
print(m.PreTrainedModel.__name__)
"""


def test_the_folder_at_the_root_is_no_regular_package() -> None:
    assert (ROOT / "kernels" / "device.py").exists()
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.rarely(how=("PYTHONPATH",))
@pytest.mark.parametrize("how", ["sys.path", "PYTHONPATH"])
def test_transformers_imports_with_the_root_first_on_the_path(how: str, tmp_path: Path) -> None:
    # nothing is to be fetched, or written into the user's home
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    if how == "PYTHONPATH":
        preamble = "import sys; sys.path.pop(0)\n"  # "-c" puts the working directory first
    else:
        del env["PYTHONPATH"]
        preamble = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    command = [sys.executable, "-c", preamble + PROBE, str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2_000:]
    assert done.stdout.strip() == "PreTrainedModel"


BARE = """
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

ABSENT = {"numba", "llvmlite", "faiss", "cupy", "lance", "pyarrow", "ray", "transformers", "triton"}


class Without(MetaPathFinder):
    # another finder, which does not find what is to be absent

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else self.finder.find_spec(name, path, target)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import importlib

folder = Path(sys.argv[1], "kernels")
for file in sorted(folder.rglob("*.py")):
    parts = file.relative_to(folder).with_suffix("").parts
    try:
        importlib.import_module(".".join(("undertow", "kernels", *parts)))
    except ImportError as error:
        print(file.stem, "needs", error.name)

import numpy as np
import torch
from undertow.kernels.arena.arena import Arena
from undertow.kernels.device import HAS_CUDA
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
    Arena(4)
except ImportError as error:
    print("host:", error.name in ABSENT)
"""


TRITON = ("attention", "bert", "decoder", "decoder_steps", "layer_norm", "linear", "linear_norm", "pool")


def test_with_torch_and_numpy_alone_a_device_arena_works() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(ROOT)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    assert done.stdout.splitlines() == [
        *(
            f"{module} needs {'triton' if module in TRITON else 'llvmlite'}"
            for module in (
                "compiled_rows",
                "host_memory",
                "bm25",
                *TRITON,
                "cpu_gate",
                "cuda_gate",
                "few_queries",
                "plan",
                "planned_gate",
                "scan",
                "hashed_words",
                "key_table",
                "pair_cosines",
                "host_rows",
            )
        ),
        "[[0, 4]] [[3]]",
        "[[1]]",
        "[0, 4] [1.0, 0.5]",
        "host: True",
    ]
