"""Receipts: result files with the hash of every source file they measured, and which of them are stale.

`measured` finds the files behind some phases: their modules, the kernels these import, the CUDA files they name and
what those include. When one of them has changed since, the receipt is stale and names it. A file that is not of the
schema is shown as unreadable, with the reason. A checkout has this project's receipts in bench/results, a wheel in its
data (`setup.py` copies them), with the hashes that files outside of the package had when it was built.
Nothing here measures.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import halfbyte
from halfbyte.errors import UsageError
from halfbyte.gates import Gates
from halfbyte.kernels.launch import INCLUDES
from halfbyte.lab import environment
from halfbyte.lab.result import Result, ResultFile, from_json
from halfbyte.model import load
from halfbyte.model.gpt_oss import arch_of, choose
from halfbyte.plan.phase import Phase
from halfbyte.plan.select import all_phases

PACKAGE = Path(halfbyte.__file__).parent
CHECKOUT = PACKAGE.parents[1]
INSTALLED = PACKAGE / "data" / "results"  # of a wheel
ELSEWHERE = PACKAGE / "data" / "measured.json"
RESULTS = INSTALLED if INSTALLED.is_dir() else CHECKOUT / "bench" / "results"
_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
# Says which kernels a phase declares, Triton's among them; a phase that launches one of these imports it itself.
DECLARING = (PACKAGE / "kernels" / "cuda" / "phase.py",)
_NATIVE = (".cu", ".cuh", ".h", ".cpp")


# ---- what was measured ----------------------------------------------------------------------------------------------


def sources_of(start: Iterable[Path], rooms: tuple[str, ...] = ("kernels",)) -> list[Path]:
    """Files reached from these: imports of the given rooms, sources that Python names, and what they include."""
    files: set[Path] = set()
    todo = list(start)
    while todo:
        path = todo.pop()
        if path in files or not path.is_file():
            continue
        files.add(path)
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py" and path not in DECLARING:
            todo += _python(path, text, rooms)
        elif path.suffix != ".py":
            todo += [INCLUDES / name for name in _INCLUDE.findall(text)]
    return sorted(files)


def _python(path: Path, text: str, rooms: tuple[str, ...]) -> Iterator[Path]:
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.endswith(_NATIVE):
                yield from path.parent.glob(node.value) if "*" in node.value else (path.parent / node.value,)
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
        phase_object = by_name[phase] if isinstance(phase, str) else phase
        starts.append(PACKAGE.joinpath(*type(phase_object).__module__.split(".")[1:]).with_suffix(".py"))
    return hashes(sources_of(starts))


def served(model: str | None, gates: Iterable[Gates], device: str | None = None) -> dict[str, str]:
    """File -> hash, for everything behind a server's answers: itself, its engine, and the phases of each plan here."""
    name, arch = load.resolve_model(model), arch_of(load.resolve_device(device))
    facts = load.read_facts(name)
    plans = [choose(facts.config, plan_gates, arch, facts.formats).chosen for plan_gates in gates]
    starts = [PACKAGE / "server" / "app.py", PACKAGE / "engine" / "build.py"]
    phases = {phase.name for plan in plans for chosen in plan.values() for phase in chosen}
    return hashes(sources_of(starts, ("server", "engine"))) | measured(phases)


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


# ---- writing --------------------------------------------------------------------------------------------------------


def result_file(
    tool: str, results: Iterable[Result], measured: Mapping[str, str], command: Sequence[str] | None = None
) -> ResultFile:
    """These results with this machine's record; `command` is what was typed after the tool's name, files by their names
    alone: receipts keep no folder of the machine."""
    typed = sys.argv[1:] if command is None else command
    arguments = (Path(word).name if Path(word).is_absolute() else word for word in typed)
    return ResultFile(tool, tuple(arguments), environment.collect(), dict(measured), tuple(results))


# ---- which are stale ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Receipt:
    name: str
    state: str  # current, STALE, unhashed, unreadable
    why: str = ""
    file: ResultFile | None = None

    @property
    def results(self) -> tuple[Result, ...]:
        return () if self.file is None else self.file.results

    @property
    def gpu(self) -> str:
        return "" if self.file is None else self.file.gpu

    @property
    def date(self) -> str:
        return "" if self.file is None else self.file.date

    def as_dict(self) -> dict[str, Any]:
        results = [asdict(r) | {"label": r.cell.label} for r in self.results]
        return {
            "name": self.name, "state": self.state, "why": self.why, "gpu": self.gpu, "date": self.date,
            "results": results,
        }  # fmt: skip


def read_all(folder: Path | None = None) -> list[Receipt]:
    folder = RESULTS if folder is None else folder
    if not folder.is_dir():
        raise UsageError(f"there are no receipts in {folder}; name a folder of results.")
    return [read(p) for p in sorted(folder.glob("*.json"))]


def read(path: Path) -> Receipt:
    try:
        file = from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, UsageError) as e:
        empty = path.is_file() and not path.stat().st_size
        return Receipt(path.stem, "unreadable", "the file is empty" if empty else str(e))
    state, why = freshness(file.measured)
    return Receipt(path.stem, state, why, file)


def freshness(measured: Mapping[str, str]) -> tuple[str, str]:
    if not measured:
        return "unhashed", "carries no hash of what it measured"
    elsewhere = _hashes_elsewhere()
    changed = [name for name, was in measured.items() if elsewhere.get(name) != was and not _same(PACKAGE / name, was)]
    if not changed:
        return "current", ""
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return "STALE", f"changed since: {', '.join(sorted(changed)[:3])}{more}"


def _hashes_elsewhere() -> dict[str, str]:
    """File -> hash, for files of the checkout that a wheel was built from and does not carry."""
    try:
        return dict(json.loads(ELSEWHERE.read_text(encoding="utf-8")))
    except OSError:
        return {}


def _same(path: Path, was: str) -> bool:
    return path.is_file() and file_hash(path) == was
