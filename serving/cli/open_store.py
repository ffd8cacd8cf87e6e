"""Opens what --store, --ray and --shards name: an engine on a store, or a cluster on Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from undertow.engine.storage.location import Location
from undertow.serving.cli.cluster_root import refuse_root
from undertow.serving.cli.output import say
from undertow.serving.cli.settings import check_settings

if TYPE_CHECKING:
    from undertow.engine.api.engine import Engine
    from undertow.engine.base.config import Settings
    from undertow.engine.base.trace import Trace
    from undertow.engine.cluster.ray.cluster import Cluster

    OpenMemory: TypeAlias = Engine | Cluster

# what to do where a command for one store is given the root of a cluster
ADD_RAY = "add --ray local, or --ray ADDRESS"


@contextmanager
def open_engine(
    store: Location,
    settings: Settings,
    *,
    writable: bool = True,
    create: bool = False,
    encodes: bool = True,
    trace: Trace | None = None,
) -> Iterator[Engine]:
    """An engine with the settings' encoder and LLM client. StoreError, WrongUsage before any model is loaded.

    `encodes=False` is a promise that no text will be embedded: no model is loaded.
    """
    from undertow.engine.api.engine import Engine, make_llm
    from undertow.engine.base.process_tuning import settle_in
    from undertow.engine.base.trace import Trace
    from undertow.engine.encoders.factory import make_encoder
    from undertow.engine.storage.store_info import DESCRIPTION, read_info
    from undertow.serving.cli.unloaded_encoder import UnloadedEncoder, stored_fingerprint

    trace = trace or Trace()
    if not create or store.exists(DESCRIPTION):
        info = read_info(store)
        stored_fingerprint(info)
    check_settings(settings)
    encoder = make_encoder(settings) if encodes else UnloadedEncoder(info)
    settle_in()
    with Engine(store, settings, encoder, llm=make_llm(settings), writable=writable, trace=trace) as engine:
        for warning in engine.warnings:
            say(f"warning: {warning}")
        yield engine


@contextmanager
def open_memory(
    store: Location,
    settings: Settings,
    ray: str | None,
    *,
    shards: int | None = None,
    create: bool = False,
    resume: bool = False,
    trace: Trace | None = None,
) -> Iterator[OpenMemory]:
    """What a command writes to: an engine on the store or, with `ray`, the cluster of a root.

    `ray`: the address of a Ray cluster, or "local". `shards`: how many a new root starts with. `create`: make
    a store that is missing. `resume`: take up work that earlier runs of an engine left; running shards do
    so by themselves. WrongUsage; StoreError; UndertowError.
    """
    if ray is not None:
        from undertow.serving.cli.ray_session import open_cluster

        with open_cluster(store, settings, ray, shards=shards) as cluster:
            yield cluster
        return
    refuse_root(store, ADD_RAY)
    with open_engine(store, settings, create=create, trace=trace) as engine:
        if resume:
            engine.resume()
        yield engine
