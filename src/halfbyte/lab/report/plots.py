"""The page's plots, by matplotlib as SVG inside of the page. Colours are the page's own variables, so that one drawing
serves light, dark and paper. Decides nothing: it is given names and numbers."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfbyte.errors import UsageError

# Placeholders that become variables of the page's style.
INK, FAINT = "#010101", "#020202"
SERIES = tuple(f"#0{n}0{n}0{n}" for n in range(3, 10))
VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)"} | {c: f"var(--series-{i})" for i, c in enumerate(SERIES)}
MARKERS = "osD^vPX"


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False  # a ceiling, or somebody else's published figures
    marked: Sequence[tuple[float, float]] = ()  # regressions


@dataclass(frozen=True)
class Plot:
    title: str
    x: str
    y: str
    lines: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    ticks: Sequence[str] = field(default_factory=list)  # of a history: names of the points


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("svg")
        from matplotlib import pyplot
    except ImportError:
        raise UsageError("the report's plots need matplotlib: pip install 'halfbyte[report]'.") from None
    return pyplot


STYLE = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10, "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": FAINT, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK,
    "ytick.color": INK, "axes.grid": True, "grid.color": FAINT, "grid.alpha": 0.25, "figure.facecolor": "none",
    "axes.facecolor": "none", "savefig.facecolor": "none", "legend.frameon": False, "axes.titlesize": 11,
    "axes.titleweight": "bold", "axes.titlelocation": "left",
}  # fmt: skip


def _svg(figure: Any, pyplot: Any, salt: str) -> str:
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    pyplot.close(figure)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    for color, variable in VARIABLES.items():
        text = text.replace(color, variable)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Identifiers of two drawings must not meet in one page.
    prefix = re.sub(r"\W", "", salt)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", text)
    return re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" role="img">', text, count=1)


def lines(plot: Plot, salt: str) -> str:
    pyplot = _pyplot()
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(6.2, 3.6))
        for i, line in enumerate(plot.lines):
            xs, ys = zip(*sorted(line.points))
            marker, style = ("", "--") if line.dashed else (MARKERS[i % len(MARKERS)], "-")
            color = SERIES[i % len(SERIES)]
            axes.plot(
                xs, ys, color=color, marker=marker, linestyle=style, linewidth=1.6, markersize=4.5, label=line.name
            )
            if line.marked:
                axes.plot(*zip(*line.marked), linestyle="", marker="x", markersize=11, color=INK, markeredgewidth=2)
        axes.set_title(plot.title)
        axes.set_xlabel(plot.x)
        axes.set_ylabel(plot.y)
        if plot.log_x:
            points = sorted({x for line in plot.lines for x, _ in line.points})
            axes.set_xscale("symlog" if points[0] <= 0 else "log", base=2)
            axes.set_xticks(points, [f"{x:g}" for x in points])
            axes.minorticks_off()
        if plot.ticks:
            axes.set_xticks(range(len(plot.ticks)), plot.ticks, rotation=30, ha="right")
        if plot.log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1.08 * max(y for line in plot.lines for _, y in line.points))
        if len(plot.lines) > 1 or plot.lines[0].name:
            axes.legend(fontsize=8, loc="best")
        return _svg(figure, pyplot, salt)


def bars(title: str, rows: Sequence[tuple[str, float, float | None]], unit: str, salt: str) -> str:
    """Name, value, ceiling or None; the first row on top."""
    pyplot = _pyplot()
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(6.2, 0.5 + 0.34 * len(rows)))
        names = [name for name, _, _ in rows]
        for i, (_, value, ceiling) in enumerate(rows):
            own = names[i].startswith("halfbyte")
            axes.barh(i, value, color=SERIES[0 if own else 1], height=0.62)
            axes.annotate(f" {value:,.0f}" if value >= 100 else f" {value:.3g}", (value, i), va="center", fontsize=9)
            if ceiling is not None:
                axes.plot([ceiling, ceiling], [i - 0.4, i + 0.4], color=INK, linewidth=1.6, linestyle=":")
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        axes.set_title(title)
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, 1.14 * max(max(v, c or 0.0) for _, v, c in rows))
        return _svg(figure, pyplot, salt)


def stacked(title: str, rows: Sequence[tuple[str, Mapping[str, float]]], categories: Sequence[str], salt: str) -> str:
    """Shares of a whole, one bar a row."""
    pyplot = _pyplot()
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(6.2, 0.9 + 0.38 * len(rows)))
        used = [c for c in categories if any(shares.get(c) for _, shares in rows)]
        left = [0.0] * len(rows)
        for k, category in enumerate(used):
            values = [100 * shares.get(category, 0.0) for _, shares in rows]
            color = FAINT if category == "idle" else SERIES[k % len(SERIES)]
            axes.barh(range(len(rows)), values, left=left, color=color, height=0.66, label=category,
                      alpha=0.35 if category == "idle" else 1.0)  # fmt: skip
            left = [a + b for a, b in zip(left, values)]
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("% of the time")
        axes.set_title(title)
        axes.grid(axis="y", visible=False)
        axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.32 if len(rows) < 5 else -0.16))
        return _svg(figure, pyplot, salt)
