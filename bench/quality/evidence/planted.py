"""One-off constraints planted among the turns of conversations: which of them reach memories, without an LLM.

    python -m undertow.bench.quality.evidence.planted --data locomo10.json --out planted.json

Each constraint is said once, in a turn of its own, and each piece of small talk as well. Gold replies
(`gold_replies.py`) read what a policy shows them perfectly, so a constraint is found if its turn is read. The
row `paper` is the same engine under the papers' profile.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from undertow.bench.machine import commit, describe
from undertow.bench.quality.datasets import Sample, load
from undertow.bench.quality.evidence.gold_replies import gold_llm
from undertow.bench.quality.json_lines import write_json
from undertow.bench.quality.vectors import KeptVectors
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Message, Turn
from undertow.engine.encoders.factory import make_encoder

SEEDS = (1, 2)
CONSTRAINTS = (
    *("I'm allergic to shellfish.", "My budget for the laptop is 900 euros.", "I can't eat gluten."),
    *("We moved: our address is 14 Harbour Lane now.", "Never call me before ten.", "I don't drink alcohol."),
    *("My knee means no stairs.", "Dad's visa runs out on 3 March.", "I only fly with a window seat."),
    *("The rent may not be above 1,150.", "I take blood thinners.", "Our cat can't stand other cats."),
    *("My size is 38 now.", "I'm off every second Friday.", "The car needs diesel."),
    *("I'm afraid of heights.", "Please write to my work email.", "The boiler guarantee ends in June."),
    *("My son is colour-blind.", "I can't lift more than ten kilos.", "Mum is vegetarian since spring."),
    *("My bank is closed to transfers over 2,000.", "No peanuts near Leo.", "I need a wheelchair ramp."),
    *("We keep the sabbath.", "The lease forbids dogs.", "I'm learning Danish, not Swedish."),
    *("My surname is Okafor since the wedding.", "I work nights in October.", "The flat has no lift."),
)
SMALL_TALK = (
    *("Thanks, that's so kind of you!", "Haha, you're the best!", "Sounds good to me, take care!"),
    *("Wow, that's really great!", "Yeah, totally, I know what you mean.", "Hope you have a nice day!"),
    *("Aww, thank you so much!", "Okay, talk to you soon!", "You're welcome, anytime!"),
    *("I'm so happy for you!", "That's amazing, good for you!", "Right, right. It is what it is."),
)


def planted(sample: Sample, seed: int) -> tuple[Sample, dict[str, str], set[str]]:
    """The sample with a constraint and two pieces of small talk in each 40 turns.

    Returns also the constraints by the dedupe key of their turn, and the keys of the small talk.
    """
    rng = random.Random(f"{sample.tenant} {seed}")
    turns, holds = list(sample.turns), list(sample.holds)
    observed = dict(sample.observations)
    said: dict[str, str] = {}
    chatter: set[str] = set()
    count = len(turns) // 40
    texts = [*rng.sample(CONSTRAINTS, count), *(rng.choice(SMALL_TALK) for _ in range(2 * count))]
    for n, text in enumerate(texts):
        place = rng.randrange(len(turns))
        key, piece = f"planted {n}", f"P:{n}"
        speaker = turns[place].messages[0]
        turn = Turn(
            *(sample.tenant, (Message("user", text, speaker.name),), key),
            *(turns[place].session_id, turns[place].timestamp),
        )
        turns.insert(place, turn)
        holds.insert(place, (piece,))
        if n < count:
            said[key] = text
            observed[piece] = (f"{speaker.speaker} said: {text}",)
        else:
            chatter.add(key)
    return replace(sample, turns=tuple(turns), holds=tuple(holds), observations=observed), said, chatter


def measure(samples: Sequence[Sample], settings: Settings, vectors: KeptVectors) -> dict[str, Any]:
    """Constraints found, small talk read, and tokens, over all samples and seeds."""
    found = constraints = read = chatter = tokens = turns = 0
    for sample, seed in ((sample, seed) for sample in samples for seed in SEEDS):
        log, said, small_talk = planted(sample, seed)
        with (
            TemporaryDirectory(prefix="undertow-planted-") as store,
            Engine(Path(store), settings, vectors, llm=gold_llm([log])) as engine,
        ):
            receipts = engine.add_batch(log.turns)
            seqs = {turn.dedupe_key: stored.seq for turn, stored in zip(log.turns, receipts, strict=True)}
            engine.flush(log.tenant)
            engine.drain()
            memories = engine.get_all(log.tenant)
            told = "\n".join(memory.text for memory in memories)
            shown = {seq for memory in memories for seq in memory.reach}
            stats = engine.stats()
        found += sum(text in told for text in said.values())
        read += sum(seqs[key] in shown for key in small_talk)
        constraints, chatter = constraints + len(said), chatter + len(small_talk)
        tokens += stats["prompt_tokens"] - stats["cached_prompt_tokens"] + stats["completion_tokens"]
        turns += len(log.turns)
    return {
        **{"logs": len(samples) * len(SEEDS), "constraints": constraints},
        "found": round(found / max(1, constraints), 4),
        "small_talk_read": round(read / max(1, chatter), 4),
        "uncached_tokens_an_exchange": round(tokens / max(1, turns), 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m undertow.bench.quality.evidence.planted")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="LoCoMo's published file")
    parser.add_argument("--vectors", type=Path, metavar="FILE", help="keep the vectors here")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    settings = Settings()
    samples = list(load(args.data, "locomo", settings.max_message_bytes))
    vectors = KeptVectors(make_encoder(settings), args.vectors)
    rows: dict[str, Any] = {
        name: measure(samples, settings.model_copy(update={"profile": name}), vectors)
        for name in (settings.profile, "paper")
    }
    vectors.save()
    write_json(args.out, {"machine": describe(), "commit": commit(), "encoder": settings.encoder, **rows})
    for name, row in rows.items():
        print(name, *(f"{figure} {value}" for figure, value in row.items()), sep="  ")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
