"""Settings from flags and environment, and opening stores with no more than a command needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undertow.engine.storage.location import Location
from undertow.serving.cli.errors import wrong_usage

if TYPE_CHECKING:
    from undertow.engine.api.engine import Engine
    from undertow.engine.api.views.reports import Reports
    from undertow.engine.base.config import Settings
    from undertow.engine.base.trace import Trace


def location_of(text: str) -> Location:
    """Where a store lies, as the command line names it. WrongUsage."""
    with wrong_usage("--store"):
        return Location.of(text)


Store = Annotated[
    Location,
    typer.Option(
        "--store",
        parser=location_of,
        metavar="PLACE",
        help="The store: a folder, or s3://BUCKET/PREFIX.",
        show_default=False,
    ),
]
Tenant = Annotated[str, typer.Option("--tenant", help="Whose memories.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to standard output and nothing else.")]
Llm = Annotated[
    str | None,
    typer.Option(
        "--llm",
        metavar="URL|off",
        help="OpenAI-compatible server; left out: UNDERTOW_LLM_URL. Several with commas between. "
        "ray:NAME: one that a vLLM actor keeps.",
    ),
]
Model = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="Model at the server; left out: its first.")
]
EncoderName = Annotated[
    str | None,
    typer.Option("--encoder", metavar="NAME", help="Embedding model; left out: UNDERTOW_ENCODER, or MiniLM."),
]
KeptIn = Annotated[
    Path | None,
    typer.Option("--vectors", metavar="FILE", help="Keep the vectors here: the next run takes seconds."),
]


def settings_of(*, llm: str | None = None, model: str | None = None, **flags: Any) -> Settings:
    """Settings of the environment, overruled by the flags that were given. WrongUsage says which is wrong."""
    from undertow.engine.base.config import Settings

    given = {name: value for name, value in flags.items() if value is not None}
    if llm is not None:
        given["llm_url"] = None if llm.lower() == "off" else llm
    if model is not None:
        given["llm_model"] = model
    with wrong_usage():
        return Settings(**given)


def check_settings(settings: Settings) -> None:
    """WrongUsage for an encoder's or a server's name that is malformed. Loads and connects nothing."""
    from undertow.engine.encoders.factory import make_encoder
    from undertow.engine.llm.client import OpenAILLM

    with wrong_usage():
        if settings.encoder.startswith("hash:"):
            make_encoder(settings)
        if settings.llm_url is not None:
            OpenAILLM(settings).close()


@contextmanager
def open_reports(store: Location) -> Iterator[Reports]:
    """The reports of a store, while others may be writing it."""
    from undertow.engine.api.views.reports import Reports
    from undertow.engine.storage.journal import Journal

    journal = Journal.open(store, writable=False)
    try:
        yield Reports(journal)
    finally:
        journal.close()


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
    from undertow.serving.cli.output import say
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
