"""The picture of the sweeps: cost and share consolidated against each threshold, recall against each k."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from undertow.bench.quality.sweeps import Point, Sweeps

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("the picture needs matplotlib. Run: pip install 'undertow[eval]'") from error

OPERATIONS = ("merge", "episode", "refine")


def draw(sweeps: Sweeps, path: Path, title: str) -> None:
    """Write the picture, in the format that the file's ending names."""
    figure = Figure(figsize=(14, 4.4), layout="constrained")
    figure.suptitle(title)
    sims, counts, recall = figure.subplots(1, 3)
    _thresholds(sims, sweeps.theta_sim, "theta_sim", "theta_sim (theta_merge follows)", 0.035)
    _thresholds(counts, sweeps.theta_count, "theta_count", "theta_count", 0.7)
    for name, points, of in (
        ("k_sub", sweeps.k_sub, "in k_sub turns"),
        ("k_epi", sweeps.k_epi, "behind k_epi episodes"),
    ):
        recall.plot([p[name] for p in points], [p["evidence_recall"] for p in points], "o-", label=of)
    recall.set(xlabel="k_sub, k_epi", ylabel="share of the evidence", ylim=(0, 1), title="search")
    recall.legend(loc="lower right")
    recall.grid(alpha=0.3)
    figure.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else None)


def _thresholds(axes: Axes, points: Sequence[Point], setting: str, label: str, width: float) -> None:
    """Prompt tokens by operation, one bar a value; the share of turns consolidated as a line over them."""
    values = [point[setting] for point in points]
    floor = [0.0] * len(points)
    for operation in (op for op in OPERATIONS if any(op in point["prompt_tokens"] for point in points)):
        tokens = [point["prompt_tokens"].get(operation, 0) / 1000 for point in points]
        axes.bar(values, tokens, width, bottom=floor, label=operation)
        floor = [below + height for below, height in zip(floor, tokens, strict=True)]
    axes.set(xlabel=label, ylabel="prompt tokens, thousands (mock's count)", title="construction")
    axes.set_xticks(values)
    axes.legend(loc="upper right", title="calls for")
    share = axes.twinx()
    share.plot(values, [point["consolidated_share"] for point in points], "ko-", markersize=4)
    share.set(ylabel="share of turns consolidated (line)", ylim=(0, 1.05))
