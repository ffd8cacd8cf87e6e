"""`undertow mcp`: memories as MCP tools, on standard input and output."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undertow.engine.storage.location import Location
from undertow.serving.auth.principal import check_name
from undertow.serving.cli import options as opt
from undertow.serving.cli.errors import WrongUsage, wrong_usage
from undertow.serving.cli.output import say
from undertow.serving.cli.served import KEY_VARIABLE as KEY_VARIABLE
from undertow.serving.cli.stores import is_root

if TYPE_CHECKING:
    from undertow.engine.base.config import Settings


def mcp(
    url: Annotated[
        str | None, typer.Option("--url", help="A service's URL, such as http://localhost:8080.")
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file", metavar="FILE", help=f"Holds the key for --url; left out: ${KEY_VARIABLE}."
        ),
    ] = None,
    store: Annotated[
        Location | None, opt.store_option("A store of this machine, without a service.", "FOLDER")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="For this tenant alone; left out: each call names one.")
    ] = None,
    models: opt.Models = opt.NO_MODELS,
) -> None:
    """Offer memories as MCP tools on standard input and output, for an agent that starts this command.

    With --url it is a client of a service; with --store it opens the store itself, which no other process
    may be writing. A service offers the same over HTTP, at /mcp.
    """
    if (url is None) == (store is None):
        raise WrongUsage("give --url URL for a service, or --store FOLDER for a store of this machine")
    if url is None and key_file is not None:
        raise WrongUsage("--key-file goes with --url: a store of this machine needs no key")
    if tenant is not None:
        with wrong_usage("--tenant"):
            check_name(tenant)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if url is not None:
        if models != opt.NO_MODELS:
            raise WrongUsage("--llm, --model and --encoder go with --store: a service has its own")
        _serve_remote(url, key_of(key_file), tenant)
    elif store is not None:
        _serve_store(store, tenant, models.settings())


def key_of(file: Path | None) -> str | None:
    """The key in the file or else in the environment; None: there is none."""
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUsage(
            f"--key-file {file} cannot be read: {getattr(error, 'strerror', 'it is no text')}"
        ) from error


def _serve_remote(url: str, key: str | None, tenant: str | None) -> None:
    from undertow.serving.client.requests import checked_url, headers_of
    from undertow.serving.mcp.stdio import refuses, serve_remote

    with wrong_usage():
        checked_url(url)
        headers_of(key)
    if (refused := asyncio.run(refuses(url, key))) is None:
        say(f"warning: {url} does not answer yet; calls fail until it does.")
    if refused:
        what = "wants a key" if key is None else "refuses this key, which may be revoked or another service's"
        raise WrongUsage(
            f"{url} {what}: set {KEY_VARIABLE} for this command, or give --key-file FILE. Where the "
            "service runs, `undertow keys create` makes one."
        )
    asyncio.run(serve_remote(url, key, tenant))


def _serve_store(store: Location, tenant: str | None, engine: Settings) -> None:
    from undertow.engine.base.process_tuning import settle_in
    from undertow.serving.async_memories import open_memories
    from undertow.serving.http.hosting import Files, serve_mcp
    from undertow.serving.http.service_settings import ServiceSettings

    if is_root(store):
        raise WrongUsage(f"{store} is a cluster's root: serve it with `undertow serve`, then give --url")
    opt.check_settings(engine)
    with wrong_usage():
        settings = ServiceSettings()
    files = Files.beside(store, None, None, open_to_all=True)
    settle_in()
    asyncio.run(
        serve_mcp(lambda loop: open_memories(store, engine, loop=loop), files, tenant, settings, engine)
    )
