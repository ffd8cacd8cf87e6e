"""The construction prompts on the real local model, run by `make soak` only. The result is committed."""

from __future__ import annotations

import pytest

from undertow.bench.quality.real_model.prompt_suite import measure, settings_for
from undertow.serving.vllm.local_server import OFFLINE_MODEL, PROJECT_ROOT, SERVER_PYTHON, LocalVLLM

from ..support.soak.runs import report

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7_200)]
RESULT = PROJECT_ROOT / "docs" / "results" / "prompt-suite.json"


def test_what_the_local_model_makes_of_the_prompts() -> None:
    if not (SERVER_PYTHON.exists() and OFFLINE_MODEL.exists()):
        pytest.skip("no local model: make setup-vllm model")
    with LocalVLLM(OFFLINE_MODEL, OFFLINE_MODEL.name) as server:
        told = measure(settings_for(server.url, OFFLINE_MODEL.name), RESULT)
    report(cases=told["cases"])
    assert told["cases"] == 20
    # measured: 0.83 and 0.97
    assert told["found"]["share"] >= 0.7 and told["facts_dated"]["share"] >= 0.85
