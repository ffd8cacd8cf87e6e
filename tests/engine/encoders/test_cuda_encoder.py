"""The encoder for CUDA: its batches, on the CPU, against `SentenceEncoder`; its graphs where a card is."""

from __future__ import annotations

import gc
import random
import shutil
from itertools import product
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

for needed in ("transformers", "sentence_transformers", "orjson", "filelock"):
    pytest.importorskip(needed, exc_type=ImportError)

from transformers import BertConfig, BertModel

import undertow.engine.encoders.cpu as sentence_encoder
import undertow.engine.encoders.cuda as cuda_encoder
from undertow.engine.encoders.base import DeviceEncoder, Float16
from undertow.engine.encoders.cpu import Batch, SentenceEncoder
from undertow.engine.encoders.cuda import Backlog, CudaSentenceEncoder
from undertow.engine.encoders.factory import make_encoder
from undertow.engine.encoders.model_files import DEFAULT_MODEL, EncoderError, model_folder
from undertow.engine.encoders.tokenizer import Windows

WORDS = """
    I you we went saw made pottery class lake hike mountain sister dog with for the a old thanks
""".split()  # noqa: SIM905


class _Small(CudaSentenceEncoder):
    """Batches of a size for tests."""

    PLACES = 512


def _texts(count: int, seed: int, longest: int = 40) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=int(n))) for n in np.linspace(1, longest, count)]


# short ones, an empty one, marks and emoji, two beyond the window, two that fill their width
TEXTS = [*_texts(12, 1), "", "héllo wörld 你好 🙂", "dog " * 300, "hike " * 600, "lake " * 254, "lake " * 13]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The default model's folder with two narrow layers of random weights and a window of 100 tokens."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    shutil.copytree(model_folder(DEFAULT_MODEL), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    wide = BertConfig(**shape, intermediate_size=128, max_position_embeddings=128, initializer_range=0.3)
    BertModel(wide).save_pretrained(folder)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 100, "do_lower_case": false}')
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(pooling.read_text().replace("384", "64"))
    return str(folder)


@pytest.fixture(scope="module")
def device(tiny_model: str) -> _Small:
    return _Small(tiny_model, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def vectors(device: _Small) -> Float16:
    return device.encode(TEXTS)


def test_agrees_with_the_cpu_encoder(tiny_model: str, vectors: Float16) -> None:
    expected = SentenceEncoder(tiny_model, dtype="float32", threads=1).encode(TEXTS)
    assert vectors.shape == expected.shape == (len(TEXTS), 64)
    assert np.abs(vectors.astype(np.float32) - expected.astype(np.float32)).max() <= 2**-12
    cosines = (vectors.astype(np.float64) * expected.astype(np.float64)).sum(axis=1)
    assert cosines.min() > 0.999  # fp16 rounding
    assert np.unique(vectors.astype(np.float32), axis=0).shape == vectors.shape


def test_the_default_model_agrees_with_the_cpu_encoder() -> None:
    texts = ["we went to the lake", "pottery", "my sister made a dog of clay with the class"]
    expected = SentenceEncoder(dtype="float32", threads=1).encode(texts).astype(np.float32)
    got = _Small(dtype="float32", device="cpu").encode(texts)
    assert np.abs(got.astype(np.float32) - expected).max() <= 2**-12


def test_shape_dtype_and_both_copies(device: _Small) -> None:
    got = device.embed(TEXTS[:5])
    assert isinstance(device, DeviceEncoder)
    assert got.device is not None
    assert got.host.shape == (5, device.dim)
    assert got.host.dtype == np.float16
    assert (got.device.dtype, got.device.is_contiguous()) == (torch.float16, True)
    assert np.array_equal(got.device.numpy(), got.host)
    nothing = device.embed([])
    assert nothing.device is not None
    assert nothing.host.shape == tuple(nothing.device.shape) == (0, device.dim)
    assert (device.fingerprint.dtype, device.fingerprint.device) == ("float32", "cpu")


def _packed(encoder: CudaSentenceEncoder, windows: Windows, batch: Batch) -> torch.Tensor:
    width, rows = batch.shape
    out = np.empty((rows, width + 1), np.int32)
    encoder.pack(windows, batch, out)
    return torch.from_numpy(out)


def _check_company(encoder: CudaSentenceEncoder, vectors: Float16) -> None:
    for i in (0, 11, 12, 15, 17):
        assert np.array_equal(encoder.encode([TEXTS[i]])[0], vectors[i]), i
    order = random.Random(3).sample(range(len(TEXTS)), len(TEXTS))
    assert np.array_equal(encoder.encode([TEXTS[i] for i in order]), vectors[order])
    with_others = encoder.encode([*_texts(7, 9), *TEXTS, *_texts(20, 10, longest=60)])
    assert np.array_equal(with_others[7 : 7 + len(TEXTS)], vectors)


def test_bits_do_not_depend_on_company(device: _Small, vectors: Float16) -> None:
    _check_company(device, vectors)


def test_bits_do_not_depend_on_equal_lengths(device: _Small) -> None:
    """A batch in which every row has the greatest length of its width against one with short rows."""
    full = ["lake " * 13] * 40
    assert np.array_equal(device.encode(full)[17], device.encode([full[0], "dog"])[0])


@pytest.mark.parametrize("chars", [1, 500])
def test_bits_do_not_depend_on_the_pieces(
    device: _Small, vectors: Float16, monkeypatch: pytest.MonkeyPatch, chars: int
) -> None:
    monkeypatch.setattr(cuda_encoder, "PIECE_CHARS", chars)
    assert np.array_equal(device.encode(TEXTS), vectors)


def test_only_the_last_piece_leaves_batches_short(device: _Small, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[Batch] = []

    def note(windows: Windows, batch: Batch) -> torch.Tensor:
        run.append(batch)
        return torch.zeros((len(batch.members), device.dim))

    monkeypatch.setattr(device, "_run", note)
    texts = TEXTS * 8
    monkeypatch.setattr(cuda_encoder, "PIECE_CHARS", 1_000)
    device.encode(texts)
    in_pieces, run = run, []
    monkeypatch.setattr(cuda_encoder, "PIECE_CHARS", 1 << 30)
    device.encode(texts)
    assert sorted((b.shape, len(b.members)) for b in in_pieces) == sorted(
        (b.shape, len(b.members)) for b in run
    )


def test_backlog_hands_out_each_window_once() -> None:
    backlog = Backlog()
    seen: list[tuple[int, list[int]]] = []
    rng = random.Random(4)
    sent: list[list[int]] = []
    for turn in range(9):
        more = [[rng.randrange(100)] * rng.randint(1, 5) for _ in range(rng.randint(0, 7))]
        sent += more
        ids = np.array([i for row in more for i in row], np.int32)
        backlog.add(Windows(ids, np.cumsum([0, *map(len, more)], dtype=np.int64)))
        rows = np.arange(len(backlog.windows))
        batches = [Batch(rows[i : i + 4], (8, 4), i + 4 <= len(rows)) for i in range(0, len(rows), 4)]
        for batch in backlog.take(batches, only_full=turn < 8):
            assert len(batch.members) == 4 or turn == 8
            for i in batch.members:
                held = backlog.windows
                seen.append(
                    (int(backlog.numbers[i]), held.ids[held.offsets[i] : held.offsets[i + 1]].tolist())
                )
        backlog.shrink()
    assert len(backlog.windows) == 0
    assert sorted(seen) == list(enumerate(sent))


def test_every_length_has_one_shape_wider_than_itself() -> None:
    for window, places in product((15, 128, 256, 300, 495, 511), (8_192, 16_384, 32_768)):
        shapes = CudaSentenceEncoder.shapes_of(window, places)
        widths = [width for width, _ in shapes]
        assert widths == sorted(set(widths))
        assert max(widths) > window
        for width, rows in shapes:
            assert rows >= 8 and width * rows % 128 == 0
            assert 0.75 * places <= width * rows <= places


def test_batches_hold_every_window_once_in_its_shape(device: _Small) -> None:
    lengths = np.random.default_rng(5).integers(1, device.window + 1, 400)
    batches = device.batches(lengths)
    assert sorted(np.concatenate([b.members for b in batches]).tolist()) == list(range(400))
    shapes = device.shapes_up_to(device.window)
    for batch in batches:
        assert len(batch.members) <= batch.shape[1]
        for length in lengths[batch.members]:
            assert batch.shape == next(s for s in shapes if s[0] > length)
    assert [b.shape[0] for b in batches] == sorted((b.shape[0] for b in batches), reverse=True)


def test_packing_by_hand(device: _Small) -> None:
    """Poisoned before: ids, padding and filler rows are written in full."""
    windows = Windows(np.array([5, 6, 7, 8, 9], np.int32), np.array([0, 2, 5]))
    out = np.full((3, 5), -99, np.int32)
    device.pack(windows, Batch(np.array([1, 0]), (4, 3)), out)
    assert out.tolist() == [[7, 8, 9, 0, 3], [5, 6, 0, 0, 2], [101, 102, 0, 0, 2]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_additive_mask_gives_the_bits_of_the_boolean_one(tiny_model: str, dtype: Any) -> None:
    encoder = _Small(tiny_model, dtype=dtype, device="cpu")
    assert encoder._additive_mask
    windows = encoder.windows(TEXTS)
    for batch in encoder.batches(windows.lengths):
        packed = _packed(encoder, windows, batch)
        encoder._additive_mask = True
        additive = encoder.pooled(packed)
        encoder._additive_mask = False
        assert torch.equal(additive, encoder.pooled(packed)), batch.shape


def test_other_models_are_given_the_mask_as_they_know_it(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentence_encoder, "TAKES_ADDITIVE_MASK", frozenset())
    encoder = _Small(tiny_model, dtype="float32", device="cpu")
    mask = torch.tensor([[True, True, False]])
    assert encoder._attention_mask(mask).tolist() == [[1, 1, 0]]
    assert np.array_equal(
        encoder.encode(TEXTS[:5]), _Small(tiny_model, dtype="float32", device="cpu").encode(TEXTS[:5])
    )


def test_packed_batches_give_the_vectors_of_their_windows(device: _Small, vectors: Float16) -> None:
    windows = device.windows(TEXTS[:14])
    batches = device.batches(windows.lengths)
    found = device.run_packed([_packed(device, windows, batch) for batch in batches])
    for batch, unit in zip(batches, found, strict=True):
        assert (unit.dtype, tuple(unit.shape)) == (torch.float32, (batch.shape[1], device.dim))
        assert np.array_equal(unit[: len(batch.members)].half().numpy(), vectors[batch.members])
    with pytest.raises(ValueError, match="none of this encoder's"):
        device.run_packed([torch.zeros((3, 18), dtype=torch.int32)])


def test_places_are_chosen_and_told_apart(tiny_model: str, device: _Small, vectors: Float16) -> None:
    other = _Small(tiny_model, dtype="float32", device="cpu", places=1_024)
    assert max(width * rows for width, rows in other.shapes_up_to(other.window)) == 1_024
    assert other.fingerprint.device == "cpu in batches of 1024 places"
    assert device.fingerprint.mismatch(other.fingerprint) is None
    assert "1024 places" in (device.fingerprint.drift(other.fingerprint) or "")
    assert _Small(tiny_model, dtype="float32", device="cpu", places=512).fingerprint == device.fingerprint
    assert np.abs(other.encode(TEXTS).astype(np.float32) - vectors.astype(np.float32)).max() <= 2**-12
    with pytest.raises(ValueError, match="places is 127"):
        _Small(tiny_model, device="cpu", places=127)


def test_the_forward_pass_never_looks_at_values(device: _Small) -> None:
    """A graph cannot, and a look could choose another kernel: tensors without values raise at one.

    Of models that take no additive mask: transformers looks whether a mask is all ones, except under
    capture and in this mode; it never is (`test_every_length_has_one_shape_wider_than_itself`).
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        packed = mode.from_tensor(torch.ones((8, 65), dtype=torch.int32))
        with pytest.raises(DataDependentOutputException):
            bool(packed.all())
        assert device.unit_pooled(packed).shape == (8, 64)


def products_allowed() -> list[bool]:
    """Whether fp16, then bf16 products may add up in 16 bits, and may split a sum over blocks."""
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("fp16", "bf16")]
    products: Any = torch.backends.cuda.matmul
    return [getattr(products, name + which) for name in names for which in ("", "_split_k")]


def test_products_that_split_a_sum_over_blocks_are_forbidden_while_a_shape_is_computed(
    device: _Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed, orders, seen = products_allowed, cuda_encoder.fixed_orders, []
    before = allowed()
    with cuda_encoder.fixed_orders("cuda"):
        assert not any(allowed())
    with pytest.raises(ZeroDivisionError), cuda_encoder.fixed_orders("cuda"):
        raise ZeroDivisionError
    assert allowed() == before
    with cuda_encoder.fixed_orders("cpu"):
        assert allowed() == before

    def pooled(packed: torch.Tensor) -> torch.Tensor:
        seen.append(allowed())
        return torch.ones(len(packed), 64)

    monkeypatch.setattr(device, "pooled", pooled)
    monkeypatch.setattr(cuda_encoder, "fixed_orders", lambda kind: orders("cuda"))
    device.unit_pooled(torch.zeros((8, 17), dtype=torch.int32))
    assert seen == [[False] * 4] and allowed() == before


def test_damaged_weights_are_an_error(tiny_model: str) -> None:
    broken = _Small(tiny_model, dtype="float32", device="cpu")
    parameter: Any = next(iter(broken._head.parameters()))
    parameter.data.fill_(float("nan"))
    with pytest.raises(EncoderError, match="not finite"):
        broken.encode(["a dog"])


def test_an_error_of_the_tokenizer_thread_is_raised(device: _Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_encoder, "PIECE_CHARS", 50)
    monkeypatch.setattr(device, "_tokens", Mock(side_effect=RuntimeError("out of words")))
    with pytest.raises(RuntimeError, match="out of words"):
        device.encode(TEXTS)
    monkeypatch.undo()
    assert len(device.encode(["still there"])) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_the_cure_is_named() -> None:
    with pytest.raises(EncoderError, match="UNDERTOW_DEVICE"):
        CudaSentenceEncoder()


# ---- on a card


@pytest.fixture(scope="module", params=[True, False], ids=["packed", "padded"])
def packed(request: pytest.FixtureRequest) -> bool:
    wanted: bool = request.param
    if wanted:
        pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    return wanted


@pytest.fixture(scope="module")
def on_card(packed: bool) -> CudaSentenceEncoder:
    encoder = CudaSentenceEncoder(packed=packed)
    assert encoder.packing_note.startswith("packed" if packed else "padded")
    return encoder


@pytest.mark.gpu
def test_settings_choose_the_card() -> None:
    pytest.importorskip("pydantic_settings")
    from undertow.engine.base.config import Settings

    encoder = make_encoder(Settings(device="cuda"))
    assert isinstance(encoder, CudaSentenceEncoder)
    assert encoder.fingerprint.dtype == "float16"
    assert encoder.fingerprint.device in ("cuda", "cuda in packed batches")
    assert isinstance(make_encoder(Settings(device="cpu")), SentenceEncoder)


@pytest.mark.gpu
def test_card_bits_do_not_depend_on_company(on_card: CudaSentenceEncoder) -> None:
    got = on_card.embed(TEXTS)
    assert got.device is not None and got.device.is_cuda
    assert np.array_equal(got.device.cpu().numpy(), got.host)
    _check_company(on_card, got.host)


@pytest.mark.gpu
def test_card_bits_are_the_same_in_every_row_of_every_shape(on_card: CudaSentenceEncoder) -> None:
    """One window at each row of its shape, with filler and with long neighbours."""
    for width, rows in on_card.shapes_up_to(on_card.window):
        text = "lake " * min(width - 3, on_card.window - 2)
        alone = on_card.encode([text])[0]
        for got in (
            on_card.encode([text] * rows),
            on_card.encode([text, *["dog " * (width - 3)] * (rows - 1)])[:1],
        ):
            assert (got == alone).all(), (width, rows)


@pytest.mark.gpu
def test_card_is_near_the_cpu(on_card: CudaSentenceEncoder) -> None:
    exact = SentenceEncoder(dtype="float32").encode(TEXTS).astype(np.float64)
    cosines = (on_card.encode(TEXTS).astype(np.float64) * exact).sum(axis=1)
    assert cosines.min() > 0.999
    single = CudaSentenceEncoder(dtype="float32").encode(TEXTS).astype(np.float64)
    assert np.abs(single - exact).max() < 2**-11


@pytest.mark.gpu
def test_graphs_give_the_bits_of_the_eager_pass(on_card: CudaSentenceEncoder, packed: bool) -> None:
    on_card.prepare()
    eager = CudaSentenceEncoder(graphs=False, packed=packed)
    assert np.array_equal(eager.encode(TEXTS), on_card.encode(TEXTS))


@pytest.mark.gpu
def test_packed_bits_do_not_depend_on_the_size_of_a_batch(on_card: CudaSentenceEncoder, packed: bool) -> None:
    if not packed:
        pytest.skip("cuBLAS may take another kernel for another shape")
    small = CudaSentenceEncoder(places=1_024)
    assert small.fingerprint == on_card.fingerprint
    assert np.array_equal(small.encode(TEXTS), on_card.encode(TEXTS))


@pytest.mark.gpu
def test_two_encoders_on_a_card_agree(on_card: CudaSentenceEncoder, packed: bool) -> None:
    expected = on_card.encode(TEXTS)
    other = CudaSentenceEncoder(packed=packed)
    assert np.array_equal(other.encode(TEXTS), expected)


@pytest.mark.gpu
def test_the_end_of_one_encoder_leaves_another_its_bits(on_card: CudaSentenceEncoder, packed: bool) -> None:
    """The workspaces of its graphs are freed, and the memory is written over."""
    on_card.prepare()
    expected = on_card.encode(TEXTS)
    other = CudaSentenceEncoder(places=8_192 if packed else 16_384, packed=packed)
    other.prepare()
    other.encode(TEXTS)
    del other
    gc.collect()
    torch.cuda.empty_cache()
    poison = [torch.full((32 << 20,), 255, dtype=torch.uint8, device="cuda") for _ in range(16)]
    assert np.array_equal(on_card.encode(TEXTS), expected)
    assert all(bool((block == 255).all()) for block in poison)


@pytest.mark.gpu
def test_prepared_shapes_take_no_more_memory(on_card: CudaSentenceEncoder) -> None:
    on_card.prepare()
    before = torch.cuda.memory_reserved()
    on_card.encode([*TEXTS, *_texts(200, 11, longest=230)] * 4)
    on_card.prepare()
    assert torch.cuda.memory_reserved() <= before + (64 << 20)  # results, not graphs
