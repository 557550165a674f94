"""The page itself: one HTML file with its style and drawings inside, and nothing from elsewhere; no scripts at all.

Everything that came from a file goes through Jinja2's escaping, because results may be a stranger's. `render` gives the
same text for the same files and the same `made`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import halfbyte
from halfbyte.errors import UsageError
from halfbyte.lab.compare import flat
from halfbyte.lab.kernel_table import CATEGORIES
from halfbyte.lab.report import content, plots
from halfbyte.lab.report.content import Board, FiledResult
from halfbyte.lab.report.sources import Collected

HERE = Path(__file__).parent
SECTIONS = (
    ("verdicts", "Verdicts"), ("boards", "Leaderboard"), ("depth", "Depth"), ("concurrency", "Concurrency"),
    ("latency", "Latency"), ("matrix", "Matrix"), ("kernels", "Kernels"), ("history", "History"),
    ("refused", "INVALID"), ("files", "Metadata"),
)  # fmt: skip
LEAD = 8  # tests in the first drawing, where one engine stands alone
HISTORIES = 12  # drawn; the others are counted
BARS = ("pp2048", "tg128 @ d2048", "tg32")  # tests whose boards are drawn, in this order
FACTS = (
    "time", "commit", "halfbyte", "system", "cpu", "cores", "memory_bytes", "container", "python", "packages.torch",
    "packages.triton", "packages.vllm", "driver.version", "driver.cuda_most", "gpus[0].name", "gpus[0].capability",
    "gpus[0].memory_kind", "gpus[0].settings.limit_watts", "gpus[0].settings.sm_mhz_most", "imports.halfbyte.path",
    "imports.halfbyte.shadows", "use.peak_memory_bytes", "use.cores_busy", "host.load",
)  # fmt: skip


def render(collected: Collected, title: str = "halfbyte: results", date: str = "", note: str = "") -> str:
    try:
        import jinja2
    except ImportError:
        raise UsageError("the report needs jinja2: pip install 'halfbyte[report]'.") from None
    results = content.measurements(collected)
    believed = content.Standings(results, collected.verdicts).believed(results)
    states = [m.result.state for m in results]
    boards = content.boards(results, collected.published, collected.verdicts)
    histories = content.histories(results)
    kernels = content.kernels(results)
    values: dict[str, Any] = {
        "title": title, "made": date, "note": note, "version": halfbyte.__version__,
        "collected": collected,
        "style": (HERE / "page.css").read_text(encoding="utf-8"), "span": _span(collected),
        "counts": {s: states.count(s) for s in ("measured", "refused", "INVALID")},
        "transcribed": sorted({p.how for p in collected.published}),
        "boards": _grouped(boards), "charts": _charts(boards),
        "lead": _lead(boards),
        "depth": _plots(content.curves(believed, collected.published, "depth"), "depth"),
        "concurrency": _plots(content.curves(believed, collected.published, "concurrency"), "streams"),
        "latency": _plots(content.latencies(believed), "latency"), "serving": _serving(believed),
        "heats": content.heat_maps(results), "kernels": kernels, "kernel_chart": _kernel_chart(kernels),
        "history": [(h, plots.lines(h.plot, f"history{i}")) for i, h in enumerate(histories[:HISTORIES])],
        "more_history": max(0, len(histories) - HISTORIES), "refusals": content.refusals(results),
        "files": [_file(collected, i) for i in range(len(collected.files) - 1, -1, -1)],
    }  # fmt: skip
    sections = {"refused": values["refusals"] or collected.unreadable, "matrix": values["heats"]}
    runs = [(e, collected.verdicts[e.hash]) for e, _ in collected.files if e.hash in collected.verdicts]
    values["verdicts"] = runs
    sections |= {"latency": values["latency"] or values["serving"]}
    values["shown"] = {id for id, _ in SECTIONS if sections.get(id, values.get(id))}
    values["sections"] = [(id, name) for id, name in SECTIONS if id in values["shown"]]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((HERE / "page.html").read_text(encoding="utf-8")).render(values)


def _span(collected: Collected) -> str:
    times = [e.time[:10] for e, _ in collected.files]
    return "" if not times else times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"


def _grouped(boards: Sequence[Board]) -> list[tuple[str, list[tuple[str, list[Board]]]]]:
    grouped: dict[str, dict[str, list[Board]]] = {}
    for b in boards:
        grouped.setdefault(b.machine, {}).setdefault(b.model, []).append(b)
    return [(machine, list(models.items())) for machine, models in grouped.items()]


def _charts(boards: Sequence[Board]) -> Mapping[str, list[str]]:
    """Bars of the boards on which somebody else stands, too; what was only published, where nothing was measured."""
    charts: dict[str, list[str]] = {b.machine: [] for b in boards}
    measured = {b.machine for b in boards if any(p.state != "published" for p in b.places)}
    for i, b in enumerate(boards):
        rows = [(p.who, p.value, p.ceiling) for p in b.places if p.value is not None]
        drawn = b.test in BARS or " + tg" in b.test  # a workload
        if drawn and len(rows) > 1 and (b.has_peer or b.machine not in measured):
            charts[b.machine].append(plots.bars(f"{b.model} {b.test}", rows, "tokens/s", f"bars{i}"))
    return charts


def _lead(boards: Sequence[Board]) -> str:
    """The page's first drawing: a decode test in which most engines stand; of a single engine all that it was asked."""
    rows = {id(b): [p for p in b.places if p.value is not None and p.state == "measured"] for b in boards}
    boards = [b for b in boards if rows[id(b)]]
    if not boards:
        return ""
    best = max(boards, key=lambda b: (len(rows[id(b)]), "tg" in b.test, b.test in BARS))
    if len(rows[id(best)]) > 1:
        bars = [(p.who, p.value or 0.0, p.ceiling) for p in rows[id(best)]]
        return plots.bars(f"{best.model} {best.test} · {best.machine}", bars, "tokens/s", "lead")
    same = [b for b in boards if (b.machine, b.model) == (best.machine, best.model) and "pp" not in b.test][:LEAD]
    bars = [(b.test, rows[id(b)][0].value or 0.0, rows[id(b)][0].ceiling) for b in same or [best]]
    who = rows[id(best)][0].who
    return plots.bars(f"{best.model} · {best.machine} · {who}", bars, "tokens/s", "lead")


def _plots(results: Any, salt: str) -> list[str]:
    return [plots.lines(plot, f"{salt}{i}") for i, plot in enumerate(results)]


def _kernel_chart(kernels: Sequence[content.Kernels]) -> str:
    rows = []
    for k in kernels:
        total_us = k.table.busy_us + k.table.idle_us
        shares = {r.category: r.share for r in k.table.rows} | {"idle": k.table.idle_us / total_us if total_us else 0.0}
        rows.append((k.title.split(" · ")[0], shares))
    return plots.stacked("Time by category", rows, (*CATEGORIES, "idle"), "kernels") if rows else ""


def _serving(results: Sequence[FiledResult]) -> list[dict[str, str]]:
    rows = []
    for m in content.newest(results):
        if m.cell.kind != "serving" or m.result.refused:
            continue
        named = {f.name: f.value for f in m.result.figures}
        missed = [t.note or t.what for t in m.result.targets if not t.ok]
        row = {
            "test": m.cell.label,
            "who": m.who,
            "speed": f"{named['speed']:.1f}" if "speed" in named else "",
            "file": m.entry.name,
            "note": "; ".join(missed),
            "in_time": f"{named['in_time']:.0f} %" if "in_time" in named else "",
        }
        for name in ("ttft", "tpot", "e2e"):
            pair = [named.get(f"{name}_{p}") for p in ("p50", "p99")]
            row[name] = " / ".join(f"{v:.1f}" for v in pair if v is not None)
        rows.append(row)
    return rows


def _file(collected: Collected, i: int) -> tuple[Any, list[tuple[str, str]], str]:
    entry, file = collected.files[i]
    values = dict(flat("", file.environment))
    facts = [(name, str(values[name])) for name in FACTS if values.get(name) not in (None, [], "")]
    return entry, facts, json.dumps(dict(file.environment), indent=1, default=str)
