"""The measured systems by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

from undertow.bench.peers.process import RUNNERS
from undertow.bench.quality.systems.base import Means, System
from undertow.bench.quality.systems.baselines import FullContext, NaiveRAG
from undertow.bench.quality.systems.engine import NaiveRagHybrid, WithoutMemories, engine_system
from undertow.bench.quality.systems.peer import PeerSystem
from undertow.engine.base.model import PolicyName

DEFAULT, CONTROL = "recmem", "turns-only"
CONTROLS = (CONTROL, "naive-rag-hybrid")
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)

CONSTRUCTING = (*POLICIES, *RUNNERS)
"""Systems that make memories, which another run can reuse (`--memories-of`)."""

SYSTEMS: dict[str, Callable[[Means], System]] = {
    **{name: partial(engine_system, name) for name in POLICIES},
    CONTROL: partial(WithoutMemories, CONTROL),
    "naive-rag-hybrid": partial(NaiveRagHybrid, "naive-rag-hybrid"),
    "full-context": FullContext,
    "naive-rag-2048": partial(NaiveRAG, 2048),
    "naive-rag-4096": partial(NaiveRAG, 4096),
    **{name: partial(PeerSystem, name) for name in RUNNERS},
}
