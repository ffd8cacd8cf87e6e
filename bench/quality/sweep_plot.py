"""The picture of a policy's sweeps: cost and memories against each setting, the evidence found against k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from undertow.bench.quality.sweeps import K, Point, Sweeps

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("the picture needs matplotlib. Run: pip install 'undertow[eval]'") from error

LABELS = {"theta_sim": "theta_sim (theta_merge follows)"}
FOUND = {"k_sub": "k_sub turns", "k_epi": "k_epi episodes", "k_sem": "k_sem facts"}


def draw(sweeps: Sweeps, path: Path, title: str) -> None:
    """Write the picture, in the format that the file's ending names."""
    settings = sweeps.construction
    rows, columns = (2, len(settings) + 1) if settings else (1, 2)
    figure = Figure(figsize=(4.4 * columns, 3.4 * rows + 0.5), layout="constrained")
    figure.suptitle(title, fontsize="x-large")
    panels: Any = figure.subplots(rows, columns)
    cost, counts = panels if settings else ([panels[0]], [panels[1]])
    operations = sorted({op for points in settings.values() for one in points for op in one["prompt_tokens"]})
    for n, (name, points) in enumerate(settings.items()):
        _tokens(cost[n], name, points, {op: f"C{nth}" for nth, op in enumerate(operations)})
        _made(counts[n], name, points)
        for axes in (cost[n], counts[n]):
            axes.set_xticks(range(len(points)), [f"{point[name]:g}" for point in points])
            axes.set_xlabel(LABELS.get(name, name))
    _found(cost[-1], sweeps.search, "evidence_recall", "share of the evidence found", (0, 1))
    _found(counts[-1], sweeps.search, "turns_behind", "turns that these are or rest on", (0, None))
    if settings:
        cost[-1].set_title("search by k")
        cost[0].set_ylabel("prompt tokens, thousands")
        counts[0].set_ylabel("how many")
        _legend(figure, cost[0], "outside lower left", "prompt tokens for")
        _legend(figure, counts[0], "outside lower right", "how many")
    figure.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else None)


def _legend(
    figure: Figure, axes: Axes, place: Literal["outside lower left", "outside lower right"], heading: str
) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc=place, title=heading, ncols=len(labels), frameon=False)


def _tokens(axes: Axes, name: str, points: Sequence[Point], colours: Mapping[str, str]) -> None:
    """Prompt tokens by operation, one bar a value."""
    places = range(len(points))
    floor = [0.0] * len(points)
    for operation, colour in colours.items():
        tokens = [point["prompt_tokens"].get(operation, 0) / 1000 for point in points]
        axes.bar(places, tokens, bottom=floor, color=colour, label=operation)
        floor = [below + height for below, height in zip(floor, tokens, strict=True)]
    axes.set_title(f"construction by {name}")


def _made(axes: Axes, name: str, points: Sequence[Point]) -> None:
    """How many calls it took, and what was made of how many turns."""
    lines = {
        "LLM calls": [sum(point["calls"].values()) for point in points],
        "episodes": [point["episodes"] for point in points],
        "facts": [point["facts"] for point in points],
        "turns consolidated": [point["consolidated_share"] * point["turns"] for point in points],
    }
    for (label, counts), marker in zip(lines.items(), "ov^s", strict=True):
        if label != "turns consolidated" or any(point["consolidated_share"] < 1 for point in points):
            axes.plot(range(len(points)), counts, f"{marker}-", markersize=4, label=label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _found(
    axes: Axes,
    search: Mapping[str, Sequence[Point]],
    figure: str,
    label: str,
    limits: tuple[float, float | None],
) -> None:
    """One line a tier, by how many of its best memories are taken."""
    for name, points in search.items():
        axes.plot(
            [p[name] for p in points], [p[figure] for p in points], "o-", markersize=4, label=FOUND[name]
        )
    axes.set_xscale("log")
    axes.set_xticks(K, [str(k) for k in K])
    axes.minorticks_off()
    axes.set(xlabel="k", ylabel=label, ylim=limits)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
