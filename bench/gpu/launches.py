"""A few launches of the gate's kernels on a small load, for ncu: `python -m undertow.bench.gpu.launches`."""

from __future__ import annotations

import argparse

from undertow.bench.gpu.gate import launcher
from undertow.bench.gpu.load import World, equal_sizes
from undertow.bench.gpu.rig import Rig
from undertow.kernels.gate.factory import make_gate


def launch(rig: Rig, tenants: int, rows: int = 1_000, dim: int = 384, times: int = 3) -> World:
    """Tenants of `rows` turns each, the newest of each asked about `times` times; the load."""
    world = World(rig, equal_sizes(tenants, tenants * rows), 5, dim)
    work = launcher(make_gate(world.arena), world.questions(1))
    for _ in range(times):
        work()
    rig.sync()
    return world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tenants", type=int, default=2_000, help="of 1,000 turns each (2,000)")
    world = launch(Rig(), parser.parse_args().tenants)
    print(f"the scan reads {world.bytes_read / 1e9:.3f} GB")


if __name__ == "__main__":
    main()
