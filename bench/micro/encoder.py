"""How fast the encoder is: `python -m undertow.bench.micro.encoder [--data LOCOMO_JSON]`.

LoCoMo exchanges through `SentenceTransformer.encode` (one call, its defaults, fp32) and through
`SentenceEncoder`, in one process and in turns, so that both meet the same machine. Medians of the repeats.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from undertow.bench.machine import LOCOMO, describe
from undertow.bench.micro.timing import in_turns
from undertow.engine.encoders.cpu import SentenceEncoder
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.encoders.model_files import DEFAULT_MODEL, model_folder
from undertow.engine.readers import read

BASELINE = "SentenceTransformer.encode"
OURS = "SentenceEncoder"
QUERY = "When did she go to the pottery class?"


def exchanges(path: Path, count: int) -> list[str]:
    """`count` texts spread evenly over the file's conversations; all of them if it has fewer."""
    texts = [turn.text for record in read(path, "locomo", max_message_bytes=1 << 20) for turn in record.turns]
    return [texts[i] for i in np.linspace(0, len(texts) - 1, min(count, len(texts))).astype(int)]


def cosines(vectors: NDArray[Any]) -> NDArray[np.float64]:
    """Cosines of all pairs of rows, float64 [pairs]."""
    exact = vectors.astype(np.float64)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    pairs: NDArray[np.float64] = (exact @ exact.T)[np.triu_indices(len(exact), 1)]
    return pairs


def measure(texts: list[str], model: str, repeats: int) -> dict[str, Any]:
    reference = SentenceTransformer(str(model_folder(model)), device="cpu", local_files_only=True)
    ours = {OURS: SentenceEncoder(model), f"{OURS}, fp32": SentenceEncoder(model, dtype="float32")}
    hashing = HashingEncoder()
    lengths = [len(ids) for ids in reference.tokenizer(texts, truncation=False)["input_ids"]]
    works: dict[str, Callable[[Sequence[str]], object]] = {
        BASELINE: lambda t: reference.encode(list(t)),
        **{name: encoder.encode for name, encoder in ours.items()},
        "HashingEncoder": hashing.encode,
    }
    seconds = in_turns({name: partial(work, texts) for name, work in works.items()}, repeats)
    query_s = in_turns({name: partial(work, [QUERY]) for name, work in works.items()}, 5 * repeats)
    # the baseline cuts texts at the window, so only those that fit are compared
    fits = [t for t, n in zip(texts, lengths, strict=True) if n <= ours[OURS].window]
    exact = cosines(reference.encode(fits))
    rows: dict[str, dict[str, Any]] = {}
    for name, (wall_s, cpu_s) in seconds.items():
        rows[name] = {
            "turns_per_s": len(texts) / wall_s,
            "tokens_per_s": sum(lengths) / wall_s,
            "cpu_ms_per_turn": 1000 * cpu_s / len(texts),
            "one_query_ms": 1000 * query_s[name][0],
            "times_baseline": seconds[BASELINE][0] / wall_s,
        }
        if name in ours:
            rows[name]["dtype"] = ours[name].fingerprint.dtype
            rows[name]["padding_share"] = ours[name].padding_share(texts)
            rows[name]["max_cosine_difference"] = float(
                np.abs(cosines(ours[name].encode(fits)) - exact).max()
            )
    return {"turns": len(texts), "tokens": sum(lengths), "rows": rows}


def show(result: dict[str, Any]) -> None:
    """The rows as a table."""
    for name, row in result["rows"].items():
        cells = (f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print(f"{name}:\n    " + ", ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=LOCOMO, help="LoCoMo in its published JSON")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--turns", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    result = {"benchmark": "encoder", "machine": describe(), "threads": torch.get_num_threads()}
    result |= measure(exchanges(options.data, options.turns), options.model, options.repeats)
    show(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
