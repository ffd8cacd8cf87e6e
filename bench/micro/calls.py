"""How long calls take: `python -m undertow.bench.micro.calls [--turns 20 1000] [--calls 2000]`.

`Engine.add` of one exchange and `Engine.search`, one after the other on one thread, for tenants with so many
turns. Messages and queries are those of the service's benchmark: most words repeat, some are new to the
encoder. Hashing encoder, no LLM, a store in the folder for temporary files. Medians: of searches in one
tenant, after as many to warm up, and of adds to several tenants, `ADDS_EACH` to each.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from undertow.bench.machine import commit, describe
from undertow.bench.system.service.world import Texts, exchange
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.encoders.factory import make_encoder

ADDS_EACH, LEAST_TENANTS = 20, 5


def median_ms(work: Callable[[str], object], texts: Sequence[str]) -> float:
    took_s = []
    for text in texts:
        began_s = time.perf_counter()
        work(text)
        took_s.append(time.perf_counter() - began_s)
    return round(1e3 * median(took_s), 4)


def measure(turns: int, calls: int, seed: int = 1) -> dict[str, Any]:
    """Median milliseconds of searches in a tenant of `turns` turns, and of adds to such tenants."""
    settings = Settings(encoder="hash:384", llm_url=None, theta_count=1_000, salience_turns=0, device="cpu")
    texts, names = Texts(seed), map("tenant{}".format, count())
    queries = texts.queries(2 * calls)
    with (
        TemporaryDirectory() as folder,
        Engine(Path(folder) / "store", settings, make_encoder(settings)) as engine,
    ):

        def filled() -> str:
            name = next(names)
            for message in texts.messages(turns):
                engine.add(name, exchange(message, "noted"))
            return name

        searched = filled()
        median_ms(lambda query: engine.search(searched, query), queries[:calls])
        search_ms = median_ms(lambda query: engine.search(searched, query), queries[calls:])
        add_ms = []
        for _ in range(max(LEAST_TENANTS, calls // (ADDS_EACH + turns))):
            added = filled()
            more = texts.messages(ADDS_EACH)
            add_ms.append(median_ms(lambda message: engine.add(added, exchange(message, "noted")), more))  # noqa: B023
    return {"turns": turns, "search_ms": search_ms, "add_ms": round(median(add_ms), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[20, 1_000])
    parser.add_argument("--calls", type=int, default=2_000)
    args = parser.parse_args()
    tenants = [measure(turns, args.calls) for turns in args.turns]
    ran = {"bench": "calls", "commit": commit(), "machine": describe(), "calls": args.calls}
    print(json.dumps({**ran, "tenants": tenants}))


if __name__ == "__main__":
    main()
