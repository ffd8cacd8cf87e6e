"""A run's folder: whose it is, what it was begun with, and what must stay so for the run to go on.

Its memories hang on a part of that alone, so that another run can answer from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson
from filelock import FileLock, Timeout

from undertow.bench.quality.run.plan import AS_BUILT_IN, NAMES, construction
from undertow.engine.base.model import UndertowError

ABOUT, STORE = "run.json", "store"
# by which a run that answers from another's memories knows them again, wherever their folder has gone
_ID = "id"


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
        differing = _differing(construction(_filled(_begun(folder))), construction(_plain(about)))
        if differing:
            raise UndertowError(
                f"the memories in {folder} are others: {differing}. Give the same or leave it out."
            )
        yield folder


def identity(folder: Path) -> str:
    """Of a run whose folder is ours. A run that was begun before there were any gets one."""
    begun = _begun(folder)
    if _ID not in begun:
        begun = {_ID: uuid4().hex, **begun}
        _keep(folder, begun)
    return str(begun[_ID])


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
        _keep(folder, {_ID: uuid4().hex, **now})
        return
    begun = _begun(folder)
    if is_older := _only_names_memories(begun, now):
        begun["memories_id"] = now["memories_id"]
    if differing := _differing(_filled(begun), now):
        has_memories = (folder / STORE).is_dir() and construction(_filled(begun)) == construction(now)
        raise UndertowError(
            f"{folder} was begun with other settings: {differing}. Give the same again, or name another --out"
            + (f"; with --memories-of {folder} that needs no new memories." if has_memories else ".")
        )
    if is_older:
        _keep(folder, begun)


def _only_names_memories(begun: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a run was begun when only the name of its memories' folder was kept, and that is the one now.

    Nothing else can be known of it; from now on it has these.
    """
    named = begun.get("memories_of")
    return named is not None and "memories_id" not in begun and named == now.get("memories_of")


def _keep(folder: Path, begun: Mapping[str, Any]) -> None:
    """Write down, in one step, what a run was begun with."""
    draft = folder / f"{ABOUT}.draft"
    draft.write_bytes(orjson.dumps(begun, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    draft.replace(folder / ABOUT)


def _begun(folder: Path) -> dict[str, Any]:
    """What a run was begun with, as it was written down."""
    file = folder / ABOUT
    try:
        begun = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError:
        begun = None
    if not isinstance(begun, dict):
        raise UndertowError(f"{file} is not this command's. Name another --out.")
    return begun


def _filled(begun: Mapping[str, Any]) -> dict[str, Any]:
    """With the settings that were not written down yet, and without its identity."""
    return {name: value for name, value in {**AS_BUILT_IN, **begun}.items() if name != _ID}


def _plain(about: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from a file."""
    plain: dict[str, Any] = orjson.loads(orjson.dumps(about))
    return plain


def _differing(begun: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What is not alike, in words; "" if all is."""
    names = [n for n in sorted({*begun, *now}) if n not in NAMES and begun.get(n) != now.get(n)]
    if "memories_id" in names:  # the folder's name tells a reader more, if it is another
        names += ["memories_of"] * (begun.get("memories_of") != now.get("memories_of"))
    return "; ".join(f"{name} {begun.get(name)!r:.80}, now {now.get(name)!r:.80}" for name in names)
