"""Which library is taken on which CPU, how many threads it gets, and what a wheel or a cache may hold."""

from __future__ import annotations

import ctypes
import hashlib
import json
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from halfbyte import gates as gates_
from halfbyte.errors import GateError, PlanError
from halfbyte.gates import AXES, Gates
from halfbyte.kernels.cpu import build, cores, library
from halfbyte.kernels.cpu.instruction_sets import INSTRUCTION_SETS, InstructionSet
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import choose
from halfbyte.plan.phase import ARCHES

WIDE = InstructionSet("avx512", "", ("-DWIDE",), frozenset({"wide512", "wide256"}))
NARROW = InstructionSet("avx2", "", (), frozenset({"wide256"}))
PLAIN = InstructionSet("portable", "", (), frozenset())
ELSEWHERE = InstructionSet("neon", "vax", (), frozenset())


@pytest.fixture
def sets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "INSTRUCTION_SETS", (ELSEWHERE, WIDE, NARROW, PLAIN))
    library._library_or_reason.cache_clear()
    yield
    library._library_or_reason.cache_clear()


def names(sets: list[InstructionSet]) -> list[str]:
    return [s.name for s in sets]


def test_every_set_is_a_value_of_the_gate() -> None:
    values = next(a for a in AXES if a.field == "cpu_instructions").values
    assert {s.name for s in INSTRUCTION_SETS} <= set(values)
    assert INSTRUCTION_SETS[-1].name == "portable"
    assert not INSTRUCTION_SETS[-1].cpu_flags


def test_flags_are_read_as_linux_writes_them(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512_vnni\npower management:\n")
    assert library.cpu_flags(info) == {"fpu", "avx2", "avx512_vnni"}
    info.write_text("processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\n")
    assert library.cpu_flags(info) == {"fp", "asimd", "asimddp", "i8mm"}


def test_the_best_that_the_cpu_has_comes_first(sets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset({"wide512", "wide256", "x"}))
    assert names(library.usable_sets()) == ["avx512", "avx2", "portable"]
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset({"wide256"}))
    assert names(library.usable_sets()) == ["avx2", "portable"]
    assert names(library.usable_sets("portable")) == ["portable"]
    with pytest.raises(build.Unavailable, match="--cpu-instructions avx512 needs wide512"):
        library.usable_sets("avx512")
    with pytest.raises(build.Unavailable, match="neon is not for this machine"):
        library.usable_sets("neon")


def test_a_set_that_cannot_be_built_leaves_the_next(sets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset({"wide512", "wide256"}))
    monkeypatch.setattr(library, "_load", lambda s, path: (s.name, path))

    def made(s: InstructionSet) -> Path:
        if s is not PLAIN:
            raise build.Unavailable(f"oldcc knows no {s.name}")
        return Path("there")

    monkeypatch.setattr(library, "library_file", made)
    assert library.open_library("auto") == ("portable", Path("there"))
    with pytest.raises(build.Unavailable, match="oldcc knows no avx512"):
        library.open_library("avx512")


def test_asking_for_a_set_that_cannot_run_is_an_error_and_never_the_reference(sets, monkeypatch) -> None:
    monkeypatch.setattr(library, "cpu_flags", frozenset)
    for gates in (Gates(cpu_instructions="avx512"), Gates(cpu_instructions="avx512", attention="cpu")):
        with pytest.raises(PlanError, match="--cpu-instructions avx512 needs wide256, wide512"):
            choose(NAMED["small"], gates, ARCHES["cpu"])
    with pytest.raises(PlanError, match=r"would have no effect on cpu \(cpu\.step: --attention asks for reference\)"):
        choose(NAMED["small"], Gates(cpu_instructions="portable", attention="reference"), ARCHES["cpu"])
    with pytest.raises(PlanError, match=r"would have no effect on sm90 \(cpu\.step: runs on a CPU\)"):
        choose(NAMED["small"], Gates(cpu_instructions="portable"), ARCHES["sm90"])


def test_a_machine_without_a_compiler_is_told_so(monkeypatch, tmp_path: Path, capsys) -> None:
    """What `make` runs first must not end it."""
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HALFBYTE_CXX", "no-such-compiler")
    monkeypatch.setattr("sys.argv", ["halfbyte.kernels.cpu"])
    library._library_or_reason.cache_clear()
    runpy.run_module("halfbyte.kernels.cpu", run_name="__main__")
    library._library_or_reason.cache_clear()
    assert "no CPU kernels: HALFBYTE_CXX is no-such-compiler" in capsys.readouterr().err


def test_a_library_of_another_shape_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = library.open_library("auto")
    known = next(s for s in INSTRUCTION_SETS if s.name == opened.instructions)

    class Longer(library.StepStruct):
        _fields_ = [("more", ctypes.c_int64)]

    monkeypatch.setattr(library, "STRUCTS", (*library.STRUCTS[:-1], Longer))
    with pytest.raises(build.Unavailable, match="has a Longer of"):
        library._load(known, opened.path)
    with pytest.raises(build.Unavailable, match="was built for"):
        library._load(replace(known, name="other"), opened.path)
    with pytest.raises(build.Unavailable, match="cannot be loaded"):
        library._load(known, Path(__file__))


# ---- wheels and caches -------------------------------------------------------------------------------------


def test_a_wheels_library_is_used_while_its_sources_are_these(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "sources_hash", lambda: "now")
    path = tmp_path / build.library_name("portable")
    path.write_bytes(b"\x7fELF")

    def manifest(sources: str, *files: str) -> None:
        digest = hashlib.sha256(b"\x7fELF").hexdigest()
        text = json.dumps({"sources": sources, "libraries": dict.fromkeys(files, digest)})
        (tmp_path / build.MANIFEST).write_text(text)

    assert build._packaged(PLAIN) is None
    manifest("now", path.name)
    assert build._packaged(PLAIN) == path
    manifest("before", path.name)
    assert build._packaged(PLAIN) is None
    manifest("now")
    assert build._packaged(PLAIN) is None
    manifest("now", path.name)
    path.write_bytes(b"\x7fELG")  # damaged
    assert build._packaged(PLAIN) is None


@pytest.mark.parametrize("damage", ["changed", "cut", "empty", "no record", "record of another", "both gone"])
def test_a_damaged_library_in_the_cache_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str
) -> None:
    compiled = []

    def compile_library(instructions: InstructionSet, target: Path) -> None:
        compiled.append(instructions.name)
        target.write_bytes(b"\x7fELF" + b"code" * 1000)

    monkeypatch.setattr(build, "_packaged", lambda instructions: None)
    monkeypatch.setattr(build, "compile_library", compile_library)
    monkeypatch.setattr(build, "_cached", lambda instructions: tmp_path / "key" / build.library_name("portable"))
    assert build.existing_file(PLAIN) is None
    path = build.library_file(PLAIN)
    good, record = path.read_bytes(), path.with_name(f"{path.name}.sha256")
    assert build.library_file(PLAIN) == build.existing_file(PLAIN) == path
    assert compiled == ["portable"]
    match damage:
        case "changed":
            path.write_bytes(good[:2000] + b"\0" + good[2001:])
        case "cut":
            path.write_bytes(good[:2000])
        case "empty":
            path.write_bytes(b"")
        case "no record":
            record.unlink()
        case "record of another":
            record.write_text("0" * 64)
        case _:
            path.unlink()
            record.unlink()
    assert build.existing_file(PLAIN) is None
    assert build.library_file(PLAIN).read_bytes() == good
    assert compiled == ["portable"] * 2
    assert build.existing_file(PLAIN) == path


def test_every_change_of_source_flag_or_compiler_is_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", lambda: "cxx")
    monkeypatch.setattr(build, "compiler_version", lambda program: "cxx 1")
    monkeypatch.setattr(build, "sources_hash", lambda: "a")
    paths = [build._cached(PLAIN), build._cached(replace(PLAIN, compiler_flags=("-O1",)))]
    monkeypatch.setattr(build, "compiler_version", lambda program: "cxx 2")
    paths.append(build._cached(PLAIN))
    monkeypatch.setattr(build, "sources_hash", lambda: "b")
    paths.append(build._cached(PLAIN))
    assert len(set(paths)) == 4
    assert {p.name for p in paths} == {"libhalfbyte_cpu.portable.so"}


# ---- threads -----------------------------------------------------------------------------------------------


def test_one_processor_of_each_core(tmp_path: Path) -> None:
    for processor, siblings in enumerate(("0,4", "1,5", "2", "3", "0,4", "1,5")):
        folder = tmp_path / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / ("core_cpus_list" if processor != 2 else "thread_siblings_list")).write_text(siblings + "\n")
    assert cores.physical_cores([0, 1, 2, 3, 4, 5], tmp_path) == [0, 1, 2, 3]
    assert cores.physical_cores([4, 5], tmp_path) == [4, 5]
    assert cores.physical_cores([8, 9], tmp_path) == [8, 9]  # nothing known: each is one


def test_a_containers_share_of_time(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "fs"
    own.write_text("0::/a/b\n")
    (root / "a" / "b").mkdir(parents=True)
    assert cores.share_of_time(own, root) is None
    (root / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert cores.share_of_time(own, root) is None
    (root / "a" / "cpu.max").write_text("250000 100000\n")
    assert cores.share_of_time(own, root) == 2
    (root / "a" / "b" / "cpu.max").write_text("50000 100000\n")
    assert cores.share_of_time(own, root) == 1
    own.write_text("3:cpu,cpuacct:/docker/x\n")
    (root / "cpu,cpuacct").mkdir()
    (root / "cpu,cpuacct" / "cpu.cfs_quota_us").write_text("-1\n")
    (root / "cpu,cpuacct" / "cpu.cfs_period_us").write_text("100000\n")
    assert cores.share_of_time(own, root) is None
    (root / "cpu,cpuacct" / "cpu.cfs_quota_us").write_text("400000\n")
    assert cores.share_of_time(own, root) == 4


@pytest.mark.parametrize(
    ("asked", "share", "omp", "count", "pinned"),
    [
        ("auto", None, None, 4, True),
        ("auto", 2, None, 2, False),
        ("auto", None, "3", 3, False),
        ("auto", None, "3,2", 3, False),
        ("auto", 8, "nonsense", 4, True),
        ("auto", 1, "16", 1, False),
        ("2", 1, "1", 2, False),
        ("4", None, None, 4, True),
        ("7", None, None, 7, False),
    ],
)
def test_threads(monkeypatch, asked: str, share: int | None, omp: str | None, count: int, pinned: bool) -> None:
    monkeypatch.setattr(cores, "physical_cores", lambda processors: [0, 2, 4, 6])
    monkeypatch.setattr(cores, "share_of_time", lambda: share)
    monkeypatch.setattr(cores, "setting", lambda name: omp)
    threads = cores.threads_for(Gates(threads=asked))
    assert threads.count == count
    assert threads.cores == ((0, 2, 4, 6) if pinned else None)


def test_threads_are_a_number_or_auto() -> None:
    assert gates_.parse({"threads": "007"}, env={}).threads == "7"
    assert gates_.parse({}, env={"HALFBYTE_THREADS": "3"}).threads == "3"
    for wrong in ("0", "-1", "many", "1.5"):
        with pytest.raises(GateError, match=r"--threads is .*; use auto or a number from 1 on"):
            gates_.parse({"threads": wrong}, env={})
    with pytest.raises(GateError, match="at most 512"):
        cores.threads_for(Gates(threads="100000"))


@pytest.mark.parametrize("words", [0, 1, 131_071, 131_072, 131_073, 1_000_003])
@pytest.mark.parametrize("threads", [1, 3])
def test_memory_is_read_whole(words: int, threads: int) -> None:
    """What a roof is measured with must have read every word once."""
    data = np.random.default_rng(words).integers(0, 1 << 63, words, dtype=np.uint64)
    for instructions in library.usable_sets():
        found = library.open_library(instructions.name)
        total = library.read_memory(found, cores.Threads(threads, None), data.ctypes.data, words)
        assert total == int(data.sum(dtype=np.uint64))
