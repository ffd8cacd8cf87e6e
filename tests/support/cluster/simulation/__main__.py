"""Runs seeds, and prints the hash of the events of each: `-m tests.support.cluster.simulation SEED...`."""

from __future__ import annotations

import sys

from .run import run

for seed in map(int, sys.argv[1:]):
    print(seed, run(seed).digest, flush=True)
