"""Servers that are kept running, alone and as Ray actors; a real HTTP server stands in for vLLM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from typer.testing import CliRunner

from undertow.bench.mock.llm import MODEL, MockReplies
from undertow.engine.base.config import Settings
from undertow.engine.llm.client import OpenAILLM
from undertow.serving.vllm import ray_actor as vllm_actor
from undertow.serving.vllm import supervisor as supervision
from undertow.serving.vllm.local_server import LocalServerError, LocalVLLM, free_port
from undertow.serving.vllm.ray_actor import ServerPlan, VLLMActor, server_states, start_servers, stop_servers
from undertow.serving.vllm.supervisor import ServerSupervisor

from ..support.llm_servers import expected, merge, prompts, results, server_stats, wait_until
from .vllm_stand_in import TALKING, alive, stand_in_of


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    return stand_in_of(tmp_path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.05)


@pytest.fixture
def supervisor(stand_in: Path, quick: None) -> Iterator[ServerSupervisor]:
    made = ServerSupervisor(
        LocalVLLM(stand_in.parent, MODEL, python=stand_in, start_timeout_s=60), check_s=0.1
    )
    yield made
    made.stop()


def answers(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/models", timeout=10) as reply:
        return bool(reply.status == 200)


def plan_of(stand_in: Path, **values: Any) -> ServerPlan:
    given: dict[str, Any] = {
        "model": str(stand_in.parent),
        "served_name": MODEL,
        "python": stand_in,
        "num_gpus": 0,
        "num_cpus": 0,
        "node_resource": "",
        "port": free_port(),
        "check_s": 0.2,
        "start_timeout_s": 60.0,
    }
    return ServerPlan(**(given | values))


# ---- the supervisor


def test_a_server_that_dies_is_started_again_at_the_same_url(supervisor: ServerSupervisor) -> None:
    url = supervisor.ready(60)
    assert answers(url)
    first = supervisor.state()
    assert (first.ready, first.url, first.starts, first.error) == (True, url, 1, None)
    assert first.pid is not None
    os.killpg(first.pid, signal.SIGKILL)
    wait_until(lambda: supervisor.state().starts == 2)
    assert supervisor.ready(60) == url
    again = supervisor.state()
    assert again.pid not in (None, first.pid) and answers(url)
    assert "ended with status" in (again.error or "")


def test_a_server_that_fails_its_health_check_is_started_again(
    supervisor: ServerSupervisor, stand_in: Path
) -> None:
    supervisor.ready(60)
    sick_pid = supervisor.state().pid
    (stand_in.parent / "sick").touch()
    wait_until(lambda: not supervisor.state().ready)
    (stand_in.parent / "sick").unlink()
    url = supervisor.ready(60)
    assert answers(url) and supervisor.state().pid != sick_pid
    assert "/health" in (supervisor.state().error or "")
    assert sick_pid is not None and not alive(sick_pid)


def test_a_start_that_fails_is_told_and_tried_again(stand_in: Path, quick: None) -> None:
    (stand_in.parent / "broken").touch()
    supervisor = ServerSupervisor(LocalVLLM(stand_in.parent, MODEL, python=stand_in), check_s=0.1)
    try:
        with pytest.raises(LocalServerError, match=r"(?s)status 3.*no room for the KV cache"):
            supervisor.ready(60)
        state = supervisor.state()
        assert not state.ready and state.url == "" and "no room" in (state.error or "")
        (stand_in.parent / "broken").unlink()
        wait_until(lambda: supervisor.state().ready)
        assert supervisor.state().starts >= 2
    finally:
        supervisor.stop()


def test_stopping_ends_a_start_that_is_under_way(tmp_path: Path) -> None:
    supervisor = ServerSupervisor(LocalVLLM(tmp_path, MODEL, python=stand_in_of(tmp_path, "time.sleep(600)")))
    wait_until(lambda: supervisor.state().pid is not None)
    pid = supervisor.state().pid
    with pytest.raises(LocalServerError, match="did not answer in 0 s"):
        supervisor.ready(0.1)
    supervisor.stop()
    assert pid is not None and not alive(pid)
    assert not supervisor.state().ready and supervisor.state().pid is None


# ---- the plan


def test_a_plan_on_cards(stand_in: Path) -> None:
    plan = plan_of(
        stand_in, num_gpus=4, num_cpus=1, node_resource="undertow_vllm", port=8000, api_key="secret"
    )
    assert plan.demand() == {"CPU": 1.0, "GPU": 4.0, "undertow_vllm": 1.0}
    server = plan.server(2, "10.0.0.7")
    command = server.command()
    assert server.url == "http://10.0.0.7:8002/v1"
    assert command[command.index("--host") + 1] == "10.0.0.7"
    assert command[command.index("--tensor-parallel-size") + 1] == "4"
    assert command[command.index("--gpu-memory-utilization") + 1] == "0.9"
    assert "--enforce-eager" not in command and "--structured-outputs-config" in command
    assert not any("secret" in word for word in command)
    assert server.environment()["VLLM_API_KEY"] == "secret"
    assert server.environment()["HF_HUB_OFFLINE"] == "1"


def test_a_plan_of_a_hub_and_one_without_cards(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hub = ServerPlan(model="some/model", from_hub=True, num_gpus=0.5, python=stand_in).server(0, "127.0.0.1")
    assert hub.command()[hub.command().index("--model") + 1] == "some/model"
    assert hub.command()[hub.command().index("--served-model-name") + 1] == "model"
    assert "HF_HUB_OFFLINE" not in hub.environment()
    assert "--tensor-parallel-size" not in hub.command()
    on_cpu = plan_of(stand_in).server(0, "127.0.0.1").command()
    assert "--enforce-eager" in on_cpu and "--gpu-memory-utilization" not in on_cpu


@pytest.mark.parametrize(
    "wrong", [{"num_gpus": 1.5}, {"num_gpus": -1}, {"gpu_memory_utilization": 0}, {"gpus": 1}]
)
def test_a_plan_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ServerPlan(model="m", **wrong)  # type: ignore[arg-type]


def test_the_shell_does_not_fail_to_be_made(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray does not start an actor again whose constructor raised, so trouble waits for `ready`."""
    monkeypatch.setattr("undertow.serving.vllm.ray_actor.get_node_ip_address", lambda: "127.0.0.1")
    shell = VLLMActor(plan_of(stand_in, python=stand_in.parent / "absent"), 0)
    with pytest.raises(LocalServerError, match="make setup-vllm"):
        shell.ready(30)
    shell.stop()


# ---- on Ray


@pytest.fixture
def no_servers(ray_address: str) -> Iterator[None]:
    yield
    stop_servers()


@pytest.mark.rarely
@pytest.mark.usefixtures("no_servers")
def test_two_actors_serve_one_engine_and_come_back_elsewhere(stand_in: Path) -> None:
    stand_in_of(stand_in.parent, TALKING)
    plan = plan_of(stand_in, port=0)
    urls = start_servers(plan, 2)
    assert list(urls) == ["ray:vllm-0", "ray:vllm-1"] and len(set(urls.values())) == 2
    assert start_servers(plan, 2) == urls, "those that run stay"
    states = server_states()
    assert [state.url for state in states.values()] == list(urls.values())

    asked = [prompt for n in range(6) for prompt in prompts(n)]
    with OpenAILLM(Settings(llm_url=",".join(urls), llm_model=MODEL)) as llm:
        assert llm.healthy().ok
        done = results([llm.submit(prompt, tenant="t") for prompt in asked])
        assert [c.reply for c in done] == [c.reply for c in expected(asked, MockReplies())]

        server_pid = states["vllm-0"].pid
        assert server_pid is not None
        os.kill(server_pid, signal.SIGKILL)
        results([llm.submit(merge(n), tenant="t") for n in range(20)])
        wait_until(lambda: server_states()["vllm-0"].starts >= 2)

        actor = psutil.Process(states["vllm-1"].pid).parent()
        assert actor is not None
        actor.kill()
        results([llm.submit(merge(100 + n), tenant="t") for n in range(20)])
        after = start_servers(plan, 2)
        assert after["ray:vllm-0"] == urls["ray:vllm-0"], "its actor lives"
        assert after["ray:vllm-1"] != urls["ray:vllm-1"], "a new actor takes what is free where it is"
        numbers = iter(range(1_000, 100_000))

        def served_there() -> bool:
            results([llm.submit(merge(next(numbers)), tenant="t") for _ in range(20)])
            return bool(server_stats(after["ray:vllm-1"])["calls"])

        wait_until(served_there)
    pids = [state.pid for state in server_states().values()]
    assert stop_servers() == 2
    assert server_states() == {}
    wait_until(lambda: not any(pid is not None and alive(pid) for pid in pids))


@pytest.mark.usefixtures("no_servers")
def test_what_a_cluster_lacks_is_named(stand_in: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(vllm_actor, "_ASK_S", 0.5)
    plan = plan_of(stand_in, num_cpus=1, node_resource="nowhere", start_timeout_s=0.5)
    with pytest.raises(LocalServerError, match=r"""ray start .* --resources='{"nowhere": 1}'.*AUTOSCALING"""):
        start_servers(plan, 1)
    assert server_states() == {}, "at once, and nothing was begun"
    monkeypatch.setenv("UNDERTOW_CLUSTER_AUTOSCALING", "true")
    lacking = r"CPU 1, nowhere 1 each, the cluster has CPU \d+, nowhere 0 in all"
    with pytest.raises(LocalServerError, match=lacking):
        start_servers(plan, 1)
    assert "waiting for the autoscaler: no node" in capsys.readouterr().err
    assert stop_servers() == 1
    assert server_states() == {}


@pytest.mark.usefixtures("no_servers")
def test_a_server_that_cannot_start_says_what_its_log_said(stand_in: Path) -> None:
    (stand_in.parent / "broken").touch()
    with pytest.raises(LocalServerError, match="no room for the KV cache"):
        start_servers(plan_of(stand_in), 1)
    assert "no room for the KV cache" in (server_states()["vllm-0"].error or ""), "the actor goes on trying"


@pytest.mark.usefixtures("no_servers")
def test_the_command_starts_shows_and_stops(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    words = ["--model", str(stand_in.parent), "--served-name", MODEL, "--python", str(stand_in)]
    words += ["--num-gpus", "0", "--num-cpus", "0", "--node-resource", ""]
    command = [sys.executable, "-m", "undertow.serving.vllm.ray_actor", "start", *words, "--port", str(port)]
    command += ["--vllm-arg=--seed", "--vllm-arg=7", "--address", ray.get_runtime_context().gcs_address]
    secret = {**os.environ, "UNDERTOW_LLM_API_KEY": "secret"}
    started = subprocess.run(command, capture_output=True, text=True, env=secret)
    assert started.returncode == 0, started.stderr
    assert started.stdout == "UNDERTOW_LLM_URL=ray:vllm-0\n"
    (url,) = re.findall(rf"ray:vllm-0 answers at (http://.*:{port}/v1)", started.stderr)

    monkeypatch.setattr(vllm_actor, "_connect", lambda address: None)  # this process is in the cluster
    shown = CliRunner().invoke(vllm_actor.cli, ["status"])
    assert shown.exit_code == 0 and shown.stdout.startswith(f"vllm-0\tready\t{url}\tstarts 1")
    (state,) = server_states().values()
    server = psutil.Process(state.pid)
    assert server.cmdline()[-2:] == ["--seed", "7"] and "secret" not in server.cmdline()
    assert server.environ()["VLLM_API_KEY"] == "secret"
    assert CliRunner().invoke(vllm_actor.cli, ["stop"]).stdout == "1 servers stopped\n"
    wait_until(lambda: not alive(server.pid))


def test_a_wrong_port_is_refused_in_words(stand_in: Path) -> None:
    refused = CliRunner().invoke(vllm_actor.cli, ["start", "--model", str(stand_in.parent), "--port", "80"])
    assert refused.exit_code == 1 and "port is 80" in refused.stderr and "Traceback" not in refused.stderr
