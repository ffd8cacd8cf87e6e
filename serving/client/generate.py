"""Makes `_sync/` of `_async/`: python -P serving/client/generate.py

A developer's tool; it needs unasync and ruff, of the extra `dev`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "_async"
TARGET = HERE / "_sync"
HEADER = "# Made of _async/ by `python -P serving/client/generate.py`: change that.\n"
# beyond unasync's own, such as `__aenter__`
NAMES = {
    "AsyncClient": "Client",
    "AsyncTransport": "Transport",
    "_async": "_sync",
    "aclose": "close",
    "aiter_lines": "iter_lines",
    "aread": "read",
    "asyncio": "time",  # for its sleep
}


def generate(target: Path = TARGET) -> None:
    """Write the sync client into a folder."""
    from unasync import Rule, unasync_files  # type: ignore[import-untyped]

    sources = sorted(SOURCE.glob("*.py"))
    unasync_files([str(path) for path in sources], [Rule(f"{SOURCE}/", f"{target}/", NAMES)])
    made = [target / path.name for path in sources]
    for path in made:
        path.write_text(HEADER + path.read_text())
    _ruff("check", "--fix", "--unsafe-fixes", "--select", "I,UP028", *made)  # names sort otherwise now
    _ruff("format", *made)  # and lines that lost an `await` may fit together


def _ruff(command: str, *args: str | Path) -> None:
    settings = HERE.parents[1] / "pyproject.toml"
    ruff = [sys.executable, "-m", "ruff", command, "--quiet", "--config", str(settings)]
    subprocess.run([*ruff, *map(str, args)], check=True)


if __name__ == "__main__":
    generate()
