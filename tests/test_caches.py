"""Caches: listed with sizes and ages, stale ones told by what made them, removed one by one and nothing else."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from halfbyte import caches
from halfbyte.errors import UsageError
from halfbyte.kernels.cuda.sampling.sampler import BUILDS
from halfbyte.kernels.launch import compile_program, nvrtc_available, nvrtc_version
from halfbyte.kv.prefix_store import PrefixStore
from halfbyte.kv.segments import PageLayout

GIB = 1 << 30
OLD, NEW = "A" * 52, "B" * 52  # as Triton names them
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every cache in a folder of its own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", str(tmp_path / "halfbyte"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    for name in ("XDG_CACHE_HOME", "FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR", "TRITON_HOME", "VLLM_CACHE_ROOT",
                 "TORCH_EXTENSIONS_DIR"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(caches, "version", {"triton": "3.9.0", "flashinfer-python": "0.6.17"}.get)
    return tmp_path


def fill(path: Path, size: int = 10, days: float = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    then = time.time() - days * 86400
    os.utime(path, (then, then))
    return path


@pytest.fixture
def filled(home: Path) -> Path:
    flashinfer = home / "home" / ".cache" / "flashinfer"
    fill(flashinfer / "0.5.3" / "121a" / "cached_ops" / "fused_moe_120" / "fused_moe_120.so", 1000, days=200)
    fill(flashinfer / "0.6.17" / "121" / "cached_ops" / "fp4_gemm" / "fp4_gemm.so", 100)
    fill(flashinfer / "0.6.17" / "121a" / "cached_ops" / "fp4_gemm" / "fp4_gemm.so", 10)
    triton = home / "home" / ".triton" / "cache"
    fill(triton / OLD / "k.cubin", 5)
    (triton / OLD / "k.json").write_text('{"triton_version": "3.6.0"}')
    fill(triton / NEW / "k.cubin", 5)
    (triton / NEW / "k.json").write_text('{"triton_version": "3.9.0"}')
    fill(home / "halfbyte" / "cpu" / "0123456789abcdef" / "lib.so", 50)
    fill(home / "halfbyte" / "peers" / "20b-q8.gguf", 500)
    fill(home / "halfbyte" / "peers" / "20b-q8-8f36cc02.gguf", 500)
    fill(home / "home" / ".cache" / "vllm" / "torch_compile_cache" / "abc" / "x", 7)
    fill(home / "home" / ".cache" / "vllm" / "precious.txt", 7)
    return home


def stale(module: str) -> dict[str, str]:
    return {e.name: e.stale for e in caches.MODULES[module].entries() if e.stale}


def test_what_is_stale_and_why(filled: Path) -> None:
    assert stale("flashinfer") == {
        "0.5.3/121a/cached_ops/fused_moe_120": "built by FlashInfer 0.5.3, but 0.6.17 is installed",
        "0.6.17/121/cached_ops/fp4_gemm": "compiled for 121 without the suffix that FP4 instructions need",
    }
    assert stale("triton") == {OLD: "built by Triton 3.6.0, but 3.9.0 is installed"}
    assert stale("cpu") == {"0123456789abcdef": "built from other sources or by another compiler, or damaged"}
    assert list(stale("peers")) == ["20b-q8.gguf"]
    assert stale("vllm") == {}


def test_a_library_that_is_in_use_is_not_stale(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from halfbyte.kernels.cpu import build

    used = fill(home / "halfbyte" / "cpu" / ("a" * 16) / "libhalfbyte_cpu.portable.so")
    fill(home / "halfbyte" / "cpu" / ("b" * 16) / "libhalfbyte_cpu.portable.so")
    monkeypatch.setattr(build, "existing_file", lambda s: used)
    assert list(stale("cpu")) == ["b" * 16]


@pytest.mark.skipif(nvrtc_available() is not None, reason="needs NVRTC")
def test_a_cubin_has_the_name_that_the_compiler_gives_it(home: Path) -> None:
    """And is current while a preset launches it."""
    program = BUILDS["sample_argmax"].program
    compile_program(program, "sm_90a")
    (path,) = (home / "halfbyte" / "cubin").iterdir()
    assert path.name == caches.cubin_name(program, "sm_90a", nvrtc_version())
    other = fill(path.with_name(path.name[:-38] + "0" * 32 + ".cubin"))
    told = {e.path: e.stale for e in caches.MODULES["cubin"].entries(deep=True)}
    assert told[path] == ""
    assert "no preset's plan" in told[other]
    assert all(not e.stale for e in caches.MODULES["cubin"].entries()), "unknown without looking at the plans"


def test_the_list_has_sizes_ages_and_jobs(run: Run, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    class Memory:
        available = 40 * GIB

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    code, out, _ = run("cache", "list", "--json")
    told = json.loads(out)
    assert (code, told["max_jobs"]) == (0, 3)
    modules = {m["module"]: m for m in told["modules"]}
    assert set(modules) == set(caches.MODULES)
    assert (modules["flashinfer"]["bytes"], modules["flashinfer"]["stale_bytes"]) == (1110, 1100)
    assert round(modules["flashinfer"]["oldest_days"]) == 200
    assert modules["vllm"]["count"] == 1
    code, out, _ = run("cache", "list", "flashinfer", "--entries", "--older-than", "100")
    assert "0.5.3/121a/cached_ops/fused_moe_120" in out
    assert "0.6.17" not in out.replace("0.6.17 is installed", "")
    code, out, _ = run("cache")
    assert (code, "MAX_JOBS=3" in out) == (0, True)


@pytest.mark.parametrize(
    ("available", "cores", "jobs"), [(8, 20, 1), (16, 20, 1), (24, 20, 1), (32, 20, 2), (118, 20, 12), (500, 20, 20)]
)
def test_jobs_from_memory(available: int, cores: int, jobs: int) -> None:
    assert caches.max_jobs(available * GIB, cores) == jobs


def test_clearing_takes_what_was_named_and_nothing_else(run: Run, filled: Path) -> None:
    code, out, _ = run("cache", "clear", "flashinfer", "--stale", "--dry-run", "--json")
    assert (code, len(json.loads(out)["removed"]), json.loads(out)["bytes"]) == (0, 2, 1100)
    assert len(caches.MODULES["flashinfer"].entries()) == 3
    code, _, _ = run("cache", "clear", "flashinfer", "--stale")
    assert [e.name for e in caches.MODULES["flashinfer"].entries()] == ["0.6.17/121a/cached_ops/fp4_gemm"]
    code, _, _ = run("cache", "clear", f"triton/{NEW}")
    assert [e.name for e in caches.MODULES["triton"].entries()] == [OLD]
    code, out, _ = run("cache", "clear", "all")
    assert code == 0
    assert not [e for m in caches.MODULES.values() for e in m.entries()]
    assert (filled / "home" / ".cache" / "vllm" / "precious.txt").exists(), "no entry, so not ours to remove"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["clear"], "say what to clear"),
        (["clear", "cuda"], "no cache 'cuda'"),
        (["clear", "triton/../../x"], "no entry"),
        (["clear", "vllm/precious.txt"], "no entry"),
        (["burn"], "no action 'burn'"),
        (["warm"], "say what to warm"),
        (["warm", "flashinfer"], "vLLM's first start"),
    ],
)
def test_a_mistake_is_one_sentence(run: Run, filled: Path, args: list[str], said: str) -> None:
    code, _, err = run("cache", *args)
    assert code == 2
    assert said in err


def test_a_variable_that_names_no_cache_loses_nothing(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "home").mkdir()
    fill(home / "home" / "letters" / "to-mother.txt")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(home / "home"))
    code, _, err = run("cache", "clear", "triton")
    assert (code, "nothing is removed" in err) == (2, True)
    (home / "work" / ".git").mkdir(parents=True)
    fill(home / "work" / "src" / "a.py")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(home / "work"))
    code, _, err = run("cache", "clear", "triton")
    assert (code, "a repository" in err) == (2, True)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/")
    assert run("cache", "clear", "triton")[0] == 2
    assert (home / "home" / "letters" / "to-mother.txt").exists()
    assert (home / "work" / "src" / "a.py").exists()


def test_a_link_is_removed_and_what_it_leads_to_is_not(home: Path) -> None:
    precious = fill(home / "elsewhere" / "k.cubin")
    folder = home / "home" / ".triton" / "cache"
    folder.mkdir(parents=True)
    (folder / NEW).symlink_to(precious.parent)
    (entry,) = caches.MODULES["triton"].entries()
    caches.remove(entry)
    assert precious.exists()
    assert not (folder / NEW).is_symlink()


def test_an_entry_outside_its_folder_is_refused(home: Path) -> None:
    precious = fill(home / "home" / "x")
    (home / "home" / ".triton" / "cache").mkdir(parents=True)
    entry = caches.CacheEntry("triton", "../../x", home / "home" / ".triton" / "cache" / ".." / ".." / "x", 1, 1, 0.0)
    with pytest.raises(UsageError, match="not inside"):
        caches.remove(entry)
    assert precious.exists()


def test_warming_compiles_the_cpu_kernels_or_says_why_not(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from halfbyte.kernels.cpu import library
    from halfbyte.kernels.cpu.build import Unavailable

    class Opened:
        path = "/x/lib.so"

    monkeypatch.setattr(library, "open_library", lambda asked: Opened)
    code, out, _ = run("cache", "warm", "cpu", "--json")
    assert (code, json.loads(out)) == (0, {"warmed": {"cpu": "/x/lib.so"}})

    def unavailable(asked: str) -> None:
        raise Unavailable("no C++ compiler was found")

    monkeypatch.setattr(library, "open_library", unavailable)
    code, _, err = run("cache", "warm", "cpu")
    assert (code, "no C++ compiler was found" in err) == (2, True)


# ---- a folder of prefixes -------------------------------------------------------------------------------------------


def test_a_prefix_folder_is_listed_verified_and_cleared(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "prefixes"
    store = PrefixStore(folder, PageLayout(b"a model's pages!", 1000, 64), 1 << 20)
    for i in range(3):
        assert store.write(bytes([i]) * 17, bytes([i]) * 1000)
    store.flush()
    option = ("--prefix-folder", str(folder), "--json")
    code, out, _ = run("cache", *option)
    (part,) = json.loads(out)["parts"]
    assert (code, part["pages"], part["tokens"], part["identity"]) == (0, 3, 192, b"a model's pages!".hex())
    code, _, error = run("cache", "clear", *option)
    assert code == 2, "a program writes to it"
    assert str(folder) in error
    store.close()
    code, out, _ = run("cache", "verify", *option)
    assert (code, json.loads(out)["damaged"]) == (0, 0)
    (path,) = folder.glob("*.prefix")
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)
    code, out, _ = run("cache", "verify", *option)
    assert (code, json.loads(out)["intact"], json.loads(out)["damaged"]) == (1, 2, 1)
    assert json.loads(run("cache", "clear", "--dry-run", *option)[1])["removed"] == 0
    assert path.exists()
    assert json.loads(run("cache", "clear", *option)[1])["removed"] == len(data)
    assert not path.exists()


@pytest.mark.parametrize(
    "words", [["verify"], ["warm", "--prefix-folder", "x"], ["list", "--prefix-folder", "nowhere"]]
)
def test_a_prefix_folder_asked_for_in_a_wrong_way_is_one_sentence(run: Run, words: list[str]) -> None:
    code, _, error = run("cache", *words)
    assert code == 2
    assert "prefix" in error
