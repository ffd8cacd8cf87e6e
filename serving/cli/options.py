"""Options of several commands, and the settings that they make."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import typer
from typer.models import OptionInfo

from undertow.engine.base.model import Format, InputError
from undertow.engine.storage.location import Location
from undertow.serving.cli.errors import WrongUsage, wrong_usage
from undertow.serving.cli.served import SCHEMES, ServiceUrl

if TYPE_CHECKING:
    from undertow.engine.base.config import Settings
    from undertow.engine.readers import Log


def location_of(text: str, over_http: str = "") -> Location:
    """Parse the value of --store. WrongUsage: it names no valid location.

    `over_http`: what a service takes in the command's place.
    """
    if text.startswith(SCHEMES):
        need = "--store: this command needs the store itself. Name a folder or s3://BUCKET/PREFIX"
        raise WrongUsage(f"{need}{over_http and f', or send {over_http}'}.")
    with wrong_usage("--store"):
        return Location.of(text)


def import_location_of(text: str) -> Location:
    return location_of(text, "the export to POST /v1/tenants/NAME/import of the service")


def place_of(text: str) -> Location:
    """As `location_of`, or the address of a service."""
    if not text.startswith(SCHEMES):
        return location_of(text)
    address = urlsplit(text)
    if not address.hostname or address.username is not None:
        raise WrongUsage("--store: a service is http://HOST:PORT, and its key goes into UNDERTOW_API_KEY.")
    return ServiceUrl(text.rstrip("/"))


def store_option(
    help: str, metavar: str = "PLACE", parser: Callable[[str], Location] = location_of
) -> OptionInfo:
    """An option --store of a command, whose value is parsed to a Location."""
    option: OptionInfo = typer.Option(
        "--store", parser=parser, metavar=metavar, help=help, show_default=False
    )
    return option


STORE = "The store: a folder, or s3://BUCKET/PREFIX."
Store = Annotated[Location, store_option(STORE)]
ImportStore = Annotated[Location, store_option(STORE, parser=import_location_of)]
ReadStore = Annotated[
    Location,
    store_option(
        "A folder, s3://BUCKET/PREFIX, or a service, http://HOST:PORT, with its key in UNDERTOW_API_KEY.",
        parser=place_of,
    ),
]
Tenant = Annotated[str, typer.Option("--tenant", help="The tenant's name.", show_default=False)]
OnlyTenant = Annotated[str | None, typer.Option("--tenant", help="Only this tenant; left out: all.")]
InTenant = Annotated[
    str | None,
    typer.Option("--tenant", help="Only if this tenant has it. A cluster then asks one shard, not all."),
]
ShownId = Annotated[
    str, typer.Argument(metavar="ID", help="Of a turn, an episode or a fact, or its first four characters.")
]
MemoryId = Annotated[str, typer.Argument(metavar="ID", help="Of a turn, an episode or a fact: the whole id.")]
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


Paths = Annotated[
    list[str], typer.Argument(metavar="PATH...", help="Logs, or folders of logs; also s3://BUCKET/PREFIX.")
]
LogFormat = Annotated[Format, typer.Option("--format", help="auto: told by the content.")]
Owner = Annotated[
    str | None,
    typer.Option("--tenant", metavar="NAME", help="The owner of an export's turns (docs/importing.md)."),
]
Profile = Annotated[
    Literal["companion", "assistant", "paper"] | None,
    typer.Option("--profile", help="Preset of thresholds; paper: RecMem's calls as published."),
]
ThetaShare = Annotated[
    float | None,
    typer.Option("--theta-share", help="Share of a tenant's pairs of turns that thetas link; 0: none."),
]
ThetaSim = Annotated[float | None, typer.Option("--theta-sim", help="Least cosine that links two turns.")]
ThetaMerge = Annotated[
    float | None, typer.Option("--theta-merge", help="Least cosine to an episode for a merge.")
]
ThetaCount = Annotated[
    int | None, typer.Option("--theta-count", help="Linked turns that make a topic recur.")
]
AnswerStyle = Annotated[
    Literal["notes", "short", "paper"] | None,
    typer.Option(
        "--answer-style",
        help="notes: notes, then the answer; short: the same, in the fewest words; paper: in one go. "
        "Left out: UNDERTOW_ANSWER_STYLE, or notes.",
    ),
]
Calls = Annotated[
    Literal["fused", "paper"] | None,
    typer.Option("--calls", help="fused: one LLM call where the papers make several; paper: as published."),
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


# ---- groups of options


@dataclass(frozen=True)
class Models:
    """The options that name the LLM server, its model and the encoder."""

    llm: Llm = None
    model: Model = None
    encoder: EncoderName = None

    def settings(self, **flags: Any) -> Settings:
        """As `settings_of`, with these options."""
        return settings_of(**asdict(self), **flags)


@dataclass(frozen=True)
class Thresholds:
    """The options that set RecMem's thresholds, and the form of a policy's calls."""

    profile: Profile = None
    theta_share: ThetaShare = None
    theta_sim: ThetaSim = None
    theta_merge: ThetaMerge = None
    theta_count: ThetaCount = None
    calls: Calls = None


# defaults of parameters: no option is given
NO_MODELS = Models()
NO_THRESHOLDS = Thresholds()


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command for Typer: the fields of each parameter that is a dataclass become its options."""
    parameters = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in parameters.items()
        if is_dataclass(parameter.annotation)
    }
    options: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        group = groups.get(name)
        options += inspect.signature(group, eval_str=True).parameters.values() if group else [parameter]

    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    named = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
    run.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


# ---- what options stand for


def settings_of(*, llm: str | None = None, model: str | None = None, **flags: Any) -> Settings:
    """Settings from the environment; the given flags take precedence. WrongUsage: one is invalid."""
    from undertow.engine.base.config import Settings

    given = {name: value for name, value in flags.items() if value is not None}
    if llm is not None:
        given["llm_url"] = None if llm.lower() == "off" else llm
    if model is not None:
        given["llm_model"] = model
    with wrong_usage():
        return Settings(**given)


def check_settings(settings: Settings) -> None:
    """WrongUsage: the encoder's or a server's name is malformed. Loads and connects nothing."""
    from undertow.engine.encoders.factory import make_encoder
    from undertow.engine.llm.client import OpenAILLM

    with wrong_usage():
        if settings.encoder.startswith(("hash:", "openai:")):
            make_encoder(settings)
        if settings.llm_url is not None:
            OpenAILLM(settings).close()


def refuse_store(root: Location) -> None:
    """WrongUsage: the location is the store of one process, but the command is for a cluster."""
    from undertow.engine.storage.store_info import is_store

    if is_store(root):
        raise WrongUsage(f"{root} is the store of one process, not a cluster's root. Name another folder.")


def logs_at(paths: list[str], tenant: str | None = None) -> list[Log]:
    """The logs that the paths name, of a tenant if it is named. WrongUsage: a path names none."""
    from undertow.engine.readers import find_logs

    try:
        return [replace(log, tenant=tenant) for log in find_logs(paths)]
    except InputError as error:
        raise WrongUsage(str(error)) from None
