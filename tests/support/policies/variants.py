"""Each way to set a policy up that changes what it makes, for the tests that go through all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_TOLD = frozenset({"narrate", "select", "integrate"})
_LEARNT = frozenset({"predict", "distil"})
_NOTED = frozenset({"segment", "notes"})
_REVISED = frozenset({"supplement", "revise"})


@dataclass(frozen=True)
class Variant:
    """Settings, and the LLM operations by which such a tenant's memories are made."""

    options: Mapping[str, Any]
    operations: frozenset[str]
    kinds: frozenset[str] = field(default=frozenset({"episode", "fact"}))


def _nemori(*operations: str, **options: Any) -> Variant:
    return Variant({"policy": "nemori", **options}, frozenset(operations))


def _himem(*operations: str, **options: Any) -> Variant:
    return Variant({"policy": "himem", "answer_mode": "best_effort", **options}, frozenset(operations))


_FACTS, _EPISODES = frozenset({"fact"}), frozenset({"episode"})
_DIRECT: dict[str, Any] = {"policy": "nemori", "ablation": "direct-extraction"}
_SILENT: dict[str, Any] = {"policy": "nemori", "ablation": "without-facts"}

VARIANTS: Mapping[str, Variant] = {
    "nemori": _nemori("partition", *_TOLD, *_LEARNT, "consolidate"),
    "nemori, append": _nemori("partition", *_TOLD, *_LEARNT, management="append"),
    "nemori, summary": _nemori("partition", *_TOLD, *_LEARNT, "summarise", management="summary"),
    "nemori, notes of a-mem": _nemori(
        "partition", *_TOLD, *_LEARNT, "annotate", "connect", management="a-mem"
    ),
    "nemori, pages of memory-os": _nemori(
        "partition", *_TOLD, *_LEARNT, "topic", "persona", management="memory-os"
    ),
    "nemori, indexed by messages": _nemori(
        "partition", *_TOLD, *_LEARNT, "consolidate", nemori_index="messages"
    ),
    "nemori-s": Variant(_DIRECT, frozenset({"partition", "distil_direct", "consolidate"}), _FACTS),
    "nemori-s, append": Variant(
        {**_DIRECT, "management": "append"}, frozenset({"partition", "distil_direct"}), _FACTS
    ),
    # of answers alone: what is distilled was distilled with episodes (paper, section 4.4)
    "nemori without episodes": _nemori(
        "partition", *_TOLD, *_LEARNT, "consolidate", k_epi=0, k_sem=20, raw_of_best=0
    ),
    "nemori without facts": Variant(_SILENT, frozenset({"partition", *_TOLD}), _EPISODES),
    "nemori, fixed chunks": _nemori(*_TOLD, *_LEARNT, "consolidate", ablation="fixed-chunks"),
    "himem": _himem(*_NOTED, *_REVISED),
    "himem, calls of the paper": _himem(*_NOTED, "traits", "align", *_REVISED, calls="paper"),
    "himem without alignment": _himem(*_NOTED, "traits", *_REVISED, himem_align_notes=False),
    "himem, aligned episodes": _himem(*_NOTED, "align", *_REVISED, himem_align_episodes=True),
    "himem without self-evolution": _himem(*_NOTED, himem_self_evolution=False),
    "himem, forgetting": _himem(*_NOTED, *_REVISED, himem_max_notes=3),
}
