"""A process with a hard limit of memory, as a container has it: a cgroup below the test's own.

Version one or two, whichever is here and may be written; where neither may, `limited_group` says so by a skip. Nothing
is left behind: what runs in the group ends with it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from halfbyte import cgroups

FILES = {1: ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.usage_in_bytes"),
         2: ("memory.max", "memory.peak", "memory.current")}  # fmt: skip
ENTER = 'echo $$ > "$GROUP/cgroup.procs" && exec "$@"'


@dataclass
class LimitedGroup:
    folder: Path
    version: int

    def limit(self, count: int) -> None:
        (self.folder / FILES[self.version][0]).write_text(str(count))

    @property
    def peak(self) -> int:
        return int((self.folder / FILES[self.version][1]).read_text())

    @property
    def used(self) -> int:
        return int((self.folder / FILES[self.version][2]).read_text())

    def start(self, command: Sequence[str], **options: object) -> subprocess.Popen[str]:
        """The process is in the group before its program begins."""
        environment = {**os.environ, "GROUP": str(self.folder), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            ["sh", "-c", ENTER, "sh", *command], env=environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, **options,  # type: ignore[call-overload]
        )  # fmt: skip

    def run(self, command: Sequence[str]) -> tuple[int, str, str]:
        process = self.start(command)
        out, err = process.communicate()
        return process.returncode, out, err

    def close(self) -> None:
        """A group can be removed once nobody is in it."""
        for _ in range(200):
            for pid in (self.folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            try:
                self.folder.rmdir()
                return
            except OSError:
                time.sleep(0.05)
        self.folder.rmdir()


@contextlib.contextmanager
def limited_group() -> Iterator[LimitedGroup]:
    problem = "there is no memory cgroup here"
    for group in cgroups.above("memory"):
        if not (group.folder / "cgroup.procs").exists():
            continue
        folder = group.folder / f"halfbyte-test-{os.getpid()}-{time.monotonic_ns()}"
        try:
            folder.mkdir()
        except OSError as e:
            problem = f"no memory cgroup can be made below {group.folder} ({e.strerror})"
            break
        made = LimitedGroup(folder, group.version)
        if not (folder / FILES[group.version][0]).exists():  # version two without delegation of this controller
            folder.rmdir()
            problem = f"{group.folder} does not hand its memory controller on"
            break
        try:
            yield made
        finally:
            made.close()
        return
    pytest.skip(problem)
