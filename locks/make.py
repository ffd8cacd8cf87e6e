"""Makes the lock files. What is pinned nowhere keeps the version that the lock has, until that is deleted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LOCKS = Path(__file__).resolve().parent
OURS = ("--constraint=constraints.txt", "--override=locks/overrides.in")
IMAGE = ("pyproject.toml", "--extra=cluster", "--extra=offline", "--extra=serve", *OURS)
SERVER = ("--python-version=3.12", "--python-platform=x86_64-manylinux_2_39")
PEERS = ("bench/peers/requirements.txt", "--constraint=bench/peers/constraints.txt")


def compiled(name: str, *options: str, wanted: str = "", python: tuple[str, ...] = ()) -> dict[str, str]:
    """The entries of one lock by package, as uv resolves them; uv's message is the error."""
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--generate-hashes"]
    command += ["--no-annotate", "--no-emit-index-url", f"--output-file={LOCKS / name}.txt", *options]
    command += python or ["--universal", "--python-version=3.11"]
    command += ["-"] if wanted else []
    subprocess.run(command, input=wanted.replace(" ", "\n"), text=True, check=True, stdout=subprocess.DEVNULL)
    made = re.split(r"^(?=[a-z])", (LOCKS / f"{name}.txt").read_text(), flags=re.MULTILINE)
    return {re.split("[=[ ]", entry)[0]: entry for entry in made[1:]}


def write(name: str, entries: dict[str, str], *left_out: dict[str, str]) -> None:
    """A lock without the packages of others."""
    names = sorted(entries.keys() - {package for other in left_out for package in other})
    (LOCKS / f"{name}.txt").write_text("# Made by `make lock`.\n" + "".join(map(entries.__getitem__, names)))


def main() -> None:
    # these two ask for other versions of what the engine needs; `make setup` installs them all the same
    alone = compiled("engine", "--no-deps", *OURS, wanted="mem0ai google-adk")
    engine = compiled("engine", "pyproject.toml", "--extra=dev", *OURS) | alone
    # what torch needs for a card alone, but for what is tested without one
    cuda = {name: engine[name] for name in engine if re.match("(nvidia|cuda)-|triton", name)}
    tested = ("nvidia-cuda-nvrtc", "triton")
    gpu = compiled("gpu", "pyproject.toml", "--extra=gpu", *OURS, wanted="faiss-gpu")
    write("engine", {name: engine[name] for name in engine if name not in cuda or name in tested})
    write("cuda", cuda)
    write("gpu", gpu, engine, cuda)
    write("service", compiled("service", *IMAGE, "--extra=streams"), cuda)
    write("peers", compiled("peers", *PEERS), cuda)
    write("vllm", compiled("vllm", "--no-deps", "serving/requirements-vllm.txt"))
    # faiss-gpu is the same module as faiss-cpu. boto3: Ray starts nodes on AWS with it
    image = compiled("image", *IMAGE, "--extra=gpu", wanted="faiss-gpu ray[default] boto3")
    write("image", image, {"faiss-cpu": ""})
    write("image-ray", compiled("image-ray", *OURS, wanted="ray[default] pydantic typer setuptools"))
    write("image-vllm", compiled("image-vllm", wanted="vllm==0.33.0", python=SERVER))
    write("tools", compiled("tools", wanted="cyclonedx-bom==7.5.0 pip-audit==2.10.1 uv==0.13.9"))


if __name__ == "__main__":
    main()
