"""Caches of compiled code: halfbyte's own, FlashInfer's, Triton's, vLLM's and torch's.

A module is one kind of cache in one folder, an entry its smallest part that can be rebuilt alone. An entry is stale if
its inputs have changed: by the hash of sources where the owner keeps one (halfbyte), else by version and architecture
(FlashInfer, Triton). An entry without such evidence is not called stale. Only entries of these folders are removed: an
entry that leads out of its folder, or a folder that is a home directory, is refused.
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

from halfbyte.architectures import GPU_ARCHES
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
class CacheEntry:
    module: str
    name: str  # within its module
    path: Path
    bytes: int
    files: int
    modified: float  # the newest file's, seconds since 1970
    stale: str = ""  # the reason; empty if it is current or unknown

    def age_days(self, now: float | None = None) -> float:
        return max(0.0, ((time.time() if now is None else now) - self.modified) / 86400)

    def as_dict(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "name": self.name,
            "bytes": self.bytes,
            "files": self.files,
            "age_days": round(self.age_days(), 1),
            "stale": self.stale,
        }


Judge = Callable[[Path], str]


def never_stale(path: Path) -> str:
    return ""


@dataclass(frozen=True)
class Module:
    name: str
    owner: str
    holds: str
    folder: Callable[[Mapping[str, str]], Path]
    patterns: tuple[str, ...]  # globs under the folder, each match of which is an entry
    name_pattern: str  # what an entry's name must match; other files in the folder are never removed
    judge: Judge = never_stale
    deep_judge: Callable[[list[Path]], Mapping[Path, str]] | None = None  # one that loads torch

    def location(self) -> Path:
        return self.folder(inherited()).expanduser()

    def entries(self, *, deep: bool = False) -> list[CacheEntry]:
        """All entries. `deep` also compares them with the plans, which loads torch and takes seconds."""
        base = self.location()
        matches = {p for pattern in self.patterns for p in base.glob(pattern)} if base.is_dir() else set()
        paths = sorted(p for p in matches if re.fullmatch(self.name_pattern, p.name))
        deeply = self.deep_judge(paths) if deep and self.deep_judge is not None and paths else {}
        return [self._entry(base, path, deeply.get(path, "") or self.judge(path)) for path in paths]

    def _entry(self, base: Path, path: Path, stale: str) -> CacheEntry:
        stats = list(_stats(path))
        return CacheEntry(
            self.name,
            path.relative_to(base).as_posix(),
            path,
            sum(s.st_size for s in stats),
            len(stats),
            max((s.st_mtime for s in stats), default=0.0),
            stale,
        )


def _stats(path: Path) -> Iterator[os.stat_result]:
    """The stat of every file under a path. Links are not followed; files that vanish meanwhile are skipped."""
    paths = [path] if path.is_symlink() or not path.is_dir() else list(path.rglob("*"))
    for p in paths:
        try:
            if p.is_symlink() or p.is_file():
                yield p.lstat()
        except OSError:
            continue


# ---- folders --------------------------------------------------------------------------------------------------------


def _own(kind: str) -> Callable[[Mapping[str, str]], Path]:
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


# ---- staleness ------------------------------------------------------------------------------------------------------


def judge_cpu(path: Path) -> str:
    """The folder's name is the hash of sources, flags and compiler."""
    from halfbyte.kernels.cpu import build

    current = {file.parent for s in build.sets_for() if (file := build.existing_file(s)) is not None}
    return "" if path in current else "built from other sources or by another compiler, or damaged"


def judge_cubins(paths: list[Path]) -> dict[Path, str]:
    """Compare cubins with the names that the plans of all presets and shapes give for the present sources."""
    names = cubin_names({m[1] for p in paths if (m := re.search(r"-(sm_\w+?)-", p.name))})
    return {p: "" if p.name in names else "no preset's plan launches it with the present sources" for p in paths}


def cubin_names(targets: set[str]) -> set[str]:
    """File names of all cubins that the presets launch on these targets (sm_90a …), in the cache and prebuilt."""
    from halfbyte.kernels.launch import nvrtc_available, nvrtc_version, prebuilt_name
    from halfbyte.kernels.prebuilt import programs_of
    from halfbyte.model.config import NAMED

    archs = [arch for arch in GPU_ARCHES.values() if arch.target in targets]
    compiler = nvrtc_version() if nvrtc_available() is None else None
    names = set()
    for program, target in programs_of(preset_plans(archs, NAMED)):
        names.add(prebuilt_name(program, target))
        if compiler is not None:
            names.add(cubin_name(program, target, compiler))
    return names


def preset_plans(archs: Iterable[Arch], shapes: Iterable[str]) -> list[tuple[Spec, Chosen, Arch]]:
    """The plans of the three presets; a preset that cannot run on an architecture is skipped."""
    from halfbyte.errors import PlanError
    from halfbyte.gates import PRESETS
    from halfbyte.model.config import NAMED
    from halfbyte.model.gpt_oss import choose

    plans = []
    for arch, preset, shape in itertools.product(archs, ("exact", "balanced", "fast"), shapes):
        with contextlib.suppress(PlanError):
            choice = choose(NAMED[shape], PRESETS[preset].gates, arch)
            plans.append((choice.spec, choice.chosen, arch))
    return plans


def cubin_name(program: Program, target: str, compiler: str) -> str:
    """The cubin's name in the cache, as `compile_program` gives it; a test compares the two."""
    from halfbyte.kernels.launch import _options

    key = hashlib.sha256("\0".join((program.hash(), compiler, *_options(program, target))).encode()).hexdigest()[:32]
    return f"{program.source.stem}-{target}-{key}.cubin"


def judge_flashinfer(path: Path) -> str:
    """version/architecture/cached_ops/module."""
    builder, arch = path.parts[-4], path.parts[-3]
    here = version("flashinfer-python")
    if here is not None and builder != here:
        return f"built by FlashInfer {builder}, but {here} is installed"
    if re.fullmatch(r"1[012]\d", arch):
        return f"compiled for {arch} without the suffix that FP4 instructions need"
    return ""


def judge_triton(path: Path) -> str:
    here = version("triton")
    for file in path.glob("*.json"):
        try:
            builder = json.loads(file.read_text(encoding="utf-8")).get("triton_version")
        except (OSError, ValueError, AttributeError):
            continue
        if here is not None and builder is not None and builder != here:
            return f"built by Triton {builder}, but {here} is installed"
    return ""


def judge_peers(path: Path) -> str:
    """Synthetic files carry the hash of their generator in the name; a name without one is from an older halfbyte."""
    return "built by an older halfbyte" if re.fullmatch(r"(20|120)b-\w+\.gguf", path.name) else ""


_CUBIN = r".+-sm_\w+-[0-9a-f]{32}\.cubin"
_ANY = r"[^.].*"
MODULES: dict[str, Module] = {
    m.name: m
    for m in (
        Module("cpu", "halfbyte", "CPU kernels, compiled at first use", _own("cpu"), ("*",), r"[0-9a-f]{16}",
               judge_cpu),
        Module("cubin", "halfbyte", "CUDA kernels, compiled at first use", _own("cubin"), ("*",), _CUBIN,
               deep_judge=judge_cubins),
        Module("prebuilt", "halfbyte", "CUDA kernels from halfbyte prebuild", _own("prebuilt"), ("*",), _CUBIN,
               deep_judge=judge_cubins),
        Module("emulator", "halfbyte", "CUDA kernels for the emulator of the tests", _own("emulator"), ("*",),
               r".+-[0-9a-f]{32}\.so"),
        Module("self-test", "halfbyte", "GPUs and plans that passed the self-test", _own("self-test"), ("*",),
               r"[0-9a-f]{24}\.json"),
        Module("scales", "halfbyte", "scale codes of the models that were inspected", _own("scales"), ("*",),
               r"[0-9a-f]{24}\.json"),
        Module("quality", "halfbyte", "what check quality measured, and where it stopped", _own("quality"), ("*",),
               r"[0-9a-f]{24}(\.json)?"),
        Module("peers", "halfbyte", "other engines and the files they are compared on", _own("peers"), ("*",),
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


def remove(entry: CacheEntry) -> None:
    """Remove an entry's files; UsageError unless they are strictly inside a folder that is only a cache."""
    folder = MODULES[entry.module].location()
    check_folder(folder)
    inside = entry.path.parent.resolve() / entry.path.name  # a link is removed, not what it leads to
    if not inside.is_relative_to(folder.resolve()) or inside == folder.resolve():
        raise UsageError(f"{entry.path} is not inside {folder}; it is not removed.")
    if inside.is_symlink() or not inside.is_dir():
        inside.unlink(missing_ok=True)
    else:
        shutil.rmtree(inside)


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be a cache, in case an environment variable points to it by mistake."""
    real, home = folder.resolve(), Path.home().resolve()
    above = [*home.parents, home, *Path.cwd().resolve().parents, Path.cwd().resolve()]
    if real in above:
        raise UsageError(f"{folder} is or contains a home or working folder, so it is not a cache; nothing is removed.")
    if (real / ".git").exists():
        raise UsageError(f"{folder} is a repository, not a cache; nothing is removed.")
