"""An S3 server on this machine's loopback, for tests of stores on an object store."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.error import URLError

# One request at a time: moto looks whether a key is there and then stores it, so that without the lock two
# conditional writes at once may both succeed, as on no real object store.
SERVER = """
import sys
from threading import Lock, Thread
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

moto, lock = DomainDispatcherApplication(create_backend_app), Lock()

def one_at_a_time(environ, start_response):
    with lock:
        return moto(environ, start_response)

server = make_server("127.0.0.1", 0, one_at_a_time, threaded=True, request_handler=MotoRequestHandler)
Thread(target=server.serve_forever, daemon=True).start()
print(server.server_address[1], flush=True)
sys.stdin.read()
"""
START_TIMEOUT_S = 60


@contextmanager
def s3_server(*buckets: str) -> Iterator[dict[str, str]]:
    """A server with empty buckets; gives the environment variables that lead to it."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        for bucket in buckets:
            _make_bucket(f"{url}/{bucket}")
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }
    finally:
        process.kill()
        process.wait()


def _make_bucket(url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=10).close()
            return
        except URLError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
