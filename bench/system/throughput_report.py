"""One run of `undertow bench ingest` as a document, with its files: figures, a picture and a trace."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from undertow.bench import machine
from undertow.bench.system.parts import load_averages
from undertow.bench.system.throughput import MOCK_REFUSALS, ingest, mock_llm, settings_for
from undertow.bench.system.throughput_load import Texts, copies, salted
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn
from undertow.engine.encoders.base import Encoder
from undertow.engine.encoders.factory import make_encoder

FIGURES, PICTURE, TRACE = "ingest.json", "ingest.png", "trace.json"


@dataclass(frozen=True, slots=True)
class Load:
    """Which turns are taken in; see throughput_load.copies."""

    data: Path
    tenants: int
    turns_per_tenant: int | None
    salted: bool

    def turns(self) -> list[Turn]:
        plain = copies(self.data, self.tenants, self.turns_per_tenant)
        return list(salted(plain) if self.salted else plain)

    def about(self, turns: int) -> dict[str, Any]:
        texts: Texts = "salted" if self.salted else "plain copies"
        return {"data": self.data.name, "tenants": self.tenants, "turns": turns, "texts": texts}


def run(load: Load, settings: Settings, latency_s: float, out: Path | None = None) -> dict[str, Any]:
    """Measure with the settings' LLM server, or with the mock where they name none. See throughput.ingest."""
    log = load.turns()
    with ExitStack() as stack:
        about = {"bench": "ingest", **conditions(), **load.about(len(log))}
        about["llm"] = f"mock, {latency_s:g} s" if settings.llm_url is None else "server"
        if settings.llm_url is None:
            about["mock_refusal_rate"] = MOCK_REFUSALS
            url = stack.enter_context(mock_llm(latency_s))
            settings = settings.model_copy(update={"llm_url": url, "llm_model": None})
        settings = settings_for(settings, log)
        encoder = make_encoder(settings)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        result = {**about, **chosen(settings, encoder), **ingest(log, settings, encoder, out and out / TRACE)}
    if out is not None:
        write(result, out)
    return result


def conditions() -> dict[str, Any]:
    """When and on what: goes into every document. `load`: what else ran, as the last minutes' averages."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": machine.commit(),
        "machine": machine.describe(),
        "load": load_averages(),
    }


def chosen(settings: Settings, encoder: Encoder) -> dict[str, Any]:
    """The settings that these figures depend on, and what the encoder of their name computes in here."""
    return {
        "policy": settings.policy,
        "encoder": settings.encoder,
        "encoder_dtype": encoder.fingerprint.dtype,
        "encoder_device": encoder.fingerprint.device,
        "theta_sim": settings.similarity_threshold,
        "theta_count": settings.recurrence_count,
        "queue_turns": settings.queue_turns,
        "llm_in_flight_limit": settings.llm_requests,
    }


def write(result: Mapping[str, Any], out: Path) -> None:
    """The document and its picture. ImportError: matplotlib is missing; the document is written first."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    (out / FIGURES).write_bytes(orjson.dumps(result, option=options))
    draw(result, out / PICTURE)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write a PNG with progress, queues and calls over time. ImportError: matplotlib is missing."""
    from matplotlib.figure import Figure  # no pyplot: no window, no state of its own

    over_time = result["over_time"]
    at_s = over_time["at_s"]
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    done, queues, calls = figure.subplots(3, 1, sharex=True, height_ratios=[3, 2, 2])

    done.plot(at_s, over_time["searchable_turns"], label="searchable", color="tab:blue")
    done.plot(at_s, over_time["consolidated_turns"], label="consolidated", color="tab:orange")
    done.set_ylabel("turns")
    waits = result["wait_s"]
    done.set_title(
        f"{result['turns']:,} turns of {result['tenants']:,} tenants, {result['texts']}, "
        f"encoder {result['encoder']}, LLM {result['llm']}\n"
        f"{result['searchable_turns_per_s']:,.0f} turns/s to searchable, "
        f"{result['consolidated_turns_per_s']:,.0f} to consolidated; a turn waits "
        f"{waits['searchable']['p50']:.2f} s and {waits['consolidated']['p50']:.2f} s (medians)",
        fontsize=10,
        loc="left",
    )

    queues.plot(at_s, over_time["undecided_turns"], label="searchable, not decided", color="tab:orange")
    queues.plot(at_s, over_time["queued_turns"], label="waiting to be stored", color="tab:blue")
    queues.set_ylabel("turns in a queue")

    calls.plot(at_s, over_time["jobs_running"], label="tenants with a job", color="tab:green")
    calls.plot(at_s, over_time["llm_in_flight"], label="LLM requests in flight", color="tab:red")
    calls.set_ylabel("under way")
    calls.set_xlabel("seconds from the first turn")

    for part in (done, queues, calls):
        part.set_ylim(bottom=0)
        part.grid(alpha=0.3)
        part.legend(loc="best", fontsize=9)
    figure.savefig(path, dpi=120)
