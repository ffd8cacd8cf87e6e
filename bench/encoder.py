"""How fast the encoder is: `python -m undertow.bench.encoder [--data LOCOMO_JSON]`.

LoCoMo exchanges through `SentenceTransformer.encode` (one call, its defaults, fp32) and through
`SentenceEncoder`, in one process and in turns, so that both meet the same machine. Medians of the repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from undertow.bench.machine import LOCOMO, describe
from undertow.engine.encoder import HashingEncoder, SentenceEncoder
from undertow.engine.readers import read
from undertow.engine.sentence_model import DEFAULT_MODEL, model_folder

BASELINE = "SentenceTransformer.encode"
OURS = "SentenceEncoder"
QUERY = "When did she go to the pottery class?"


def exchanges(path: Path, count: int) -> list[str]:
    """`count` texts spread evenly over the file's conversations; all of them if it has fewer."""
    texts = [turn.text for record in read(path, "locomo", max_message_bytes=1 << 20) for turn in record.turns]
    return [texts[i] for i in np.linspace(0, len(texts) - 1, min(count, len(texts))).astype(int)]


def timed(work: Callable[[Sequence[str]], object], texts: Sequence[str]) -> tuple[float, float]:
    """(wall seconds, CPU seconds of all threads)"""
    wall, cpu = time.perf_counter(), time.process_time()
    work(texts)
    return time.perf_counter() - wall, time.process_time() - cpu


def in_turns(
    works: dict[str, Callable[[Sequence[str]], object]], texts: Sequence[str], repeats: int
) -> dict[str, tuple[float, float]]:
    """Median wall and CPU seconds of each, after one unmeasured round."""
    for work in works.values():
        work(texts)
    rounds = [{name: timed(work, texts) for name, work in works.items()} for _ in range(repeats)]
    return {
        name: (statistics.median(r[name][0] for r in rounds), statistics.median(r[name][1] for r in rounds))
        for name in works
    }


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
    seconds = in_turns(works, texts, repeats)
    query_s = in_turns(works, [QUERY], 5 * repeats)
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


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "turns/s": lambda row: f"{row['turns_per_s']:.1f}",
    "ktok/s": lambda row: f"{row['tokens_per_s'] / 1000:.1f}",
    "CPU ms/turn": lambda row: f"{row['cpu_ms_per_turn']:.2f}",
    "ratio": lambda row: f"{row['times_baseline']:.2f}",
    "query ms": lambda row: f"{row['one_query_ms']:.1f}",
    "padding": lambda row: f"{row['padding_share']:.1%}" if "padding_share" in row else "",
    "cos diff": lambda row: f"{row['max_cosine_difference']:.5f}" if "padding_share" in row else "",
    "dtype": lambda row: row.get("dtype", ""),
}


def show(result: dict[str, Any]) -> None:
    machine = result["machine"]
    print(f"{result['turns']} LoCoMo exchanges, {result['tokens']} tokens")
    print(f"{machine['cpu']}, {machine['cores']} cores, torch {torch.__version__}\n")
    print(" " * 28 + "".join(f"{title:>13}" for title in COLUMNS))
    for name, row in result["rows"].items():
        print(f"{name:28}" + "".join(f"{cell(row):>13}" for cell in COLUMNS.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=LOCOMO, help="LoCoMo in its published JSON")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--turns", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    result = measure(exchanges(options.data, options.turns), options.model, options.repeats)
    result = {"benchmark": "encoder", "machine": describe(), "threads": torch.get_num_threads(), **result}
    show(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
