"""How many facts get the date of the turn that says them: LoCoMo's own observations, without an LLM.

    python -m undertow.bench.quality.evidence.fact_dates --data FILE [--out FILE]

Each observation stands for a fact of a reply, its message for the turn that says it. A prompt shows that
turn among 15 others: next to it, from the whole conversation, or those with most words in common with it, as
in a cluster. The reply names the right turn, a wrong one or all. Or a fact is packed of two turns'
observations, word for word, and the reply names one of the two. `turns_that_say` checks what is named.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, get_args

import typer

from undertow.bench.machine import commit
from undertow.bench.quality.datasets import Sample, load
from undertow.bench.quality.json_lines import write_json
from undertow.engine.policies.attribution import telling_words, turns_that_say

SHOWN = 16
Line = tuple[date, str]
Others = Literal["next to it", "anywhere", "most alike"]


def shares(samples: Sequence[Sample], others: Others, seed: int = 0) -> dict[str, Any]:
    """The share of facts dated within a day of their turn, by what replies name: as named, and as checked."""
    rng, picked = random.Random(seed), random.Random(seed)  # so that each draws the same without the other
    dated: defaultdict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for sample in samples:
        lines, observed = _lines(sample), sample.observed()
        words = [telling_words(text) for _, text in lines]
        for place, (_, line) in enumerate(lines):
            for fact in observed.get(line, ()):
                shown = _shown(rng, words, place, others)
                wrong = rng.choice([n for n in shown if n != place])
                said = {n: words[n] for n in shown}
                replies = {"the right turn": [place], "a wrong turn": [wrong], "all turns": shown}
                for name, named in replies.items():
                    says = turns_that_say(telling_words(fact), named, said)
                    dated[name].append((_is_of(lines, [place], named), _is_of(lines, [place], says)))
                if observed_too := [n for n in shown if n != place and observed.get(lines[n][1])]:
                    other = picked.choice(observed_too)
                    both = f"{fact} {observed[lines[other][1]][0]}"
                    says = turns_that_say(telling_words(both), [place], said)
                    right = [place, other]
                    dated["one of two turns"].append(
                        (_is_of(lines, right, [place]), _is_of(lines, right, says))
                    )
    return {
        name: {"as named": _share(held, 0), "as checked": _share(held, 1), "facts": len(held)}
        for name, held in dated.items()
    }


def _lines(sample: Sample) -> list[Line]:
    return [
        (date.fromisoformat((turn.timestamp or "")[:10]), line)
        for turn in sample.turns
        for line in turn.text.split("\n")
    ]


def _shown(rng: random.Random, words: Sequence[frozenset[str]], place: int, others: Others) -> list[int]:
    """The places of the shown lines, ascending."""
    count = len(words)
    if others == "next to it":
        first = max(0, min(place - rng.randrange(SHOWN), count - SHOWN))
        return list(range(first, first + SHOWN))
    rest = [n for n in range(count) if n != place]
    if others == "anywhere":
        return sorted({place, *rng.sample(rest, SHOWN - 1)})
    own = words[place]
    rest.sort(key=lambda n: (-len(own & words[n]) / max(1, len(own | words[n])), n))
    return sorted({place, *rest[: SHOWN - 1]})


def _is_of(lines: Sequence[Line], right: Sequence[int], rests_on: Sequence[int]) -> bool:
    """Whether the last of the turns is within a day of the last of the right ones."""
    return abs((max(lines[n][0] for n in rests_on) - max(lines[n][0] for n in right)).days) <= 1


def _share(held: Sequence[tuple[bool, bool]], which: int) -> float:
    return round(fmean(one[which] for one in held), 3)


def main(
    data: Annotated[Path, typer.Option(help="LoCoMo's file")],
    out: Annotated[Path | None, typer.Option(help="the result, one JSON document")] = None,
) -> None:
    samples = list(load(data, "locomo", 1 << 20))
    found: dict[str, Any] = {"bench": "fact-dates", "commit": commit()}
    found |= {others: shares(samples, others) for others in get_args(Others)}
    if out is not None:
        write_json(out, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    typer.run(main)
