"""Fixtures shared by the test files: a real vLLM server with a tiny random-weight model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from undertow.serving.local_vllm import SERVER_PYTHON, LocalVLLM

TINY_CONTEXT_TOKENS = 4096


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a two-layer byte-level Llama with random weights, made once a session."""
    from undertow.serving.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"), context_tokens=TINY_CONTEXT_TOKENS)


@pytest.fixture(scope="session")
def tiny_vllm(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalVLLM]:
    """A running vLLM server that serves the tiny model under the name `tiny`."""
    if not SERVER_PYTHON.exists() and "CI" not in os.environ:
        pytest.skip(f"no vLLM environment ({SERVER_PYTHON} is missing): run `make setup-vllm`")
    server = LocalVLLM(
        tiny_model_dir,
        "tiny",
        max_model_len=TINY_CONTEXT_TOKENS,
        kv_cache_gib=1,
        log_path=tmp_path_factory.mktemp("vllm") / "server.log",
        start_timeout_s=420,
    )
    with server:
        yield server
