"""Counting tokens of prompts: by a tokenizer's file, or by bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.encoders.token_count import token_count
from undertow.prompts.builders import ShownTurn, episode_prompt

SETTINGS = Settings(encoder="hash:384", device="cpu", llm_url=None)


def test_a_tokenizer_counts_whole_texts_without_its_window(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.enable_truncation(5)
    words.save(str(tmp_path / "tokenizer.json"))
    tokens = token_count(SETTINGS, tmp_path)
    prompt = episode_prompt([ShownTurn(1, None, "Ana: hi\nBo: yes")] * 3)
    words.no_truncation()
    whole = sum(len(words.encode(text).ids) for text in (prompt.system, prompt.user))
    assert tokens.of_prompt(prompt) == whole + tokens.template_tokens
    assert str(tmp_path) in tokens.name


def test_without_a_tokenizer_bytes_are_counted_and_it_is_said() -> None:
    tokens = token_count(SETTINGS)
    assert (tokens.of_text("12345678"), tokens.of_text("123456789")) == (2, 3)
    assert "bytes / 4" in tokens.name


def test_a_folder_without_a_tokenizer_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(UndertowError, match=r"tokenizer\.json"):
        token_count(SETTINGS, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UndertowError, match=r"cannot be used as a tokenizer"):
        token_count(SETTINGS, tmp_path)
