"""`bundle`: everything that a machine without a network needs, in one archive: wheels, models, checksums, an installer.

One pass over every file: it is hashed while it is copied. A model that `pull` recorded is held to its record on the
way. The archive is not compressed: weights do not shrink.
"""

from __future__ import annotations

import email
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from halfbyte import gates as gates_
from halfbyte.cli.options import Activity, JsonOption, LoadingBar, err, print_json
from halfbyte.errors import CheckpointError, PeerError, UsageError

ROOT = "halfbyte-bundle"
MACHINES = ("x86_64", "aarch64")
# Of the C library, from the oldest that wheels are made for to that of DGX OS and Ubuntu 24.04.
GLIBC = range(17, 40)


@dataclass(frozen=True)
class Member:
    """A file of the bundle, and what it must hash to where that is known."""

    name: str
    path: Path
    sha256: str | None = None


class HashingFile:
    """A file that tarfile reads, hashed on the way."""

    def __init__(self, file: IO[bytes], on_bytes: Callable[[int], None]) -> None:
        self.file = file
        self.hash = hashlib.sha256()
        self.on_bytes = on_bytes

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(size)
        self.hash.update(data)
        self.on_bytes(len(data))
        return data


def wheel_members(folder: Path) -> list[Member]:
    wheels = sorted(folder.glob("*.whl"))
    if not any(w.name.startswith("halfbyte-") for w in wheels):
        raise UsageError(
            f"{folder} has no wheel of halfbyte; make one with `make wheel`, and give its folder with --wheels."
        )
    return [Member(f"wheels/{w.name}", w) for w in wheels]


def check_complete(folder: Path, extra: str | None, machine: str | None) -> None:
    """Refuse wheels that cannot install alone: what our wheel names as needed must lie beside it."""
    names = {_plain(w.name.split("-")[0]) for w in folder.glob("*.whl")}
    missing = sorted(requirements_of(own_wheel(folder, machine), extra) - names)
    if missing:
        raise UsageError(
            f"{folder} lacks {len(missing)} packages that halfbyte needs ({', '.join(missing[:5])}"
            f"{', …' if len(missing) > 5 else ''}), so the bundle could not be installed; add --download."
        )


def requirements_of(wheel: Path, extra: str | None) -> set[str]:
    """Names of the packages that a wheel always needs, or for `extra`. Those for some platforms alone are left out."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            metadata = email.message_from_bytes(archive.read(name))
    except (OSError, zipfile.BadZipFile, StopIteration):
        raise UsageError(f"{wheel} is no wheel; make it again with `make wheel`.") from None
    names = set()
    for line in metadata.get_all("Requires-Dist", []):
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        if not marker or (extra is not None and re.fullmatch(rf"extra == ['\"]{re.escape(extra)}['\"]", marker)):
            names.add(_plain(re.split(r"[\s<>=!~\[(]", requirement, maxsplit=1)[0]))
    return names


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def own_wheel(folder: Path, machine: str | None) -> Path:
    """The newest wheel of halfbyte in a folder, for a machine where one is named."""
    wheels = sorted(
        w for w in folder.glob("halfbyte-*.whl") if machine is None or machine in w.name or "-any" in w.name
    )
    if not wheels:
        raise UsageError(
            f"{folder} has no wheel of halfbyte{f' for {machine}' if machine else ''}; `make wheel` makes one."
        )
    return wheels[-1]


def model_members(model: str) -> Iterator[Member]:
    """What loading reads, what belongs to it, and the record that `pull` wrote, if it did."""
    from halfbyte.model import checkpoint, checksums, load

    path = load.resolve_model(model).path
    if path is None:
        raise UsageError(f"{model} has no files to put into a bundle; name a folder, a .gguf file or what was pulled.")
    checkpoint.read_config(path)  # every header is looked at, so that no broken model travels
    folder = path if path.is_dir() else path.parent
    names = checksums.read_by_loading(path)
    records: dict[str, checksums.FileRecord] = {}
    if path.is_dir():
        names |= {n for n in (*checkpoint.COMPANIONS, checksums.RECORD) if (folder / n).exists()}
    if (folder / checksums.RECORD).exists():
        records = dict(checksums.read_record(folder).files)
    label = path.name if path.is_dir() else ""
    for name in sorted(names):
        where = "/".join(part for part in ("models", label, name) if part)
        yield Member(where, folder / name, records[name].sha256 if name in records else None)


def fetch(wheels: Path, extra: str | None, machine: str | None, python: str | None) -> None:
    """Download what our wheel in that folder needs, beside it."""
    wheel = own_wheel(wheels, machine)
    requirement = f"{wheel}[{extra}]" if extra else str(wheel)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(wheels)]
    command += ["--only-binary", ":all:"]
    if machine or python:
        machine, python = machine or "x86_64", python or f"{sys.version_info.major}.{sys.version_info.minor}"
        for minor in reversed(GLIBC):
            command += ["--platform", f"manylinux_2_{minor}_{machine}"]
        command += [
            "--platform",
            f"manylinux2014_{machine}",
            "--platform",
            f"linux_{machine}",
            "--python-version",
            python,
        ]
    done = subprocess.run([*command, requirement], env=gates_.child_environment(), capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise PeerError(f"pip could not download what {wheel.name} needs: {last}")


def write(target: Path, members: list[Member], extra: str | None, progress: Callable[[int, int, str], None]) -> int:
    """The archive; returns how many files are in it. It appears whole or not at all."""
    from halfbyte.model.weight_file import write_then_rename

    total, done = sum(m.path.stat().st_size for m in members), 0
    sums: list[str] = []
    with write_then_rename(target, folder=False, needs=total) as hidden, tarfile.open(hidden, "w") as archive:

        def add(name: str, size: int, file: IO[bytes], mode: int, expected: str | None = None) -> None:
            nonlocal done

            def count(read: int) -> None:
                nonlocal done
                done += read
                progress(done, total, name)

            info = tarfile.TarInfo(f"{ROOT}/{name}")
            info.size, info.mode = size, mode
            source: Any = HashingFile(file, count)
            archive.addfile(info, source)
            digest = source.hash.hexdigest()
            if expected is not None and digest != expected:
                raise CheckpointError(
                    f"{name} is not the file that was pulled (its SHA-256 differs); pull the model again."
                )
            sums.append(f"{digest}  {name}\n")

        for member in members:
            with member.path.open("rb") as file:
                add(member.name, member.path.stat().st_size, file, 0o644, member.sha256)
        requirement = f"halfbyte[{extra}]\n" if extra else "halfbyte\n"
        add("requirement.txt", len(requirement), io.BytesIO(requirement.encode()), 0o644)
        script = resources.files("halfbyte").joinpath("data/install.sh").read_bytes()
        add("install.sh", len(script), io.BytesIO(script), 0o755)
        listed = "".join(sums).encode()
        info = tarfile.TarInfo(f"{ROOT}/SHA256SUMS")
        info.size = len(listed)
        archive.addfile(info, io.BytesIO(listed))
    return len(sums) + 1


def bundle(
    target: Annotated[
        Path,
        typer.Argument(metavar="TARGET", help="The archive to write, for example halfbyte.tar.", show_default=False),
    ],
    wheels: Annotated[Path, typer.Option(help="The folder with our wheel and those it needs.")] = Path("dist"),
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model to include: a folder, a .gguf file or one that was pulled; repeat it for more."),
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="First download what our wheel needs into --wheels, with pip.")
    ] = False,
    extra: Annotated[str | None, typer.Option(help="An optional part to install, for example gpu.")] = None,
    machine: Annotated[
        str | None, typer.Option(help="The target's processor, if it is another: x86_64 or aarch64.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="The target's version of Python, if it is another, for example 3.12.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Put wheels, models and their checksums into one archive, for a machine without a network."""
    if machine is not None and machine not in MACHINES:
        raise UsageError(f"--machine is {machine!r}; use {' or '.join(MACHINES)}.")
    if not wheels.is_dir():
        raise UsageError(f"{wheels} is no folder; make the wheel with `make wheel`, or name its folder with --wheels.")
    if download:
        with Activity("pip downloads what halfbyte needs"):
            fetch(wheels, extra, machine, python)
    members = wheel_members(wheels)
    check_complete(wheels, extra, machine)
    for name in model or []:
        members += model_members(name)
    names = [m.name for m in members]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise UsageError(f"two models would both be {twice} in the bundle; rename one of their folders.")
    with LoadingBar(f"writing {target}") as progress:
        count = write(target, members, extra, progress)
    if json:
        print_json({"file": str(target), "files": count, "bytes": target.stat().st_size})
    else:
        err.print(f"{target} has {count} files; on the other machine: tar xf {target.name}, then sh {ROOT}/install.sh")


def register(app: typer.Typer) -> None:
    app.command()(bundle)
