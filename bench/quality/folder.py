"""A run's folder: whose it is, what it was begun with, and what must stay so for the run to go on.

Its memories hang on a part of that alone, so that another run can answer from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from filelock import FileLock, Timeout

from undertow.bench.quality.plan import AS_BUILT_IN, construction
from undertow.engine.model import UndertowError

ABOUT, STORE = "run.json", "store"


@contextmanager
def run_folder(folder: Path, about: Mapping[str, Any]) -> Iterator[Path]:
    """The folder, ours alone inside the block. `about`: plain data of all that its lines hang on.

    UndertowError: another process works there, or it was begun with something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder, "--out"):
        _claim(folder, about)
        yield folder


@contextmanager
def memories_of(folder: Path, about: Mapping[str, Any]) -> Iterator[Path]:
    """Another run's folder, ours alone inside the block, to answer from its memories a run that is `about`.

    UndertowError: there is no such run, another process works there, or its memories are others.
    """
    if not (folder / ABOUT).is_file() or not (folder / STORE).is_dir():
        raise UndertowError(
            f"--memories-of {folder}: there are no memories of `undertow eval`. Name the --out of a run."
        )
    with _alone(folder, "--memories-of"):
        differing = _differing(construction(_begun(folder)), construction(_plain(about)))
        if differing:
            raise UndertowError(
                f"the memories in {folder} are others: {differing}. Give the same or leave it out."
            )
        yield folder


@contextmanager
def _alone(folder: Path, option: str) -> Iterator[None]:
    lock = FileLock(folder / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UndertowError(
            f"another process works in {folder}. Wait for it, or name another {option}."
        ) from None
    try:
        yield
    finally:
        lock.release()


def _claim(folder: Path, about: Mapping[str, Any]) -> None:
    file = folder / ABOUT
    if not file.exists():
        draft = file.with_name(ABOUT + ".draft")
        draft.write_bytes(orjson.dumps(about, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        draft.replace(file)
        return
    begun, now = _begun(folder), _plain(about)
    if differing := _differing(begun, now):
        has_memories = (folder / STORE).is_dir() and construction(begun) == construction(now)
        raise UndertowError(
            f"{folder} was begun with other settings: {differing}. Give the same again, or name another --out"
            + (f"; with --memories-of {folder} that needs no new memories." if has_memories else ".")
        )


def _begun(folder: Path) -> dict[str, Any]:
    """What a run was begun with."""
    file = folder / ABOUT
    try:
        begun = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError:
        begun = None
    if not isinstance(begun, dict):
        raise UndertowError(f"{file} is not this command's. Name another --out.")
    return AS_BUILT_IN | begun


def _plain(about: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from a file."""
    plain: dict[str, Any] = orjson.loads(orjson.dumps(about))
    return plain


def _differing(begun: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What is not alike, in words; "" if all is."""
    names = [name for name in sorted({*begun, *now}) if begun.get(name) != now.get(name)]
    return "; ".join(f"{name} {begun.get(name)!r:.80}, now {now.get(name)!r:.80}" for name in names)
