"""`halfbyte check --kit`: what a machine that we do not have can tell us, in one command and one archive.

Facts of the machine, the doctor's word, the kernels' self-test, levels 1 to 4 on the embedded model; the inspection of
a model and the cost of its presets (the embedded one, unless another is named); on a GPU then kernel path, benchmark
and kernel profile of the largest gpt-oss that fits (random weights of its shape: nothing is downloaded). All of it ends
within a budget of time: what no longer fits, or is not done when it is over, is left out and named. The archive holds
results that `halfbyte report` reads, the test logs, and the engines' logs. Names of the user, of the machine, of
folders and addresses are taken out of every file first; prompts are the kit's own.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from halfbyte.errors import HalfbyteError
from halfbyte.gates import PRESETS, child_environment
from halfbyte.lab import environment
from halfbyte.lab.child import start_child
from halfbyte.lab.levels.log_page import write_files
from halfbyte.lab.levels.protocol import Outcome, run_levels
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.options import CheckOptions, StressCounts, Works
from halfbyte.lab.peers.halfbyte import HalfbytePeer
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.peers.process import TimeLimits
from halfbyte.memory import read_memory
from halfbyte.model import load

BUDGET_S = 20 * 60.0
SHAPES = ("120b", "20b")  # the largest first
PRESETS_MEASURED = ("fast", "exact")
ROOM = 1.15  # times the weights: KV cache and workspace beside them
QUALITY_S = 5 * 60.0
LEAST_S = 60.0  # a step that has less is not begun
KEPT_BYTES = 2 << 20  # of a log: its end
# What the archive takes; JSON is results alone, since `report` reads every JSON file in it.
TEXT = (".md", ".log", ".txt")
SHORT = StressCounts(sequential=30, load=60)

Progress = Callable[[str], None]


@dataclass
class Kit:
    """One run. `left_out` says what did not fit into the time."""

    folder: Path
    budget_s: float = BUDGET_S
    device: str | None = None
    progress: Progress = lambda _: None
    done: Callable[[Outcome], None] = lambda _: None
    counts: StressCounts = SHORT
    model: str | None = None  # that is inspected, and whose presets are compared; None: the embedded one
    begun: float = field(default_factory=time.monotonic)
    left_out: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.begun)

    def has_time(self, title: str, need_s: float = LEAST_S) -> bool:
        if self.left_s < need_s:
            self.left_out.append(f"{title}: {max(0.0, self.left_s):.0f} s were left")
        return self.left_s >= need_s

    # ---- the steps -----------------------------------------------------------------------------

    def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        gpu = load.resolve_device(self.device).type == "cuda"
        self.doctor()
        flags = ("--self-test", "always") if gpu else ()
        self.levels("embedded", None, "exact", ("1", "1.5", "2", "3", "4"), Works((512,), (32,), repeats=3), flags)
        self.inspection()
        shape = largest(self.device) if gpu else None
        for preset in PRESETS_MEASURED if shape else ():
            title = f"{shape} {preset}"
            if self.has_time(f"benchmark of {title}", 3 * LEAST_S):
                self.levels(title, f"random:{shape}", preset, ("1.5", "4"), Works(), flags)
        self.profile(f"random:{shape}" if shape else None, "fast" if shape else "exact", gpu)
        facts = environment.collect()
        lines = [f"{key}: {json.dumps(value, default=str)}" for key, value in facts.items()]
        lines += [f"left out: {text}" for text in self.left_out] or ["nothing was left out"]
        (self.folder / "facts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def levels(
        self, title: str, model: str | None, preset: str, levels: Sequence[str], works: Works, flags: tuple[str, ...]
    ) -> None:
        """Level by level, so that the last ones are left out where the time does not suffice."""
        folder = self.folder / re.sub(r"[^a-z0-9]+", "-", title)
        setup = Setup(model, PRESETS[preset].gates, self.device, flags=flags)
        subject = Subject(HalfbytePeer(), setup, folder, preset=preset, baseline=setup.gates, progress=self.progress)
        options = CheckOptions(counts=self.counts, works=works)
        report = None
        for level in levels:
            if not self.has_time(f"level {level} of {title}"):
                continue
            left, until = self.left_s, self.begun + self.budget_s
            subject.limits = replace(TimeLimits(), start_s=min(600.0, left), request_s=min(120.0, left), until=until)
            part = run_levels(subject, [level], options)
            if self.left_s <= 0:  # its engine was ended in the middle: what it says is no verdict
                self.left_out.append(f"level {level} of {title}: the time was over while it ran")
                break
            for outcome in part.outcomes:
                self.done(outcome)
            if report is None:
                report = part
            else:
                report.outcomes += part.outcomes
        if report is not None:
            write_files(report, folder)
            self.outcomes += report.outcomes

    def profile(self, model: str | None, preset: str, gpu: bool) -> None:
        if not self.has_time("kernel profile"):
            return
        self.progress("kernel profile")
        arguments = ["-m", "halfbyte", "profile", *([model] if model else []), "--preset", preset]
        arguments += ["--out", str(self.folder / "profile.json"), "--pp", "2048" if gpu else "256"]
        if not gpu:
            arguments += ["--device", "cpu", "--tokens", "8", "--depth", "256"]
        if code := self.child(arguments, "profile.txt", self.left_s):
            self.left_out.append(f"kernel profile: it ended with {code}")

    def inspection(self) -> None:
        """What the model holds, and what its presets cost. The texts are the kit's own."""
        arguments = [*([self.model] if self.model else []), *(["--device", self.device] if self.device else [])]
        for title, name, command in (
            ("inspection", "inspect.txt", ["inspect", *arguments]),
            ("quality", "quality.txt", ["check", "quality", *arguments, "--lengths", "2048"]),
        ):
            if not self.has_time(title):
                continue
            self.progress(title)
            code = self.child(["-m", "halfbyte", *command, "--json"], name, min(QUALITY_S, self.left_s))
            if code not in (0, 1):  # 1: a preset did not pass, which is a result
                self.left_out.append(f"{title}: it ended with {code}")

    def doctor(self) -> None:
        """Its word on the machine, which is no verdict of the kit's."""
        self.child(["-m", "halfbyte", "doctor"], "doctor.txt", LEAST_S)

    def child(self, arguments: Sequence[str], name: str, limit_s: float) -> int:
        """Python with these words, its output in a file; its exit status."""
        with (self.folder / name).open("w", encoding="utf-8") as file:
            process = start_child(
                [sys.executable, *arguments],
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                env=child_environment(),
            )
            try:
                return process.wait(max(1.0, limit_s))
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait()


def largest(device: str | None) -> str | None:
    """The largest gpt-oss whose weights fit into what is free, all layers in MXFP4."""
    free = read_memory(load.resolve_device(device)).free
    for shape in SHAPES:
        name = load.resolve_model(f"{load.RANDOM}{shape}")
        if load.weight_bytes(name, PRESETS["exact"].gates) * ROOM < free:
            return shape
    return None


# ---- the archive -----------------------------------------------------------------------------------------------------


def private_words(folder: Path) -> dict[str, str]:
    """What may say who and where somebody is, and what stands in its place; the longest first."""
    substitutes = {
        str(folder.resolve()): "(kit)", str(folder): "(kit)", str(Path.cwd()): "(folder)", str(Path.home()): "~",
        socket.gethostname(): "(machine)", sys.prefix: "(environment)",
        str(Path(load.__file__).parents[3]): "(halfbyte)",
    }  # fmt: skip
    with contextlib.suppress(OSError, KeyError):  # a user without a name
        substitutes[getpass.getuser()] = "(user)"
    long_enough = {w: t for w, t in substitutes.items() if len(w) > 3 and w not in ("root", "localhost", os.sep)}
    return dict(sorted(long_enough.items(), key=lambda pair: -len(pair[0])))


_ADDRESS = re.compile(r"\b(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}\b(?!\.\d)")
_MAIL = re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.]+\b")


def without_private(text: str, substitutes: dict[str, str]) -> str:
    """Whole words only: a user may be called like a part of ours."""
    for word, instead in substitutes.items():
        text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", lambda _, instead=instead: instead, text)  # type: ignore[misc]
    return _MAIL.sub("(mail)", _ADDRESS.sub("(address)", text))


def values_without_private(raw: Any, substitutes: dict[str, str]) -> Any:
    """The row of a result; the names of its fields are the schema's."""
    if isinstance(raw, dict):
        return {key: values_without_private(value, substitutes) for key, value in raw.items()}
    if isinstance(raw, list):
        return [values_without_private(value, substitutes) for value in raw]
    return without_private(raw, substitutes) if isinstance(raw, str) else raw


def write_archive(folder: Path, archive: Path) -> list[str]:
    """Every result and text of a run, in one file; their names."""
    substitutes = private_words(folder)
    names = []
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            result = path.name in ("results.json", "profile.json")
            if not result and path.suffix not in TEXT:
                continue
            name = without_private(path.relative_to(folder).as_posix().replace("/", "-"), substitutes)
            if result:
                text = json.dumps(values_without_private(json.loads(path.read_text("utf-8")), substitutes)) + "\n"
            else:
                text = without_private(path.read_bytes()[-KEPT_BYTES:].decode(errors="replace"), substitutes)
            zipped.writestr(name, text)
            names.append(name)
    return names


def make_kit(kit: Kit, archive: Path) -> list[str]:
    """Runs it and writes the archive, whatever failed on the way; the names of its files."""
    try:
        kit.run()
    except HalfbyteError as e:
        kit.left_out.append(f"the kit ended early: {e}")
        (kit.folder / "facts.txt").write_text("\n".join(kit.left_out) + "\n", encoding="utf-8")
    return write_archive(kit.folder, archive)
