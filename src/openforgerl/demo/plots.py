"""The report's figures, as SVG text."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

COLOURS = {"untrained": "#9aa5b1", "sft": "#3b82c4", "rl": "#d9772b"}
"""One colour a stage, in every figure."""
LABELS = {"untrained": "untrained", "sft": "SFT", "rl": "SFT + RL"}
MEASURES = {"pass_at_1": "pass@1", "pass_at_3": "pass@3", "pass_hat_3": "pass^3"}


def held_out(stages: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Bars of the three measures for each stage, with their 95 % intervals."""
    figure, axes = _figure(6.4, 3.4)
    width = 0.8 / max(len(stages), 1)
    for place, (stage, measures) in enumerate(stages.items()):
        values = [measures[name]["value"] for name in MEASURES]
        low = [max(measures[name]["value"] - measures[name]["low"], 0.0) for name in MEASURES]
        high = [max(measures[name]["high"] - measures[name]["value"], 0.0) for name in MEASURES]
        at = [index + (place - (len(stages) - 1) / 2) * width for index in range(len(MEASURES))]
        axes.bar(at, values, width * 0.92, color=COLOURS[stage], label=LABELS[stage])
        axes.errorbar(at, values, yerr=[low, high], fmt="none", ecolor="#333333", elinewidth=1, capsize=3)
        for x, value in zip(at, values, strict=True):
            axes.annotate(f"{value:.2f}", (x, value), xytext=(0, 3), textcoords="offset points", ha="left", fontsize=7)
    axes.set_xticks(range(len(MEASURES)), list(MEASURES.values()))
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("held-out tasks solved")
    axes.legend(frameon=False, fontsize=8)
    return _svg(figure)


def reward_per_step(rewards: Sequence[float]) -> str:
    """Mean reward of each GRPO step, and its running mean over five steps."""
    figure, axes = _figure(6.4, 2.8)
    steps = range(1, len(rewards) + 1)
    axes.plot(steps, rewards, color="#d9772b", alpha=0.35, linewidth=1, label="step")
    smooth = [sum(rewards[max(0, i - 4) : i + 1]) / len(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
    axes.plot(steps, smooth, color="#d9772b", linewidth=2, label="mean of 5 steps")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("GRPO step")
    axes.set_ylabel("mean reward")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return _svg(figure)


def validation_curve(points: Sequence[Mapping[str, float]]) -> str:
    """SFT validation loss over steps (nats per token)."""
    figure, axes = _figure(6.4, 2.8)
    axes.plot(
        [point["step"] for point in points],
        [point["loss"] for point in points],
        color="#3b82c4",
        marker="o",
        markersize=3,
    )
    axes.set_xlabel("SFT step")
    axes.set_ylabel("validation loss (nats per token)")
    axes.set_ylim(bottom=0)
    return _svg(figure)


def token_account(stages: Mapping[str, Mapping[str, Any]]) -> str:
    """Where every sampled token ended: trained, masked or dropped."""
    figure, axes = _figure(6.4, 0.7 + 0.5 * len(stages))
    colours = {"trained": "#4c9f70", "masked": "#e3b23c", "dropped": "#b5534c"}
    for place, account in enumerate(stages.values()):
        left = 0
        parts = {
            "trained": account["trained"],
            "masked": sum(account["masked"].values()),
            "dropped": sum(account["dropped"].values()),
        }
        for name, count in parts.items():
            axes.barh(place, count, left=left, color=colours[name], label=name if place == 0 else None)
            left += count
    axes.set_yticks(range(len(stages)), list(stages))
    axes.invert_yaxis()
    axes.set_xlabel("sampled tokens")
    axes.legend(frameon=False, fontsize=8, ncols=3)
    return _svg(figure)


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
