"""The command line: `undertow COMMAND`, and `main` behind it.

Commands import torch, lance and the like when they run, so that `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Annotated

import typer

from undertow.serving.cli.commands import (
    bench,
    check,
    cluster,
    consume,
    edit,
    erase,
    estimate,
    ingest,
    keys,
    mcp,
    policy,
    read,
    serve,
)
from undertow.serving.cli.commands.eval.eval import evaluate
from undertow.serving.cli.errors import EXIT_CODES, Guarded
from undertow.serving.cli.options import with_groups

__all__ = ["app", "main"]

COMMANDS: dict[str, Callable[..., None]] = {
    "ingest": ingest.ingest,
    "serve": serve.serve,
    "mcp": mcp.mcp,
    "search": read.search,
    "ask": read.ask,
    "list": read.list_,
    "explain": read.explain,
    "get": read.get,
    "history": read.history,
    "export": read.export,
    "import": edit.import_,
    "stats": read.stats,
    "update": edit.update,
    "delete": edit.delete,
    "erase": erase.erase,
    "policy": policy.policy,
    "flush": policy.flush,
    "jobs": edit.jobs,
    "reindex": edit.reindex,
    "repair": edit.repair,
    "audit": check.audit,
    "calibrate": check.calibrate,
    "estimate": estimate.estimate,
    "eval": evaluate,
    "doctor": check.doctor,
    "demo": check.demo,
    "quickstart": check.quickstart,
}

app = typer.Typer(
    cls=Guarded,
    name="undertow",
    help="Long-term memory for LLM agents: every turn in a cheap store, an LLM call when a topic recurs.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for name, command in COMMANDS.items():
    app.command(name)(with_groups(command))
app.add_typer(consume.consume, name="consume")
app.add_typer(cluster.cluster, name="cluster")
app.add_typer(keys.keys, name="keys")
app.add_typer(bench.bench, name="bench")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"undertow {metadata.version('undertow')}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of every command; see `Guarded`."""


def main() -> None:
    """Entry point of the `undertow` program."""
    app(prog_name="undertow")
