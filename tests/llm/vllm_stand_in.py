"""Stand-ins for the Python of a vLLM environment: scripts that listen as vLLM would, and start at once."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

PROLOGUE = f"""#!{sys.executable}
import pathlib, signal, subprocess, sys, time

def given(flag):
    return sys.argv[sys.argv.index(flag) + 1]

host, port = given("--host"), int(given("--port"))
"""

# answers health checks, from a process that has a child; the files `broken` and `sick` make it fail
SERVING = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

here = pathlib.Path(__file__).parent
if (here / "broken").exists():
    print("no room for the KV cache", flush=True)
    sys.exit(3)

class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        sick = self.path == "/health" and (here / "sick").exists()
        self.send_response(500 if sick else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *said):
        pass

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("Starting vLLM server", flush=True)
ThreadingHTTPServer((host, port), Server).serve_forever()
"""

# replies to prompts too
TALKING = """
import uvicorn
from undertow.bench.mock.llm import MockReplies
from undertow.bench.mock.server import MockServer

uvicorn.run(MockServer(MockReplies()).app(), host=host, port=port, log_level="critical")
"""

# never listens, and ignores SIGTERM
DEAF = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("Starting to load model", flush=True)
time.sleep(600)
"""


def stand_in_of(folder: Path, body: str = SERVING) -> Path:
    """The interpreter of a vLLM environment, as far as LocalVLLM can tell, in a folder that has a model."""
    path = folder / "python"
    path.write_text(PROLOGUE + body)
    path.chmod(0o755)
    (folder / "config.json").write_text("{}")
    return path


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
