"""Options of several commands."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from typer.models import OptionInfo

from undertow.engine.storage.location import Location
from undertow.serving.cli.errors import wrong_usage


def location_of(text: str) -> Location:
    """Parse the value of --store. WrongUsage: it names no valid location."""
    with wrong_usage("--store"):
        return Location.of(text)


def store_option(help: str, metavar: str = "PLACE") -> OptionInfo:
    """An option --store of a command, whose value is parsed to a Location."""
    option: OptionInfo = typer.Option(
        "--store", parser=location_of, metavar=metavar, help=help, show_default=False
    )
    return option


Store = Annotated[Location, store_option("The store: a folder, or s3://BUCKET/PREFIX.")]
Tenant = Annotated[str, typer.Option("--tenant", help="The tenant's name.", show_default=False)]
OnlyTenant = Annotated[str | None, typer.Option("--tenant", help="Only this tenant; left out: all.")]
InTenant = Annotated[
    str | None,
    typer.Option("--tenant", help="Only if this tenant has it. A cluster then asks one shard, not all."),
]
MemoryId = Annotated[str, typer.Argument(metavar="ID", help="A turn, an episode or a fact.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to standard output and nothing else.")]
Llm = Annotated[
    str | None,
    typer.Option(
        "--llm",
        metavar="URL|off",
        help="OpenAI-compatible server; left out: UNDERTOW_LLM_URL. Several are separated by commas. "
        "ray:NAME: one that a vLLM actor runs.",
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


class LogFormatName(StrEnum):
    AUTO = "auto"
    MESSAGES = "messages"
    PARQUET = "parquet"
    LOCOMO = "locomo"
    LONGMEMEVAL = "longmemeval"


class ProfileName(StrEnum):
    COMPANION = "companion"
    ASSISTANT = "assistant"


Paths = Annotated[
    list[str],
    typer.Argument(metavar="PATH...", help="Logs, or folders of logs; also s3://BUCKET/PREFIX."),
]
LogFormat = Annotated[LogFormatName, typer.Option("--format")]
Profile = Annotated[ProfileName | None, typer.Option("--profile", help="Preset of thresholds.")]
ThetaSim = Annotated[float | None, typer.Option("--theta-sim", help="Least cosine that links two turns.")]
ThetaMerge = Annotated[
    float | None, typer.Option("--theta-merge", help="Least cosine to an episode for a merge.")
]
ThetaCount = Annotated[
    int | None, typer.Option("--theta-count", help="Linked turns that make a topic recur.")
]
BatchTurns = Annotated[
    int | None, typer.Option("--batch-turns", help="Turns per commit; left out: by the encoder's speed.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first refused input.")]
Resume = Annotated[bool, typer.Option("--resume", help="Start each file where the last run left it.")]
TraceFile = Annotated[Path | None, typer.Option("--trace", help="Write a Chrome trace here.")]
RAY_METAVAR = "ADDRESS|local"
RAY_HELP = "Ray's address (auto: the running one), or this machine."
Ray = Annotated[
    str | None, typer.Option("--ray", metavar=RAY_METAVAR, help=f"Work on a cluster's shards: {RAY_HELP}")
]
RayAddress = Annotated[str, typer.Option("--ray", metavar=RAY_METAVAR, help=RAY_HELP)]
Shards = Annotated[
    int | None, typer.Option("--shards", min=1, help="With --ray: the number of shards of a new cluster.")
]
