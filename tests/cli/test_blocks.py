"""Every command and every Python block of README and docs runs here, or says why not.

A block is not run if `<!-- not run: REASON -->` stands directly above it; its options, modules, targets and
settings are looked up all the same. The pages' terminal: tests/support/service/terminal.py.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ..engine.readers.exports.samples import boat_chat
from ..support.cluster.forked import ROOT
from ..support.eval import conversation
from ..support.service.blocks import blocks_of, faults_of, faults_of_words, pages
from ..support.service.terminal import Terminal

TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in pages()}
BLOCKS = [block for page, text in TEXTS.items() for block in blocks_of(page, text)]
CODE = [block for block in BLOCKS if block.is_code]
RUN = [block for block in CODE if block.reason is None]
# not run, at most
MOST = {
    "needs a card": 6,
    "needs a cluster": 2,
    "needs minutes and gigabytes": 10,
    "needs another program": 3,
}
# what the Python blocks of a page have made
HOLDS = {
    "docs/adapters.md": [
        "found.memories == []",
        "[i.key for i in (item, *good, *near, *store.search(('ann',)))] == ['fish'] * 4",
        "spaces == [('ann', 'food')]",
        "result.final_output",
        "shown[-1].content == 'My boat lies in Wick.'",
    ],
    "docs/arrow.md": ["tables['turns'].num_rows == 1"],
}


# files that readers have, in small: exports of their accounts, a published benchmark
GIVEN: dict[str, Any] = {
    "chatgpt-export/conversations.json": [boat_chat()],
    "WhatsApp Chat with Ann.txt": "05/01/2026, 09:12 - Ann: The boat leaks.\n",
    "mem0.json": {"results": [{"id": "1", "memory": "Ann sails.", "user_id": "ann"}]},
    "locomo10.json": [conversation(sample_id="conv-30")],
}


@pytest.mark.parametrize("page", dict.fromkeys(block.page for block in RUN))
def test_the_blocks_of_a_page_run(
    page: str, tmp_path: Path, server: str, request: pytest.FixtureRequest
) -> None:
    blocks = [block for block in RUN if block.page == page]
    text = "".join(block.text for block in blocks)
    on_ray = "connect(" in text or "--ray" in text
    more = {"RAY_ADDRESS": request.getfixturevalue("ray_address")} if on_ray else {}
    with closing(Terminal(tmp_path, blocks, server, **more)) as terminal:
        for name, content in GIVEN.items():
            file = terminal.folder / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(content if isinstance(content, str) else json.dumps(content))
        shutil.make_archive(
            str(terminal.folder / "chatgpt-export"), "zip", terminal.folder / "chatgpt-export"
        )
        if page == "CONTRIBUTING.md":  # whose reader stands in a checkout
            for entry in ROOT.iterdir():
                (terminal.folder / entry.name).symlink_to(entry)
        for block in blocks:
            terminal.run(block)
        for expression in HOLDS.get(page, ()):
            terminal.holds(page, expression)


def test_every_block_is_sound_as_it_stands() -> None:
    faults = [f"{block.place}: {fault}" for block in BLOCKS for fault in faults_of(block)]
    faults += [fault for page, text in TEXTS.items() for fault in faults_of_words(page, text)]
    assert not faults, "\n" + "\n".join(faults)


def test_few_blocks_are_not_run(record_property: Callable[[str, object], None]) -> None:
    kept = Counter(block.kind for block in CODE if block.reason is not None)
    count = f"{len(RUN)} blocks of commands and Python run, {kept.total()} do not: {dict(kept)}"
    record_property("told", count)
    assert kept <= Counter(MOST), kept - Counter(MOST)
    assert kept.total() <= len(CODE) / 3
