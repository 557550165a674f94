"""Lists the control groups above this process, which hold a container's limits, for both versions of cgroups.

Only the groups are listed; `memory` and `kernels.cpu.cores` read the limits from a controller's files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class ControlGroup:
    folder: Path
    version: int  # 1 or 2


def above(controller: str, own: Path = OWN, root: Path = ROOT) -> Iterator[ControlGroup]:
    """Every group of a controller (memory, cpu) that this process is in, the innermost first.

    In a container the path of the group may be the host's and not be there; the limit is then at the root of what is
    mounted, which comes last.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base, version = (root / controllers, 1) if controllers else (root, 2)
        if version == 1 and not base.is_dir():
            base = root / controller
        parts = [p for p in path.split("/") if p and p != ".."]
        for depth in range(len(parts), -1, -1):
            yield ControlGroup(base.joinpath(*parts[:depth]), version)
