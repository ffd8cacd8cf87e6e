"""Picks the gate for an arena. It stands above the implementations, so that none imports another."""

from __future__ import annotations

from undertow.kernels.arena.arena import Arena
from undertow.kernels.gate.gate import Gate


def make_gate(arena: Arena) -> Gate:
    """The fastest gate for the device that holds the arena's rows."""
    # Imported here: the compiled code of the other one is not loaded.
    if arena.device == "cuda":
        from undertow.kernels.gate.cuda_gate import CudaGate

        return CudaGate(arena)
    from undertow.kernels.gate.cpu_gate import NumbaGate

    return NumbaGate(arena)
