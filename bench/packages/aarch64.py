"""Whether every pinned dependency has a wheel for Linux on aarch64, written down with its date.

    python -m bench.packages.aarch64 [--index https://pypi.org/simple]

Asks the index for the files of every package in constraints.txt and constraints-cpu.txt and of those that the image of
vLLM names (nothing but names, torch's and vLLM's metadata is downloaded) and writes `aarch64.json` beside this file:
for each Python that we serve the file that pip would take on a machine like GB10 (glibc 2.39), what torch itself asks
for by exact versions, and what vLLM asks for. A test compares the record with the pins. A package that only comes as
sources, or that the index does not have in that version, is recorded so.
"""

from __future__ import annotations

import argparse
import datetime
import io
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[2]
EVERYWHERE, WITHOUT_CUDA = "constraints.txt", "constraints-cpu.txt"
RECORD = Path(__file__).with_name("aarch64.json")
PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
GLIBC = (2, 39)  # Ubuntu 24.04, which DGX OS 7 is
JSON = "application/vnd.pypi.simple.v1+json"


def pins(*files: str) -> dict[str, str]:
    """Of these files: name -> version."""
    lines = [line for file in files for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
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


def files_of(client: httpx.Client, index: str, name: str) -> dict[str, str]:
    """File -> where it is."""
    page = f"{index.rstrip('/')}/{canonicalize_name(name)}/"
    answer = client.get(page, headers={"Accept": f"{JSON}, text/html;q=0.1"})
    if answer.status_code == 404:
        return {}
    answer.raise_for_status()
    if "json" in answer.headers.get("content-type", ""):
        return {file["filename"]: file["url"] for file in answer.json()["files"] if not file.get("yanked")}
    links = re.findall(r'<a [^>]*href="([^"#]+)[^>]*>\s*([^<\s]+)\s*</a>', answer.text)
    return {file: urljoin(page, place) for place, file in links}


class RemoteFile(io.RawIOBase):
    """A file behind HTTP, read in parts: of a wheel of half a gigabyte only its metadata is wanted."""

    def __init__(self, client: httpx.Client, place: str) -> None:
        self.client, self.place, self.at = client, place, 0
        head = client.head(place)
        head.raise_for_status()
        self.size = int(head.headers["content-length"])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        last = min(self.at + len(buffer), self.size) - 1
        if last < self.at:
            return 0
        answer = self.client.get(self.place, headers={"Range": f"bytes={self.at}-{last}"})
        if answer.status_code != 206:
            raise SystemExit(f"{self.place}: the index does not give parts of files ({answer.status_code})")
        buffer[: len(answer.content)] = answer.content
        self.at += len(answer.content)
        return len(answer.content)


def text_in(client: httpx.Client, wheel: str, ending: str) -> str:
    """Of the one file in a wheel at this place whose name ends so."""
    with zipfile.ZipFile(io.BufferedReader(RemoteFile(client, wheel), 1 << 18)) as z:
        (name,) = [name for name in z.namelist() if name.endswith(ending)]
        return z.read(name).decode()


def asked(client: httpx.Client, wheel: str) -> list[Requirement]:
    """What a wheel at this place wants on such a machine."""
    wanted = re.findall(r"^Requires-Dist: (.*)$", text_in(client, wheel, ".dist-info/METADATA"), re.M)
    here = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "aarch64", "extra": ""}
    return [r for r in map(Requirement, wanted) if r.marker is None or r.marker.evaluate(here)]


def asked_exactly(client: httpx.Client, wheel: str) -> list[str]:
    """In one version and no other."""
    return sorted(f"{r.name}{r.specifier}" for r in asked(client, wheel) if str(r.specifier).startswith("=="))


def image_pins() -> dict[str, str]:
    """What the image of vLLM names by version: package -> version."""
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    return {
        name.lower(): version for name, version in re.findall(r"^ARG (VLLM|FASTSAFETENSORS)_VERSION=(\S+)$", text, re.M)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", default="https://pypi.org/simple")
    index = parser.parse_args().index
    packages: dict[str, Any] = {}
    with httpx.Client(timeout=60, follow_redirects=True) as client:
        torch_asks: list[str] = []
        vllm_asks: list[str] = []
        for name, version in {**pins(EVERYWHERE, WITHOUT_CUDA), **image_pins()}.items():
            files = files_of(client, index, name)
            wheels = {f"{a}.{b}": choose(list(files), version, (a, b)) for a, b in PYTHONS}
            if name == "torch" and wheels["3.12"] is not None:
                torch_asks = asked_exactly(client, files[wheels["3.12"]])
            if name == "vllm" and wheels["3.12"] is not None:
                vllm_asks = sorted(
                    f"{r.name}{r.specifier}" for r in asked(client, files[wheels["3.12"]]) if r.specifier
                )
            known = any(f"-{version}" in file for file in files)
            packages[name] = {"version": version, "wheels": wheels, "in_index": known}
            if None in wheels.values():
                print(f"{name} {version}: no wheel for {[p for p, w in wheels.items() if w is None]}", file=sys.stderr)
    record = {
        "made": datetime.date.today().isoformat(), "by": "python -m bench.packages.aarch64", "index": index,
        "glibc": ".".join(map(str, GLIBC)), "pythons": [f"{a}.{b}" for a, b in PYTHONS], "torch_asks": torch_asks,
        "vllm_asks": vllm_asks, "packages": packages,
    }  # fmt: skip
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{len(packages)} packages: {RECORD.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
