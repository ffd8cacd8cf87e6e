"""A run's folder: whose it is, what it was begun with, and what must stay so for the run to go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from filelock import FileLock, Timeout

from undertow.engine.model import UndertowError

ABOUT = "run.json"


@contextmanager
def run_folder(folder: Path, about: Mapping[str, Any]) -> Iterator[Path]:
    """The folder, ours alone inside the block. `about`: plain data of all that its lines hang on.

    UndertowError: another process works there, or it was begun with something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "lock", timeout=0):
            _claim(folder, about)
            yield folder
    except Timeout:
        raise UndertowError(
            f"another process works in {folder}. Wait for it, or name another --out."
        ) from None


def _claim(folder: Path, about: Mapping[str, Any]) -> None:
    file = folder / ABOUT
    if not file.exists():
        draft = file.with_name(ABOUT + ".draft")
        draft.write_bytes(orjson.dumps(about, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        draft.replace(file)
        return
    try:
        begun = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError:
        begun = None
    if not isinstance(begun, dict):
        raise UndertowError(f"{file} is not this command's. Name another --out.")
    now = orjson.loads(orjson.dumps(about))
    if differing := [name for name in sorted({*begun, *now}) if begun.get(name) != now.get(name)]:
        told = "; ".join(f"{name} {begun.get(name)!r:.80}, now {now.get(name)!r:.80}" for name in differing)
        raise UndertowError(
            f"{folder} was begun with other settings: {told}. Give the same again, or name another --out."
        )
