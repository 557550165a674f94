"""README's table of results as markdown, from receipts: each figure beside its ceiling, and what is stale marked so.

A row names cells by what they measured; the newest receipt that has the cell counts, current before stale. A cell that
nobody measured is shown as such. Invents nothing and rounds for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfbyte.lab.receipts import Receipt
from halfbyte.lab.result import Figure, Result


@dataclass(frozen=True)
class Row:
    """One line: figures of several cells that differ in one word of their shape (or of the cell itself)."""

    label: str
    command: str
    kind: str
    figure: str
    path: str = ""
    model: str = ""
    preset: str = ""
    shape: Mapping[str, Any] = field(default_factory=dict)
    over: str = ""  # the word that differs
    values: tuple[Any, ...] = ("",)
    gates: Mapping[str, Any] | None = None


ENGINE: dict[str, Any] = {"path": "engine", "model": "120b", "preset": "fast"}
KERNEL: dict[str, Any] = {"kind": "decode", "figure": "speed", "path": "cuda.decode_step"}
FORMATS = ("mxfp4", "q8", "checkpoint")
BENCH = "halfbyte bench random:120b --preset fast"
SERVED = f"{BENCH} --pp 2048 --tg 128 --depth 2048 --concurrency 1,8 --served"
SERVING = "python -m halfbyte.lab.measure.serving random:120b --preset fast"
ROWS = (
    Row("decode @ 2k through the engine, every layer MXFP4", f"{BENCH} --tg 128 --depth 2048", "decode", "speed",
        shape={"tg": 128, "depth": 2048, "concurrency": 1}, **ENGINE),
    Row("engine, total at 8 / 32 / 64 streams of 128 tokens", f"{BENCH} --tg 128 --depth 128 --concurrency 8,32,64",
        "decode", "speed", shape={"tg": 128, "depth": 128}, over="concurrency", values=(8, 32, 64), **ENGINE),
    Row("engine, pp512 / pp2048 / pp8192", f"{BENCH} --pp 512,2048,8192", "prompt", "speed",
        shape={"depth": 0, "concurrency": 1}, over="pp", values=(512, 2048, 8192), gates={}, **ENGINE),
    Row("the same, fp8 from 3072 rows on", f"{BENCH} --activation long=fp8 --pp 512,2048,8192", "prompt", "speed",
        shape={"depth": 0, "concurrency": 1}, over="pp", values=(512, 2048, 8192), gates={"activation": "long=fp8"},
        **ENGINE),
    Row("over HTTP, of the engine's own: decode @ 2k, 1 / 8 streams", SERVED, "served decode", "ratio",
        path="http / engine", model="120b", shape={"depth": 2048}, over="concurrency", values=(1, 8)),
    Row("over HTTP, of the engine's own: pp2048 @ 2k, 1 / 8 streams", SERVED, "served prompt", "ratio",
        path="http / engine", model="120b", shape={"depth": 2048}, over="concurrency", values=(1, 8)),
    Row("closed loop over HTTP, 1100 in, 256 out, total at 1 / 8 / 32 / 64 streams", f"{SERVING} --streams 1,8,32,64",
        "serving", "speed", path="http", model="random:120b", preset="fast", shape={"pp": 1100, "tg": 256},
        over="concurrency", values=(1, 8, 32, 64)),
    Row("longest gap between tokens in the first minute of mixed traffic after ready", f"{SERVING} --first-minute 60",
        "first minute", "gap_longest", path="http", model="random:120b", preset="fast"),
    Row("from nothing to ready, random weights, warm-up included", f"{SERVING} --first-minute 60", "first minute",
        "ready", path="http", model="random:120b", preset="fast"),
    Row("decode step alone @ 2k, 120b: MXFP4 / q8 / checkpoint", "python -m bench.kernels.decode", model="120b",
        shape={"rows": 1, "context": 2048}, over="formats", values=FORMATS, **KERNEL),
    Row("decode step alone @ 32k, 120b", "python -m bench.kernels.decode", model="120b",
        shape={"rows": 1, "context": 32768}, over="formats", values=FORMATS, **KERNEL),
    Row("decode step alone @ 2k, 20b", "python -m bench.kernels.decode", model="20b",
        shape={"rows": 1, "context": 2048}, over="formats", values=FORMATS, **KERNEL),
    Row("from safetensors to the first answer, kernels cached / not", "python -m halfbyte.lab.measure.load", "start",
        "ready", path="engine", model="120b", over="kernel_cache", values=("filled", "empty")),
    Row("GPU memory at its peak beyond weights and KV", "python -m halfbyte.lab.measure.load", "start", "extra_memory",
        path="engine", model="120b", over="kernel_cache", values=("filled",)),
    Row("plans clean under memcheck / racecheck / initcheck / synccheck", "python -m halfbyte.lab.levels.sanitizer",
        "sanitizer", "clean", shape={"of": "plans"}, over="path",
        values=("memcheck", "racecheck", "initcheck", "synccheck")),
    Row("kernel tests clean under memcheck",
        "python -m halfbyte.lab.levels.sanitizer --tools memcheck --tests tests/kernels", "sanitizer", "clean",
        path="memcheck", shape={"of": None}),
    Row("decode steps, two passes equal to the last bit", "python -m halfbyte.lab.levels.stress", "stress", "steps",
        path="cuda.decode_step"),
    Row("embedded model's answers, token for token a CPU's: exact / balanced / fast",
        "python -m halfbyte.lab.levels.embedded --eval", "accuracy", "equal_answers", path="engine", model="tiny",
        shape={"padded": True}, over="preset", values=("exact", "balanced", "fast"), gates={"activation": "auto"}),
    Row("host work per step at 1 / 64 streams", "python -m halfbyte.lab.measure.host", "host work", "step",
        path="engine", over="concurrency", values=(1, 64)),
    Row("server in front of a scripted source, per token at 1 stream", "python -m halfbyte.lab.measure.server",
        "front end", "per_token", path="http", shape={"concurrency": 1}),
    Row("server in front of a scripted source, 64 streams", "python -m halfbyte.lab.measure.server", "front end",
        "speed", path="http", shape={"concurrency": 64}),
    Row("embedded model, 4200 problems of an unseen seed: mean", "training/train.py --stage evaluate", "accuracy",
        "mean", path="training's network", model="tiny", shape={"seed": 4242}),
    Row("embedded model through the engine on a CPU: mean", "halfbyte eval --seed 31415 --per-task 40", "accuracy",
        "mean", model="tiny", shape={"seed": 31415}),
    Row("tokens per verification, EAGLE-3 / draft model", "training/acceptance.py", "acceptance",
        "tokens_per_verification", model="tiny", shape={"conversations": 156}, over="path",
        values=("eagle3", "draft")),
)  # fmt: skip


def markdown(receipts: Sequence[Receipt], rows: Sequence[Row] = ROWS) -> Iterator[str]:
    yield "| | measured | ceiling | command |"
    yield "|---|---|---|---|"
    for row in rows:
        pairs = [_find(receipts, row, value) for value in row.values]
        figures = " / ".join("–" if pair is None else _value(pair[1]) for pair in pairs)
        units = {pair[1].unit for pair in pairs if pair is not None} - {"ratio", "tests", "steps"}
        ceilings = [pair[1].ceiling for pair in pairs if pair is not None]
        beside = " / ".join("–" if c is None else number(c.value) for c in ceilings) if any(ceilings) else ""
        states = {pair[0].state for pair in pairs if pair is not None} - {"current"}
        stale = f" ({', '.join(sorted(states))})" if states else ""
        missing = " (not measured)" if all(pair is None for pair in pairs) else ""
        yield f"| {row.label} | {figures} {' '.join(units)}{stale}{missing} | {beside} | `{row.command}` |"


def _find(receipts: Sequence[Receipt], row: Row, value: Any) -> tuple[Receipt, Figure] | None:
    matches = [
        (receipt, result)
        for receipt in receipts
        for result in receipt.results
        if _fits(result, row, value) and any(f.name == row.figure for f in result.figures)
    ]
    if not matches:
        return None
    receipt, result = max(matches, key=lambda pair: (pair[0].state == "current", pair[0].date, pair[0].name))
    return receipt, result.figure(row.figure)


def _fits(result: Result, row: Row, value: Any) -> bool:
    cell = result.cell
    wanted: dict[str, Any] = {"path": row.path, "model": row.model, "preset": row.preset}
    shape = dict(row.shape)
    if row.over in wanted:
        wanted[row.over] = value
    elif row.over:
        shape[row.over] = value
    if cell.kind != row.kind or any(v and getattr(cell, name) != v for name, v in wanted.items()):
        return False
    if any(cell.shape.get(name) != v for name, v in shape.items()):
        return False
    if row.gates is None:
        return True
    activation = dict(cell.gates).get("activation", "auto")
    return bool(activation == row.gates.get("activation", "auto"))


def _value(figure: Figure) -> str:
    return f"**{number(figure.value)}**"


def number(value: float) -> str:
    """19.9k, 844, 17.7, 0.067: three figures are what a person reads."""
    if value >= 10_000:
        return f"{value / 1000:.1f}k"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if 1 <= value < 10 else f"{value:.3g}"
