"""Whether every pinned dependency has a wheel for Linux on aarch64, written down with its date.

    python -m bench run aarch64-packages

Asks the index for the files of every package in constraints.txt and constraints-cpu.txt and of those that the image of
vLLM names (nothing but names, torch's and vLLM's metadata is downloaded) and writes `aarch64.json` beside this file:
for each Python that we serve the file that pip would take on a machine like GB10 (glibc 2.39), what torch itself asks
for by exact versions, and what vLLM asks for. A test compares the record with the pins. A package that only comes as
sources, or that the index does not have in that version, is recorded so.
"""

from __future__ import annotations

import datetime
import io
import json
import re
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from bench.measurement import ROOT, Run, measurement

EVERYWHERE, WITHOUT_CUDA = "constraints.txt", "constraints-cpu.txt"
RECORD = Path(__file__).with_name("aarch64.json")
PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
GLIBC = (2, 39)  # Ubuntu 24.04, which DGX OS 7 is
JSON = "application/vnd.pypi.simple.v1+json"


def pins(*files: str) -> dict[str, str]:
    """The pinned version of each package that the files name."""
    lines = [line for file in files for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    return dict(m.groups() for line in lines if (m := re.match(r"([\w.-]+)==([\w.+!-]+)$", line.strip())))


def platforms() -> list[str]:
    """What such a machine takes, the best first."""
    named = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}
    tags = [f"manylinux_{GLIBC[0]}_{minor}_aarch64" for minor in range(GLIBC[1], 16, -1)]
    return [*tags, *(f"{name}_aarch64" for minor, name in named.items() if minor == 17), "linux_aarch64"]


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
            _, release, _, offered = parse_wheel_filename(name)
        except InvalidWheelFilename:
            continue
        ranks = [accepted[tag] for tag in offered if tag in accepted]
        if str(release).partition("+")[0] == version.partition("+")[0] and ranks:
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
    return {file: urljoin(page, link) for link, file in links}


class RemoteWheel(io.RawIOBase):
    """A file behind HTTP, read in parts: of a wheel of half a gigabyte only its metadata is wanted."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self.client, self.url, self.at = client, url, 0
        head = client.head(url)
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
        answer = self.client.get(self.url, headers={"Range": f"bytes={self.at}-{last}"})
        if answer.status_code != 206:
            raise SystemExit(f"{self.url}: the index does not give parts of files ({answer.status_code})")
        buffer[: len(answer.content)] = answer.content
        self.at += len(answer.content)
        return len(answer.content)


def text_in(client: httpx.Client, wheel: str, ending: str) -> str:
    """The text of the only file in the wheel whose name has this ending."""
    with zipfile.ZipFile(io.BufferedReader(RemoteWheel(client, wheel), 1 << 18)) as z:
        (name,) = [name for name in z.namelist() if name.endswith(ending)]
        return z.read(name).decode()


def requirements_of(client: httpx.Client, wheel: str) -> list[Requirement]:
    """What a wheel at this place wants on such a machine."""
    lines = re.findall(r"^Requires-Dist: (.*)$", text_in(client, wheel, ".dist-info/METADATA"), re.M)
    here = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "aarch64", "extra": ""}
    return [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate(here)]


def asked_exactly(client: httpx.Client, wheel: str) -> list[str]:
    """In one version and no other."""
    return sorted(f"{r.name}{r.specifier}" for r in requirements_of(client, wheel) if str(r.specifier).startswith("=="))


def image_pins() -> dict[str, str]:
    """What the image of vLLM names by version: package -> version."""
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    return {
        name.lower(): version for name, version in re.findall(r"^ARG (VLLM|FASTSAFETENSORS)_VERSION=(\S+)$", text, re.M)
    }


def record_text(record: dict[str, Any]) -> str:
    """JSON with one line for each field, and one for each package."""
    packages = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in record["packages"].items())
    fields = ",\n".join(f" {json.dumps(key)}: {json.dumps(record[key])}" for key in record if key != "packages")
    return f'{{\n{fields},\n "packages": {{\n{packages}\n }}\n}}\n'


@dataclass(frozen=True)
class Options:
    index: str = "https://pypi.org/simple"


@measurement("aarch64-packages", needs=("network",), seconds=900, receipt=False, routine=False)
def aarch64_packages(run: Run, options: Options) -> None:
    packages: dict[str, Any] = {}
    with httpx.Client(timeout=60, follow_redirects=True) as client:
        torch_asks: list[str] = []
        vllm_asks: list[str] = []
        for name, version in {**pins(EVERYWHERE, WITHOUT_CUDA), **image_pins()}.items():
            files = files_of(client, options.index, name)
            wheels = {f"{a}.{b}": choose(list(files), version, (a, b)) for a, b in PYTHONS}
            if name == "torch" and wheels["3.12"] is not None:
                torch_asks = asked_exactly(client, files[wheels["3.12"]])
            if name == "vllm" and wheels["3.12"] is not None:
                vllm_asks = sorted(
                    f"{r.name}{r.specifier}" for r in requirements_of(client, files[wheels["3.12"]]) if r.specifier
                )
            published = any(f"-{version}" in file for file in files)
            packages[name] = {"version": version, "wheels": wheels, "in_index": published}
            if None in wheels.values():
                print(f"{name} {version}: no wheel for {[p for p, w in wheels.items() if w is None]}", file=sys.stderr)
    record = {
        "made": datetime.date.today().isoformat(), "by": "python -m bench run aarch64-packages", "index": options.index,
        "glibc": ".".join(map(str, GLIBC)), "pythons": [f"{a}.{b}" for a, b in PYTHONS], "torch_asks": torch_asks,
        "vllm_asks": vllm_asks, "packages": packages,
    }  # fmt: skip
    RECORD.write_text(record_text(record), encoding="utf-8")
    print(f"{len(packages)} packages: {RECORD.relative_to(ROOT)}")
