"""Success criteria by GPU, from a file each (`targets/`), and the verdicts of measured cells against them.

A criterion names a model, a test, a figure and what it must reach; `required` ones fail the level that misses them, the
others are rungs of a ladder that say how far it got. A file may also point at receipts: then a cell must reach a share
of what the same cell reached there, if this is a checkout that has them. Measures nothing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halfbyte.errors import UsageError
from halfbyte.lab import receipts
from halfbyte.lab.result import Check, Result

FOLDER = Path(__file__).parent / "targets"


@dataclass(frozen=True)
class Target:
    model: str
    test: Mapping[str, int]  # what the cell's shape must say; depth 0 and concurrency 1 unless named
    figure: str
    rung: str
    source: str
    least: float | None = None
    most: float | None = None
    statistic: str = "value"  # or low, high
    required: bool = False
    preset: str = ""  # empty: any

    def __post_init__(self) -> None:
        if (self.least is None) == (self.most is None):
            raise UsageError(f"the target {self.rung!r} must say either least or most.")
        if self.statistic not in ("value", "low", "high"):
            raise UsageError(
                f"the target {self.rung!r} names the statistic {self.statistic!r}; use value, low or high."
            )

    def fits(self, result: Result) -> bool:
        cell = result.cell
        test = {"depth": 0, "concurrency": 1, **self.test}
        has = {"depth": 0, "concurrency": 1, **cell.shape}
        same = all(has.get(name) == value for name, value in test.items())
        return same and cell.model.endswith(self.model) and self.preset in ("", cell.preset)

    def check(self, result: Result) -> Check | None:
        """None where the cell has no such figure."""
        figure = next((f for f in result.figures if f.name == self.figure), None)
        if figure is None:
            return None
        value = float(getattr(figure, self.statistic))
        bound = self.least if self.least is not None else self.most
        assert bound is not None
        ok = value >= bound if self.least is not None else value <= bound
        sign = "at least" if self.least is not None else "at most"
        return Check(f"{self.rung}: {sign} {bound:.6g} {figure.unit}", ok, value, bound, self.source)


@dataclass(frozen=True)
class Targets:
    gpus: tuple[str, ...]
    targets: tuple[Target, ...] = ()

    def judge(self, results: Sequence[Result]) -> tuple[list[Result], list[str]]:
        """The results with their verdicts, and a sentence for every required one that is missed."""
        judged, missed = [], []
        for result in results:
            checks = []
            for target in self.targets:
                if result.figures and target.fits(result) and (check := target.check(result)) is not None:
                    checks.append(check)
                    if target.required and not check.ok:
                        missed.append(f"{result.cell.label}: {check.value:.6g}, {check.what} ({target.source})")
            judged.append(replace(result, targets=(*result.targets, *checks)) if checks else result)
        return judged, missed


def read_targets(path: Path) -> Targets:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        listed = tuple(Target(**t) for t in raw.get("target", ()))
        pointed = tuple(_from_receipts(raw["receipts"])) if "receipts" in raw else ()
        return Targets(tuple(raw["gpus"]), (*listed, *pointed))
    except (OSError, tomllib.TOMLDecodeError, LookupError, TypeError) as e:
        raise UsageError(f"{path} is no file of targets ({type(e).__name__}: {e}).") from None


def _from_receipts(raw: Mapping[str, Any]) -> Iterator[Target]:
    if not receipts.RESULTS.is_dir():
        return
    for name in raw["files"]:
        for result in receipts.read(receipts.RESULTS / f"{name}.json").results:
            speed = next((f for f in result.figures if f.name == "speed"), None)
            if speed is None:
                continue
            shape = {k: int(v) for k, v in result.cell.shape.items() if k in ("pp", "tg", "depth", "concurrency")}
            share = float(raw["share"])
            yield Target(
                result.cell.model, shape, "speed", f"{share:.0%} of our receipt", f"{name}.json, {result.cell.path}",
                least=share * speed.value, preset=result.cell.preset, required=False,
            )  # fmt: skip


def targets_for(gpu: str, file: Path | None = None) -> Targets | None:
    """The targets of a GPU by its name, or those of a file; None where there are none."""
    if file is not None:
        return read_targets(file)
    for path in sorted(FOLDER.glob("*.toml")):
        targets = read_targets(path)
        if any(name.lower() in gpu.lower() for name in targets.gpus):
            return targets
    return None
