"""No response of the service ever holds what is another tenant's: its text, its ids, its count or its scores.

A state machine drives random requests of several tenants and keys over HTTP, one after the other and side by
side, against a simple model: what each tenant has said (support/isolation/tenants.py). Each turn has a
word that tells whose it is, and what is told to one tenant is searched for words, ids and names of all
others (support/isolation/secrets.py): bodies, errors, headers, and what the service tells its operator in
logs, metrics and spans. In the soak, and with fewer steps:

    make soak PROOF=isolation

Leaks that were put into the code by hand, one at a time, and each found within 2,000 steps: a search that
looks at another tenant's turns at times; scores that depend on how many tenants have searched; a memory, or a
job, that is found by its id alone; a list of everybody's jobs; figures of all tenants; a page of the export
before; answers kept for an Idempotency-Key whichever tenant it was of, or beyond an erasure; the tenant of a
call in an attribute that calls at the same time share; a log with tenants' names.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import psutil
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.search import keyword_index
from undertow.serving.http import hosting
from undertow.serving.telemetry.tracing import LinkedSampler, Tracing

from ...support.cli import logged
from ...support.faults.harness import RATES
from ...support.isolation import acts, attempts, moves
from ...support.isolation.tenants import ALL, NAMES, Act, Tenants
from ...support.service.http import is_problem, serving
from ...support.soak.runs import private_bytes, report

STEPS = 1_000
SOAK_STEPS = 100_000
STEPS_A_RUN = 100

CHANGES = (acts.add, acts.add, acts.update, acts.delete, acts.repeat)
SEARCHES = (acts.search, acts.search, acts.search_explained, acts.search_by_mem0)
LOOKS = (*SEARCHES, acts.look, acts.look_at_pages, acts.answer, acts.flush, acts.flush_later)
MOVES = (moves.restore, moves.import_anothers, moves.import_broken, moves.remove, moves.change_key)
ATTEMPTS = (
    attempts.touch_what_is_anothers,
    attempts.ask_for_anothers_job,
    attempts.touch_anothers_webhook,
    attempts.act_for_another,
    attempts.search_another_by_mem0,
    attempts.act_beyond_the_scope,
    attempts.repeat_for_another,
    attempts.go_on_where_anothers_page_ended,
)
# what does not depend on other tenants, not even by what of theirs it is about
ALONE = (*CHANGES, *LOOKS, moves.restore, moves.remove)
# where the draws of an act begin
RANDOM = st.integers(0, 2**32 - 1).map(Random)


class Watched:
    """A service, its operator's key, and all that it tells its operator."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.spans = InMemorySpanExporter()
        provider = TracerProvider(LinkedSampler(0.0))
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        tracing = Tracing(provider)
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(hosting, "tracing", lambda: tracing)
        self.log = stack.enter_context(logged())
        parts = EngineParts(
            llm=lambda _: MockLLM(MockReplies(**RATES, malformed_rate=0.12)),
            observers=lambda _: (tracing.observer(None),),
        )
        # indexes of words are made in several slices, though no tenant is large
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(keyword_index, "SLICE_ROWS", 3)
        # no tenant has too many jobs here: that is for other tests
        opened = serving(folder, parts=parts, engine={"theta_count": 2}, max_tenant_jobs=1_000)
        self.service = stack.enter_context(opened)
        self.http = self.service.client_of(None)
        self.operator = self.service.key()
        self.pool = stack.enter_context(ThreadPoolExecutor(len(NAMES)))

    def ask(self, path: str, *, by: str | None = None, status: int = 200, **params: Any) -> httpx2.Response:
        """Something about no tenant, as the operator or with a key."""
        headers = {"Authorization": f"Bearer {by or self.operator}"}
        response = self.http.get(path, params=params, headers=headers)
        assert response.status_code == status, response.text
        return response

    def logged_lines(self) -> list[dict[str, Any]]:
        """Those since the last call."""
        (handler,) = [h for h in logging.getLogger().handlers if getattr(h, "stream", None) is self.log]
        with handler.lock or ExitStack():
            text = self.log.getvalue()
            self.log.seek(0)
            self.log.truncate()
        return [json.loads(line) for line in text.splitlines()]

    def drawn_spans(self) -> tuple[ReadableSpan, ...]:
        """Those since the last call."""
        spans = self.spans.get_finished_spans()
        self.spans.clear()
        return spans


class Isolation(RuleBasedStateMachine):
    """Tenants of one service that know nothing of each other."""

    watched: Watched
    steps = 0
    runs = itertools.count()
    # the first one: when Hypothesis repeats what led to it, the service is no longer as it was
    failure: AssertionError | None = None

    @initialize()
    def begin(self) -> None:
        """The service goes on from run to run: what earlier ones left there are neighbours too."""
        watched = self.watched
        self.turns_before = watched.ask("/v1/stats").json()["turns"]
        run = f"run{next(Isolation.runs)}-"
        self.tenants = Tenants(watched.service, watched.http, watched.operator, run)
        self.names = self.tenants.names
        self.act_all([(acts.add, name, Random(name)) for name in self.names[:4]])

    # ---- what tenants do, and what they try

    @rule(act=st.sampled_from(CHANGES), rng=RANDOM)
    def change(self, act: Act, rng: Random) -> None:
        self.act(act, rng.choice(self.names), rng)

    @rule(act=st.sampled_from(LOOKS), rng=RANDOM)
    def look(self, act: Act, rng: Random) -> None:
        self.act(act, rng.choice(self.names), rng)

    @rule(act=st.sampled_from(MOVES), rng=RANDOM)
    def come_or_go(self, act: Act, rng: Random) -> None:
        self.act(act, rng.choice(self.names), rng)

    @rule(act=st.sampled_from(ATTEMPTS), rng=RANDOM)
    def attempt(self, act: Act, rng: Random) -> None:
        self.act(act, rng.choice(self.names), rng)

    @rule(several=st.lists(st.sampled_from(ALONE), min_size=2, max_size=4), rng=RANDOM)
    def act_side_by_side(self, several: list[Act], rng: Random) -> None:
        """What each tenant does at the same time as others goes as if it were alone."""
        names = rng.sample(self.names, len(several))
        self.act_all([(act, name, Random(rng.random())) for act, name in zip(several, names, strict=True)])

    def act(self, act: Act, name: str, rng: Random) -> None:
        try:
            act(self.tenants, name, rng)
        except AssertionError as failure:
            Isolation.failure = Isolation.failure or failure
            raise

    def act_all(self, several: list[tuple[Act, str, Random]]) -> None:
        """Each counts as a step."""
        Isolation.steps += len(several) - 1
        doing = [self.watched.pool.submit(self.act, act, name, rng) for act, name, rng in several]
        for failure in [done.exception() for done in doing]:
            if failure is not None:
                raise failure

    # ---- what those are told who may know of several tenants, or of all

    @rule()
    def list_names(self) -> None:
        """Who may see the names of a branch sees those alone."""
        there = sorted(name for name in self.names if self.tenants.lots[name].exists)
        branch = [name for name in there if name.startswith(self.tenants.branch_prefix)]
        listed = self.watched.ask("/v1/tenants", by=self.tenants.branch, limit=ALL)
        assert listed.json()["results"] == branch
        assert self.watched.ask("/v1/tenants", prefix=self.tenants.run).json()["results"] == there

    @rule(path=st.sampled_from(("/v1/stats", "/v1/usage", "/v1/status", "/metrics")))
    def count_all(self, path: str) -> None:
        """All tenants together have what each of them has; whose key is for some is told of none together."""
        turns = self.watched.ask("/v1/stats").json()["turns"]
        assert turns - self.turns_before == sum(len(lot.texts) for lot in self.tenants.lots.values())
        is_problem(self.watched.ask(path, by=self.tenants.branch, status=403), 403)

    def teardown(self) -> None:
        """Logs and spans name who asked, and about whom, by ids alone; metrics name nobody."""
        if not hasattr(self, "tenants"):
            return
        self.tenants.drop_keys()
        secrets, asked = self.tenants.secrets, self.tenants.asked
        secrets.check(self.watched.ask("/metrics").text)
        for line in self.watched.logged_lines():
            about = asked.get(line.pop("request_id", ""), ())
            secrets.check(json.dumps(line, ensure_ascii=False), ids_of=about)
        for span in self.watched.drawn_spans():
            about = asked.get(f"{span.context.trace_id:032x}", ()) if span.context else ()
            told = f"{span.name} {dict(span.attributes or {})} {span.events} {span.status.description}"
            secrets.check(told, ids_of=about)

    @invariant()
    def count(self) -> None:
        Isolation.steps += 1


def drive(folder: Path, steps: int, *, anew: bool = False) -> None:
    """Runs of the machine until so many steps were taken; the same ones each time, unless `anew`."""
    with ExitStack() as stack:
        Isolation.watched = Watched(folder, stack)
        Isolation.steps, Isolation.runs, Isolation.failure = 0, itertools.count(), None
        while Isolation.steps < steps:
            runs = -(-(steps - Isolation.steps) // STEPS_A_RUN)
            bounds = hypothesis_settings(
                max_examples=min(runs, 100),
                stateful_step_count=STEPS_A_RUN,
                deadline=None,
                derandomize=not anew,
                database=None,
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
            )
            try:
                run_state_machine_as_test(Isolation, settings=bounds)
            except Flaky as flaky:
                raise Isolation.failure or flaky from None


def test_no_tenant_learns_of_another(tmp_path: Path) -> None:
    drive(tmp_path, STEPS)


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_no_tenant_learns_of_another_in_a_long_run(tmp_path: Path) -> None:
    steps = int(os.environ.get("ISOLATION_STEPS", SOAK_STEPS))
    process = psutil.Process()
    began_bytes = private_bytes(process)
    drive(tmp_path, steps, anew=True)
    report(steps=Isolation.steps, grown_bytes_max=private_bytes(process) - began_bytes)
