"""Cases that `make test` leaves out, as they take long: those marked `rarely`.

    python -m tests.support.soak.rare N    # those of the N-th file, as a unit of `make soak PROOF=rare`

`rarely(policy=("eager",), ...)` marks the cases of a test with such a parameter, and `rarely` all of them.
"""

from __future__ import annotations

import sys

import pytest

from undertow.bench.machine import ROOT

from .runs import report

# of the policies, those that are there to be compared with
COMPARED = ("eager", "a-mem", "memory-os")
FILES = tuple(
    sorted(
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.rarely" in path.read_text(encoding="utf-8")
    )
)


class _Count:
    cases = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.cases += report.when == "call" and report.passed


if __name__ == "__main__":
    count, file = _Count(), FILES[int(sys.argv[1]) % len(FILES)]
    words = ["-q", "-rs", "-m", "rare", "--timeout", "0", "-p", "no:cacheprovider", file]
    if (ended := pytest.main(words, [count])) == 0 and count.cases:  # all skipped is no proof
        report(files=1, cases=count.cases)
    sys.exit(ended)
