"""Counts tokens of prompts: with the model's tokenizer if available, else with an approximation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.prompts.builders import Prompt

# ChatML around a system and a user message, and before the reply (counted for Qwen2.5's template).
TEMPLATE_TOKENS = 13
REMEMBERED_LINES = 1 << 16
BYTES_PER_TOKEN = 4  # 3.5 to 4.5 for English prose in common tokenizers


class TokenCount:
    """Counts tokens line by line with a cache for repeated lines. No tokenizer joins tokens across lines."""

    def __init__(
        self, name: str, count: Callable[[str], int], *, template_tokens: int = TEMPLATE_TOKENS
    ) -> None:
        """`name`: the method, for messages. `template_tokens`: the tokens that a chat template adds."""
        self.name = name
        self.template_tokens = template_tokens
        self._of_line = lru_cache(REMEMBERED_LINES)(count)

    def of_text(self, text: str) -> int:
        return sum(map(self._of_line, text.splitlines(keepends=True)))

    def of_prompt(self, prompt: Prompt) -> int:
        return self.template_tokens + self.of_text(prompt.system) + self.of_text(prompt.user)


def token_count(settings: Settings, tokenizer: Path | None = None) -> TokenCount:
    """Count with the tokenizer in this folder (or file), by default with the encoder's, else as bytes / 4.

    UndertowError: the given tokenizer is unusable.
    """
    if tokenizer is not None:
        file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
        return _by_file(file, f"the tokenizer {tokenizer}")
    if settings.encoder.startswith(("hash:", "openai:")):
        return TokenCount(f"bytes / {BYTES_PER_TOKEN}", by_bytes)
    from undertow.engine.encoders.model_files import model_folder

    file = model_folder(settings.encoder) / "tokenizer.json"
    return _by_file(file, f"the encoder's tokenizer ({settings.encoder}), not the LLM's")


def by_bytes(text: str) -> int:
    return math.ceil(len(text.encode()) / BYTES_PER_TOKEN)


def _by_file(file: Path, name: str) -> TokenCount:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception for a malformed file
        raise UndertowError(
            f"{file} cannot be used as a tokenizer ({error}). Name a model's folder, with its tokenizer.json."
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TokenCount(name, partial(_length, tokenizer))


def _length(tokenizer: Any, text: str) -> int:
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return len(encoding.ids)
