"""The encoders: what they compute, and that a text's bits do not depend on anything else."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from undertow.engine.base.config import Settings
from undertow.engine.encoders import cpu as sentence_encoder
from undertow.engine.encoders.base import OWN_PROMPTS, TEXT_FORMAT, Fingerprint, Float16, Prompts
from undertow.engine.encoders.cpu import SentenceEncoder
from undertow.engine.encoders.factory import make_encoder
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.encoders.model_files import (
    DEFAULT_MODEL,
    Dtype,
    EncoderError,
    model_digest,
    model_folder,
    single_threaded_pool,
    working_dtype,
)
from undertow.engine.storage.store_info import StoreError

_VOCABULARY = """
    I you we they went saw made painted bought pottery class lake hike mountain yesterday tomorrow my
    sister brother dog with for and the a of new old really great thanks how was it to support group
    adoption agency piano concert recipe camping weekend marathon kindergarten
""".split()  # noqa: SIM905


def _text(words: int, rng: random.Random) -> str:
    return f"Ana: {' '.join(rng.choices(_VOCABULARY, k=words))}\nBo: {rng.choice(_VOCABULARY)}"


def _texts(count: int, seed: int, longest: int = 85) -> list[str]:
    rng = random.Random(seed)
    return [_text(n, rng) for n in np.linspace(2, longest, count).astype(int)]


# the last one is over the window; WIDE takes every batch shape up to it
TEXTS = [*_texts(20, 1), "", "where did Ana hike?", "héllo wörld 你好 🙂", _text(300, random.Random(2))]
WIDE = _texts(24, 4, longest=240)


def _unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    scaled: NDArray[np.float64] = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return scaled


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def encoder(request: pytest.FixtureRequest) -> SentenceEncoder:
    return SentenceEncoder(dtype=request.param, threads=2)


@pytest.fixture(scope="module")
def fp32() -> SentenceEncoder:
    return SentenceEncoder(dtype="float32", threads=2)


@pytest.fixture(scope="module")
def reference() -> SentenceTransformer:
    return SentenceTransformer(str(model_folder(DEFAULT_MODEL)), device="cpu", local_files_only=True)


@pytest.fixture(scope="module")
def vectors(encoder: SentenceEncoder) -> Float16:
    return encoder.encode(TEXTS)


@pytest.fixture
def torch_threads() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_fp32_agrees_with_sentence_transformers(
    fp32: SentenceEncoder, reference: SentenceTransformer
) -> None:
    short = TEXTS[:-1]  # sentence-transformers would cut the last one
    expected = reference.encode(short, normalize_embeddings=True, show_progress_bar=False)
    assert np.abs(fp32.encode(short).astype(np.float32) - expected).max() < 2**-12  # fp16 rounding below 0.5


def test_bf16_stays_near_fp32(fp32: SentenceEncoder) -> None:
    near = SentenceEncoder(dtype="bfloat16", threads=1).encode(TEXTS).astype(np.float64)
    assert (near * fp32.encode(TEXTS).astype(np.float64)).sum(axis=1).min() > 0.999


def test_long_text_is_the_mean_of_its_windows(fp32: SentenceEncoder, reference: SentenceTransformer) -> None:
    words = random.Random(5).choices([w for w in _VOCABULARY if w.isalpha()], k=700)
    pieces = [reference.tokenizer.tokenize(w) for w in words]
    tokens = [p for piece in pieces for p in piece]
    room = fp32.window - 2
    windows = [
        reference.tokenizer.convert_tokens_to_string(tokens[i : i + room]).strip()
        for i in range(0, len(tokens), room)
    ]
    assert len(windows) >= 3
    parts = reference.encode(windows, normalize_embeddings=True, show_progress_bar=False)
    expected = _unit(parts.astype(np.float64).mean(axis=0))
    assert np.abs(fp32.encode([" ".join(words)])[0] - expected).max() < 2**-11


def test_every_width_is_used_and_a_full_window_is_not_cut(fp32: SentenceEncoder) -> None:
    # 254 words of one token each and two special tokens fill the window; one word more makes a second
    full, over = "lake " * 254, "lake " * 254 + "piano"
    assert fp32.windows([full]).lengths.tolist() == [256]
    assert fp32.windows([over]).lengths.tolist() == [256, 3]
    lone = fp32.encode(["piano"])[0].astype(np.float64)
    both = _unit(_unit(fp32.encode([full])[0].astype(np.float64)) + lone)
    assert np.abs(fp32.encode([over])[0] - both).max() < 2**-10
    used = {batch.shape for batch in fp32.batches(fp32.windows([*WIDE, full]).lengths)}
    assert used == set(fp32.shapes_up_to(fp32.window))


def test_shape_dtype_and_length(encoder: SentenceEncoder, vectors: Float16) -> None:
    assert vectors.shape == (len(TEXTS), encoder.dim) == (len(TEXTS), 384)
    assert vectors.dtype == np.float16
    assert np.abs(np.linalg.norm(vectors.astype(np.float64), axis=1) - 1).max() < 1e-3
    assert encoder.encode([]).shape == (0, 384)


def test_bits_do_not_depend_on_company(encoder: SentenceEncoder, vectors: Float16) -> None:
    for i in [0, 7, 19, 20, 22, 23]:  # alone
        assert np.array_equal(encoder.encode([TEXTS[i]])[0], vectors[i]), i
    order = list(range(len(TEXTS)))
    random.Random(3).shuffle(order)  # in any order, so at any position of a batch
    assert np.array_equal(encoder.encode([TEXTS[i] for i in order]), vectors[order])
    with_others = encoder.encode([*_texts(7, 9), *TEXTS, *_texts(5, 10)])
    assert np.array_equal(with_others[7 : 7 + len(TEXTS)], vectors)


def test_bits_of_wide_texts_do_not_depend_on_company(encoder: SentenceEncoder) -> None:
    vectors = encoder.encode(WIDE)
    assert np.array_equal(encoder.encode([*_texts(5, 8), *WIDE[::-1]])[5:], vectors[::-1])
    assert np.array_equal(encoder.encode(WIDE[-1:]), vectors[-1:])


def test_bits_do_not_depend_on_equal_lengths(encoder: SentenceEncoder) -> None:
    """A batch in which every row has the width's greatest length against one with short rows."""
    full = ["lake " * n for n in (13, 13, 13)] * 6
    assert np.array_equal(encoder.encode(full)[0], encoder.encode([full[0], "dog"])[0])


def test_bits_do_not_depend_on_threads(
    encoder: SentenceEncoder, vectors: Float16, torch_threads: int
) -> None:
    """Eight threads in a product do change bf16 bits, so a count that leaked into the workers would show."""
    torch.set_num_threads(8)
    dtype: Dtype = "bfloat16" if encoder.fingerprint.dtype == "bfloat16" else "float32"
    assert np.array_equal(SentenceEncoder(dtype=dtype, threads=1).encode(TEXTS), vectors)
    torch.set_num_threads(1)
    assert np.array_equal(encoder.encode(TEXTS), vectors)


@pytest.mark.parametrize("amx", [False, True])
def test_every_cpu_has_its_shapes_and_stores_tell_them_apart(
    monkeypatch: pytest.MonkeyPatch, amx: bool
) -> None:
    """With AMX's shapes on any CPU: company must not reach the bits there either."""
    monkeypatch.setattr(sentence_encoder, "cpu_has", lambda unit: amx)
    encoder = SentenceEncoder(dtype="float32", threads=2)
    rows = [rows for _, rows in encoder.shapes_up_to(encoder.window)]
    assert (rows[0], rows[6], rows[-1]) == ((16, 12, 8) if amx else (2, 2, 2))
    assert encoder.fingerprint.device == ("cpu" if amx else "cpu in batches of 2 rows")
    vectors = encoder.encode(TEXTS)
    assert np.array_equal(encoder.encode(TEXTS[3:4]), vectors[3:4])
    assert np.array_equal(encoder.encode(TEXTS[::-1]), vectors[::-1])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_worker_computes_on_one_thread(torch_threads: int, threads: int) -> None:
    torch.set_num_threads(8)
    pool = single_threaded_pool(threads)
    assert torch.get_num_threads() == 8
    seen = pool.map(lambda _: (torch.ones(1 << 18).sum(), torch.get_num_threads())[1], range(4 * threads))
    assert set(seen) == {1}
    pool.shutdown()


@pytest.mark.parametrize(
    ("units", "dtype"),
    [
        ({"amx_bf16": True}, torch.bfloat16),
        ({"amx_bf16": False, "avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": False, "avx512_bf16": False, "avx512_f": True}, torch.float32),
        ({"architecture": "aarch64"}, torch.float32),
    ],
)
def test_auto_is_bf16_where_the_cpu_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, units: dict[str, Any], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units)
    assert working_dtype("auto", "cpu") == dtype
    assert working_dtype("float32", "cpu") == torch.float32
    assert working_dtype("auto", "cuda") == torch.float16


def test_torch_is_left_as_it_was(torch_threads: int) -> None:
    torch.set_num_threads(2)
    SentenceEncoder(threads=1).encode(["a text"])
    assert torch.get_num_threads() == 2
    assert not torch.is_inference_mode_enabled()


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    SentenceEncoder(threads=1).encode(TEXTS[:3])
    assert capfd.readouterr() == ("", "")


def test_lone_surrogates_are_taken(encoder: SentenceEncoder) -> None:
    broken = json.loads('"a \\ud83d dog"')
    assert np.array_equal(encoder.encode([broken]), encoder.encode(["a � dog"]))


def test_importing_loads_no_torch() -> None:
    module = "undertow.engine.encoders.factory"
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_queries_and_documents_have_the_prompts_of_the_model(tmp_path: Path, fp32: SentenceEncoder) -> None:
    plain = fp32.fingerprint
    assert np.array_equal(fp32.encode_queries(TEXTS[:3]), fp32.encode(TEXTS[:3])), "MiniLM has none"
    assert plain.digest == model_digest(model_folder(DEFAULT_MODEL), TEXT_FORMAT, fp32.window, "")
    folder = tmp_path / "model"
    shutil.copytree(model_folder(DEFAULT_MODEL), folder)
    configuration = folder / "config_sentence_transformers.json"

    def prompted(own: dict[str, Any], given: Prompts = OWN_PROMPTS) -> SentenceEncoder:
        configuration.write_text(json.dumps(own))
        return SentenceEncoder(str(folder), dtype="float32", threads=1, prompts=given)

    e5 = prompted({"prompts": {"query": "query: ", "passage": "passage: "}, "default_prompt_name": "query"})
    assert np.array_equal(e5.encode(["a lake"]), fp32.encode(["passage: a lake"]))
    assert np.array_equal(e5.encode_queries(["a lake"]), fp32.encode(["query: a lake"]))
    assert plain.mismatch(e5.fingerprint)
    qwen = prompted({"prompts": {"query": "Query:", "document": ""}, "default_prompt_name": None})
    assert qwen.prompts == ("Query:", "")
    assert plain.mismatch(qwen.fingerprint) is None, "what is stored is the same"
    assert prompted({}, Prompts("ask: ", None)).prompts == ("ask: ", "")
    usual = prompted({"prompts": {"all": "all: "}, "default_prompt_name": "all"})
    assert usual.prompts == ("all: ", "all: ")


def test_digest_follows_the_model(tmp_path: Path) -> None:
    here = SentenceEncoder(threads=1).fingerprint
    folder = tmp_path / "model"
    shutil.copytree(model_folder(DEFAULT_MODEL), folder)
    (folder / "README.md").write_text("other words")
    copy = SentenceEncoder(str(folder), threads=1).fingerprint
    assert (copy.digest, copy.dim) == (here.digest, here.dim)
    assert here.mismatch(copy) is None  # though the names differ
    settings = folder / "sentence_bert_config.json"
    settings.write_text(settings.read_text().replace("256", "128"))
    narrow = SentenceEncoder(str(folder), threads=1)
    assert narrow.window == 128
    assert narrow.fingerprint.digest != here.digest


def test_missing_model_names_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(EncoderError, match=r"no-such/model.*UNDERTOW_ENCODER.*undertow\[offline\]"):
        SentenceEncoder("no-such/model")
    with pytest.raises(EncoderError, match=r"modules\.json"):
        SentenceEncoder(str(tmp_path))


def test_fingerprints_refuse_and_warn() -> None:
    store = Fingerprint("mini", "ab" * 16, 384, "bfloat16", "cpu")
    assert store.mismatch(store) is None
    assert store.drift(store) is None
    for other in (replace(store, digest="cd" * 16), replace(store, dim=768)):
        assert "undertow reindex" in (store.mismatch(other) or "")
    for other in (replace(store, dtype="float32"), replace(store, device="cuda")):
        assert store.mismatch(other) is None
        assert other.dtype in (store.drift(other) or "")


@pytest.mark.parametrize(
    "change", [{"dim": "384"}, {"dim": True}, {"model": None}, {"extra": 1}, {"digest": ...}]
)
def test_a_damaged_fingerprint_is_a_store_error(change: dict[str, Any]) -> None:
    made = Fingerprint("mini", "ab" * 16, 384, "bfloat16", "cpu")
    assert Fingerprint.stored(asdict(made)) == made
    damaged = {name: value for name, value in {**asdict(made), **change}.items() if value is not ...}
    with pytest.raises(StoreError, match=r"store\.json needs the fields model, digest, dim, dtype, device"):
        Fingerprint.stored(damaged)


def test_hashing_encoder_by_hand() -> None:
    """One word: 16 hashed places, each +-1 (a place hit twice adds up)."""
    vector = HashingEncoder(64).encode(["Lake"])[0].astype(np.float64)
    again = HashingEncoder(64).encode(["  lake!"])[0]
    steps = vector / np.abs(vector[vector != 0]).min()
    assert np.array_equal(vector, again)
    assert np.abs(steps - np.round(steps)).max() < 1e-2
    assert np.abs(np.round(steps)).sum() <= 16
    assert (np.abs(np.round(steps)).sum() - 16) % 2 == 0


def test_hashing_encoder_bits_are_fixed() -> None:
    """The same on every machine: a change of these numbers is a change of format."""
    vectors = HashingEncoder().encode(TEXTS)
    assert hashlib.blake2b(vectors.tobytes(), digest_size=8).hexdigest() == "0ca158d52abbb42e"


SHARED = HashingEncoder(64)
WORDY = st.text(st.sampled_from("aAbZ09_ -'.\n\x00éÉßİıΣς北\u0307\u2019\U0001f600\ud800"), max_size=24)


@given(st.lists(WORDY, max_size=6))
def test_hashing_encoder_is_what_it_says(texts: list[str]) -> None:
    """Word by word in Python, for letters of all kinds, texts without words, and words across calls."""
    expected = np.zeros((len(texts), 64))
    for row, text in zip(expected, texts, strict=True):
        for word in re.findall(r"\w+", text.lower()) or [""]:
            digest = hashlib.blake2b(word.encode(errors="surrogatepass"), digest_size=32).digest()
            for place in np.frombuffer(digest, "<u2") % 128:
                row[place % 64] += 1 if place < 64 else -1
        row /= np.sqrt((row * row).sum()) or 1.0
    assert SHARED.encode(texts).tobytes() == expected.astype(np.float16).tobytes()


def test_words_are_entered_once_as_their_table_grows_under_several_threads() -> None:
    encoder, draw = HashingEncoder(64), random.Random(5)
    texts = [" ".join(f"word{draw.randrange(9_000)}" for _ in range(12)) for _ in range(1_500)]
    expected = np.concatenate([HashingEncoder(64).encode(texts[i : i + 50]) for i in range(0, 1_500, 50)])
    with ThreadPoolExecutor(4) as threads:
        encoded = list(threads.map(encoder.encode, ([text] for text in texts)))
    assert np.array_equal(np.concatenate(encoded), expected)
    known = len(encoder._words)
    assert known == 1 + len({word for text in texts for word in text.split()}), "and the empty one"
    assert np.array_equal(encoder.encode(texts), expected) and len(encoder._words) == known


def test_hashing_encoder_is_invariant_and_shared_words_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = HashingEncoder()
    vectors = encoder.encode(TEXTS)
    assert vectors.dtype == np.float16
    assert encoder.encode([]).shape == (0, 384)
    order = random.Random(3).sample(range(len(TEXTS)), len(TEXTS))
    fresh = HashingEncoder()
    assert np.array_equal(np.concatenate([fresh.encode([TEXTS[i]]) for i in order]), vectors[order])
    monkeypatch.setattr(HashingEncoder, "MAX_WORDS", 3)  # the table of words is dropped at every call
    assert np.array_equal(encoder.encode(TEXTS), vectors)
    a, b, c = encoder.encode(
        ["we hike at the lake", "we hike at the mountain", "piano concert tonight"]
    ).astype(np.float64)
    assert a @ b > 0.6 > 0.3 > a @ c


def test_make_encoder_reads_the_name() -> None:
    assert make_encoder(Settings(encoder="hash:128")).fingerprint.model == "hash:128"
    assert make_encoder(Settings()).fingerprint.model == DEFAULT_MODEL
    for name in ("hash:", "hash:x", "hash:7", "hash:-384"):
        with pytest.raises(ValueError, match=r"hash|dimensions"):
            make_encoder(Settings(encoder=name))
