"""Opens what --store names: for reading while others write, or for writing, there or on a Ray cluster.

A location holds the store of one process, or the root of a cluster, whose shards have a store each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from undertow.engine.base.model import UndertowError
from undertow.engine.storage.location import Location
from undertow.serving.cli.errors import WrongUsage
from undertow.serving.cli.options import check_settings
from undertow.serving.cli.output import say
from undertow.serving.cli.served import ServedReports, ServiceUrl, client_of

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from undertow.engine.api.engine import Engine
    from undertow.engine.api.views.reports import Reports
    from undertow.engine.base.config import Settings
    from undertow.engine.cluster.ray.cluster import Cluster
    from undertow.engine.encoders.base import Fingerprint, Float16

    OpenMemory: TypeAlias = Engine | Cluster
    AnyReports: TypeAlias = Reports | ServedReports

# the advice where a command for one store is given the root of a cluster
ADD_RAY = "add --ray local, or --ray ADDRESS"


def is_root(store: Location) -> bool:
    """Whether the location is a cluster's root."""
    from undertow.engine.cluster.shard_map import exists

    return exists(store)


def refuse_root(store: Location, advice: str = ADD_RAY) -> None:
    """WrongUsage: the location is a cluster's root, but the command writes a single store."""
    if is_root(store):
        raise WrongUsage(f"{store} is the root of a cluster, whose running shards write it: {advice}.")


def shard_store(root: Location, shard: str) -> Location:
    return root / f"shards/{shard}"


# ---- reading


@contextmanager
def open_reports(store: Location) -> Iterator[Reports]:
    """The reports of one store."""
    from undertow.engine.base.process_tuning import without_pandas

    with without_pandas():
        from undertow.engine.api.views.reports import Reports
        from undertow.engine.storage.journal import Journal

    with closing(Journal.open(store, writable=False)) as journal:
        yield Reports(journal)


def tenant_reports(store: Location, tenant: str) -> AbstractContextManager[Reports]:
    """The reports of the store that holds the tenant."""
    return open_reports(store_of(store, tenant))


@contextmanager
def all_reports(store: Location) -> Iterator[list[Reports]]:
    """The reports of `stores_of`."""
    with ExitStack() as stack:
        yield [stack.enter_context(open_reports(location)) for location in stores_of(store)]


@contextmanager
def some_reports(store: Location, tenant: str | None) -> Iterator[Sequence[AnyReports]]:
    """The reports of all stores, or of the one that holds the tenant; a service has one."""
    with ExitStack() as stack:
        if isinstance(store, ServiceUrl):
            yield [ServedReports(stack.enter_context(client_of(store)), tenant)]
        elif tenant is None:
            yield stack.enter_context(all_reports(store))
        else:
            yield [stack.enter_context(tenant_reports(store, tenant))]


def store_of(store: Location, tenant: str) -> Location:
    """The store that holds the tenant: the given one or, in a cluster, its shard's.

    During resharding this is the shard that has the tenant now.
    """
    if not is_root(store):
        return store
    from undertow.engine.cluster.shard_map import load
    from undertow.engine.storage.store_info import is_store

    shard_map = load(store)
    owner, home = (shard_store(store, name) for name in (shard_map.owner(tenant), shard_map.home(tenant)))
    if owner != home and is_store(owner):
        with open_reports(owner) as reports:
            if tenant in reports.catalog:
                return owner
    return home


def stores_of(store: Location) -> list[Location]:
    """The given store or, in a cluster, the stores of all shards that have one."""
    if not is_root(store):
        return [store]
    from undertow.engine.cluster.shard_map import load
    from undertow.engine.storage.store_info import is_store

    locations = [shard_store(store, shard) for shard in load(store).all_shards]
    return [location for location in locations if is_store(location)]


# ---- writing


@contextmanager
def open_engine(
    store: Location,
    settings: Settings,
    *,
    writable: bool = True,
    create: bool = False,
    encodes: bool = True,
    trace: Path | None = None,
) -> Iterator[Engine]:
    """An engine with the settings' encoder and LLM client. StoreError, WrongUsage before any model is loaded.

    `encodes=False`: the command embeds no text, so no model is loaded. `trace`: the file for a Chrome trace.
    """
    from undertow.engine.api.engine import Engine, make_llm
    from undertow.engine.base.process_tuning import settle_in
    from undertow.engine.base.trace import Trace
    from undertow.engine.encoders.base import Fingerprint
    from undertow.engine.encoders.factory import make_encoder
    from undertow.engine.storage.store_info import DESCRIPTION, read_info

    if not create or store.exists(DESCRIPTION):
        fingerprint = Fingerprint.stored(read_info(store).encoder)
    check_settings(settings)
    encoder = make_encoder(settings) if encodes else UnloadedEncoder(fingerprint)
    settle_in()
    with Engine(
        store, settings, encoder, llm=make_llm(settings), writable=writable, trace=Trace(trace)
    ) as engine:
        for warning in engine.warnings:
            say(f"warning: {warning}")
        yield engine


class UnloadedEncoder:
    """Has the fingerprint of the store's own encoder, and refuses to encode."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.fingerprint = fingerprint
        self.dim = fingerprint.dim

    def encode(self, texts: Sequence[str]) -> Float16:
        """UndertowError: the command was to embed nothing."""
        raise UndertowError(f"the encoder {self.fingerprint.model} was not loaded for this command")


@contextmanager
def open_memory(
    store: Location,
    settings: Settings,
    ray: str | None,
    *,
    shards: int | None = None,
    create: bool = False,
    resume: bool = False,
    trace: Path | None = None,
) -> Iterator[OpenMemory]:
    """What a command writes to: an engine on the store or, with `ray`, the cluster of a root.

    `ray`: the address of a Ray cluster, or "local". `shards`: the number of shards of a new root. `create`:
    make a store that is missing. `resume`: continue the undecided work of earlier runs; shards always do.
    WrongUsage; StoreError; UndertowError.
    """
    if ray is not None:
        from undertow.serving.cli.ray_session import open_cluster

        with open_cluster(store, settings, ray, shards=shards) as cluster:
            yield cluster
        return
    refuse_root(store)
    with open_engine(store, settings, create=create, trace=trace) as engine:
        if resume:
            engine.resume()
        yield engine


def is_engine(memory: OpenMemory) -> TypeIs[Engine]:
    """Whether it is an engine of this process, not a cluster, whose commands must not load torch."""
    from undertow.engine.cluster.routing.router import Router

    return not isinstance(memory, Router)
