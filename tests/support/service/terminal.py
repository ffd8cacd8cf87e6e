"""A terminal in which the blocks of a page run from top to bottom, as a reader would run them.

Shell blocks run in one bash, with errors as errors (-euo pipefail; curl fails by status), Python blocks in
one process and one namespace, which sees what the shell exports. `undertow` is the program itself, forked
from a process that has imported it. What differs from the page's text is what differs for each reader:

- ports: 8000 is that of a mock LLM server, any other a free one;
- `ut_...` is the key that the page has shown last; else one for all tenants, of a service that is started
  where a page talks to one and does not start it;
- `.venv/bin/` is where this Python is, and `connect("local")` joins the Ray of the tests;
- a server goes to the background once it listens, and ends with the page.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from undertow.serving.vllm.local_server import free_port

from ..cluster.forked import FORKS, ROOT, Forked, fork, settle
from .blocks import SHELL, Block

MOST_S = 120.0  # for a block, or for a server until it listens
PORT = re.compile(r"(localhost:|127\.0\.0\.1:|--port )(\d{4,5})\b")
LLM, SERVICE = "8000", "8080"
ALL_SCOPES = [word for scope in ("read", "write", "erase", "admin") for word in ("--scope", scope)]
ENV = {
    "UNDERTOW_ENCODER": "hash:384",
    "UNDERTOW_DEVICE": "cpu",
    "UNDERTOW_SERVICE_STREAM_S": "1",  # an endless stream ends
    "MEM0_TELEMETRY": "False",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}
# what `undertow` is on this terminal's PATH: it asks the thread below, and ends as the fork ends
PROGRAM = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect({address!r})
    asked.sendall(json.dumps([os.getpid(), sys.argv[1:], dict(os.environ), os.getcwd()]).encode())
    asked.shutdown(socket.SHUT_WR)
    sys.exit(int(asked.recv(9) or 99))
"""
CURL = "fail-with-body\nsilent\nshow-error\n"


class Terminal:
    def __init__(self, folder: Path, page: Sequence[Block], llm: str, **more: str) -> None:
        """`llm`: the URL of a mock LLM server. `more`: variables of the environment."""
        self.folder, text = folder / "page", "".join(block.text for block in page)
        self._own_service = "undertow serve" in text
        llm_port = re.findall(r":(\d+)/", llm)[0]
        self._ports: dict[str, str] = {} if f"--port {LLM}" in text else {LLM: llm_port}
        self._out, self._err, self._bin = folder / "out.txt", folder / "err.txt", folder / "bin"
        for made in (self.folder, self._bin):
            made.mkdir()
        for file in (self._out, self._err):
            file.write_text("")
        (folder / ".curlrc").write_text(CURL)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("UNDERTOW_", "PYTEST_"))}
        path = f"{self._bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._env = {**kept, **ENV, "PATH": path, "CURL_HOME": str(folder), **more}
        self._servers: dict[str, Forked] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._python: tuple[Connection, BaseProcess] | None = None
        address = f"\0undertow-{os.getpid()}-{id(self)}"  # of no file: a path may be too long
        self._listener.bind(address)
        self._listener.listen()
        program = self._bin / "undertow"
        program.write_text(PROGRAM.format(python=sys.executable, address=address))
        program.chmod(0o755)
        threading.Thread(target=self._answer, daemon=True).start()
        with self._out.open("a") as out, self._err.open("a") as err:
            where: Any = {"cwd": self.folder, "env": self._env, "start_new_session": True}
            streams: Any = {"stdin": subprocess.PIPE, "stdout": out, "stderr": err, "text": True}
            self._shell = subprocess.Popen(["bash", "-euo", "pipefail"], bufsize=1, **where, **streams)

    def close(self) -> None:
        if self._python is not None:
            self._python[0].close()
            self._python[1].join(10)
            self._python[1].kill()
        with suppress(ProcessLookupError):
            os.killpg(self._shell.pid, 9)  # its own group: what it started, too
        self._shell.wait()
        for server in self._servers.values():
            server.kill()
        self._listener.shutdown(socket.SHUT_RDWR)  # else its thread waits on, and it stays open
        self._listener.close()

    def run(self, block: Block) -> None:
        text = self._here(block.text)
        if block.language in SHELL:
            self._in_shell(block, text)
        else:
            self._in_python(block, text)

    def holds(self, place: str, expression: str) -> None:
        """Check what the Python blocks of the page have made."""
        self._in_python(Block(place, 0, "python", "", None), f"assert {expression}, {expression!r}")

    def _here(self, text: str) -> str:
        """The text as this reader enters it."""
        text = PORT.sub(lambda found: found[1] + self._port(found[2]), text)
        if "ut_..." in text:
            shown = re.findall(r"^ut_\S+$", self._out.read_text(), re.MULTILINE)
            assert shown, "an earlier block has to show a key"
            text = text.replace("ut_...", shown[-1])
        return text.replace(".venv/bin/", "").replace('connect("local")', 'connect("auto")')

    def _port(self, port: str) -> str:
        if port not in self._ports:
            self._ports[port] = str(free_port())
            if port == SERVICE and not self._own_service:
                for words in (["keys", "create", "--all-tenants", *ALL_SCOPES], ["serve", "--llm", "off"]):
                    files = (self._env, self._out, self._err, self.folder)
                    code = self._program([*words, "--store", "service"], *files)
                    assert code == 0, self._err.read_text()
        return self._ports[port]

    def _in_shell(self, block: Block, text: str) -> None:
        script, done = self.folder.parent / "block.sh", self.folder.parent / "environment"
        # a server is put in the background by the program itself
        script.write_text(f"set -x\n{text}{{ set +x; }} 2>/dev/null\nenv -0 > {done}.new\n")
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"source {script}; mv {done}.new {done}\n")
        ends_at = time.monotonic() + MOST_S
        while not done.exists():
            code = self._shell.poll()
            if code is not None or time.monotonic() > ends_at:
                raise AssertionError(f"{block.place}: exit code {code}\n{self._told()}")
            time.sleep(0.01)
        self._env = dict(line.split("=", 1) for line in done.read_text().split("\0") if line)
        done.unlink()

    def _in_python(self, block: Block, text: str) -> None:
        if self._python is None:
            here, there = FORKS.Pipe()
            files = (str(self._out), str(self._err), self.folder)
            self._python = here, fork(run_python, there, *files)
            there.close()
        self._python[0].send((block.page, block.line, text, self._env))
        failure = self._python[0].recv() if self._python[0].poll(MOST_S) else f"no end in {MOST_S} s"
        assert failure is None, f"{block.place}: {failure}\n{self._told()}"

    def _told(self) -> str:
        return f"{self._out.read_text()[-2_000:]}\n----\n{self._err.read_text()[-4_000:]}"

    def _answer(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                asked, _ = self._listener.accept()
                with asked, asked.makefile() as given:
                    pid, words, env, folder = json.load(given)
                    out, err = (Path(f"/proc/{pid}/fd/{stream}") for stream in (1, 2))
                    asked.sendall(str(self._program(words, env, out, err, folder)).encode())

    def _program(
        self, words: list[str], env: Mapping[str, str], out: Path, err: Path, folder: Path | str
    ) -> int:
        """The exit code of `undertow`; 0 of a server, once it listens."""
        serves = words[0] == "serve" or words[:2] == ["consume", "flight"]
        port = ""
        if serves:
            if "--port" not in words:
                words = [*words, "--port", self._port(SERVICE)]
            port = words[words.index("--port") + 1]
            if former := self._servers.pop(port, None):
                former.terminate()
                self._end_of(former)
            out, err = self._out, self._err  # those of the command end with it
        process = Forked(words, env, out, err, folder=Path(folder))
        if serves:
            self._servers[port] = process
        return self._end_of(process, port)

    def _end_of(self, process: Forked, port: str = "") -> int:
        """Its exit code; 0 once it listens at a port."""
        ends_at = time.monotonic() + MOST_S
        while time.monotonic() < ends_at:
            if (code := process.poll()) is not None:
                return code
            if port:
                with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", int(port)), 5):
                    return 0
            time.sleep(0.01)
        process.kill()
        return 98


def run_python(connection: Connection, out: str, err: str, folder: Path) -> None:
    """In a fork: run the Python blocks of a page that come, and answer with what they raise."""
    settle({}, out, err, folder)
    space: dict[str, Any] = {"__name__": "__main__"}
    sys.path.remove(str(ROOT))
    with asyncio.Runner() as runner, suppress(EOFError):
        while True:
            page, line, text, env = connection.recv()
            os.environ.clear()
            os.environ.update(env)
            failure = None
            try:
                code = compile("\n" * line + text, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                if (awaited := eval(code, space)) is not None:
                    runner.run(awaited)
            except BaseException:  # noqa: BLE001 - told where the page is run
                failure = traceback.format_exc()
            sys.stdout.flush()
            connection.send(failure)
