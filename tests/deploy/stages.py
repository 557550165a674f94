"""The stages of a Dockerfile in plain folders, by chroot: what a build does, where no engine of containers runs.

A base is a folder of Debian's own packages, a layer is a copy of the one before, a cache mount is a folder that the
caller names, a bind mount is a folder of another stage. Mounts are made in a namespace of each command's own, so none
is left behind. What an engine adds beyond that (digests, layers, other machines' instructions) is not here.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # as bases have it
HOST_FILES = ("etc/resolv.conf", "etc/hosts")  # how a command reaches Debian and PyPI


@dataclass(frozen=True)
class Instruction:
    word: str
    rest: str


@dataclass(frozen=True)
class Image:
    """A folder that is a root, and what a container of it begins with."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    folder: str = "/"
    user: str = "0:0"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    healthcheck: tuple[str, ...] = ()


def parsed(path: Path) -> tuple[dict[str, str], dict[str, tuple[str, list[Instruction]]]]:
    """Arguments in front of the first stage; name of a stage -> its base and instructions, continued lines joined."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    common: dict[str, str] = {}
    stages: dict[str, tuple[str, list[Instruction]]] = {}
    for line in filter(str.strip, "\n".join(lines).replace("\\\n", " ").splitlines()):
        word, rest = line.strip().split(None, 1)
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages[name.strip()] = (base.strip(), [])
        elif stages:
            stages[next(reversed(stages))][1].append(Instruction(word, rest))
        else:
            key, _, value = rest.partition("=")
            common[key] = value
    return common, stages


def filled(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda m: variables.get(m.group(1), m.group(0)), text)


def flags(rest: str) -> tuple[dict[str, list[str]], str]:
    """`--mount=… --from=… words` -> flags by name, words."""
    found: dict[str, list[str]] = {}
    while m := re.match(r"--([\w-]+)=(\S+)\s+", rest):
        found.setdefault(m.group(1), []).append(m.group(2))
        rest = rest[m.end() :]
    return found, rest


def pips_settings() -> tuple[dict[str, str], list[str]]:
    """What pip on this machine is told, as variables, and the folders that it names: a chroot's pip needs both."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    pairs = re.findall(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", told, re.M)
    variables = {f"PIP_{name.replace('-', '_').upper()}": value for name, value in pairs}
    words = [word.removeprefix("file://") for value in variables.values() for word in value.split()]
    paths = [Path(word) for word in words if word.startswith("/") and Path(word).exists()]
    # An index on a disk has its files beside its pages.
    return variables, list(dict.fromkeys(str(Path(*p.parts[:3]) if p.is_dir() else p) for p in paths))


def inside(image: Image, words: list[str], *, binds: dict[str, Path], read_only: bool = False, alone: bool = False,
           extra: dict[str, str] | None = None) -> list[str]:  # fmt: skip
    """The command that runs `words` in the image. Binds: place in the image -> folder here. Alone: no network at all,
    processes and a /tmp of its own.
    """
    root = shlex.quote(str(image.root))
    steps = ["set -e"]
    if read_only:
        steps += [f"mount --bind {root} {root}", f"mount -o remount,bind,ro {root}"]
    steps += [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
    if alone:
        steps += ["ip link set lo up", f"mount -t tmpfs -o mode=1777 tmpfs {root}/tmp"]
    for place, source in binds.items():
        steps.append(f"mount --rbind {shlex.quote(str(source))} {root}{shlex.quote(place)}")
    variables = [f"{k}={v}" for k, v in {**image.environment, **(extra or {})}.items()]
    to = ["chroot", f"--userspec={image.user}", "--groups=", str(image.root), "/usr/bin/env", "-i", *variables]
    steps.append("exec " + shlex.join([*to, "/bin/sh", "-c", f'cd {image.folder} && exec "$@"', "sh", *words]))
    spaces = ["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
    return ["unshare", *spaces, *(["--net", "--ipc"] if alone else []), "sh", "-c", "\n".join(steps)]


@dataclass
class Builder:
    dockerfile: Path
    context: Path
    work: Path  # the images' folders
    bases: dict[str, Path]  # value of FROM -> a root, instead of an image
    arguments: dict[str, str] = field(default_factory=dict)
    caches: dict[str, Path] = field(default_factory=dict)  # target of a cache mount -> a folder to keep it in
    made: dict[str, Image] = field(default_factory=dict)
    ran: list[tuple[str, str]] = field(default_factory=list)  # stage, command

    def build(self, name: str) -> Image:
        """Of a stage, and of those that it needs."""
        if name not in self.made:
            common, stages = parsed(self.dockerfile)
            common |= {key: value for key, value in self.arguments.items() if key in common}
            base, steps = stages[name]
            base = filled(base, common)
            before = Image(self.bases[base]) if base in self.bases else self.build(base)
            image = replace(before, root=self.work / name)
            subprocess.run(["cp", "-a", "--reflink=auto", f"{before.root}/.", str(image.root)], check=True)
            variables: dict[str, str] = {}
            for one in steps:
                image = self._step(name, image, one, variables)
            self.made[name] = image
        return self.made[name]

    def _step(self, stage: str, image: Image, one: Instruction, variables: dict[str, str]) -> Image:
        known = {**image.environment, **variables}
        if one.word == "ARG":
            key, _, value = one.rest.partition("=")
            variables[key] = self.arguments.get(key, filled(value, known))
        elif one.word == "ENV":
            pairs = dict(word.split("=", 1) for word in shlex.split(one.rest))
            return replace(image, environment={**image.environment, **{k: filled(v, known) for k, v in pairs.items()}})
        elif one.word == "WORKDIR":
            (image.root / one.rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            return replace(image, folder=one.rest)
        elif one.word == "USER":
            return replace(image, user=one.rest)
        elif one.word in ("ENTRYPOINT", "CMD"):
            return replace(
                image, **{{"ENTRYPOINT": "entrypoint", "CMD": "command"}[one.word]: tuple(json.loads(one.rest))}
            )
        elif one.word == "HEALTHCHECK":
            return replace(image, healthcheck=tuple(json.loads(one.rest.split("CMD", 1)[1])))
        elif one.word == "COPY":
            self._copy(image, one.rest, known)
        elif one.word == "RUN":
            self._run(stage, image, one.rest, variables)
        else:
            assert one.word in ("LABEL", "VOLUME", "EXPOSE", "STOPSIGNAL"), one
        return image

    def _copy(self, image: Image, rest: str, known: dict[str, str]) -> None:
        found, words = flags(rest)
        *sources, target = shlex.split(filled(words, known))
        place = Path(target) if target.startswith("/") else Path(image.folder, target)
        here = image.root / str(place).lstrip("/")
        origin = self.build(found["from"][0]).root if "from" in found else self.context
        for source in sources:
            there = origin / source.lstrip("/")
            into = here / there.name if not there.is_dir() and (target.endswith("/") or here.is_dir()) else here
            into.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-a", f"{there}/." if there.is_dir() else there, into], check=True)
            if "chmod" in found:
                into.chmod(int(found["chmod"][0], 8))

    def _run(self, stage: str, image: Image, rest: str, variables: dict[str, str]) -> None:
        found, command = flags(rest)
        settings, folders = pips_settings()
        binds = {place: Path(place) for place in folders}
        for mount in found.get("mount", []):
            told = dict(word.split("=", 1) for word in mount.split(","))
            if told["type"] == "cache":
                binds[told["target"]] = self.caches.setdefault(told["target"], self.work / f"cache-{len(self.caches)}")
                binds[told["target"]].mkdir(parents=True, exist_ok=True)
            else:
                binds[told["target"]] = self.build(told["from"]).root / told["source"].lstrip("/")
        for name in HOST_FILES:
            shutil.copyfile(f"/{name}", image.root / name)
        made = [place for place in binds if not (image.root / place.lstrip("/")).exists()]
        for place, source in binds.items():
            at = image.root / place.lstrip("/")
            at.parent.mkdir(parents=True, exist_ok=True)
            at.mkdir(exist_ok=True) if source.is_dir() else at.touch()
        words = inside(image, ["/bin/sh", "-c", command], binds=binds, extra={**settings, **variables})
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, f"{stage}: {command}\n{done.stdout[-4000:]}"
        self.ran.append((stage, command))
        for place in made:  # as an engine leaves none of its mount points behind
            at = image.root / place.lstrip("/")
            if at.is_dir() and not any(at.iterdir()):
                at.rmdir()
