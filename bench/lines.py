"""Lines of our own text that a wheel ships, by room and file type: `python -m bench lines`.

Counts physical lines of the tracked files in src/halfbyte, without vendored libraries, licences and compressed data.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

from bench.measurement import ROOT

PACKAGE = Path("src/halfbyte")
NOT_TEXT = frozenset((".xz", ".woff2", ""))


def shipped() -> dict[Path, int]:
    """Lines of each file, by its path below the package."""
    listing = subprocess.run(["git", "ls-files", str(PACKAGE)], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [Path(line) for line in listing.stdout.splitlines()]
    own = [
        path for path in files if path.suffix not in NOT_TEXT and "vendor" not in path.parts and (ROOT / path).is_file()
    ]
    return {path.relative_to(PACKAGE): (ROOT / path).read_bytes().count(b"\n") for path in own}


def main(largest: int) -> int:
    lines = shipped()
    rooms: Counter[tuple[str, str]] = Counter()
    for path, count in lines.items():
        rooms[path.parts[0] if len(path.parts) > 1 else "(root)", path.suffix] += count
    totals = Counter[str]()
    for (room, _), count in rooms.items():
        totals[room] += count
    for room, total in totals.most_common():
        kinds = ", ".join(f"{kind} {n}" for (name, kind), n in rooms.most_common() if name == room)
        print(f"{total:7} {room:12} {kinds}")
    print(f"{sum(totals.values()):7} together")
    for path, count in Counter(lines).most_common(largest):
        print(f"{count:7} {path.as_posix()}")
    return 0
