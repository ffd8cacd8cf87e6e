"""Some of the poison set's attacks on the local model, run by `make soak PROOF=poison` only."""

from __future__ import annotations

from pathlib import Path

import pytest

from undertow.bench.quality.real_model.poisoning import attacks, run, settings_for, summary
from undertow.engine.api.engine import Engine, make_llm
from undertow.engine.encoders.factory import make_encoder
from undertow.serving.vllm.local_server import OFFLINE_MODEL, SERVER_PYTHON, LocalVLLM

from ..support.soak.runs import report, soak_round

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7_200)]
AT_ONCE = 5


def test_attacks_on_the_local_model(tmp_path: Path) -> None:
    """How many come through; docs/untrusted.md says which may. What an attack may not do is end the run."""
    if not (SERVER_PYTHON.exists() and OFFLINE_MODEL.exists()):
        pytest.skip("no local model: make setup-vllm model")
    some = attacks()[AT_ONCE * soak_round() :][:AT_ONCE]
    with LocalVLLM(OFFLINE_MODEL, OFFLINE_MODEL.name) as server:
        settings = settings_for(server.url, OFFLINE_MODEL.name)
        with Engine(tmp_path / "store", settings, make_encoder(settings), llm=make_llm(settings)) as engine:
            told = summary(list(run(engine, some)))
    verdicts = {where: told[where] for where in ("memories", "answer")}
    report(attacks=told["cases"], **verdicts)
    assert told["cases"] == len(some) > 0
