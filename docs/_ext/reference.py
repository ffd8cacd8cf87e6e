"""Writes the pages of docs/reference from the code, before Sphinx reads the pages.

They cannot be out of date, as they are made at every build and never committed. ValueError: a setting, an
option or a metric has no words, so nothing could be said of it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_origin

import typer
from prometheus_client import CollectorRegistry, ProcessCollector
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings
from sphinx.application import Sphinx

import undertow
from undertow.engine.base.config import Settings
from undertow.engine.cluster.settings import ClusterSettings
from undertow.serving import cli
from undertow.serving.cli.errors import EXIT_CODES, Exit
from undertow.serving.http import problems
from undertow.serving.http.app import make_app
from undertow.serving.http.service_settings import ServiceSettings
from undertow.serving.telemetry.metrics import HTTPMetrics, ShardCollector

MADE = "This page is made from the code.\n"
SETTINGS: dict[type[BaseSettings], str] = {
    Settings: "Of an engine",
    ServiceSettings: "Of the service",
    ClusterSettings: "Of a cluster",
}
# a suffix of the metrics that a kind of metric has, as Prometheus names them
SERIES = {"counter": "_total", "histogram": "_bucket, _sum, _count", "gauge": ""}
OUTSIDE = re.compile(r"\]\((\.\./[^)#]+\.md)")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", lambda app: write(Path(app.srcdir, "reference")))
    app.connect("source-read", adapted)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write(folder: Path) -> None:
    """Write the pages; those that stay as they are keep their time, so that Sphinx does not read them anew."""
    folder.mkdir(exist_ok=True)
    pages = {
        "settings.rst": settings(),
        "commands.md": commands(),
        "http.md": http(),
        "metrics.md": metrics(),
        "errors.md": errors(),
        "python.rst": python(),
    }
    for name, parts in pages.items():
        text = "\n".join(parts)
        if not (page := folder / name).exists() or page.read_text() != text:
            page.write_text(text)


def adapted(app: Sphinx, name: str, text: list[str]) -> None:
    """What pages need here and not on GitHub: the list of decisions, and Markdown outside docs/ as a file."""
    if name == "decisions/README":
        text[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"
    page = Path(app.srcdir, name).parent

    def linked(link: re.Match[str]) -> str:
        inside = (page / link[1]).resolve().is_relative_to(Path(app.srcdir).resolve())
        return link[0] if inside else f"](path:{link[1]}"

    text[0] = OUTSIDE.sub(linked, text[0])


def heading(text: str, line: str) -> str:
    return f"{text}\n{line * len(text)}\n"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown, or nothing if there are no rows."""
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    names = list(head)
    lines = [names, ["---"] * len(names), *cells] if cells else []
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def required(words: str | None, of: str) -> str:
    if not (words or "").strip():
        raise ValueError(f"{of} has no words for the reference. Write what it means where it is defined.")
    return str(words).strip()


# ---- settings


def settings() -> Iterator[str]:
    yield heading("Settings", "=")
    yield MADE
    yield (
        "Each is a variable of the environment, and a field of its class in Python. An empty variable counts as "
        "not set. A variable with the prefix ``UNDERTOW_`` that is no setting is refused.\n"
    )
    for model, title in SETTINGS.items():
        yield heading(title, "-")
        yield (
            f"``undertow.{model.__name__}``. {inspect.getdoc(model)}\n"
            if model.__name__ in undertow.__all__
            else ""
        )
        for names, words in meanings(model):
            prefix = model.model_config["env_prefix"]
            variables = [f"{prefix}{name}".upper() for name in names]
            yield ".. envvar:: " + "\n            ".join(variables) + "\n"
            for name, variable in zip(names, variables, strict=True):
                shown = f"``{name}``: " if len(names) > 1 else ""
                yield f"   | {shown}{bounded(model.model_fields[name])}"
            yield f"\n   {required(words, variables[0])}\n"


def meanings(model: type[BaseSettings]) -> Iterator[tuple[list[str], str]]:
    """The fields with the comment above them, which is of all up to an empty line or the next comment."""
    fields: list[str] = []
    words: list[str] = []
    for line in [*inspect.getsource(model).partition("    @")[0].splitlines(), ""]:
        text = line.strip()
        if fields and (not text or text.startswith("#")):
            yield fields, " ".join(words)
            fields, words = [], []
        if text.startswith("#"):
            words.append(text.removeprefix("# "))
        elif line[4:5].isalpha() and (name := text.partition(":")[0]) in model.model_fields:
            fields.append(name)


def bounded(field: FieldInfo) -> str:
    """A field's type, its bounds and its default."""
    words = {"ge": "from", "gt": "above", "le": "to", "lt": "below", "pattern": "like"}
    bounds = [
        f"{word} {value:,}" if not isinstance(value, str) else f"{word} ``{value}``"
        for part in field.metadata
        for name, word in words.items()
        if (value := getattr(part, name, None)) is not None
    ]
    default = "computed" if field.default_factory else literal(field.default)
    return f"{' '.join([typed(field.annotation), *bounds])}; default: {default}"


def literal(value: object) -> str:
    return "none" if value in (None, (), "") else f"``{value}``" if isinstance(value, str) else f"{value}"


def typed(kind: Any) -> str:
    """A type in words."""
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    if kind in plain:
        return plain[kind]
    parts = get_args(kind)
    if get_origin(kind) is tuple:
        return f"a list of {typed(parts[0])}"
    if parts and all(isinstance(part, str) for part in parts):
        return ", ".join(f"``{part}``" for part in parts)
    if parts:
        return " or ".join(typed(part) for part in parts if part is not type(None))
    return f"{getattr(kind, '__name__', kind)}"


# ---- the command line


def commands() -> Iterator[str]:
    yield f"# Commands\n\n{MADE}\nEach shows the same with `--help`.\n"
    yield from command("undertow", typer.main.get_command(cli.app))


def command(name: str, one: Any) -> Iterator[str]:
    yield f"## `{name}`\n"
    yield required(one.help, name) + "\n"
    context = one.context_class(one)
    yield f"```\n{name} {' '.join(one.collect_usage_pieces(context))}\n```\n"
    shown = [(*param.get_help_record(context), param.help) for param in one.params if not param.hidden]
    rows = ((f"`{usage}`", required(words and more, f"{name} {usage}")) for usage, more, words in shown)
    yield table(("argument or option", "meaning"), rows)
    for child, more in sorted(getattr(one, "commands", {}).items()):
        yield from command(f"{name} {child}", more)


# ---- HTTP


def http() -> Iterator[str]:
    """From the OpenAPI document, for which the application needs no service behind it."""
    parts = dict.fromkeys(("load", "guard", "turns", "metrics", "settings"))
    document = make_app(SimpleNamespace(memories=SimpleNamespace(tenant_key=None), **parts)).openapi()  # type: ignore[arg-type]
    yield f"# HTTP\n\n{MADE}\n{document['info']['description']}"
    yield "A service has the same document at `/openapi.json`, and a page to try it at `/docs`.\n"
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            yield f"## {method.upper()} {path}\n"
            yield f"{required(route.get('description'), path)}\n"
            yield table(("parameter", "in", "type", "meaning"), map(parameter, route.get("parameters", ())))
            sent = route.get("requestBody", {}).get("content", {})
            yield from (f"Sends `{media}`: {shape(body['schema'])}.\n" for media, body in sent.items())
            yield from answers(route["responses"])
    yield "## Shapes\n"
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield f"(shape-{name.lower()})=\n### {name}\n"
        yield schema.get("description", "") + "\n"
        needed = schema.get("required", ())
        rows = ((f"`{key}`", *meaning(of, key in needed)) for key, of in schema.get("properties", {}).items())
        yield table(("field", "type", "meaning"), rows) or f"{shape({**schema, 'description': ''})}\n"


def parameter(of: Mapping[str, Any]) -> tuple[str, ...]:
    kind, words = meaning(
        {**of["schema"], "description": of.get("description", "")}, of.get("required", False)
    )
    return f"`{of['name']}`", of["in"], kind, words


def meaning(schema: Mapping[str, Any], needed: bool) -> tuple[str, str]:
    """The type of a field, and what is said of it."""
    default = schema.get("default")
    more = ["required"] if needed else [] if default in (None, "", {}) else [f"default: `{default}`"]
    return shape(schema), " ".join([schema.get("description", ""), *(f"({one})" for one in more)])


def shape(schema: Mapping[str, Any]) -> str:
    """A schema in words, with links to the shapes that have names."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#shape-{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(shape(one) for one in schema[key]))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {shape(schema.get('items', {}))}"
    if isinstance(inner := schema.get("additionalProperties"), Mapping) and inner:
        return f"object of {shape(inner)}"
    return str(schema.get("type", "any"))


def answers(responses: Mapping[str, Any]) -> Iterator[str]:
    """What a route responds with; those of errors in one line, as they are the same for all."""
    for status, response in responses.items():
        if int(status) < 400:
            forms = [
                f"`{media}`: {shape(body.get('schema', {}))}"
                for media, body in response.get("content", {}).items()
            ]
            yield f"**{status}** {'; '.join(forms) or response['description']}\n"
    failures = [status for status in responses if int(status) >= 400]
    yield f"Errors: {', '.join(failures)}.\n" if failures else ""


# ---- metrics, errors


def metrics() -> Iterator[str]:
    yield f"# Metrics\n\n{MADE}\nA service tells them at `/metrics`. None has a label for tenants.\n"
    shards = [
        (one.name, one.type, one._labelnames, one.documentation) for one in ShardCollector({}).collect()
    ]
    ours = [
        (one._name, one._type, one._labelnames, one._documentation)
        for one in vars(HTTPMetrics()).values()
        if hasattr(one, "_labelnames")
    ]
    process = CollectorRegistry()
    ProcessCollector(registry=process)
    theirs = [(one.name, one.type, (), one.documentation) for one in process.collect()]
    for title, families in {"HTTP": ours, "Shards": shards, "The process": theirs}.items():
        yield f"## {title}\n"
        rows = (
            (
                f"`{name}{SERIES[kind] if kind == 'counter' else ''}`",
                kind,
                ", ".join(labels),
                required(words, name),
            )
            for name, kind, labels, words in families
        )
        yield table(("name", "type", "labels", "meaning"), rows)


def errors() -> Iterator[str]:
    yield f"# Exit codes and problem types\n\n{MADE}\n## Exit codes\n"
    told = dict(re.findall(r"(\d+) ([^;]+?)(?=[;.]\s|[;.]$)", EXIT_CODES))
    yield table(("code", "meaning"), ((f"{one:d}", required(told.get(f"{one:d}"), one.name)) for one in Exit))
    yield f"## Problem types\n\nErrors over HTTP are `{problems.MEDIA_TYPE}` (RFC 9457).\n"
    rows = (
        (f"`{problems.URN}{slug}`", status, words)
        for (slug, status), words in sorted(problem_types().items())
    )
    yield table(("type", "status", "what it says"), rows)


def problem_types() -> dict[tuple[str, str], str]:
    """The problems of engine errors, and those that the service raises itself, with their words if fixed."""
    kinds = [*problems.KINDS.values(), problems.INTERNAL]
    found = {(kind.slug, str(kind.status)): kind.detail or "What is wrong, and what to do." for kind in kinds}
    for file in sorted(Path(problems.__file__).parents[1].rglob("*.py")):
        tree = ast.parse(file.read_text())
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "Problem" and len(call.args) == 3:
                status, slug, words = (
                    one.value if isinstance(one, ast.Constant) else None for one in call.args
                )
                if status and slug:
                    found.setdefault((slug, str(status)), words or "What is wrong, and what to do.")
    return found


# ---- Python


def python() -> Iterator[str]:
    yield heading("Python", "=")
    yield MADE
    for name in sorted(set(undertow.__all__) - {"__version__"}):
        of = getattr(undertow, name)
        kind = "autofunction" if inspect.isfunction(of) else "autoclass"
        yield f".. {kind}:: undertow.{name}"
        if kind == "autoclass" and name not in ("Settings", "ClusterSettings"):
            yield "   :members:\n   :inherited-members: Exception"
        yield ""
