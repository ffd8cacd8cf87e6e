"""Starting and stopping a local server, with a stand-in for vLLM that starts at once."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path

import psutil
import pytest

from undertow.serving.vllm.local_server import FOR_PEERS, LocalServerError, LocalVLLM

from ..support.llm_servers import wait_until
from .vllm_stand_in import DEAF, alive, stand_in_of


def test_serves_inside_the_block_and_leaves_nothing_behind(tmp_path: Path) -> None:
    stages: list[str] = []
    server = LocalVLLM(
        tmp_path, "m", python=stand_in_of(tmp_path), progress=lambda stage, elapsed_s: stages.append(stage)
    )
    with server:
        assert server.url == f"http://127.0.0.1:{server.port}/v1"
        with urllib.request.urlopen(f"{server.root_url}/health", timeout=10) as reply:
            assert reply.status == 200
        assert server.pid is not None
        family = [server.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True))]
        assert len(family) >= 2
        log_path = server.log_path
        server.check_alive()
    wait_until(lambda: not any(map(alive, family)))
    assert stages[0] == "starting Python"
    assert log_path is not None and not log_path.exists()
    with pytest.raises(LocalServerError, match="not been started"):
        server.check_alive()


def test_a_start_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("undertow.serving.vllm.local_server.TERMINATE_S", 0.5)
    pids: list[int | None] = []
    server = LocalVLLM(
        tmp_path,
        "m",
        python=stand_in_of(tmp_path, DEAF),
        start_timeout_s=10.0,
        log_path=tmp_path / "log",
        progress=lambda stage, elapsed_s: pids.append(server.pid),
    )
    with pytest.raises(LocalServerError, match=r"not ready after 1\d s: loading the weights"):
        server.start()
    assert pids[0] is not None and not alive(pids[0])
    assert server.pid is None and (tmp_path / "log").exists()


def test_what_is_missing_is_named_with_its_cure(tmp_path: Path) -> None:
    with pytest.raises(LocalServerError, match="make setup-vllm"):
        LocalVLLM(tmp_path, "m", python=tmp_path / "absent").start()
    with pytest.raises(LocalServerError, match=r"no config\.json .*make model"):
        LocalVLLM(tmp_path / "absent", "m", python=stand_in_of(tmp_path)).start()


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LocalServerError, match=f"port {port} .*in use"):
            LocalVLLM(tmp_path, "m", python=stand_in_of(tmp_path), port=port).start()


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGINT])
def test_the_server_does_not_outlive_its_parent(tmp_path: Path, with_signal: signal.Signals) -> None:
    # started in the background, we may have been told to ignore SIGINT, and would hand that on
    program = f"""
        import signal, time
        from undertow.serving.vllm.local_server import LocalVLLM
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with LocalVLLM({str(tmp_path)!r}, "m", python={str(stand_in_of(tmp_path))!r}) as server:
            print(server.pid, flush=True)
            time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server_pid = int(parent.stdout.readline())
        children = psutil.Process(server_pid).children(recursive=True)
        os.kill(parent.pid, with_signal)
        try:
            parent.wait(timeout=30)
        finally:
            parent.kill()
    wait_until(lambda: not any(alive(pid) for pid in (server_pid, *(child.pid for child in children))))


def test_white_space_in_json_is_ours_to_forbid_and_peers_have_theirs(tmp_path: Path) -> None:
    """vLLM takes the last of two values."""
    given = []
    for extra in ((), FOR_PEERS):
        command = LocalVLLM(tmp_path, "m", extra_args=extra).command()
        last = len(command) - command[::-1].index("--structured-outputs-config")
        given.append(json.loads(command[last]).get("disable_any_whitespace", False))
    assert given == [True, False]


def test_make_runs_no_script_where_our_http_hides_that_of_python() -> None:
    """serving/ has an `http`: a script run by its path there needs -P, or torch finds that one."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    scripts = [line.strip() for line in makefile.splitlines() if re.search(r"bin/python .*\.py\b", line)]
    assert len(scripts) >= 2
    assert [line for line in scripts if "bin/python -P " not in line] == []
