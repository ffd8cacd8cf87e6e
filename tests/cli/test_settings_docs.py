"""What an operator may have to set stands in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from undertow.engine.base.config import Settings

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {f"UNDERTOW_{name.upper()}": field for name, field in Settings.model_fields.items()}


@pytest.mark.parametrize("name", ["UNDERTOW_WORDS_ROWS", "UNDERTOW_IVF_ROWS"])
def test_the_bounds_of_a_large_tenant_stand_in_the_operators_page_with_their_defaults(name: str) -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert f"{SETTINGS[name].default:,}" in re.findall(rf"`{name}`[^(]*\(([\d,]+)\)", page)


def test_the_readme_names_what_decides_how_words_count() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {"UNDERTOW_SEARCH", "UNDERTOW_WORDS_ROWS"} <= set(re.findall(r"`(UNDERTOW_\w+)`", readme)) & set(
        SETTINGS
    )
