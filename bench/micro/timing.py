"""Timing by turns: every task is measured in every round, so that other load affects all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Task = Callable[[], object]


def timed(task: Task) -> tuple[float, float]:
    """(wall seconds, CPU seconds of all threads)"""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    task()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def in_turns(tasks: Mapping[str, Task], repeats: int) -> dict[str, tuple[float, float]]:
    """Median wall and CPU seconds of each task, after one unmeasured round."""
    for task in tasks.values():
        task()
    rounds = [{name: timed(task) for name, task in tasks.items()} for _ in range(repeats)]
    return {
        name: (statistics.median(r[name][0] for r in rounds), statistics.median(r[name][1] for r in rounds))
        for name in tasks
    }
