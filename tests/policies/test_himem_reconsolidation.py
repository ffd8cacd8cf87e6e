"""HiMem's reconsolidation driven by hand: what a question missed, and the three relations to the notes."""

from __future__ import annotations

from typing import Any

import pytest

from undertow.engine.base.model import Decision, Memory
from undertow.engine.llm.client import BadReply
from undertow.engine.policies.base import PromptBudget, TurnView
from undertow.engine.policies.himem.policy import Alignment, HiMem
from undertow.prompts.builders import prompt_version
from undertow.prompts.reply_schemas import Reply, ReviseReply, Revision, SupplementDraft, SupplementReply

from ..support.policies.driver import BAD, ROOMY, Driven, View, drive, lines_under, stored

QUESTION = "Where does Ann live?"
EARLY = stored("episode", "Ann moved to Berlin.", 2, (0, 1))
LATE = stored("episode", "Ann moved to Paris.", 5, (3, 4))
LIVES = stored("fact", "Ann lives in Berlin.", 2, (1,), fact_kind="profile")
BAKES = stored("fact", "Ann bakes bread.", 5, (4,), fact_kind="fact")


def view_of(*memories: Memory) -> View:
    turns = {n: TurnView(n, f"Ann: turn{n}", f"2026-03-{n + 1:02d}", session="a") for n in range(6)}
    return View(turns, list(memories))


def missing(*texts: str, said_by: tuple[int, ...] = (1,)) -> SupplementReply:
    """Said by the first episode that is shown, or by `said_by`."""
    drafts = [SupplementDraft(episodes=list(said_by), text=text, kind="profile") for text in texts]
    return SupplementReply(notes=drafts)


def related(*given: tuple[int, Any, int | None, str]) -> ReviseReply:
    return ReviseReply(decisions=[Revision(candidate=c, relation=r, note=n, text=t) for c, r, n, t in given])


def ask(view: View, *replies: Reply | BadReply, budget: PromptBudget = ROOMY, **named: Any) -> Driven:
    episodes = named.get("episodes", (LATE.id, EARLY.id))
    steps = HiMem(budget, Alignment()).reconsolidate(9, QUESTION, episodes, view)
    return drive(steps, view, replies=replies)


def test_only_the_question_and_its_episodes_are_shown_and_what_is_found_rests_on_those_that_say_it() -> None:
    view = view_of(EARLY, LATE, BAKES)
    said = *missing("Ann lives in Paris.").notes, *missing("Ann moves.", said_by=(2, 1)).notes
    done = ask(view, SupplementReply(notes=list(said)), related())
    assert [p.operation for p in done.prompts] == ["supplement", "revise"]
    assert QUESTION in done.prompts[0].user and "turn0" not in done.prompts[0].user
    assert [LATE.text in line for line in lines_under(done.prompts[0], "Episodes")] == [True, False]
    one, both = done.made("fact")
    assert (one.text, one.source_seqs, one.shown_seqs) == ("Ann lives in Paris.", (3, 4), (0, 1))
    assert (both.text, both.source_seqs, both.shown_seqs) == ("Ann moves.", (0, 1, 3, 4), ())
    assert [(m.fact_kind, m.episode_id) for m in (one, both)] == [("profile", LATE.id), ("profile", EARLY.id)]
    assert (done.outcome.decision, done.outcome.cluster, done.outcome.settled) == (Decision.FIRED, (), ())


def test_without_stored_notes_there_is_nothing_to_compare() -> None:
    done = ask(view_of(EARLY, LATE), missing("Ann lives in Paris."))
    assert ([m.text for m in done.made("fact")], len(done.prompts)) == (["Ann lives in Paris."], 1)
    assert ask(view_of(LATE), missing()).outcome.drafts == ()


def test_independent_adds_extendable_updates_contradictory_replaces() -> None:
    view = view_of(EARLY, LATE, LIVES, BAKES)
    found = missing("Ann sails.", "Ann bakes rye bread.", "Ann lives in Paris.")
    done = ask(
        view,
        found,
        related(
            (1, "independent", None, ""),
            (2, "extendable", 2, "Ann bakes bread, also of rye."),
            (3, "contradictory", 1, "ignored"),
        ),
    )
    assert len(lines_under(done.prompts[1], "Stored notes")) == 2
    added, updated, replaced = done.made("fact")
    assert (added.text, added.version, added.supersedes) == ("Ann sails.", 1, ())
    assert (updated.id, updated.version, updated.text) == (BAKES.id, 2, "Ann bakes bread, also of rye.")
    assert (updated.source_seqs, updated.shown_seqs) == ((3, 4), (0, 1))
    assert updated.prompt_version == prompt_version("revise")
    assert (replaced.text, replaced.supersedes) == ("Ann lives in Paris.", (LIVES.id,))
    assert done.deleted() == [LIVES.id], "a last, empty version: its history stays"


@pytest.mark.parametrize(
    "wrong", [(1, "extendable", 9, "x"), (1, "contradictory", 0, ""), (1, "extendable", None, "x")]
)
def test_what_a_wrong_number_leaves_open_is_added(wrong: tuple[int, Any, int | None, str]) -> None:
    done = ask(view_of(LATE, BAKES), missing("Ann sails."), related(wrong))
    assert ([m.text for m in done.made("fact")], done.deleted()) == (["Ann sails."], [])


def test_a_note_is_changed_once_and_a_candidate_decided_once() -> None:
    found = missing("One.", "Two.")
    done = ask(
        view_of(LATE, LIVES),
        found,
        related((1, "extendable", 1, "Both."), (1, "independent", None, ""), (2, "contradictory", 1, "")),
    )
    assert [(m.text, m.version) for m in done.made("fact")] == [("Both.", 2), ("Two.", 1)]
    assert not done.deleted()


IN_OSLO = stored("fact", "Ann lives in Oslo.", 3, (2,), fact_kind="profile")


@pytest.mark.parametrize("said_by", [(2,), (), (3,)])
def test_older_words_contradict_no_later_note_and_do_not_stand_beside_it(said_by: tuple[int, ...]) -> None:
    """However late a turn is that was shown with them; without a usable number, the oldest say it."""
    view = view_of(EARLY, LATE, IN_OSLO)
    found = missing("Ann lives in Berlin.", said_by=said_by)
    done = ask(view, found, related((1, "contradictory", 1, "")))
    assert (done.deleted(), done.made("fact")) == ([], [])
    (date,) = lines_under(done.prompts[1], "Candidates")
    assert '"2026-03-02"' in date, "of the turn that said it"


def test_later_words_contradict_a_note_that_was_found_beside_still_later_ones() -> None:
    old = stored("fact", "Ann lives in Berlin.", 5, (0, 1), shown_seqs=(3, 4, 5), fact_kind="profile")
    view = view_of(EARLY, LATE, old)
    done = ask(view, missing("Ann lives in Paris."), related((1, "contradictory", 1, "")))
    assert done.deleted() == [old.id]
    (new,) = done.made("fact")
    assert (new.text, new.timestamp, new.supersedes) == ("Ann lives in Paris.", "2026-03-05", (old.id,))


def test_what_was_found_goes_with_every_turn_that_was_shown_for_it() -> None:
    note = stored("fact", "Ann lives in Paris.", 7, (3, 4), shown_seqs=(0, 1), fact_kind="profile")
    view = view_of(EARLY, LATE, note)
    del view.turns[0]
    assert note.id in drive(HiMem(ROOMY, Alignment()).forget(9, 0, view), view, replies=[BAD]).deleted()


def test_what_is_stored_word_for_word_is_not_asked_about() -> None:
    done = ask(view_of(EARLY, LATE, LIVES), missing(LIVES.text))
    (again,) = done.made("fact")
    assert (again.id, again.version, again.source_seqs) == (LIVES.id, 2, (1, 3, 4))


def test_episodes_that_are_gone_or_rest_on_a_deleted_turn_are_left_out() -> None:
    view = view_of(EARLY, LATE)
    del view.turns[4]
    done = ask(view, missing("Ann lives in Berlin."))
    assert [EARLY.text in line for line in lines_under(done.prompts[0], "Episodes")] == [True]
    del view.turns[0]
    assert ask(view).outcome.decision is Decision.WAITS
    assert ask(view_of(EARLY), episodes=("unknown",)).prompts == []


def test_the_least_relevant_episodes_go_where_the_context_is_short() -> None:
    view = view_of(EARLY, LATE)
    whole = ask(view, missing()).prompts[0].size_tokens
    (prompt,) = ask(view, missing(), budget=PromptBudget(whole + 63, 64)).prompts
    assert [LATE.text in line for line in lines_under(prompt, "Episodes")] == [True]


@pytest.mark.parametrize("replies", [(BAD,), (missing("New."), BAD)])
def test_a_bad_reply_changes_nothing_and_parks_nothing(replies: tuple[Any, ...]) -> None:
    outcome = ask(view_of(LATE, BAKES), *replies).outcome
    assert (outcome.decision, outcome.drafts, outcome.settled) == (Decision.WAITS, (), ())
    assert "no JSON" in (outcome.reason or "")
