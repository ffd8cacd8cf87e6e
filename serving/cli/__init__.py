"""The command line: `undertow COMMAND`, and `main` behind it.

torch, lance and the rest are imported inside the commands that need them, so that `--help` is quick.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from undertow.serving.cli.commands import (
    bench as benching,
)
from undertow.serving.cli.commands import (
    check as checking,
)
from undertow.serving.cli.commands import (
    cluster as clustering,
)
from undertow.serving.cli.commands import (
    edit as changing,
)
from undertow.serving.cli.commands import (
    estimate as estimating,
)
from undertow.serving.cli.commands import (
    import_ as importing,
)
from undertow.serving.cli.commands import (
    ingest as ingesting,
)
from undertow.serving.cli.commands import (
    keys as keying,
)
from undertow.serving.cli.commands import (
    mcp as agents,
)
from undertow.serving.cli.commands import (
    policy as policies,
)
from undertow.serving.cli.commands import (
    read as reading,
)
from undertow.serving.cli.commands import (
    serve as serving,
)
from undertow.serving.cli.commands.eval import eval as evaluating
from undertow.serving.cli.errors import EXIT_CODES, Guarded

__all__ = ["app", "main"]

app = typer.Typer(
    cls=Guarded,
    name="undertow",
    help="Long-term memory for LLM agents: every turn in a cheap store, an LLM call when a topic recurs.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"undertow {version('undertow')}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Options of every command; see `Guarded`."""


app.command()(ingesting.ingest)
app.command()(serving.serve)
app.command()(agents.mcp)
app.command()(reading.search)
app.command()(reading.ask)
app.command(name="list")(reading.list_)
app.command()(reading.explain)
app.command()(reading.get)
app.command()(reading.history)
app.command()(reading.export)
app.command(name="import")(importing.import_)
app.command()(reading.stats)
app.command()(changing.update)
app.command()(changing.delete)
app.command()(changing.erase)
app.command()(policies.policy)
app.command()(policies.flush)
app.command()(changing.jobs)
app.command()(changing.reindex)
app.command()(checking.calibrate)
app.command()(estimating.estimate)
app.command(name="eval")(evaluating.evaluate)
app.command()(checking.doctor)
app.command()(checking.demo)
app.add_typer(clustering.cluster, name="cluster")
app.add_typer(keying.keys, name="keys")
app.add_typer(benching.bench, name="bench")


def main() -> None:
    """Entry point of the `undertow` program."""
    app(prog_name="undertow")
