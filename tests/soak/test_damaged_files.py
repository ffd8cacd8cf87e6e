"""Damaged files are refused with an error that names the cure, or taken.

Of exports, what is taken is the whole. Lance's files have no checksums: a reader may find other words there
(`store_changed`), or what is no record (`store_unreadable`: an error without a cure). Both are counted.

SOAK_CASES: of a run; SOAK_ROUND: the first seed. A few cases run with all tests.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.api.ingest_files import Ingest
from undertow.engine.api.transfer.record_lines import RecordLines
from undertow.engine.base.model import UndertowError
from undertow.engine.storage.store_info import DESCRIPTION, read_info
from undertow.serving.auth.key_file import KeyFile, parse
from undertow.serving.auth.principal import Scope, TenantScope

from ..support.engine import NEVER, open_engine, turns_of
from ..support.faults.harness import end_state, reports
from ..support.soak.runs import report, soak_round

CASES = int(os.environ.get("SOAK_CASES", "2000"))
BYTES = b'\x00\xff"{}[]\\\n\r,:0-9eE\xc3\xed\xa0\x80' + "\u202e".encode()


def damaged(data: bytes, rng: Random) -> bytes:
    """The file cut off, with bytes changed, doubled, taken out or put in, a bit flipped, or lines moved."""
    at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    end = min(end, at + rng.choice((1, 8, 200, len(data))))
    noise = bytes(rng.choice(BYTES) for _ in range(rng.randrange(1, 64)))
    flipped = data[at : at + 1].translate(bytes(n ^ 1 << at % 8 for n in range(256)))
    ways = (b"", noise + data[at + len(noise) :], data[at:end] + data[at:], data[end:], noise + data[at:])
    lines = rng.sample(split := data.splitlines(keepends=True), len(split))
    return rng.choice((*(data[:at] + way for way in (*ways, flipped + data[at + 1 :])), b"".join(lines)))


class Files:
    """Whole files of each kind, and what must hold of a damaged one: the name of its outcome."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "whole"
        with open_engine(self.store, **NEVER) as engine:
            engine.add_batch([*turns_of("ann", 12), *turns_of("bob", 3)])
            assert engine.drain()
        with reports(self.store) as of:
            self.export = b"".join(json.dumps(record).encode() + b"\n" for record in of.export("ann"))
        self.state = end_state(self.store)
        keys = KeyFile(folder / "keys.json")
        for scope in Scope:
            keys.create(TenantScope(("ann",), None, all_tenants=False), (scope,))
        self.keys = (folder / "keys.json").read_bytes()
        line = '{"tenant": "t", "messages": [{"role": "user", "content": "w%d"}], "id": %d}\n'
        self.log = "".join(line % (n, n) for n in range(6)).encode()

    def of_export(self, engine: Engine, rng: Random) -> str:
        """Nothing of a refused import is stored; what is taken is the whole."""
        path = self.folder / "export.jsonl"
        path.write_bytes(damaged(self.export, rng))
        tenant = f"t{rng.random()}"
        try:
            with path.open("rb") as lines:
                engine.import_(tenant, RecordLines.read(lines, 1 << 20))
        except UndertowError:
            assert not engine.tenant_names(tenant), "part of a refused import is stored"
            raise
        assert engine.tenant_stats(tenant)["turns"] == 12
        return "taken"

    def of_log(self, engine: Engine, rng: Random) -> str:
        path = self.folder / "log.jsonl"
        path.write_bytes(damaged(self.log, rng))
        run = Ingest(engine)
        run.feed([path])
        assert run.settle()
        return "partly" if run.report.errors else "taken"

    def of_keys(self, _engine: Engine, rng: Random) -> str:
        parse(damaged(self.keys, rng), self.folder / "keys.json")
        return "taken"

    def of_description(self, _engine: Engine, rng: Random) -> str:
        place = self.folder / "described"
        place.mkdir(exist_ok=True)
        (place / DESCRIPTION).write_bytes(damaged((self.store / DESCRIPTION).read_bytes(), rng))
        read_info(place)
        return "taken"

    def of_store(self, _engine: Engine, rng: Random) -> str:
        """One file of a store: a reader is refused, or finds all."""
        place = self.folder / f"store-{rng.random()}"
        shutil.copytree(self.store, place)
        path = rng.choice(sorted(p for p in place.rglob("*") if p.is_file()))
        path.write_bytes(damaged(path.read_bytes(), rng)) if rng.random() < 0.9 else path.unlink()
        try:
            state = end_state(place)
        except BaseException as error:
            # a record's bytes, as Lance gave them, are no JSON; or Lance has panicked, which is no Exception
            if isinstance(error, ValueError) or type(error).__name__ == "PanicException":
                return "unreadable"
            raise
        finally:
            shutil.rmtree(place)
        return "taken" if state == self.state else "changed"


KINDS: tuple[tuple[str, int], ...] = (
    ("export", 10),
    ("log", 10),
    ("keys", 10),
    ("description", 10),
    ("store", 1),
)


def cases(folder: Path, first: int, count: int) -> Counter[str]:
    """So many cases; the outcomes by kind of file. An error that no user should meet names its seed."""
    found: Counter[str] = Counter()
    files = Files(folder)
    names, weights = zip(*KINDS, strict=True)
    with open_engine(folder / "into", **NEVER) as engine:
        for seed in range(first, first + count):
            rng = Random(seed)
            (name,) = rng.choices(names, weights)
            check: Callable[[Engine, Random], str] = getattr(files, f"of_{name}")
            try:
                found[f"{name}_{check(engine, rng)}"] += 1
            except UndertowError:
                found[f"{name}_refused"] += 1
            except BaseException as error:
                raise AssertionError(f"seed {seed}, {name}: {error!r:.300}") from error
    return found


def test_some_damaged_files_are_refused_or_whole(tmp_path: Path) -> None:
    found = cases(tmp_path, 0, 200)
    assert found.total() == 200 and found["export_refused"] > 20, found


@pytest.mark.soak
def test_damaged_files_are_refused_or_whole(tmp_path: Path) -> None:
    found = cases(tmp_path, 1_000 + soak_round() * CASES, CASES)
    assert (
        found["export_taken"] < found["export_refused"] / 10 and found["store_changed"] < found["store_taken"]
    )
    report(cases=found.total(), outcomes=dict(found))
