"""Receipts: measured results on disk, each with the hash of every source file it measured, and which are stale.

A receipt is a JSON file in bench/results. `measured` maps the source files behind its figures to their hashes; when one
of them has changed since, the receipt is stale and names it. Receipts of older scripts carry one hash of a program or a
room in `sources`; they are current while some program or room still has that hash. One that carries neither says
nothing of its sources, and is shown so. Nothing here measures.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import halfbyte
from halfbyte.errors import UsageError
from halfbyte.kernels.launch import INCLUDES
from halfbyte.lab import environment
from halfbyte.plan.phase import Phase
from halfbyte.plan.select import all_phases

PACKAGE = Path(halfbyte.__file__).parent
RESULTS = PACKAGE.parents[1] / "bench" / "results"
_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
_NATIVE = (".cu", ".cuh", ".h", ".cpp")


# ---- what was measured ----------------------------------------------------------------------------------------------


def sources_of(start: Iterable[Path], rooms: tuple[str, ...] = ("kernels",)) -> list[Path]:
    """Files reached from these: imports of the given rooms, sources that Python names, and what they include."""
    found: set[Path] = set()
    todo = list(start)
    while todo:
        path = todo.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            todo += _python(path, text, rooms)
        else:
            todo += [INCLUDES / name for name in _INCLUDE.findall(text)]
    return sorted(found)


def _python(path: Path, text: str, rooms: tuple[str, ...]) -> Iterator[Path]:
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.endswith(_NATIVE):
                yield path.parent / node.value
            names = [node.value]  # a module that is imported by name
        for name in names:
            parts = name.split(".")
            if parts[0] == "halfbyte" and len(parts) > 2 and parts[1] in rooms:
                yield PACKAGE.joinpath(*parts[1:]).with_suffix(".py")
                package = PACKAGE.joinpath(*parts[1:])
                if package.is_dir():
                    yield from package.glob("*.py")


def measured(phases: Iterable[Phase | str]) -> dict[str, str]:
    """File -> hash, for everything behind these phases."""
    by_name = {p.name: p for p in all_phases()}
    starts = []
    for phase in phases:
        one = by_name[phase] if isinstance(phase, str) else phase
        starts.append(PACKAGE.joinpath(*type(one).__module__.split(".")[1:]).with_suffix(".py"))
    return hashes(sources_of(starts))


def hashes(paths: Iterable[Path]) -> dict[str, str]:
    return {_name(p): file_hash(p) for p in sorted(paths)}


def weights(*models: Path) -> dict[str, str]:
    """File -> hash of the weights of those models that are part of the checkout; another machine lacks the others."""
    house = PACKAGE.resolve().parents[1]
    return hashes(f for m in models for f in m.glob("*.safetensors") if f.resolve().is_relative_to(house))


def _name(path: Path) -> str:
    return Path(os.path.relpath(path.resolve(), PACKAGE.resolve())).as_posix()


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


# ---- which are stale ------------------------------------------------------------------------------------------------


@functools.cache
def known_hashes() -> frozenset[str]:
    """Every single hash that today's sources answer to: rooms, and CUDA programs with what they include."""
    from halfbyte.kernels.launch import Program

    rooms = ("kernels", "kernels/triton", "kernels/cuda", "engine", "server")
    programs = (Program(p, "") for p in sorted((PACKAGE / "kernels").rglob("*.cu")))
    triton = hashlib.sha256()
    for path in sorted((PACKAGE / "kernels" / "triton").rglob("*.py")):
        triton.update(path.read_bytes())
    return frozenset([*map(environment.source_hash, rooms), *(p.hash() for p in programs), triton.hexdigest()[:16]])


@dataclass(frozen=True)
class Row:
    """One figure of a receipt beside its ceiling; `share` of it reached."""

    what: str
    figure: float
    unit: str
    ceiling: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class Receipt:
    name: str
    state: str  # current, STALE, unhashed, unreadable
    why: str = ""
    gpu: str = ""
    date: str = ""
    rows: tuple[Row, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def as_dict(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if k != "raw"}


def read_all(folder: Path | None = None) -> list[Receipt]:
    folder = RESULTS if folder is None else folder
    if not folder.is_dir():
        raise UsageError(f"there are no receipts in {folder}; run from a checkout, or name a folder of results.")
    return [read(p) for p in sorted(folder.glob("*.json"))]


def read(path: Path) -> Receipt:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError("not an object")
    except (OSError, UnicodeDecodeError, ValueError) as e:
        return Receipt(path.stem, "unreadable", "the file is empty" if not path.stat().st_size else str(e))
    state, why = freshness(raw)
    inner = raw.get("environment")
    record: Mapping[str, Any] = inner if isinstance(inner, Mapping) else {}
    gpus = [g.get("name", "") for g in record.get("gpus", []) if isinstance(g, Mapping)]
    gpu = raw.get("gpu") or raw.get("device") or (gpus[0] if gpus else raw.get("machine", ""))
    date = raw.get("date") or str(record.get("time", ""))[:10]
    return Receipt(path.stem, state, why, str(gpu), str(date), tuple(figures(raw)), raw)


def freshness(raw: Mapping[str, Any]) -> tuple[str, str]:
    held = raw.get("measured")
    if isinstance(held, Mapping) and held:
        changed = [name for name, was in held.items() if not _same(PACKAGE / str(name), str(was))]
        if not changed:
            return "current", ""
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        return "STALE", f"changed since: {', '.join(sorted(changed)[:3])}{more}"
    inner = raw.get("environment")
    one = raw.get("sources") or (inner.get("sources") if isinstance(inner, Mapping) else None)
    if not isinstance(one, str):
        return "unhashed", "carries no hash of what it measured"
    if one in known_hashes():
        return "current", ""
    return "STALE", f"measured sources {one}, which are no more"


def _same(path: Path, was: str) -> bool:
    return path.is_file() and file_hash(path) == was


# ---- figures --------------------------------------------------------------------------------------------------------


def figures(raw: Mapping[str, Any]) -> Iterator[Row]:
    """The figures of every kind of receipt in the house; a kind nobody knows has none."""
    for row in _rows(raw.get("rows")):
        if "tokens_per_s" in row and "context" in row:
            what = f"{row['model']} {row['formats']} rows {row['rows']} @ {row['context']}"
            yield Row(what, row["tokens_per_s"], "tok/s", row.get("ceiling"), row.get("share"))
        elif "case" in row and "us" in row:
            yield Row(str(row["case"]), row["us"], "us", None, row.get("of_ceiling"))
    for part in _rows(raw.get("speed")):
        for row in _rows(part.get("rows")):
            if "tokens_per_s" in row:
                what = f"{part.get('model')} {part.get('preset')} {row.get('test')}"
                yield Row(what, row["tokens_per_s"], "tok/s", row.get("ceiling"), row.get("share"))
        for row in _rows(part.get("isolated")):
            if "us" in row:
                what = f"{part.get('model')} {part.get('preset')} {row['phase']} M={row['rows']}"
                yield Row(what, row["us"], "us", None, row.get("share"))
    for row in _rows(raw.get("results")):
        for role in ("gate_up", "down"):
            inner = row.get(role)
            if isinstance(inner, Mapping) and isinstance(row.get("us"), Mapping) and role in row["us"]:
                yield Row(f"{role} {row.get('tokens')} tokens", row["us"][role], "us", None, inner.get("of_ceiling"))
    for row in _rows(raw.get("steps")):
        if "way" in row:
            what = f"{raw.get('model')} {raw.get('preset')} rows {row['rows']} {row['way']}"
            yield Row(what, row["tokens_per_s"], "tok/s")
    for row in _rows(raw.get("profiles")):
        what = f"{row['model']} {row['preset']} {row['what']}"
        yield Row(what, row["rows"] * 1e6 / row["step_us"], "tok/s")
    held = raw.get("runs")
    runs: Mapping[str, Any] = held if isinstance(held, Mapping) else {"": raw}
    for run, report in runs.items():
        tasks = report.get("tasks") if isinstance(report, Mapping) else None
        for task, score in tasks.items() if isinstance(tasks, Mapping) else ():
            yield Row(f"{run} {task}".strip(), 100 * score["accuracy"], f"% of {score['problems']}", 100.0)
    for row in _rows(raw.get("formats")):
        yield Row(f"{row['format']}: KL", row["kl"], "nats")
    for name in ("eagle3", "draft"):
        if isinstance(raw.get(name), Mapping):
            yield Row(name, raw[name]["tokens_per_verification"], "tokens", 1.0 + raw["drafted"])
    if checked := _rows(raw.get("checked")):
        ran = [row for row in checked if row["outcome"] != "skipped"]
        yield Row(f"{raw.get('tool')}: tests without an error", sum(row["clean"] for row in ran), "tests", len(ran))
    for row in _rows(raw.get("load")):
        if "failed" in row:
            continue
        yield Row(f"{row['model']} {row['preset']} {row['case']}", row["ready_s"], "s", row.get("limit_s"))


def _rows(value: Any) -> list[dict[str, Any]]:
    return [r for r in value if isinstance(r, dict)] if isinstance(value, list) else []
