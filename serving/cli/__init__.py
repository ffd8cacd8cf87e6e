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

# by the panels of --help
COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Start": {"quickstart": check.quickstart, "demo": check.demo, "doctor": check.doctor},
    "Take in": {"ingest": ingest.ingest, "import": edit.import_, "flush": policy.flush},
    "Find": {"search": read.search, "ask": read.ask},
    "Look": {
        "list": read.list_,
        "get": read.get,
        "history": read.history,
        "explain": read.explain,
        "stats": read.stats,
        "jobs": edit.jobs,
        "audit": check.audit,
        "export": read.export,
    },
    "Change": {
        "update": edit.update,
        "delete": edit.delete,
        "erase": erase.erase,
        "policy": policy.policy,
        "reindex": edit.reindex,
        "repair": edit.repair,
    },
    "Serve": {"serve": serve.serve, "mcp": mcp.mcp},
    "Measure": {"calibrate": check.calibrate, "estimate": estimate.estimate, "eval": evaluate},
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
for panel, commands in COMMANDS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel)(with_groups(command))
app.add_typer(consume.consume, name="consume", rich_help_panel="Take in")
app.add_typer(keys.keys, name="keys", rich_help_panel="Serve")
app.add_typer(cluster.cluster, name="cluster", rich_help_panel="Serve")
app.add_typer(bench.bench, name="bench", rich_help_panel="Measure")


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
