"""The one place where a name becomes a system."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from undertow.bench.quality.baselines import FullContext, NaiveRAG
from undertow.bench.quality.engine_system import EngineSystem
from undertow.bench.quality.systems import Means, System

DEFAULT = "recmem"

SYSTEMS: dict[str, Callable[[Means], System]] = {
    DEFAULT: partial(EngineSystem, DEFAULT),
    "full-context": FullContext,
    "naive-rag-2048": partial(NaiveRAG, 2048),
    "naive-rag-4096": partial(NaiveRAG, 4096),
}
