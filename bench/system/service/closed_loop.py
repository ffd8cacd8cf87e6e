"""The most requests a second that the service answers: a closed loop of connections, driven by wrk.

wrk takes little of the machine that it shares with the service. It sends requests that the bench prepared.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from undertow.bench.system.service.world import Request
from undertow.engine.base.model import UndertowError

CONNECTIONS = 16
# prepared for each second: no text may be sent twice
MOST_PER_S = 12_000
MISSING = "the closed loop needs wrk, which is not on the PATH. Install it: apt-get install wrk"

SCRIPT = r"""
local requests, threads = {}, {}
sent_count = 0

function setup(thread) table.insert(threads, thread) end

function init(args)
  local file = assert(io.open(args[1], "rb"))
  for request in file:read("*a"):gmatch("[^%z]+") do requests[#requests + 1] = request end
  file:close()
end

function request()
  sent_count = sent_count + 1
  return requests[(sent_count - 1) % #requests + 1]
end

function done(summary, latency, all)
  local sent = 0
  for _, thread in ipairs(threads) do sent = sent + thread:get("sent_count") end
  local errors = summary.errors
  local function ms(percentile) return latency:percentile(percentile) / 1e3 end
  io.write(string.format(
    '{"requests": %d, "seconds": %.3f, "sent": %d, "not_200": %d, "failed": %d, ' ..
    '"p50": %.3f, "p95": %.3f, "p99": %.3f, "max": %.3f}\n',
    summary.requests, summary.duration / 1e6, sent, errors.status,
    errors.connect + errors.read + errors.write + errors.timeout,
    ms(50), ms(95), ms(99), latency.max / 1e3))
end
"""


def drive(
    url: str, requests: Sequence[Request], seconds: float, connections: int = CONNECTIONS
) -> dict[str, Any]:
    """Send the requests in order over so many connections, each as soon as the one before was answered.

    UndertowError: wrk is missing or failed, or there were too few requests.
    """
    if shutil.which("wrk") is None:
        raise UndertowError(MISSING)
    with TemporaryDirectory(prefix="undertow-bench-") as made:
        script, data = Path(made) / "requests.lua", Path(made) / "requests"
        script.write_text(SCRIPT)
        data.write_bytes(b"\0".join(request.sent for request in requests))
        command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "30s"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ran = subprocess.run(
            [*command, "-s", str(script), url, "--", str(data)], capture_output=True, text=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ran.returncode:
        raise UndertowError(f"wrk failed: {ran.stderr.strip() or ran.stdout.strip()}")
    told = json.loads(ran.stdout.strip().splitlines()[-1])
    if told["sent"] > len(requests):
        raise UndertowError(f"wrk sent {told['sent']:,} requests, and only {len(requests):,} differ")
    took_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "connections": connections,
        "answered_per_s": round((told["requests"] - told["not_200"]) / told["seconds"], 1),
        "requests": told["requests"],
        "not_200": told["not_200"],
        "failed": told["failed"],
        "latency_ms": {name: round(told[name], 2) for name in ("p50", "p95", "p99", "max")},
        "generator_cpu_share": round(took_s / told["seconds"], 3),
    }
