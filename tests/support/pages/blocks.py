"""The fenced blocks of Markdown pages, and what can be checked of them without running them."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from undertow.engine.base.config import Settings
from undertow.engine.base.environment import OTHERS
from undertow.engine.cluster.settings import ClusterSettings
from undertow.serving.cli import app
from undertow.serving.http.service_settings import ServiceSettings

from ..cluster.forked import FORKS, ROOT

SHELL = ("bash", "sh", "console")
SHOWN = ("text", "json", "yaml", "toml", "{toctree}")
COMMAND = re.compile(
    r"^\s*(\$ |[A-Z_]+=\S|\.venv/|\./|"
    r"(undertow|make|pip|python3?|pytest|curl|docker|kubectl|export|bash|git|ray) )"
)
FENCE = re.compile(r"( *)(`{3,}|~{3,})(.*)")
NOT_RUN = re.compile(r" *<!-- not run: (.+) -->")
REASON = re.compile(
    r"needs (?:a card|a cluster|a hosted LLM|(minutes and gigabytes|another program) \(.+\)(?<!\(\)))$"
)
DEFAULTS = {
    f"{model.model_config['env_prefix']}{name}".upper(): field.default
    for model in (Settings, ServiceSettings, ClusterSettings)
    for name, field in model.model_fields.items()
}


@dataclass(frozen=True)
class Block:
    page: str
    line: int  # of its fence
    language: str
    text: str
    reason: str | None  # why it is not run

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_code(self) -> bool:
        return self.language in (*SHELL, "python")

    @property
    def kind(self) -> str:
        """The reason without what stands in brackets."""
        return (self.reason or "").partition(" (")[0]


def pages() -> list[str]:
    """README, CONTRIBUTING, SECURITY and all below docs/, but for what is made at the build."""
    found = [page.relative_to(ROOT).as_posix() for page in sorted((ROOT / "docs").rglob("*.md"))]
    first = ["README.md", "CONTRIBUTING.md", "SECURITY.md"]
    return first + [page for page in found if not page.startswith("docs/reference/")]


def blocks_of(page: str, text: str) -> Iterator[Block]:
    lines = iter(enumerate(text.splitlines(), 1))
    before = ""
    for number, line in lines:
        if opened := FENCE.match(line):
            inside: list[str] = []
            for _, content in lines:
                if content.strip() == opened[2]:
                    break
                inside.append(content.removeprefix(opened[1]))
            reason = NOT_RUN.match(before)
            language = opened[3].strip().partition(" ")[0]
            yield Block(page, number, language, "\n".join(inside) + "\n", reason and reason[1])
        before = line


def faults_of(block: Block) -> Iterator[str]:
    """What is wrong with it as it stands."""
    commands = [line for line in block.text.splitlines() if COMMAND.match(line)]
    if block.language not in ("", *SHELL, "python", *SHOWN):
        yield f"nothing is known of the language {block.language!r}"
    if commands and (block.language == "" or (block.language == "text" and COMMAND.match(block.text))):
        yield f"a command without a language: {commands[0]}"
    if block.reason is not None:
        if not REASON.match(block.reason):
            yield f"this is no reason: {block.reason}"
        if not block.is_code:
            yield "a reason above a block that is never run"
    if block.is_code:
        yield from unknown_settings(block.text)
    if block.language in SHELL and block.reason is not None:
        for words in commands_of(block.text):
            yield from (f"{fault}: {shlex.join(words)}" for fault in faults_of_command(words))


def unknown_settings(text: str) -> Iterator[str]:
    named = set(re.findall(r"\bUNDERTOW_[A-Z_]*[A-Z]\b(?!_)", text))
    yield from (f"{name} is no setting" for name in sorted(named - {*DEFAULTS, *OTHERS}))


def faults_of_words(page: str, text: str) -> Iterator[str]:
    """What a page names between its blocks, in backticks, and the program does not have."""
    words = re.sub(r"^ *(```+).*?^ *\1", "", text, flags=re.MULTILINE | re.DOTALL)
    code = re.findall(r"`([^`\n]+)`", words)
    yield from (f"{page}: {fault}" for part in code for fault in unknown_settings(part))
    for part in (part for part in code if part.startswith("undertow ")):
        command: Any = typer.main.get_command(app)
        rest = part.split()[1:]
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        known = {option for param in command.params for option in param.opts} | {"--version"}
        strange = rest[:1] if hasattr(command, "commands") else [one for one in rest if one.startswith("--")]
        yield from (f"{page}: no {one} in `{part}`" for one in strange if one.partition("=")[0] not in known)
    for name, told in re.findall(r"`(UNDERTOW_\w+)` \((\d[\d,]*)(?: s)?[;,)]", words):
        if DEFAULTS[name] not in (None, float(told.replace(",", ""))):
            yield f"{page}: the default of {name} is {DEFAULTS[name]}, not {told}"


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of each command, without assignments before it."""
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r" [<>]+ ?\S+", "", line.removeprefix("$ "))  # where its output goes
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|"):
                if words:
                    yield words
                words = []
            elif words or not re.match(r"[A-Z_]+=", word):
                words.append(word)


def faults_of_command(words: Sequence[str]) -> Iterator[str]:
    """What the program, Makefile, pyproject.toml or the folders do not have."""
    names = [Path(word).name for word in words]
    if "undertow" in names and words[0] != "pip":
        yield from wrong_options(words[names.index("undertow") + 1 :])
    elif "-m" in words and (module := words[words.index("-m") + 1]).startswith("undertow."):
        yield from wrong_arguments(module, words[words.index("-m") + 2 :])
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        yield from (f"no target {word}" for word in words[1:] if word not in targets)
    elif words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = ",".join(re.findall(r"undertow\[(.+?)\]", " ".join(words))).split(",")
        unknown = {*filter(None, extras)} - set(project["optional-dependencies"])
        yield from (f"no extra {one}" for one in unknown)
    for word in words:
        if re.match(r"(bench|tests|kuberay|examples)/[\w/]+(\.\w+)?$", word) and not (ROOT / word).exists():
            yield f"no such file {word}"


def wrong_options(words: Sequence[str]) -> Iterator[str]:
    """What the program's own parser says of the arguments of `undertow`."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while True:
        context = command.context_class(command)
        try:
            given, rest, _ = command.make_parser(context).parse_args(rest)
        except Exception as refused:  # noqa: BLE001 - typer has its own copy of click's errors
            yield str(refused)
            return
        for param in command.params:
            try:
                param.process_value(context, given.get(param.name))
            except Exception as refused:  # noqa: BLE001 - as above
                if "does not exist" not in str(refused):  # the reader's files are not here
                    yield f"{param.name}: {refused}"
        below = getattr(command, "commands", None)
        if below is None:
            yield from (f"unexpected {word}" for word in rest)
            return
        if not rest or rest[0] not in below:
            yield f"no command {' '.join(rest[:1])}"
            return
        command, rest = below[rest[0]], rest[1:]


def wrong_arguments(module: str, words: Sequence[str]) -> Iterator[str]:
    """What a module that is run says of its arguments, by its own parser; those without one take none."""
    found = find_spec(module) and find_spec(f"{module}.__main__" if is_package(module) else module)
    if not found or not found.origin:
        yield f"no module {module}"
    elif "ArgumentParser" in Path(found.origin).read_text():
        process = FORKS.Process(target=parse_only, args=(module, list(words)))
        process.start()
        process.join()
        if process.exitcode:
            yield f"its parser refuses them with exit code {process.exitcode}"


def is_package(module: str) -> bool:
    found = find_spec(module)
    return found is not None and found.submodule_search_locations is not None


def parse_only(module: str, words: list[str]) -> None:
    """In a fork: begin to run a module, and end once it has parsed its arguments."""
    parse = argparse.ArgumentParser.parse_args

    def parsed(parser: argparse.ArgumentParser, *args: Any) -> None:
        parse(parser, *args)
        sys.exit(0)

    argparse.ArgumentParser.parse_args = parsed  # type: ignore[method-assign, assignment]
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit("nothing was parsed")
