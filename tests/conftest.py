"""Fixtures and options shared by the test files: the gpu marker, and a real vLLM server with a tiny model.

What needs the engine is imported inside the fixtures: the kernels' tests run with torch, CuPy and NumPy.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from undertow.kernels import device

from .s3_server import s3_server

if TYPE_CHECKING:
    from undertow.serving.local_vllm import LocalVLLM

TINY_CONTEXT_TOKENS = 4096
S3_BUCKETS = ("memories", "whole", "bulk-logs", "readers-logs")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        default=os.environ.get("UNDERTOW_REQUIRE_GPU", "") not in ("", "0"),
        help="tests marked gpu fail where they would be skipped (also: UNDERTOW_REQUIRE_GPU=1)",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked gpu is skipped without a CUDA device, and fails if one was asked for."""
    if item.get_closest_marker("gpu") is None or (reason := device.why_no_cuda()) is None:
        return
    if item.config.getoption("--require-gpu"):
        pytest.fail(f"a GPU is required, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture
def lacking(request: pytest.FixtureRequest) -> Callable[[str], NoReturn]:
    """Ends a test that lacks something: skipped; failed where a GPU, with all it needs, is required."""

    def end(what: str) -> NoReturn:
        if request.config.getoption("--require-gpu"):
            pytest.fail(f"--require-gpu, but this is missing: {what}", pytrace=False)
        pytest.skip(f"missing: {what}")

    return end


@pytest.fixture(scope="session")
def s3_variables() -> Iterator[dict[str, str]]:
    """The environment that leads to an S3 server: one a session, as clients are kept by bucket."""
    with s3_server(*S3_BUCKETS) as variables:
        yield variables


@pytest.fixture(scope="module")
def s3(s3_variables: dict[str, str]) -> Iterator[dict[str, str]]:
    """An S3 server with `S3_BUCKETS`, to which this process's environment leads for a test file."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_variables.items():
            patch.setenv(name, value)
        yield s3_variables


@pytest.fixture(scope="session")
def ray_address(s3_variables: dict[str, str]) -> Iterator[str]:
    """The address of a Ray on this machine, started once a session; its workers find the S3 server."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'undertow[cluster]'")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_variables.items():
            patch.setenv(name, value)  # workers have the environment in which Ray was started
        ray.init(
            num_cpus=8,  # counted, not used: shards of several tests stand side by side
            object_store_memory=200 << 20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a two-layer byte-level Llama with random weights, made once a session."""
    from undertow.serving.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"), context_tokens=TINY_CONTEXT_TOKENS)


@pytest.fixture(scope="session")
def tiny_vllm(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalVLLM]:
    """A running vLLM server that serves the tiny model under the name `tiny`."""
    from undertow.serving.local_vllm import SERVER_PYTHON, LocalVLLM

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
