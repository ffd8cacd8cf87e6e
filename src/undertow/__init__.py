"""Undertow: long-term memory for LLM agents, with an LLM call only when a topic recurs.

The public names below are loaded on first use, so that `import undertow.kernels` needs no engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undertow.engine.cluster.actors import connect as connect
    from undertow.engine.cluster.cluster import Cluster as Cluster
    from undertow.engine.cluster.resources import ClusterSettings as ClusterSettings
    from undertow.engine.config import Settings as Settings
    from undertow.engine.encoder import make_encoder as make_encoder
    from undertow.engine.engine import Engine as Engine
    from undertow.engine.engine import make_llm as make_llm
    from undertow.engine.model import Memory as Memory
    from undertow.engine.model import Message as Message
    from undertow.engine.model import Turn as Turn
    from undertow.engine.model import UndertowError as UndertowError
    from undertow.serving.client import AsyncClient as AsyncClient
    from undertow.serving.client import Client as Client

__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "serving.client",
    "Client": "serving.client",
    "Cluster": "engine.cluster.cluster",
    "ClusterSettings": "engine.cluster.resources",
    "Engine": "engine.engine",
    "Memory": "engine.model",
    "Message": "engine.model",
    "Settings": "engine.config",
    "Turn": "engine.model",
    "UndertowError": "engine.model",
    "connect": "engine.cluster.actors",
    "make_encoder": "engine.encoder",
    "make_llm": "engine.engine",
}

__all__ = [
    "AsyncClient",
    "Client",
    "Cluster",
    "ClusterSettings",
    "Engine",
    "Memory",
    "Message",
    "Settings",
    "Turn",
    "UndertowError",
    "__version__",
    "connect",
    "make_encoder",
    "make_llm",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'undertow' has no attribute {name!r}")
    return getattr(import_module(f"undertow.{_HOMES[name]}"), name)
