"""What was compiled and is kept, whoever keeps it: halfbyte's own caches, FlashInfer's, Triton's, vLLM's, torch's.

A module is one kind of cache in one folder, an entry the least part of it that can be made again alone. An entry is
stale when what it was made of is no longer here: by hash of sources where the owner keeps one (ours), by version and
architecture where not (FlashInfer, Triton). What cannot be known is not called stale. Removes entries of these folders
and nothing else: an entry that leads out of its folder, or a folder that is somebody's home, is refused.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.errors import UsageError
from halfbyte.gates import cache_folder, inherited
from halfbyte.installed import version

if TYPE_CHECKING:
    from halfbyte.kernels.launch import Program
    from halfbyte.plan.phase import Arch, Spec
    from halfbyte.plan.select import Chosen

GIB = 1 << 30
JOBS_RESERVE, JOB_BYTES = 16 * GIB, 8 * GIB  # what stays free; what one instance of a CUTLASS kernel takes to compile


def max_jobs(available: int, cores: int) -> int:
    """How many compilers of CUTLASS kernels may run at once: (available − 16 GiB) / 8 GiB, and no more than cores."""
    return max(1, min(cores, (available - JOBS_RESERVE) // JOB_BYTES))


@dataclass(frozen=True)
class Entry:
    module: str
    name: str  # within its module
    path: Path
    bytes: int
    files: int
    modified: float  # the newest file's, seconds since 1970
    stale: str = ""  # why; empty: it is not, or nobody can know

    def age_days(self, now: float | None = None) -> float:
        return max(0.0, ((time.time() if now is None else now) - self.modified) / 86400)

    def as_dict(self) -> dict[str, Any]:
        return {
            "module": self.module, "name": self.name, "bytes": self.bytes, "files": self.files,
            "age_days": round(self.age_days(), 1), "stale": self.stale,
        }  # fmt: skip


Judge = Callable[[Path], str]


def nobody_knows(path: Path) -> str:
    return ""


@dataclass(frozen=True)
class Module:
    name: str
    owner: str
    holds: str
    folder: Callable[[Mapping[str, str]], Path]
    patterns: tuple[str, ...]  # globs under the folder, each match of which is an entry,
    named: str  # if its own name is of this kind: whatever else lies there is nobody's to remove
    judge: Judge = nobody_knows
    deep_judge: Callable[[list[Path]], Mapping[Path, str]] | None = None  # one that loads torch

    def place(self) -> Path:
        return self.folder(inherited()).expanduser()

    def entries(self, *, deep: bool = False) -> list[Entry]:
        """With `deep`, staleness that only the plans can tell, too: seconds, because torch is loaded."""
        base = self.place()
        found = {p for pattern in self.patterns for p in base.glob(pattern)} if base.is_dir() else set()
        paths = sorted(p for p in found if re.fullmatch(self.named, p.name))
        deeply = self.deep_judge(paths) if deep and self.deep_judge is not None and paths else {}
        return [self._entry(base, path, deeply.get(path, "") or self.judge(path)) for path in paths]

    def _entry(self, base: Path, path: Path, stale: str) -> Entry:
        stats = list(_stats(path))
        return Entry(
            self.name, path.relative_to(base).as_posix(), path, sum(s.st_size for s in stats), len(stats),
            max((s.st_mtime for s in stats), default=0.0), stale,
        )  # fmt: skip


def _stats(path: Path) -> Iterator[os.stat_result]:
    """Of every file, links not followed; one that vanishes meanwhile is left out."""
    found = [path] if path.is_symlink() or not path.is_dir() else list(path.rglob("*"))
    for p in found:
        try:
            if p.is_symlink() or p.is_file():
                yield p.lstat()
        except OSError:
            continue


# ---- whose, and where -----------------------------------------------------------------------------------------------


def _ours(kind: str) -> Callable[[Mapping[str, str]], Path]:
    return lambda env: cache_folder(kind)


def _cache_home(env: Mapping[str, str]) -> Path:
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache")


def _flashinfer(env: Mapping[str, str]) -> Path:
    return Path(env.get("FLASHINFER_WORKSPACE_BASE") or "~") / ".cache" / "flashinfer"


def _triton(env: Mapping[str, str]) -> Path:
    return Path(env.get("TRITON_CACHE_DIR") or Path(env.get("TRITON_HOME") or "~") / ".triton" / "cache")


def _vllm(env: Mapping[str, str]) -> Path:
    return Path(env.get("VLLM_CACHE_ROOT") or _cache_home(env) / "vllm")


def _inductor(env: Mapping[str, str]) -> Path:
    own = Path(tempfile.gettempdir()) / f"torchinductor_{re.sub(r'[^A-Za-z0-9]', '_', getpass.getuser())}"
    return Path(env.get("TORCHINDUCTOR_CACHE_DIR") or own)


def _extensions(env: Mapping[str, str]) -> Path:
    return Path(env.get("TORCH_EXTENSIONS_DIR") or _cache_home(env) / "torch_extensions")


# ---- what is stale --------------------------------------------------------------------------------------------------


def judge_cpu(path: Path) -> str:
    """The folder's name is the hash of sources, flags and compiler."""
    from halfbyte.kernels.cpu import build

    current = {found.parent for s in build.sets_for() if (found := build.existing_file(s)) is not None}
    return "" if path in current else "made of other sources or by another compiler"


def judge_cubins(paths: list[Path]) -> dict[Path, str]:
    """Against the names that the plans of every preset and shape would give with today's sources and compiler."""
    known = cubin_names({m[1] for p in paths if (m := re.search(r"-(sm_\w+?)-", p.name))})
    return {p: "" if p.name in known else "no preset's plan launches it with today's sources" for p in paths}


def cubin_names(targets: set[str]) -> set[str]:
    """Of whatever the presets launch on these (sm_90a …), as the cache and as `halfbyte prebuild` name it."""
    from halfbyte.kernels.launch import nvrtc_available, nvrtc_version, prebuilt_name, target_of
    from halfbyte.kernels.prebuilt import programs_of
    from halfbyte.model.config import NAMED
    from halfbyte.plan.phase import ARCHES

    archs = [arch for arch in ARCHES.values() if arch.is_gpu and target_of(arch) in targets]
    compiler = nvrtc_version() if nvrtc_available() is None else None
    names = set()
    for program, target in programs_of(preset_plans(archs, NAMED)):
        names.add(prebuilt_name(program, target))
        if compiler is not None:
            names.add(cubin_name(program, target, compiler))
    return names


def preset_plans(archs: Iterable[Arch], shapes: Iterable[str]) -> list[tuple[Spec, Chosen, Arch]]:
    """What the three presets choose; a plan that cannot run there launches nothing there."""
    from halfbyte.errors import PlanError
    from halfbyte.gates import PRESETS
    from halfbyte.model.config import NAMED
    from halfbyte.model.gpt_oss import choose

    plans = []
    for arch, preset, shape in itertools.product(archs, ("exact", "balanced", "fast"), shapes):
        with contextlib.suppress(PlanError):
            spec, chosen, _ = choose(NAMED[shape], PRESETS[preset].gates, arch)
            plans.append((spec, chosen, arch))
    return plans


def cubin_name(program: Program, target: str, compiler: str) -> str:
    """As `compile_program` names it; a test holds the two together."""
    from halfbyte.kernels.launch import _options

    key = hashlib.sha256("\0".join((program.hash(), compiler, *_options(program, target))).encode()).hexdigest()[:32]
    return f"{program.source.stem}-{target}-{key}.cubin"


def judge_flashinfer(path: Path) -> str:
    """version/architecture/cached_ops/module."""
    made, arch = path.parts[-4], path.parts[-3]
    here = version("flashinfer-python")
    if here is not None and made != here:
        return f"FlashInfer {made} made it, {here} is installed"
    if re.fullmatch(r"1[012]\d", arch):
        return f"compiled for {arch} without the suffix that FP4 instructions need"
    return ""


def judge_triton(path: Path) -> str:
    here = version("triton")
    for file in path.glob("*.json"):
        try:
            made = json.loads(file.read_text(encoding="utf-8")).get("triton_version")
        except (OSError, ValueError, AttributeError):
            continue
        if here is not None and made is not None and made != here:
            return f"Triton {made} made it, {here} is installed"
    return ""


def judge_peers(path: Path) -> str:
    """Synthetic files have the hash of their maker in their names; older halfbytes gave none."""
    return "an older halfbyte made it" if re.fullmatch(r"(20|120)b-\w+\.gguf", path.name) else ""


_CUBIN = r".+-sm_\w+-[0-9a-f]{32}\.cubin"
_ANY = r"[^.].*"
MODULES: dict[str, Module] = {
    m.name: m
    for m in (
        Module("cpu", "halfbyte", "CPU kernels, compiled at first use", _ours("cpu"), ("*",), r"[0-9a-f]{16}",
               judge_cpu),
        Module("cubin", "halfbyte", "CUDA kernels, compiled at first use", _ours("cubin"), ("*",), _CUBIN,
               deep_judge=judge_cubins),
        Module("prebuilt", "halfbyte", "CUDA kernels from halfbyte prebuild", _ours("prebuilt"), ("*",), _CUBIN,
               deep_judge=judge_cubins),
        Module("emulator", "halfbyte", "CUDA kernels for the emulator of the tests", _ours("emulator"), ("*",),
               r".+-[0-9a-f]{32}\.so"),
        Module("self-test", "halfbyte", "GPUs and plans that passed the self-test", _ours("self-test"), ("*",),
               r"[0-9a-f]{24}\.json"),
        Module("peers", "halfbyte", "other engines and the files they are compared on", _ours("peers"), ("*",),
               r".+\.gguf|llama\.cpp-.+", judge_peers),
        Module("flashinfer", "FlashInfer", "kernels that FlashInfer compiled", _flashinfer, ("*/*/cached_ops/*",), _ANY,
               judge_flashinfer),
        Module("triton", "Triton", "kernels that Triton compiled", _triton, ("*",), r"[A-Z2-7]{40,60}|[0-9a-f]{64}",
               judge_triton),
        Module("vllm", "vLLM", "vLLM's compiled graphs and what it knows of models", _vllm,
               ("torch_compile_cache/*", "torch_aot_compile/*", "modelinfos/*", "flashinfer_autotune_cache/*"), _ANY),
        Module("inductor", "torch", "kernels that torch.compile made", _inductor, ("*",),
               r"[a-z2-7]{2}|fxgraph|aotautograd|triton|cache|locks|pgo|precompiled_headers"),
        Module("extensions", "torch", "C++ extensions that torch compiled", _extensions, ("py3*_*/*",), _ANY),
    )
}  # fmt: skip


# ---- removing -------------------------------------------------------------------------------------------------------


def remove(entry: Entry) -> None:
    """The entry's files. Refuses what is not strictly inside a cache folder that is nothing else."""
    folder = MODULES[entry.module].place()
    check_folder(folder)
    inside = entry.path.parent.resolve() / entry.path.name  # a link is removed, not what it leads to
    if not inside.is_relative_to(folder.resolve()) or inside == folder.resolve():
        raise UsageError(f"{entry.path} is not inside {folder}, so it is left alone.")
    if inside.is_symlink() or not inside.is_dir():
        inside.unlink(missing_ok=True)
    else:
        shutil.rmtree(inside)


def check_folder(folder: Path) -> None:
    """A variable that names a folder of another kind must not become a way to lose it."""
    real, home = folder.resolve(), Path.home().resolve()
    above = [*home.parents, home, *Path.cwd().resolve().parents, Path.cwd().resolve()]
    if real in above:
        raise UsageError(f"{folder} is above or at a home or working folder and no cache; nothing is removed there.")
    if (real / ".git").exists():
        raise UsageError(f"{folder} is a repository and no cache; nothing is removed there.")
