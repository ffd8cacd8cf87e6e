"""The commands that only read: they work while another process ingests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from undertow.engine.base.model import AnswerMode
from undertow.engine.storage.location import Location
from undertow.serving.cli.cluster_root import every_reports, is_root, open_reports, store_of
from undertow.serving.cli.errors import Exit, WrongUsage, wrong_usage
from undertow.serving.cli.open_store import open_engine
from undertow.serving.cli.options import AsJson, EncoderName, Llm, Model, Store, Tenant
from undertow.serving.cli.output import put_json, put_json_lines, put_pairs, put_table, put_text, say
from undertow.serving.cli.settings import settings_of

if TYPE_CHECKING:
    from undertow.engine.api.engine import Engine
    from undertow.engine.api.views.reports import Reports
    from undertow.engine.base.config import Settings
    from undertow.engine.base.results import Hit, SearchResult

T = TypeVar("T")

Since = Annotated[str | None, typer.Option("--since", help="Only what is dated at or after this.")]
Until = Annotated[str | None, typer.Option("--until", help="Only what is dated at or before this.")]

WhereOption = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="KEY=VALUE",
        help="Only what has this in its metadata, or rests on such a turn. Give it again for other keys; the "
        "same key again means any of its values. A number, true or false is one, unless in double quotes.",
    ),
]

SHOWN_FIELDS = {
    "turns": ("seq", "id", "timestamp", "text"),
    "episodes": ("id", "version", "made_at_seq", "superseded_at_seq", "timestamp", "source_seqs", "text"),
    "facts": ("id", "made_at_seq", "superseded_at_seq", "timestamp", "fact_kind", "text"),
}
WHY_FIELDS = (
    "seq",
    "decision",
    "merge_asked",
    "score",
    "cluster_seqs",
    "consolidated_at_seq",
    "nearest_episode",
    "episode_ids",
    "fact_ids",
)


class ListKind(StrEnum):
    TENANTS = "tenants"
    TURNS = "turns"
    EPISODES = "episodes"
    FACTS = "facts"


def search(
    query: Annotated[str, typer.Argument(help="What to look for.")],
    tenant: Tenant,
    store: Store,
    k: Annotated[int | None, typer.Option("-k", min=1, max=1000, help="How many results.")] = None,
    since: Since = None,
    until: Until = None,
    where: WhereOption = None,
    encoder: EncoderName = None,
    as_json: AsJson = False,
) -> None:
    """Find a tenant's turns, episodes and facts nearest to a query."""
    _check_words("query", query)
    since, until = _moment("--since", since), _moment("--until", until)
    filters = _filters(where or [])
    settings = settings_of(llm="off", encoder=encoder)
    with open_engine(store_of(store, tenant), settings, writable=False) as engine:
        engine.tenants.require(tenant)
        found = engine.search(
            tenant, query, k_sub=k, k_epi=k, k_sem=k, since=since, until=until, where=filters
        )
    # of the tiers only the turns may be found through an index, which can miss some
    recall = {"turn": {"turn_recall": found.turn_recall}}
    hits = [{**asdict(hit), **recall.get(hit.kind, {})} for hit in found.ranked(k)]
    if as_json:
        put_json_lines(hits)
    else:
        put_table(hits, ("score", "kind", "timestamp", "memory"), title=f"{len(hits)} results for {tenant}")
        if found.turn_recall < 1:
            say(f"(turns found through an index, measured recall {found.turn_recall:.3f})")


def _check_words(name: str, text: str) -> None:
    if not text.strip():
        raise WrongUsage(f"the {name} is empty. Give some words to search for.")


def _moment(option: str, value: str | None) -> str | None:
    """The option's value as ISO 8601 text. WrongUsage says what is accepted."""
    from undertow.engine.base.timestamps import parse_timestamp

    with wrong_usage(option):
        return None if value is None else parse_timestamp(value)


def _filters(options: list[str]) -> dict[str, list[Any]]:
    """What `--where` asks for: the values of each key. WrongUsage."""
    import orjson

    filters: dict[str, list[Any]] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not (key and equals):
            raise WrongUsage(f"--where {option!r:.80} is not KEY=VALUE, as in --where topic=work.")
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            value = text
        filters.setdefault(key, []).append(value if isinstance(value, str | int | float | bool) else text)
    return filters


def ask(
    question: Annotated[str, typer.Argument(help="What to answer from memory.")],
    tenant: Tenant,
    store: Store,
    as_of: Annotated[
        str | None, typer.Option("--as-of", help="When the question is asked, for relative dates.")
    ] = None,
    mode: Annotated[
        AnswerMode | None,
        typer.Option(
            "--mode", help="Which memories are looked at, and when; left out: UNDERTOW_ANSWER_MODE."
        ),
    ] = None,
    llm: Llm = None,
    model: Model = None,
    encoder: EncoderName = None,
    as_json: AsJson = False,
) -> None:
    """Answer a question from a tenant's memory, with one LLM call, or up to three (best effort)."""
    from undertow.engine.base.model import UndertowError

    _check_words("question", question)
    settings = settings_of(llm=llm, model=model, encoder=encoder)
    with _open_to_answer(store, tenant, settings) as engine:
        engine.tenants.require(tenant)
        try:
            given = engine.answer(tenant, question, as_of=as_of, mode=mode)
        except UndertowError as error:
            if not engine.server_lost:
                raise
            say(f"undertow: {error}")
            raise typer.Exit(Exit.LLM) from None
    usage = asdict(given.usage)
    if as_json:
        document = {"tenant": tenant, "question": question, "answer": given.text}
        put_json({**document, "memories": [asdict(h) for h in _all(given.found)], "usage": usage})
    else:
        put_text(given.text)
        say(f"({usage['prompt_tokens']} prompt and {usage['completion_tokens']} completion tokens)")


@contextmanager
def _open_to_answer(store: Location, tenant: str, settings: Settings) -> Iterator[Engine]:
    """For writing where that can be, so that the call's cost is recorded; else for reading only."""
    from undertow.engine.storage.store_info import StoreError

    with ExitStack() as stack:
        try:
            if is_root(store):
                raise StoreError(
                    "the tenant's shard alone writes its journal. Ask a running cluster instead."
                )
            if store.folder is None:
                raise StoreError(f"{store} has no lock to ask; writing would stop whoever writes it now.")
            engine = stack.enter_context(open_engine(store, settings))
        except StoreError as refusal:
            location = store_of(store, tenant)
            engine = stack.enter_context(open_engine(location, settings, writable=False))
            say(f"warning: the cost of this call is not recorded: {refusal}")
        yield engine


def _all(found: SearchResult) -> list[Hit]:
    return [*found.episodes, *found.facts, *found.turns]


def list_(
    store: Store,
    kind: Annotated[ListKind, typer.Option("--kind", help="What to list.")],
    tenant: Annotated[str | None, typer.Option("--tenant", help="Whose; not with --kind tenants.")] = None,
    every: Annotated[bool, typer.Option("--all", help="With earlier versions and deleted turns.")] = False,
    as_json: AsJson = False,
) -> None:
    """List tenants, or one tenant's turns, episodes or facts."""
    if (kind is ListKind.TENANTS) != (tenant is None):
        need = "takes no --tenant" if tenant is not None else "needs --tenant"
        raise typer.BadParameter(f"--kind {kind.value} {need}")
    records = _tenant_sizes(store) if tenant is None else _of_tenant(store, tenant, kind, every=every)
    if as_json:
        put_json_lines(records)
    else:
        columns = SHOWN_FIELDS.get(kind.value, ("tenant", "turns"))
        put_table(records, [c for c in columns if every or c != "superseded_at_seq"])


def _tenant_sizes(store: Location) -> list[dict[str, Any]]:
    with every_reports(store) as shards:
        sizes = [record for reports in shards for record in reports.tenant_sizes()]
    return sorted(sizes, key=lambda record: str(record["tenant"]))


def _of_tenant(store: Location, tenant: str, kind: ListKind, *, every: bool) -> list[dict[str, Any]]:
    with open_reports(store_of(store, tenant)) as reports:
        if kind is ListKind.TURNS:
            return reports.turns(tenant, every=every)
        return reports.memories(tenant, "episode" if kind is ListKind.EPISODES else "fact", every=every)


def explain(tenant: Tenant, store: Store, as_json: AsJson = False) -> None:
    """Why each memory exists: what was decided for each turn, and on what grounds."""
    with open_reports(store_of(store, tenant)) as reports:
        records = reports.explain(tenant)
    if as_json:
        put_json_lines(records)
        return
    put_table([_short(r) for r in records], WHY_FIELDS, title=f"Decisions of {tenant}")


def _short(record: dict[str, Any]) -> dict[str, Any]:
    """The first digits of ids are enough for people; `list` and `history` take the whole id."""
    decision = record["decision"] + (" (deleted)" if record.get("deleted") else "")
    ids = {name: [i[:8] for i in record[name]] for name in ("episode_ids", "fact_ids")}
    return {**record, **ids, "decision": decision, "nearest_episode": (record["nearest_episode"] or "")[:8]}


def get(
    memory_id: Annotated[str, typer.Argument(metavar="ID", help="A turn, an episode or a fact.")],
    store: Store,
    as_json: AsJson = False,
) -> None:
    """Show one memory as it stands."""
    with every_reports(store) as shards:
        record = _of_any(shards, lambda reports: reports.get(memory_id))
    if as_json:
        put_json(record)
    else:
        columns = ("kind", "tenant", "version", "made_at_seq", "timestamp", "source_seqs", "text")
        put_table([record], columns, title=memory_id)


def history(
    memory_id: Annotated[str, typer.Argument(metavar="ID", help="A turn, an episode or a fact.")],
    store: Store,
    as_json: AsJson = False,
) -> None:
    """Every version of one memory, oldest first."""
    with every_reports(store) as shards:
        records = _of_any(shards, lambda reports: reports.history(memory_id))
    if as_json:
        put_json_lines(records)
    else:
        columns = ("kind", "version", "made_at_seq", "superseded_at_seq", "deleted", "timestamp", "text")
        put_table(records, columns, title=f"History of {memory_id}")


def _of_any(shards: list[Reports], ask: Callable[[Reports], T]) -> T:
    """An id does not tell its tenant, so each shard is asked. UndertowError: none has it."""
    from undertow.engine.base.model import UndertowError

    refusal = UndertowError("the cluster has stored nothing yet.")
    for reports in shards:
        try:
            return ask(reports)
        except UndertowError as error:
            refusal = error
    raise refusal


def export(
    tenant: Tenant,
    store: Store,
    vectors: Annotated[bool, typer.Option("--vectors", help="With the embeddings.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Changes nothing: the output is always JSON lines.")
    ] = True,
) -> None:
    """Write all that is kept of a tenant as JSON lines: turns, memories in every version, decisions."""
    with open_reports(store_of(store, tenant)) as reports:
        put_json_lines(reports.export(tenant, vectors=vectors))


def stats(
    store: Store,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only this tenant.")] = None,
    as_json: AsJson = False,
) -> None:
    """Counts, pending work and LLM cost of a store, or of one tenant in it."""
    from undertow.engine.api.views.stats import store_stats, store_usage, tenant_stats

    if tenant is None:
        with every_reports(store) as shards:
            counts = _sum(store_stats(reports.tenants) for reports in shards)
            spent = [store_usage(reports.tenants, None) for reports in shards]
            usage = {name: _sum(u.get(name, {}) for u in spent) for name in sorted(set().union(*spent))}
    else:
        with open_reports(store_of(store, tenant)) as reports:
            counts = tenant_stats(reports.tenants.existing(tenant))
            usage = store_usage(reports.tenants, tenant)
    if as_json:
        put_json({**({} if tenant is None else {"tenant": tenant}), **counts, "usage": usage})
        return
    put_pairs(counts, title=str(store) if tenant is None else f"{tenant} in {store}")
    columns = ("operation", "calls", "prompt_tokens", "cached_prompt_tokens", "completion_tokens")
    put_table([{"operation": name, **used} for name, used in usage.items()], columns, title="LLM cost")


def _sum(figures: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Figures of the same names added up, in the order of the first."""
    total: Counter[str] = Counter()
    for some in figures:
        total.update(some)
    return dict(total)
