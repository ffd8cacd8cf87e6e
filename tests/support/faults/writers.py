"""Writers that are killed: processes that append to one store, and tell what was acknowledged."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from undertow.engine.storage import journal as journal_module
from undertow.engine.storage import tail
from undertow.engine.storage.journal import Durability, Fenced, Journal, Row

SOON_S = 60
TENANTS = ("ann", "bob", "eve")
DIM = 16


def write(store: str, name: str, durability: Durability, told: Any) -> None:
    """Open the store, taking it over, and append until killed or fenced. Sends each acknowledged text."""
    # small bounds, so that a short life has flushes, commits past the log, merges and purges in it
    tail.ROWS_PER_FLUSH, journal_module.ROWS_PAST_LOG, journal_module.COMMITS_PER_COMPACTION = 24, 12, 3
    rng = random.Random(name)
    try:
        journal = Journal.open(store, writable=True, takeover=True, durability=durability)
        count = 0
        while True:
            texts = [f"{name}/{count + n}" for n in range(rng.choice((1, 1, 2, 5, 20)))]
            count += len(texts)
            rows = [Row("turn", t, t, 0, text.encode()) for text in texts for t in (rng.choice(TENANTS),)]
            journal.append(rows)
            told.send(texts)
            match rng.randrange(40):
                case 0:
                    assert sum(1 for _ in journal.read()) > 0
                case 1:
                    journal.purge()
    except Fenced:
        told.send(None)


@dataclass
class Kills:
    """Kills writers of one store, and counts what became of the rows that were acknowledged."""

    context: ForkServerContext
    store: Path
    rng: random.Random
    durability: Durability
    kills: int = 0
    overtaken: int = 0
    acknowledged: list[str] = field(default_factory=list)
    lives: int = 0

    def kill(self, paused: BaseProcess | None = None) -> None:
        """One life of a writer: it ends by a kill, or is stopped, overtaken and goes on, to be fenced."""
        ours, theirs = self.context.Pipe(duplex=False)
        self.lives += 1
        name = f"{self.store.name}-{self.lives}"
        writer = self.context.Process(target=write, args=(str(self.store), name, self.durability, theirs))
        writer.start()
        theirs.close()
        try:
            assert ours.poll(SOON_S), f"writer {name} wrote nothing"
            self._hear(ours.recv())  # EOFError: it has ended by itself
            time.sleep(self.rng.expovariate(1 / 0.06))
            pid = writer.pid
            assert pid is not None
            if paused is None and self.rng.random() < 0.1:
                os.kill(pid, signal.SIGSTOP)
                self.kill(paused=writer)
                os.kill(pid, signal.SIGCONT)
                writer.join(SOON_S)
                assert writer.exitcode == 0, "the overtaken writer was not stopped"
                self.overtaken += 1
            else:
                writer.kill()
                writer.join()
                assert writer.exitcode == -signal.SIGKILL, f"writer {name} had ended by itself"
                self.kills += 1
            with suppress(EOFError):
                while True:
                    self._hear(ours.recv())
        finally:
            if writer.is_alive():
                writer.kill()

    def _hear(self, texts: list[str] | None) -> None:
        """Note what was acknowledged; None: the writer was fenced."""
        self.acknowledged += texts or ()

    def check(self) -> dict[str, int]:
        """How many rows were acknowledged, are lost, are there twice, or stand before their writer's last."""
        texts = [row.payload.decode() for row in Journal.open(self.store, writable=False).read()]
        shown, last, disordered = Counter(texts), Counter[str](), 0
        for writer, _, number in (text.partition("/") for text in texts):
            disordered += int(number) < last[writer]
            last[writer] = int(number)
        return {
            "acknowledged": len(self.acknowledged),
            "lost": sum(text not in shown for text in self.acknowledged),
            "doubled": sum(count > 1 for count in shown.values()),
            "disordered": disordered,
        }
