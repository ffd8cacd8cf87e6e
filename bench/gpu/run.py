"""What the GPU path reaches on this machine's card: `undertow bench gpu`, `python -m undertow.bench.gpu.run`.

Prints a table (measured, limit, part of the limit, target) and one JSON line. Every part runs in a process
of its own: it finds the whole card free, and its failure costs no other part its figures.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from undertow.bench import machine
from undertow.bench.gpu.figures import (
    PARTS,
    Figure,
    NotMeasured,
    Part,
    WrongResults,
    as_markdown,
    as_text,
    unmeasured,
)
from undertow.bench.gpu.rig import FULL, QUICK, Limits, Rig, Scale, measure_limits
from undertow.engine.base.process_tuning import settle_in
from undertow.kernels.device import why_no_cuda

T = TypeVar("T")

WITH_MODEL = ("encoder", "ingest")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for."""

    quick: bool = False
    only: tuple[str, ...] = PARTS
    out: Path | None = None
    encoder: Path | None = None
    """The folder of the model for the parts "encoder" and "ingest"; by default the settings' model."""


def check(options: Options) -> None:
    """NotMeasured: there is no card. ValueError: an unknown part, or no such folder or model."""
    if unknown := [name for name in options.only if name not in PARTS]:
        raise ValueError(f"--only knows {', '.join(PARTS)}, not {', '.join(unknown)}")
    if options.out is not None and not (options.out.is_dir() or options.out.parent.is_dir()):
        raise ValueError(f"--out {options.out}: there is no folder {options.out.parent}; make it first")
    if options.encoder is not None and not (options.encoder / "modules.json").is_file():
        raise ValueError(
            f"--encoder {options.encoder}: there is no modules.json, so it is not the folder of a "
            "sentence-transformers model; name one that is"
        )
    if reason := why_no_cuda():
        raise NotMeasured(
            f"there is no card to measure: {reason}. docs/gpu.md says how to install for a GPU; "
            "`python -m undertow.bench.micro.gate` measures the CPU."
        )


def run(options: Options) -> tuple[dict[str, Any], list[Figure]]:
    """Measure the parts in turn, after `check`: the JSON document, and its figures.

    With `out`, both files are written anew after every part.
    """
    scale = QUICK if options.quick else FULL
    progress = partial(print, "measuring", file=sys.stderr, flush=True)
    progress("copy bandwidth and matmul rate")
    limits, name = apart(_limits, scale).result()
    result = _describe(options, scale, limits, name)
    figures: list[Figure] = []
    sound = True
    for part in options.only:
        progress(part)
        found, fine = _outcome(part, apart(measure_part, part, scale, limits, options.encoder))
        figures += found.figures
        sound &= fine
        result["details"][part] = found.details
        result["figures"] = [figure.record() for figure in figures]
        if options.out is not None:
            write(options.out, result, figures)
    return {**result, "sound": sound}, figures


def measure_part(part: str, scale: Scale, limits: Limits, encoder: Path | None = None) -> Part:
    """One part, in this process; with the model in the folder `encoder` where the part has one."""
    module = import_module(f"undertow.bench.gpu.{part}")
    if part == "ingest":
        settle_in()  # as `undertow ingest` does
    model = {"encoder": str(encoder)} if encoder is not None and part in WITH_MODEL else {}
    found: Part = module.measure(Rig(), scale, limits, **model)
    return found


def apart(work: Callable[..., T], *given: Any) -> Future[T]:
    """A call in a fresh process, finished."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *given)


def _limits(scale: Scale) -> tuple[Limits, str]:
    rig = Rig()
    return measure_limits(rig, scale), torch.cuda.get_device_name(rig.device)


def _outcome(part: str, done: Future[Part]) -> tuple[Part, bool]:
    """A part's figures, or its goals unmeasured with the reason; and whether the part is sound."""
    match done.exception():
        case None:
            return done.result(), True
        case NotMeasured() | ImportError() as missing:
            return unmeasured(part, f"not measured: {missing}"), True
        case WrongResults() as wrong:
            return unmeasured(part, f"void: {wrong}"), False
        case error:
            traceback.print_exception(error)
            reason = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
            return unmeasured(part, reason), False


def _describe(options: Options, scale: Scale, limits: Limits, name: str) -> dict[str, Any]:
    return {
        "bench": "gpu",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "quick": options.quick,
        "card": machine.card_now() or {"name": name},
        "cuda": torch.version.cuda,
        "limits": {
            "copy_gb_per_s": round(limits.copy_bytes_per_s / 1e9, 1),
            "matmul_tflop_per_s": round(limits.matmul_flop_per_s / 1e12, 1),
        },
        "machine": machine.describe(),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "scale": asdict(scale),
        "figures": [],
        "details": {},
    }


def write(out: Path, result: dict[str, Any], figures: Sequence[Figure]) -> None:
    """The JSON document at `out`, or named after the card where that is a folder; the table beside it."""
    slug = re.sub(r"[^a-z0-9]+", "-", str(result["card"].get("name", "unknown")).lower()).strip("-")
    path = out / f"gpu-{slug}.json" if out.is_dir() else out
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(as_markdown(result, figures), encoding="utf-8")


def report(options: Options, *, as_json: bool) -> int:
    """Run and print; the exit code: 0, or 1 where a part failed or gave wrong results."""
    result, figures = run(options)
    if not as_json:
        card = result["card"]
        copy, matmul = result["limits"].values()
        print(f"{card['name']}, driver {card.get('driver', 'unknown')}, CUDA {result['cuda']}")
        print(f"copy {copy:,.0f} GB/s, bf16 matrix product {matmul:,.0f} TFLOP/s\n")
        print(as_text(figures) + "\n")
    print(json.dumps(result))
    return 0 if result["sound"] else 1


def parts_of(text: str) -> tuple[str, ...]:
    """The names in a comma-separated list, in the order in which they run."""
    named = [name.strip() for name in text.split(",") if name.strip()]
    return tuple(p for p in PARTS if p in named) + tuple(n for n in named if n not in PARTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, shorter runs, the same sizes")
    parser.add_argument("--only", type=parts_of, default=PARTS, help=f"some of: {','.join(PARTS)}")
    parser.add_argument("--out", type=Path, help="a file or folder for the JSON, with a table beside it")
    parser.add_argument("--encoder", type=Path, metavar="FOLDER", help="the model; else the settings'")
    given = parser.parse_args()
    options = Options(given.quick, given.only, given.out, given.encoder)
    try:
        check(options)
    except (NotMeasured, ValueError) as error:
        sys.stderr.write(f"bench gpu: {error}\n")
        sys.exit(2)
    sys.exit(report(options, as_json=given.json))


if __name__ == "__main__":
    main()
