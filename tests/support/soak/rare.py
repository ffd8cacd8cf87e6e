"""Cases that `make test` leaves out, as they take long and resemble others: those marked `rarely`.

    python -m tests.support.soak.rare N    # those of the N-th file, as a unit of `make soak PROOF=rare`

`rarely(policy=("eager",), ...)` marks the cases of a test with such a parameter, and `rarely` all of them.
"""

from __future__ import annotations

import sys

import pytest

from .runs import report

# of the policies, those that are there to be compared with
COMPARED = ("eager", "a-mem", "memory-os")
FILES = (
    "tests/cluster/resharding/test_resharding.py",
    "tests/cluster/test_simulation.py",
    "tests/engine/api/erase/test_erase_turns.py",
    "tests/engine/api/test_policy_change.py",
    "tests/engine/encoders/test_packed.py",
    "tests/engine/step/test_equivalence.py",
    "tests/engine/step/test_kill.py",
    "tests/engine/storage/journal/test_log_simulation.py",
    "tests/kernels/test_gate_shim.py",
    "tests/llm/test_faults.py",
    "tests/llm/test_vllm_embeddings.py",
    "tests/policies/test_oracles.py",
    "tests/service/streams/test_kafka.py",
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
