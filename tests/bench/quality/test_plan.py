"""What a run of `undertow eval` is about: all that its lines hang on, so that no two runs share a folder."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.run.folder import ABOUT, identity, memories_of, run_folder
from undertow.bench.quality.run.plan import (
    AS_BUILT_IN,
    OTHERWISE,
    RUNNING,
    SETTINGS,
    Plan,
    chosen,
    construction,
)
from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError


def plan_of(folder: Path, **settings: Any) -> Plan:
    data = folder / "data.json"
    data.write_text("[]")
    own = Settings(policy="himem", **settings)
    return Plan("locomo", data, (), "himem", own, None, folder / "out")


def test_every_setting_is_known_to_shape_a_run_or_not_to() -> None:
    """A new one goes into one of the three lists in bench/quality/run/plan.py."""
    assert Counter((*SETTINGS, *OTHERWISE, *RUNNING)) == Counter(list(Settings.model_fields))


@pytest.mark.parametrize(
    ("name", "value", "shapes_memories"),
    [
        ("himem_max_notes", 5, True),
        ("himem_self_evolution", False, True),
        ("tenant_token_budget", 1_000, True),
        ("answer_mode", "best_effort", False),
        ("words_rows", 0, False),
    ],
)
def test_a_run_with_another_setting_is_another_run(
    name: str, value: object, shapes_memories: bool, tmp_path: Path
) -> None:
    plan = plan_of(tmp_path)
    other = replace(plan, settings=plan_of(tmp_path, **{name: value}).settings).about()
    with run_folder(plan.folder, plan.about()):
        (plan.folder / "store").mkdir()
    with pytest.raises(UndertowError, match=f"begun with other settings: {name} "):
        run_folder(plan.folder, other).__enter__()
    assert (construction(other) != construction(plan.about())) == shapes_memories
    if not shapes_memories:
        with memories_of(plan.folder, other) as folder:
            assert folder == plan.folder


def test_a_run_that_was_begun_before_a_setting_was_written_down_has_it_as_built_in(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    with run_folder(plan.folder, plan.about()):
        begun = json.loads((plan.folder / ABOUT).read_text())
    for name in ("himem_max_notes", "himem_self_evolution", "answer_mode", "ivf_rows"):
        assert begun.pop(name) == AS_BUILT_IN[name]
    (plan.folder / ABOUT).write_text(json.dumps(begun))
    with run_folder(plan.folder, plan.about()) as folder:
        assert folder == plan.folder
    changed = plan_of(tmp_path, himem_max_notes=5).about()
    with pytest.raises(UndertowError, match="himem_max_notes None, now 5"):
        run_folder(plan.folder, changed).__enter__()


def built(plan: Plan, folder: Path) -> Path:
    """The folder of a run that has made memories."""
    with run_folder(folder, replace(plan, folder=folder).about()):
        (folder / "store").mkdir()
    return folder


def answering(plan: Plan, source_run: Path) -> Plan:
    """A run that answers from the memories in a folder."""
    with memories_of(source_run, replace(plan, memories_of=source_run).about()) as folder:
        return replace(plan, memories_of=source_run, memories_id=identity(folder))


def begin(plan: Plan) -> None:
    with run_folder(plan.folder, plan.about()):
        pass


def test_a_run_goes_on_with_the_memories_that_it_was_begun_with_alone(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    mine, other = (built(plan, tmp_path / name / "run") for name in ("a", "b"))
    begin(answering(plan, mine))
    with pytest.raises(UndertowError, match="begun with other settings: memories_id "):
        begin(answering(plan, other))
    moved = mine.rename(tmp_path / "moved")
    begin(answering(plan, moved))
    assert answering(plan, moved).about()["memories_of"] == "moved"
    with pytest.raises(UndertowError, match=r"memories_id .*; memories_of 'run', now None"):
        begin(plan)


def test_data_may_be_renamed_and_not_changed(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    begin(plan)
    renamed = replace(plan, data=plan.data.rename(tmp_path / "renamed.json"))
    begin(renamed)
    assert renamed.about()["data"] == "renamed.json"
    renamed.data.write_text("[1]")
    with pytest.raises(UndertowError, match="begun with other settings: data_digest "):
        begin(renamed)


def test_chosen_questions_are_evenly_spread() -> None:
    categories = ["adversarial" if n % 3 == 2 else "single-hop" for n in range(30)]
    asked = tuple(Question(str(n), "?", name, (), "", None) for n, name in enumerate(categories))
    sample = Sample("t", (), (), asked)
    assert len(chosen(sample, None)) == len(chosen(sample, 20)) == len(chosen(sample, 99)) == 20
    # of the 20 that are answered, numbers 2, 7, 12 and 17
    assert [q.id for q in chosen(sample, 4)] == ["3", "10", "18", "25"]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        run_folder(tmp_path / "out", {}),
        pytest.raises(UndertowError, match="another process"),
        run_folder(tmp_path / "out", {}),
    ):
        pass


def test_memories_that_are_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with pytest.raises(UndertowError, match="Name the --out of a run"):
        memories_of(tmp_path, {}).__enter__()
