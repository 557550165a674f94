"""README's plot of the headline results, from receipts: an SVG that follows the reader's light or dark colours.

`python -m bench table --write` draws it.

Left: tokens per second over HTTP at 1 to 64 streams on one H200, beside the best vLLM backend in the same run. Right:
two CPU cores beside llama.cpp on the same weights. A cell without a valid figure has no bar.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.measurement import RESULTS, ROOT
from halfbyte.lab.result import Result, from_json
from halfbyte.lab.statistics import number

FILE = ROOT / "docs" / "img" / "headline.svg"
STREAMS = (1, 8, 32, 64)
WIDTH, HEIGHT, TOP, BASE = 860, 330, 78, 276
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600; font-size: 15px }
.small { font-size: 11.5px; fill: #59636e } .axis { stroke: #d1d9e0 }
.fast { fill: #1f6feb } .exact { fill: #79b0ff } .peer { fill: #afb8c1 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9198a1 } .axis { stroke: #3d444d }
.fast { fill: #4493f8 } .exact { fill: #1f4f99 } .peer { fill: #6e7681 } }
"""


@dataclass(frozen=True)
class Bar:
    style: str
    value: float | None  # None: there is no valid figure


@dataclass(frozen=True)
class BarGroup:
    label: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Panel:
    title: str
    subtitle: str
    legend: tuple[tuple[str, str], ...]  # style and text
    groups: tuple[BarGroup, ...]
    left: int
    width: int


def results(name: str) -> tuple[Result, ...]:
    return from_json(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))).results


def panels() -> list[Panel]:
    board = results("leaderboard")
    cpu = results("llamacpp-20b")

    def streams(count: int, choose: Callable[[Result], bool]) -> float | None:
        speeds = [
            result.figure("speed").value
            for result in board
            if result.cell.kind == "serving" and result.cell.shape["concurrency"] == count
            and choose(result) and result.figures
        ]  # fmt: skip
        return max(speeds, default=None)

    served = tuple(
        BarGroup(
            str(count),
            (
                Bar("fast", streams(count, lambda r: r.cell.preset == "fast")),
                Bar("exact", streams(count, lambda r: r.cell.preset == "exact")),
                Bar("peer", streams(count, lambda r: r.cell.engine.startswith("vllm"))),
            ),
        )
        for count in STREAMS
    )
    two_cores = tuple(
        BarGroup(label, (Bar("fast", result.figure("speed").value), Bar("peer", result.figure("peer_speed").value)))
        for kind, label in (("decode", "decode"), ("prompt", "prompt of 256"))
        for result in cpu
        if result.cell.kind == kind and result.cell.model == "20b-q8"
    )
    return [
        Panel(
            "gpt-oss-120b on one H200, over HTTP",
            "tokens/s in all, by number of streams; 1,100 tokens in, 256 out",
            (
                ("fast", "halfbyte, all layers MXFP4"),
                ("exact", "halfbyte, as released"),
                ("peer", "vLLM 0.26, its best"),
            ),
            served,
            40,
            500,
        ),
        Panel(
            "gpt-oss-20b on two CPU cores",
            "tokens/s; 8-bit attention and head",
            (("fast", "halfbyte"), ("peer", "llama.cpp")),
            two_cores,
            600,
            230,
        ),
    ]


def draw(panel: Panel) -> Iterator[str]:
    top = max(bar.value or 0.0 for group in panel.groups for bar in group.bars)
    x = panel.left
    yield f'<text class="title" x="{x}" y="24">{panel.title}</text>'
    yield f'<text class="small" x="{x}" y="42">{panel.subtitle}</text>'
    at = x
    for style, text in panel.legend:
        yield f'<rect class="{style}" x="{at}" y="52" width="10" height="10" rx="2"/>'
        yield f'<text class="small" x="{at + 15}" y="61">{text}</text>'
        at += 34 + round(6.1 * len(text))
    yield f'<line class="axis" x1="{x}" y1="{BASE}" x2="{x + panel.width}" y2="{BASE}"/>'
    step = panel.width / len(panel.groups)
    for number_of_group, group in enumerate(panel.groups):
        wide = min(38.0, 0.8 * step / len(group.bars))
        start = x + step * number_of_group + (step - wide * len(group.bars)) / 2
        for i, bar in enumerate(group.bars):
            middle = start + wide * i + wide / 2
            if bar.value is None:
                yield f'<text class="small" x="{middle:.1f}" y="{BASE - 6}" text-anchor="middle">–</text>'
                continue
            height = (BASE - TOP - 16) * bar.value / top
            yield (
                f'<rect class="{bar.style}" x="{start + wide * i + 2:.1f}" y="{BASE - height:.1f}" '
                f'width="{wide - 4:.1f}" height="{height:.1f}" rx="2"/>'
                f'<text class="small" x="{middle:.1f}" y="{BASE - height - 5:.1f}" text-anchor="middle">'
                f"{number(bar.value)}</text>"
            )
        center = x + step * (number_of_group + 0.5)
        yield f'<text x="{center:.1f}" y="{BASE + 20}" text-anchor="middle">{group.label}</text>'


def svg(parts: Sequence[Panel]) -> str:
    lines = [line for panel in parts for line in draw(panel)]
    source = (
        f'<text class="small" x="40" y="{HEIGHT - 10}">From bench/results/leaderboard.json and llamacpp-20b.json; '
        "random weights of the true shapes. – : no valid figure.</text>"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    label = 'aria-label="Tokens per second of halfbyte beside vLLM and llama.cpp">'
    return "\n".join([f"{head} {label}", f"<style>{STYLE}</style>", *lines, source, "</svg>", ""])


def is_current() -> bool:
    return FILE.is_file() and FILE.read_text(encoding="utf-8") == svg(panels())


def write() -> None:
    FILE.write_text(svg(panels()), encoding="utf-8")
