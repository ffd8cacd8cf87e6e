"""Fixtures and options shared by the test files: the gpu marker, one S3 server and one Ray a session.

What needs the engine is imported inside the fixtures: the kernels' tests run with torch, CuPy and NumPy.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable, Generator, Iterator
from functools import cache
from typing import Any, NoReturn

import pytest

from undertow.kernels import device

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # where the kernels' tests alone are run
    pass
else:  # no test depends on the machine's speed
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")

# The tests state the calls and counts of the papers, in processes that they start too. What else RecMem does
# by default has tests of its own.
for name in ("SALIENCE_TURNS", "QUIET_SHARE", "ANSWER_TOKENS"):
    os.environ.setdefault(f"UNDERTOW_{name}", "0")

# each HTTP client makes one, which reads all certificates of the machine
ssl.create_default_context = cache(ssl.create_default_context)  # type: ignore[assignment]
S3_BUCKETS = ("memories", "whole", "bulk-logs", "readers-logs")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        default=os.environ.get("UNDERTOW_REQUIRE_GPU", "") not in ("", "0"),
        help="tests marked gpu fail where they would be skipped (also: UNDERTOW_REQUIRE_GPU=1)",
    )


SLOW_TO_START = ("tiny_vllm", "ray_address")
LONGEST_FILES = (
    *("test_contract.py", "test_ray_cluster.py", "test_process_cluster.py", "test_isolation.py"),
    *("test_resharding.py", "test_kill.py", "test_equivalence.py", "test_cluster.py", "test_serve.py"),
    *("test_serve_workers.py", "test_serve_on_ray.py", "test_log_simulation.py", "test_policy_change.py"),
    *("test_faults.py", "test_gate_shim.py", "test_examples.py", "test_mcp_stdio.py", "test_gate.py"),
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark rare cases. The longest files first: the short ones fill what is left of each worker's time."""
    for item in items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        for mark in item.iter_markers("rarely"):
            if not mark.kwargs or any(values.get(name) in cases for name, cases in mark.kwargs.items()):
                item.add_marker("rare")
                item.add_marker("soak")

    def place(item: pytest.Item) -> tuple[bool, int]:
        starts_slowly = any(name in getattr(item, "fixturenames", ()) for name in SLOW_TO_START)
        names = (*LONGEST_FILES, item.path.name)
        return not starts_slowly, names.index(item.path.name)

    items.sort(key=place)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked gpu is skipped without a CUDA device, and fails if one was asked for."""
    if item.get_closest_marker("gpu") is None or (reason := device.why_no_cuda()) is None:
        return
    if item.config.getoption("--require-gpu"):
        pytest.fail(f"a GPU is required, but {reason}", pytrace=False)
    pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests want told, by `record_property("told", ...)`: where they run in other processes too."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "told":
                terminalreporter.write_line(str(value))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, object]:
    """A file with tests for the gpu is not skipped as a whole where a GPU is required."""
    report = yield
    if report.outcome != "skipped" or not collector.config.getoption("--require-gpu"):
        return report
    if "mark.gpu" in collector.path.read_text(encoding="utf-8"):
        report.outcome = "failed"
        report.longrepr = f"a GPU is required, with all that its tests need, but {report.longrepr}"
    return report


@pytest.fixture
def lacking(request: pytest.FixtureRequest) -> Callable[[str], NoReturn]:
    """Ends a test that lacks something: skipped; failed where a GPU, with all it needs, is required."""

    def end(what: str) -> NoReturn:
        if request.config.getoption("--require-gpu"):
            pytest.fail(f"--require-gpu, but this is missing: {what}", pytrace=False)
        pytest.skip(f"missing: {what}")

    return end


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of tests that are coroutines (marked `anyio`)."""
    return "asyncio"


@pytest.fixture
def calls_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Notes each call of `owner.name` from now on, as `note` tells it; the call does what it did."""

    def begin(owner: object, name: str, note: Callable[..., object]) -> list[Any]:
        noted: list[Any] = []
        really = getattr(owner, name)

        def call(*given: Any, **more: Any) -> Any:
            noted.append(note(*given, **more))
            return really(*given, **more)

        monkeypatch.setattr(owner, name, call)
        return noted

    return begin


@pytest.fixture(scope="session")
def s3_variables() -> Iterator[dict[str, str]]:
    """The environment that leads to an S3 server: one a session, as clients are kept by bucket."""

    from .support.storage.s3_server import s3_server  # not above: some copy this file alone

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
        patch.setenv("RAY_worker_niceness", "0")  # else tests beside these would starve them
        ray.init(
            num_cpus=8,  # counted, not used: shards of several tests stand side by side
            object_store_memory=200 << 20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
