"""Whether every pinned dependency has a wheel for Linux on aarch64, written down with its date.

    python -m bench.packages.aarch64 [--index https://pypi.org/simple]

Asks the index for the files of every package in constraints.txt (names alone, nothing is downloaded) and writes
`aarch64.json` beside this file: for each Python that we serve the file that pip would take on a machine like GB10
(glibc 2.39). A test compares the record with constraints.txt. A package that only comes as sources, or that the index
does not have in that version, is recorded so.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from pathlib import Path
from typing import Any

import httpx
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("aarch64.json")
PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
GLIBC = (2, 39)  # Ubuntu 24.04, which DGX OS 7 is
JSON = "application/vnd.pypi.simple.v1+json"


def pins() -> dict[str, str]:
    """Of constraints.txt: name -> version."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(m.groups() for line in lines if (m := re.match(r"([\w.-]+)==([\w.+!-]+)$", line.strip())))


def platforms() -> list[str]:
    """What such a machine takes, the best first."""
    named = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}
    found = [f"manylinux_{GLIBC[0]}_{minor}_aarch64" for minor in range(GLIBC[1], 16, -1)]
    return [*found, *(f"{name}_aarch64" for minor, name in named.items() if minor == 17), "linux_aarch64"]


def tags(python: tuple[int, int]) -> list[Tag]:
    where = platforms()
    short = f"cp{python[0]}{python[1]}"
    return [*cpython_tags(python, platforms=where), *compatible_tags(python, short, where)]


def choose(files: list[str], version: str, python: tuple[int, int]) -> str | None:
    """The wheel that pip would take; None if there is none."""
    accepted = {tag: i for i, tag in enumerate(tags(python))}
    best: tuple[int, str] | None = None
    for name in files:
        try:
            _, found, _, offered = parse_wheel_filename(name)
        except InvalidWheelFilename:
            continue
        ranks = [accepted[tag] for tag in offered if tag in accepted]
        if str(found).partition("+")[0] == version.partition("+")[0] and ranks:
            best = min(best or (min(ranks), name), (min(ranks), name))
    return best[1] if best else None


def files_of(client: httpx.Client, index: str, name: str) -> list[str]:
    answer = client.get(
        f"{index.rstrip('/')}/{canonicalize_name(name)}/", headers={"Accept": f"{JSON}, text/html;q=0.1"}
    )
    if answer.status_code == 404:
        return []
    answer.raise_for_status()
    if "json" in answer.headers.get("content-type", ""):
        return [file["filename"] for file in answer.json()["files"] if not file.get("yanked")]
    return re.findall(r"<a [^>]*>\s*([^<\s]+)\s*</a>", answer.text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", default="https://pypi.org/simple")
    index = parser.parse_args().index
    packages: dict[str, Any] = {}
    with httpx.Client(timeout=60, follow_redirects=True) as client:
        for name, version in pins().items():
            files = files_of(client, index, name)
            wheels = {f"{a}.{b}": choose(files, version, (a, b)) for a, b in PYTHONS}
            known = any(f"-{version}" in file for file in files)
            packages[name] = {"version": version, "wheels": wheels, "in_index": known}
            if None in wheels.values():
                print(f"{name} {version}: no wheel for {[p for p, w in wheels.items() if w is None]}", file=sys.stderr)
    record = {
        "made": datetime.date.today().isoformat(), "by": "python -m bench.packages.aarch64", "index": index,
        "glibc": ".".join(map(str, GLIBC)), "pythons": [f"{a}.{b}" for a, b in PYTHONS], "packages": packages,
    }  # fmt: skip
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{len(packages)} packages: {RECORD.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
