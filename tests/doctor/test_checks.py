"""Single checks on a healthy machine with one thing changed: what no whole fixture is about, and their edges."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from halfbyte.doctor import live
from halfbyte.doctor.diagnosis import diagnose
from halfbyte.doctor.finding import Finding, Purpose
from halfbyte.doctor.live import read_speed
from halfbyte.doctor.machine import Machine, read_records
from halfbyte.doctor.model_files import look_at
from halfbyte.doctor.reading import GPU_QUERY, REASONS_QUERY, gpus, meminfo, version

FIXTURES = Path(__file__).parent / "fixtures"
GB10 = "NVIDIA GB10, {capability}, {driver}, [N/A], [N/A], {mhz}, 3003, {busy}, 4.5, [N/A], [N/A], 38, Enabled, {mode}"


def changed(kind: str, name: str, answer: Any, *, base: str = "gb10-healthy") -> Machine:
    machine = read_records(FIXTURES / f"{base}.json")[0]
    machine.answers.setdefault(kind, {})[name] = answer
    return machine


def only(machine: Machine, id: str, **purpose: Any) -> list[Finding]:
    return [f for f in diagnose(machine, Purpose(**purpose)) if f.id == id]


def gpu(capability: str = "12.1", driver: str = "580.142", mhz: int = 208, busy: int = 0, mode: str = "Default") -> Any:
    told = GB10.format(capability=capability, driver=driver, mhz=mhz, busy=busy, mode=mode)
    return ("command", GPU_QUERY, {"status": 0, "output": told + "\n"})


@pytest.mark.parametrize(
    ("id", "change", "severity", "said"),
    [
        ("gpu.architecture", gpu(capability="8.7"), "error", "compute capability 8.7: halfbyte has kernels for sm80"),
        ("gpu.architecture", gpu(capability="7.0"), "error", "llama.cpp or LMDeploy serve"),
        ("wsl.version", ("system", "", {"kernel": "4.4.0-19041-Microsoft", "python": "3.12.3"}), "error", "WSL1"),
        ("gpu.mode", gpu(mode="Prohibited"), "error", "Prohibited"),
        ("gpu.partitioned", ("variables", "", {"CUDA_VISIBLE_DEVICES": "MIG-4a"}), "warning", "divided (MIG)"),
        ("gpu.partitioned", ("variables", "", {"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}), "warning", "by MPS"),
        ("cuda.driver", gpu(driver="570.12"), "error", "needs the 580 series"),
        ("cuda.known-bad", gpu(driver="590.44.01"), "warning", "CUDA graphs"),
        ("gpu.xid", ("kernel_log", "", ["NVRM: Xid (PCI:000f:01:00): 79, GPU has fallen off"]), "warning", "79"),
        ("cuda.packages", ("packages", "", {"torch": "2.13.0", "triton": "3.9.0"}), "error", "cuda-bindings"),
        ("cuda.ptxas", ("ptxas", "", "12.8"), "error", "does not know sm_121a"),
        ("install.python", ("system", "", {"kernel": "6.17.0", "python": "3.10.4"}), "error", "3.10.4"),
        ("install.python", ("system", "", {"kernel": "6.17.0", "python": "3.15.0"}), "warning", "3.15.0"),
        ("triton.compiler", ("python_headers", "", False), "warning", "Python.h"),
        ("disk.swapfile", ("folder", "/sys/block", ["zram0"]), "note", "zram"),
        ("processes.compilers", ("processes", "", [{"pid": 9, "parent": 8, "name": "cicc", "zombie": False,
                                                   "bytes": 9 << 30}]), "note", "9.0 GiB"),
        ("install.variables", ("variables", "", {"HALFBYTE_MOE_KERNAL": "triton"}), "error", "did you mean"),
        ("cache.folder", ("disk", "~/.cache/halfbyte", {"total": 9**15, "free": 9**14, "kind": "ext4",
                                                       "writable": False}), "warning", "not writable"),
        ("memory.cgroup", ("cgroup_memory", "", [{"limit": 2 << 30, "left": 1 << 30}]), "warning", "embedded model"),
    ],
)  # fmt: skip
def test_one_thing_is_wrong(id: str, change: tuple[str, str, Any], severity: str, said: str) -> None:
    machine = changed(*change)
    if id == "disk.swapfile":
        machine.answers.setdefault("file", {})["/sys/block/zram0/disksize"] = "17179869184\n"
    (found,) = only(machine, id)
    assert found.severity == severity
    assert said in found.evidence


def test_a_governor_that_saves_power_is_a_note_where_it_really_does() -> None:
    place = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    assert [f.severity for f in only(changed("file", place, "powersave\n"), "cpu.governor")] == ["note"]
    assert not only(read_records(FIXTURES / "rtx5090-healthy.json")[0], "cpu.governor")  # amd-pstate's own


def test_no_compiler_matters_to_triton_alone() -> None:
    machine = changed("program", "cc", None)
    machine.answers["program"] |= {"gcc": None, "clang": None}
    (found,) = only(machine, "triton.compiler")
    assert "a C compiler" in found.evidence
    machine.answers["triton_module"] = {"": True}
    assert not only(machine, "triton.compiler"), "an image brings it compiled"
    machine = changed("program", "cc", None)
    machine.answers["program"] |= {"gcc": None, "clang": "clang"}
    assert not only(machine, "triton.compiler")


def test_tritons_module_is_looked_for_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (tmp_path / "KEY").mkdir()
    assert not live.triton_module()
    (tmp_path / "KEY" / "cuda_utils.cpython-312-aarch64-linux-gnu.so").touch()
    assert live.triton_module()


@pytest.mark.parametrize(
    ("told", "there", "severity", "said"),
    [
        ({"NCCL_SOCKET_IFNAME": "enp1s0f1np1", "GLOO_SOCKET_IFNAME": "eth0"}, ["enp1s0f1np1"], "error", "different"),
        (
            {"NCCL_SOCKET_IFNAME": "eth7"},
            ["enp1s0f1np1", "lo"],
            "error",
            "no interface eth7; the interfaces are enp1s0f1np1",
        ),
        ({}, ["enp1s0f1np1"], "note", "NCCL_SOCKET_IFNAME is not set"),
        ({}, ["eth0", "lo"], "warning", "NCCL_SOCKET_IFNAME is not set); the interfaces are eth0"),
    ],
)
def test_interfaces_of_a_cluster(told: dict[str, str], there: list[str], severity: str, said: str) -> None:
    machine = changed("variables", "", told, base="two-sparks-healthy")
    machine.answers["folder"] = {"/sys/class/net": there}
    (found,) = only(machine, "cluster.interface", cluster=True)
    assert found.severity == severity
    assert said in found.evidence


def test_an_idle_clock_is_no_defect_and_a_busy_one_is_judged() -> None:
    assert not only(changed(*gpu(mhz=208, busy=0)), "gpu.clocks")
    assert not only(changed(*gpu(mhz=2400, busy=97)), "gpu.clocks")
    assert only(changed(*gpu(mhz=850, busy=97)), "gpu.clocks")


def test_the_power_cap_alone_is_no_slowdown() -> None:
    assert not only(changed("command", REASONS_QUERY, {"status": 0, "output": "0x0000000000000004\n"}), "gpu.throttled")


def test_unified_memory_is_seen_without_its_size() -> None:
    (found,) = gpus(read_records(FIXTURES / "gb10-healthy.json")[0])
    assert (found.unified, found.total, found.capability) == (True, None, (12, 1))
    (found,) = gpus(read_records(FIXTURES / "rtx5090-healthy.json")[0])
    assert (found.unified, found.total) == (False, 32607 * 2**20)


def test_old_drivers_call_the_reasons_otherwise() -> None:
    machine = changed("command", REASONS_QUERY, {"status": 2, "output": "Field is not a valid field to query."})
    old = "nvidia-smi --query-gpu=clocks_throttle_reasons.active --format=csv,noheader"
    machine.answers["command"][old] = {"status": 0, "output": "0x0000000000000040\n"}
    assert "hardware thermal slowdown" in only(machine, "gpu.throttled")[0].evidence


def test_numbers_of_meminfo_and_versions() -> None:
    machine = changed("file", "/proc/meminfo", "MemTotal:  2 kB\nHugePages_Total:       0\nnonsense\n")
    assert meminfo(machine) == {"MemTotal": 2048}
    assert (version("580.95.05"), version("13"), version(None), version("n/a")) == ((580, 95, 5), (13,), (), ())


@pytest.mark.parametrize(
    ("words", "engine"),
    [
        (["/venv/bin/python", "/venv/bin/halfbyte", "serve", "secret"], "halfbyte"),
        (["python3", "-m", "vllm.entrypoints.cli.main", "serve"], "vllm"),
        (["VLLM::EngineCore"], "vllm"),
        (["ray::RayWorker.run", "", ""], "ray"),
        (["bash", "vllm-notes.sh"], None),
        (["vim", "/home/x/halfbyte.txt"], None),
        ([], None),
    ],
)
def test_an_engine_is_known_by_its_program_alone(words: list[str], engine: str | None) -> None:
    class Process:
        def cmdline(self) -> list[str]:
            return words

    assert live._engine(Process()) == engine


# ---- a model's files ------------------------------------------------------------------------------------------------


def shard(path: Path, size: int) -> None:
    header = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


def test_a_folder_is_looked_at_without_torch(tmp_path: Path) -> None:
    shard(tmp_path / "model-00001-of-00002.safetensors", 64)
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    (tmp_path / "config.json").write_text("{}")
    found = look_at(tmp_path)
    assert found is not None
    assert found["missing"] == ["model-00002-of-00002.safetensors"]
    assert (found["kind"], found["cut_off"], found["vocabulary"]) == ("safetensors", [], False)
    shard(tmp_path / "model-00002-of-00002.safetensors", 64)
    whole = (tmp_path / "model-00002-of-00002.safetensors").read_bytes()
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(whole[:-1])
    (tmp_path / "x.part").touch()
    found = look_at(tmp_path)
    assert found is not None
    assert (found["missing"], found["cut_off"]) == ([], ["model-00002-of-00002.safetensors"])
    assert found["unfinished"] == ["x.part"]
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"\xff" * 40)
    assert look_at(tmp_path)["cut_off"] == ["model-00002-of-00002.safetensors"]  # type: ignore[index]


def test_gguf_and_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(12))
    (tmp_path / "b.gguf").write_bytes(b"nope" + bytes(12))
    assert look_at(tmp_path / "a.gguf") == {"kind": "gguf", "bytes": 16, "largest": "a.gguf"}
    assert look_at(tmp_path / "b.gguf")["kind"] == "unknown"  # type: ignore[index]
    assert look_at(tmp_path / "none") is None
    assert look_at(tmp_path) == {"kind": "folder", "bytes": 32, "largest": "a.gguf"}


def test_a_disk_is_read_and_a_small_file_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(1000))
    assert read_speed(str(tmp_path / "small")) is None
    with (tmp_path / "large").open("wb") as file:
        file.truncate(80 << 20)
    measured = read_speed(str(tmp_path / "large"))
    assert measured is not None
    assert measured["bytes"] == 80 << 20
    assert measured["seconds"] > 0
