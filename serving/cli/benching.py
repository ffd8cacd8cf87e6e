"""`undertow bench`: measurements of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from undertow.serving.cli.errors import WrongUsage, wrong_usage
from undertow.serving.cli.opening import AsJson

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)


@bench.callback()
def group() -> None:
    """Measure this machine."""


@bench.command()
def gpu(
    as_json: AsJson = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer repeats and shorter runs, of the same sizes.")
    ] = False,
    only: Annotated[
        str | None, typer.Option("--only", metavar="PARTS", help="Some of gate,topk,encoder,ingest.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the JSON here, a table beside it; a folder will do.")
    ] = None,
    encoder: Annotated[
        Path | None,
        typer.Option(
            "--encoder", metavar="FOLDER", help="The model of encoder and ingest; else the settings'."
        ),
    ] = None,
) -> None:
    """What the GPU path reaches on this card, against measured limits and targets (docs/gpu.md).

    Minutes; nothing else should use the card. Exit code 1: a part failed or gave wrong results.
    """
    from undertow.bench.gpu import Options, check, parts_of, report
    from undertow.bench.gpu_figures import PARTS, NotMeasured

    options = Options(quick, PARTS if only is None else parts_of(only), out, encoder)
    try:
        with wrong_usage():
            check(options)
    except NotMeasured as error:
        raise WrongUsage(str(error)) from error
    raise typer.Exit(report(options, as_json=as_json))
