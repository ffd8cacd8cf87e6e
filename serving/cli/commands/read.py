"""The commands that only read: they work while another process writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undertow.engine.base.limits import MAX_QUERY_CHARS
from undertow.engine.base.model import AnswerMode, MemoryKind, UndertowError, unknown_memory
from undertow.engine.storage.location import Location
from undertow.serving.cli import options as opt
from undertow.serving.cli.errors import Exit, WrongUsage, wrong_usage
from undertow.serving.cli.output import (
    put_json,
    put_json_lines,
    put_pairs,
    put_records,
    put_table,
    put_text,
    say,
)
from undertow.serving.cli.progress import said_if_long
from undertow.serving.cli.served import ServiceUrl, client_of, hit_report
from undertow.serving.cli.stores import (
    all_reports,
    is_root,
    open_engine,
    some_reports,
    store_of,
    tenant_reports,
)

if TYPE_CHECKING:
    from undertow.engine.api.engine import Engine
    from undertow.engine.base.config import Settings
    from undertow.engine.base.results import Report
    from undertow.serving.cli.stores import AnyReports


def moment(text: str) -> str | None:
    """Parse the value of --since or --until as ISO 8601. WrongUsage says what is accepted."""
    from undertow.engine.base.timestamps import parse_timestamp

    with wrong_usage("--since or --until"):
        return parse_timestamp(text)


Since = Annotated[
    str | None, typer.Option("--since", parser=moment, metavar="TIME", help="Only from this time on.")
]
Until = Annotated[
    str | None, typer.Option("--until", parser=moment, metavar="TIME", help="Only up to this time.")
]
WhereOption = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="KEY=VALUE",
        help="Only turns with this metadata, and memories made from them. May be repeated: all keys must "
        "match, and one of the values of each. To match a number, true or false as text, put it in quotes. "
        """VALUE may be operators: --where 'rating={"$gte": 3, "$lt": 9}'.""",
    ),
]

# an id is that long; `get` and `history` take as many of its first characters, if no other begins so
ID_CHARS, FEWEST_ID_CHARS, SHOWN_ID_CHARS = 32, 4, 8
SHOWN_FIELDS = {
    "turns": ("seq", "id", "timestamp", "text"),
    "episodes": ("id", "version", "made_at_seq", "superseded_at_seq", "timestamp", "source_seqs", "text"),
    "facts": ("id", "made_at_seq", "superseded_at_seq", "timestamp", "fact_kind", "text"),
}
WHY_FIELDS = (
    *("seq", "decision", "merge_asked", "score", "cluster_seqs", "consolidated_at_seq"),
    *("nearest_episode", "episode_ids", "fact_ids"),
)


class ListKind(StrEnum):
    TENANTS = "tenants"
    TURNS = "turns"
    EPISODES = "episodes"
    FACTS = "facts"


def search(
    query: Annotated[str, typer.Argument(help="What to look for.")],
    tenant: opt.Tenant,
    store: opt.ReadStore,
    k: Annotated[int | None, typer.Option("-k", "--top-k", min=1, max=1000, help="How many results.")] = None,
    since: Since = None,
    until: Until = None,
    where: WhereOption = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the parts of each score, and what was left out and why.")
    ] = False,
    encoder: opt.EncoderName = None,
    as_json: opt.AsJson = False,
) -> None:
    """Find a tenant's turns, episodes and facts nearest to a query."""
    _check_words("query", query)
    filters = _filters(where or [])
    asked: dict[str, Any] = {"since": since, "until": until, "explain": explain}
    if isinstance(store, ServiceUrl):
        if encoder is not None:
            raise WrongUsage("--encoder is the service's own setting: leave it out with a service")
        with client_of(store) as client:
            served = client.search(tenant, query, top_k=k, filters=filters, **asked)
        hits, recall, words_only = list(map(hit_report, served.results)), served.recall, served.words_only
        how = None if served.explanation is None else served.explanation.model_dump(mode="json")
    else:
        settings = opt.settings_of(llm="off", encoder=encoder)
        with open_engine(store_of(store, tenant), settings, writable=False) as engine:
            engine.tenants.require(tenant)
            found = engine.search(tenant, query, k_sub=k, k_epi=k, k_sem=k, where=filters, **asked)
        ranked, recall, words_only = found.ranked(k), found.turn_recall, found.words_only
        hits, how = list(map(asdict, ranked)), found.explained(ranked)
    # an index may miss turns, but no episodes or facts
    hits = [{**hit, "turn_recall": recall} if hit["kind"] == "turn" else hit for hit in hits]
    title = f"{len(hits)} result{'s' * (len(hits) != 1)} for {tenant}"
    if how is None:
        shown = hits if as_json else [{**hit, "id": hit["id"][:SHOWN_ID_CHARS]} for hit in hits]
        put_records(shown, ("score", "id", "kind", "timestamp", "memory"), title=title, as_json=as_json)
    else:
        _put_explained(hits, how, title, as_json=as_json)
    if recall < 1 and not as_json:
        say(f"(turns found through an index, measured recall {recall:.3f})")
    if words_only:
        say(WORDS_ONLY)


PARTS = ("score", "id", "cosine", "neighbour_cosine", "words", "words_around", "matched", "memory")
LEFT_OUT_BY = {"time": "time", "filters": "metadata", "count": "-k, of its kind", "top_k": "-k"}


def _put_explained(hits: list[Report], how: Report, title: str, *, as_json: bool) -> None:
    """The hits with the parts of their scores, then what was left out."""
    if as_json:
        put_json({"results": hits, "explanation": how})
        return

    def row(hit: Report) -> Report:
        parts = how["scores"][hit["id"]]
        around = parts["neighbour_words"] + parts["stretch_words"]
        short = {"id": hit["id"][:SHOWN_ID_CHARS], "left_out_by": LEFT_OUT_BY.get(hit.get("reason", ""))}
        return {**hit, **parts, **short, "words_around": around}

    put_table(list(map(row, hits)), PARTS, title=title)
    others = list(map(row, how["left_out"]))
    if others:
        columns = ("score", "id", "left_out_by", "matched", "memory")
        put_table(others, columns, title=f"The {len(others)} best left out")
    for name, count in how["passing"].items():
        say(f"({count:,} of {how['turns']:,} turns pass the filter by {LEFT_OUT_BY[name]})")
    if how["telling_words"]:
        say(f"(words that weigh more: {how['telling_words']})")


def _check_words(name: str, text: str) -> None:
    if not text.strip():
        raise WrongUsage(f"the {name} is empty. Give some words to search for.")
    if len(text) > MAX_QUERY_CHARS:
        raise WrongUsage(f"the {name} has {len(text):,} characters. Ask in at most {MAX_QUERY_CHARS:,}.")


def _filters(options: list[str]) -> dict[str, Any]:
    """The values of each key in the `--where` options, or its operators. WrongUsage."""
    import orjson

    from undertow.engine.search.where import Where

    filters: dict[str, Any] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not (key and equals):
            raise WrongUsage(f"--where {option!r:.80} is not KEY=VALUE, as in --where topic=work.")
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            if text.startswith(("{", "[")):
                form = 'operators go as n={"$gte": 3}'
                raise WrongUsage(f"--where {option!r:.80} is no JSON; {form}.") from None
            value = text
        given = filters.setdefault(key, value if isinstance(value, dict) else [])
        if isinstance(given, list) and not isinstance(value, dict):
            given.append(value if isinstance(value, str | int | float | bool) else text)
        elif given is not value:
            raise WrongUsage(f"--where {key!r:.80} has operators beside another --where. Give it once.")
    with wrong_usage("--where"):
        Where.of(filters)
    return filters


WORDS_ONLY = "(found by words alone: the embedding endpoint cannot be used now)"


def ask(
    question: Annotated[str, typer.Argument(help="What to answer from memory.")],
    tenant: opt.Tenant,
    store: opt.ReadStore,
    as_of: Annotated[
        str | None, typer.Option("--as-of", help="When the question is asked, for relative dates.")
    ] = None,
    mode: Annotated[
        AnswerMode | None,
        typer.Option("--mode", help="How memories are chosen; left out: UNDERTOW_ANSWER_MODE."),
    ] = None,
    style: opt.AnswerStyle = None,
    models: opt.Models = opt.NO_MODELS,
    as_json: opt.AsJson = False,
) -> None:
    """Answer a question from a tenant's memory, with one LLM call, or up to three (best effort)."""
    _check_words("question", question)
    if isinstance(store, ServiceUrl):
        if style is not None or models != opt.NO_MODELS:
            raise WrongUsage("the service has its own model and style: leave those options out")
        with client_of(store) as client:
            told = client.answer(tenant, question, as_of=as_of, mode=mode)
        text, usage, words_only = told.answer, dict(told.usage), told.words_only
        memories = list(map(hit_report, told.memories))
    else:
        settings = models.settings(answer_style=style)
        waiting = said_if_long(f"Waiting for the LLM server, {settings.llm_url}. Ctrl-C ends it.")
        with _open_to_answer(store, tenant, settings) as engine, waiting:
            engine.tenants.require(tenant)
            try:
                given = engine.answer(tenant, question, as_of=as_of, mode=mode)
            except UndertowError as error:
                if not engine.server_lost:
                    raise
                say(f"undertow: {error}")
                raise typer.Exit(Exit.LLM) from None
        text, usage, words_only = given.text, asdict(given.usage), given.found.words_only
        memories = [asdict(hit) for hit in (*given.found.episodes, *given.found.facts, *given.found.turns)]
    if as_json:
        document = {"tenant": tenant, "question": question, "answer": text, "memories": memories}
        put_json({**document, "usage": usage})
    else:
        put_text(text)
        if words_only:
            say(WORDS_ONLY)
        say(f"({usage['prompt_tokens']} prompt and {usage['completion_tokens']} completion tokens)")


@contextmanager
def _open_to_answer(store: Location, tenant: str, settings: Settings) -> Iterator[Engine]:
    """An engine that can write where possible, so that the call's cost is recorded; else for reading only."""
    from undertow.engine.storage.store_info import StoreError

    with ExitStack() as stack:
        try:
            if is_root(store):
                raise StoreError("only the tenant's shard writes its store. Ask a running cluster instead.")
            if store.folder is None:
                raise StoreError(f"{store} has no lock; writing would stop its present writer.")
            engine = stack.enter_context(open_engine(store, settings))
        except StoreError as refusal:
            engine = stack.enter_context(open_engine(store_of(store, tenant), settings, writable=False))
            say(f"warning: the cost of this call is not recorded: {refusal}")
        yield engine


def list_(
    store: opt.ReadStore,
    kind: Annotated[
        ListKind | None, typer.Option("--kind", help="What to list. Left out: tenants, or a tenant's turns.")
    ] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Whose; not with --kind tenants.")] = None,
    every: Annotated[bool, typer.Option("--all", help="With earlier versions and deleted turns.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """List tenants, or one tenant's turns, episodes or facts."""
    kind = kind or (ListKind.TENANTS if tenant is None else ListKind.TURNS)
    if (kind is ListKind.TENANTS) != (tenant is None):
        need = "takes no --tenant" if tenant is not None else "needs --tenant"
        raise typer.BadParameter(f"--kind {kind.value} {need}")
    if tenant is None:
        with some_reports(store, None) as shards:
            records = [record for reports in shards for record in reports.tenant_sizes()]
        records.sort(key=lambda record: str(record["tenant"]))
    else:
        with some_reports(store, tenant) as (reports,):
            if kind is ListKind.TURNS:
                records = reports.turns(tenant, every=every)
            else:
                wanted: MemoryKind = "episode" if kind is ListKind.EPISODES else "fact"
                records = reports.memories(tenant, wanted, every=every)
    columns = SHOWN_FIELDS.get(kind.value, ("tenant", "turns"))
    put_records(records, [c for c in columns if every or c != "superseded_at_seq"], as_json=as_json)


def explain(tenant: opt.Tenant, store: opt.ReadStore, as_json: opt.AsJson = False) -> None:
    """Show why each memory exists: the decision on each turn, and its grounds."""
    with some_reports(store, tenant) as (reports,):
        records = reports.explain(tenant)
    if as_json:
        put_json_lines(records)
    else:
        put_table([_short(r) for r in records], WHY_FIELDS, title=f"Decisions of {tenant}")


def _short(record: dict[str, Any]) -> dict[str, Any]:
    """For people: ids cut to their first digits, by which `get` and `history` find them."""
    decision = record["decision"] + (" (deleted)" if record.get("deleted") else "")
    ids = {name: [i[:SHOWN_ID_CHARS] for i in record[name]] for name in ("episode_ids", "fact_ids")}
    nearest = (record["nearest_episode"] or "")[:SHOWN_ID_CHARS]
    return {**record, **ids, "decision": decision, "nearest_episode": nearest}


def get(
    memory_id: opt.ShownId, store: opt.ReadStore, tenant: opt.InTenant = None, as_json: opt.AsJson = False
) -> None:
    """Show one memory as it stands."""
    record = _of_any(store, tenant, memory_id, lambda reports, whole: reports.get(whole))
    if as_json:
        put_json(record)
    else:
        columns = ("kind", "tenant", "version", "made_at_seq", "timestamp", "source_seqs", "text")
        put_table([record], columns, title=memory_id)


def history(
    memory_id: opt.ShownId, store: opt.ReadStore, tenant: opt.InTenant = None, as_json: opt.AsJson = False
) -> None:
    """Show every version of one memory, oldest first."""
    records = _of_any(store, tenant, memory_id, lambda reports, whole: reports.history(whole))
    columns = ("kind", "version", "made_at_seq", "superseded_at_seq", "deleted", "timestamp", "text")
    put_records(records, columns, title=f"History of {memory_id}", as_json=as_json)


def _of_any(
    store: Location, tenant: str | None, memory_id: str, read: Callable[[AnyReports, str], Any]
) -> Any:
    """The first shard's answer about a memory, by its id or the beginning of it: neither tells its tenant.

    UndertowError: no shard has it; several ids begin so.
    """
    refusal = UndertowError("the cluster has stored nothing yet.")
    with some_reports(store, tenant) as shards:
        if FEWEST_ID_CHARS <= len(memory_id) < ID_CHARS:
            meant = {whole for reports in shards for whole in reports.ids_from(memory_id)}
            if len(meant) > 1:
                raise UndertowError(
                    f"{len(meant):,} memories have ids that begin with {memory_id}: give more."
                )
            memory_id = meant.pop() if meant else memory_id
        elif len(memory_id) < FEWEST_ID_CHARS:
            more = f"give {FEWEST_ID_CHARS} characters or more. `undertow list` shows the ids"
            raise UndertowError(f"{memory_id!r:.80} is too short for an id: {more}.")
        for reports in shards:
            try:
                found = read(reports, memory_id)
                owner = (found[0] if isinstance(found, list) else found).get("tenant")
                if tenant is None or owner in (None, tenant):  # a service has looked
                    return found
                refusal = unknown_memory(memory_id, tenant)
            except UndertowError as error:
                refusal = error
    raise refusal


def export(
    store: opt.ReadStore,
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Whose; with --parquet it may be left out: all tenants.")
    ] = None,
    vectors: Annotated[bool, typer.Option("--vectors", help="With the embeddings.")] = False,
    parquet: Annotated[
        Path | None,
        typer.Option("--parquet", metavar="FOLDER", help="Write turns.parquet and memories.parquet there."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="No effect: the output is always JSON.")] = True,
) -> None:
    """Write everything stored of a tenant as JSON lines: turns, all versions of memories, decisions.

    With --parquet its turns and memories as tables, which pandas, DuckDB and Spark read; `undertow ingest`
    takes turns.parquet back. docs/arrow.md describes the columns.
    """
    if parquet is None:
        if tenant is None:
            raise WrongUsage("give --tenant NAME, or --parquet FOLDER for the tables of all tenants")
        with some_reports(store, tenant) as (reports,):
            put_json_lines(reports.export(tenant, vectors=vectors))
        return
    from undertow.engine.api.transfer.arrow import export_parquet

    with some_reports(store, tenant) as shards:
        exports = (
            reports.export(name, vectors=vectors) if tenant else _unless_gone(reports, name, vectors)
            for reports in shards
            for name in ([tenant] if tenant else [one["tenant"] for one in reports.tenant_sizes()])
        )
        digest = shards[0].encoder_digest if shards else None
        if vectors and shards and digest is None:
            raise WrongUsage("a service does not tell its encoder: leave out --vectors, or name its store")
        rows = export_parquet(exports, parquet, digest)
    put_json({"folder": str(parquet), **rows})


def _unless_gone(reports: AnyReports, tenant: str, vectors: bool) -> Iterator[Report]:
    """The export of a tenant that is among others; of one erased meanwhile a line on standard error."""
    from undertow.engine.tenants.catalog import UnknownTenant
    from undertow.serving.client import NotFound

    try:
        yield from reports.export(tenant, vectors=vectors)
    except (UnknownTenant, NotFound):
        say(f"{tenant!r:.80} was erased meanwhile: it is left out.")


def stats(
    store: opt.ReadStore,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only this tenant.")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Show counts, pending work and LLM cost of a store, or of one tenant."""
    if isinstance(store, ServiceUrl):
        with client_of(store) as client:
            counts, usage = client.stats(tenant), client.usage(tenant)
    else:
        counts, usage = _counted(store, tenant)
    if as_json:
        put_json({**({} if tenant is None else {"tenant": tenant}), **counts, "usage": usage})
        return
    put_pairs(counts, title=str(store) if tenant is None else f"{tenant} in {store}")
    columns = ("operation", "calls", "prompt_tokens", "cached_prompt_tokens", "completion_tokens")
    put_table([{"operation": name, **used} for name, used in usage.items()], columns, title="LLM cost")


def _counted(store: Location, tenant: str | None) -> tuple[Report, Report]:
    """The counts of a store or of one tenant, and the LLM calls and tokens by operation."""
    from undertow.engine.api.views.stats import store_stats, store_usage, tenant_stats
    from undertow.engine.base.queries import StatsQuery, UsageQuery

    if tenant is not None:
        with tenant_reports(store, tenant) as reports:
            return dict(tenant_stats(reports.tenants.existing(tenant))), store_usage(reports.tenants, tenant)
    with all_reports(store) as shards:
        counts = StatsQuery().combined([store_stats(reports.tenants) for reports in shards])
        usage = UsageQuery().combined([store_usage(reports.tenants) for reports in shards])
    return dict(counts), dict(usage)
