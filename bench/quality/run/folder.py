"""A run's folder: its lock, and the settings that a run must keep to be resumed.

The memories depend on only some of those settings, so that another run can answer from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson
from filelock import FileLock, Timeout

from undertow.bench.quality.json_lines import write_json
from undertow.bench.quality.run.plan import AS_BUILT_IN, NAMES, construction
from undertow.engine.base.model import UndertowError

ABOUT, STORE = "run.json", "store"
# identifies the memories for a run that answers from them, even after the folder has moved
_ID = "id"


@contextmanager
def run_folder(folder: Path, about: Mapping[str, Any]) -> Iterator[Path]:
    """The folder, locked inside the block. `about`: plain data of everything its lines depend on.

    UndertowError: another process works there, or the run was begun with other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder, "--out"):
        _claim(folder, about)
        yield folder


@contextmanager
def memories_of(folder: Path, about: Mapping[str, Any]) -> Iterator[Path]:
    """Another run's folder, locked inside the block, whose memories serve the run that `about` describes.

    UndertowError: there is no such run, another process works there, or its memories are different.
    """
    if not (folder / ABOUT).is_file() or not (folder / STORE).is_dir():
        raise UndertowError(
            f"--memories-of {folder}: there are no memories of `undertow eval`. Name the --out of a run."
        )
    with _alone(folder, "--memories-of"):
        differing = _differing(construction(_filled(_begun(folder))), construction(_plain(about)))
        if differing:
            raise UndertowError(
                f"the memories in {folder} are others: {differing}. Give the same or leave it out."
            )
        yield folder


def identity(folder: Path) -> str:
    """The id of the run in a folder that is ours."""
    return str(_begun(folder)[_ID])


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
    now = _plain(about)
    if not (folder / ABOUT).exists():
        write_json(folder / ABOUT, {_ID: uuid4().hex, **now})
        return
    begun = _filled(_begun(folder))
    if differing := _differing(begun, now):
        has_memories = (folder / STORE).is_dir() and construction(begun) == construction(now)
        raise UndertowError(
            f"{folder} was begun with other settings: {differing}. Give the same again, or name another --out"
            + (f"; with --memories-of {folder} that needs no new memories." if has_memories else ".")
        )


def _begun(folder: Path) -> dict[str, Any]:
    """What a run was begun with. UndertowError: the file is not one of ours."""
    file = folder / ABOUT
    try:
        begun = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError:
        begun = None
    if not isinstance(begun, dict) or _ID not in begun:
        raise UndertowError(f"{file} is not this command's. Name another --out.")
    return begun


def _filled(begun: Mapping[str, Any]) -> dict[str, Any]:
    """Without the id, and with defaults for settings that did not exist when the run began."""
    return {name: value for name, value in {**AS_BUILT_IN, **begun}.items() if name != _ID}


def _plain(about: Mapping[str, Any]) -> dict[str, Any]:
    """As read back from a file."""
    plain: dict[str, Any] = orjson.loads(orjson.dumps(about))
    return plain


def _differing(begun: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The differences in words; "" without any."""
    names = [n for n in sorted({*begun, *now}) if n not in NAMES and begun.get(n) != now.get(n)]
    if "memories_id" in names:  # the folder's name tells a reader more, if it is another
        names += ["memories_of"] * (begun.get("memories_of") != now.get("memories_of"))
    return "; ".join(f"{name} {begun.get(name)!r:.80}, now {now.get(name)!r:.80}" for name in names)
