"""A process that changes a cluster in forked children, some of which are killed; run with `python -m`.

Each line of standard input is a task (JSON); the answer is one line with the child's exit status. A child
sends turns before each call to a shard, and tells in `out` what has been acknowledged. With `kill`, [n, s],
it dies by SIGKILL s seconds after the n-th time, whatever it is doing then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path
from threading import Timer
from typing import Any

from undertow.engine.cluster.resharding import coordinator as resharding
from undertow.engine.cluster.resharding.coordinator import reshard, resume

from .driver import load_prompts
from .harness import turns_of
from .moving import Shards, Traffic


def child(task: dict[str, Any]) -> None:
    out = os.open(task["out"], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    resharding.TENANTS_PER_BATCH = 2
    logs = turns_of(Path(task["log"])).values()
    turns = [turn for of_tenant in zip(*logs, strict=True) for turn in of_tenant]
    sends, delay_s = task["kill"] or (-1, 0.0)
    with Shards(Path(task["root"])) as shards:
        traffic = Traffic(shards, turns, Counter())

        def send() -> None:
            nonlocal sends
            traffic.send(4)
            os.write(out, json.dumps(traffic.acked).encode() + b"\n")
            sends -= 1
            if sends == 0:
                Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

        busy = shards.busy(send)
        send()
        if shards.map.before is not None:
            resume(shards.root, busy)
        reshard(shards.root, task["shards"], busy)


def main() -> None:
    load_prompts()
    # a fork takes along the calling thread alone; engines begin theirs in the child, where they are used
    warnings.filterwarnings("ignore", "lance is not fork-safe")
    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(task)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"exit": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()
