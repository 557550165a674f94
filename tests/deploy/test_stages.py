"""The commands of the native image's stages, run in bare chroots of Debian's packages; the image then serves: as its
own user, on a root that nobody can write to, without a network, without a compiler.

Slow, and needs root, debootstrap and a network. The bases are stood in for by Debian 12 with its own Python, the stub
of the CUDA driver by one that is compiled here from the names in its header. Not run: what needs nvcc (FlashInfer's
kernels) or gigabytes of CUDA's libraries; what pip would install there is resolved, for both machines.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.packages.aarch64 import files_of, requirements_of, text_in
from tests.deploy.stages import Builder, Image, inside, parsed
from tests.deploy.tools import DEPLOY, ROOT, passes

pytestmark = pytest.mark.slow
PYPI = "https://pypi.org/simple"
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "nvcc", "ld", "as")
# In the container, beside the server: waits for the health check of the image, asks, and ends it as docker would.
LIFE = """
import json, os, signal, subprocess, sys, time, urllib.request
server = subprocess.Popen(json.loads(sys.argv[1]))
check = json.loads(sys.argv[2])
deadline = time.monotonic() + 240
while subprocess.run(check, stderr=subprocess.DEVNULL).returncode:
    if server.poll() is not None or time.monotonic() > deadline:
        sys.exit(f"the server is not healthy; exit status {server.poll()}")
    time.sleep(0.5)
body = {"model": "tiny", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
head = {"content-type": "application/json"}
asked = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", json.dumps(body).encode(), head)
answer = json.load(urllib.request.urlopen(asked, timeout=120))["choices"][0]["message"]["content"]
try:
    open("/opt/halfbyte/written", "w")
    writable = True
except OSError as e:
    writable = str(e)
server.send_signal(signal.SIGTERM)
print(json.dumps({"answer": answer, "uid": os.getuid(), "root": writable, "ended": server.wait(60)}))
"""

# What Triton does at its first launch, with the stub in the driver's place.
LOOK = """
import ctypes
ctypes.CDLL("/models/libcuda.so", mode=ctypes.RTLD_GLOBAL)
from triton.backends.nvidia.driver import CudaUtils
CudaUtils()
"""


def debian(folder: Path) -> Path:
    """A root with Debian 12 and its Python, as `python`, with headers: so much the base has."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None or shutil.which("unshare") is None:
        pytest.skip("chroots need root, debootstrap and unshare")
    wanted = ["--variant=minbase", "--include=python3,python3-venv,libpython3-dev,ca-certificates"]
    done = subprocess.run(["debootstrap", *wanted, "bookworm", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"Debian's packages are not to be had here: {done.stdout[-300:]}")
    (folder / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    return folder


def driver_stub(root: Path) -> Path:
    """Instead of the image with CUDA's toolkit: a driver whose every function answers as NVIDIA's stub does."""
    import triton

    header = Path(triton.__file__).parent / "backends" / "nvidia" / "include" / "cuda.h"
    text = header.read_text(encoding="utf-8", errors="replace")
    names = set(re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w+)\s*\(", text)) | set(
        re.findall(r"#define \w+\s+(cu\w+_v\d+)", text)
    )
    folder = root / "usr/local/cuda-13.0/lib64/stubs"
    folder.mkdir(parents=True)
    source = root / "stub.c"
    source.write_text("".join(f"int {name}(void) {{ return 34; }}\n" for name in sorted(names)))
    passes(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", folder / "libcuda.so"])
    return root


def checkout(folder: Path) -> Path:
    """The context of a build: what git keeps, with the changes of today."""
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", ROOT, folder], check=True)
    listed = ["git", "ls-files", "-z", "--modified", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.run(listed, cwd=ROOT, capture_output=True, text=True).stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    work = tmp_path_factory.mktemp("images")
    arguments, _ = parsed(DEPLOY / "Dockerfile")
    bases = {arguments["PYTHON_IMAGE"]: debian(work / "debian"), arguments["CUDA_IMAGE"]: driver_stub(work / "toolkit")}
    yield Builder(
        DEPLOY / "Dockerfile", checkout(work / "context"), work, bases,
        {"BUILD_TORCH_INDEX": PYPI}, {"/build/build": ROOT / "build"},
    )  # fmt: skip
    shutil.rmtree(work, ignore_errors=True)


@pytest.fixture(scope="module")
def native(builder: Builder) -> Image:
    return builder.build("native")


def test_every_command_of_the_native_image_ran(builder: Builder, native: Image) -> None:
    _, stages = parsed(DEPLOY / "Dockerfile")
    needed = ("wheel", "final", "native-packages", "native-kernels", "native")
    wanted = [(name, one.rest) for name in needed for one in stages[name][1] if one.word == "RUN"]
    assert len(builder.ran) == len(wanted)
    assert {stage for stage, _ in builder.ran} == {stage for stage, _ in wanted}


def test_it_holds_no_compiler_and_no_checkout(native: Image) -> None:
    found = [str(p) for p in native.root.rglob("*") if p.name in COMPILERS and os.access(p, os.X_OK) and p.is_file()]
    assert not found
    assert not (native.root / "build").exists()
    cubins = list(native.root.glob("opt/halfbyte/lib/python3*/site-packages/halfbyte/kernels/prebuilt/*.cubin"))
    assert cubins


def test_the_image_serves_as_nobody_on_a_root_that_cannot_be_written(native: Image, tmp_path: Path) -> None:
    assert native.user == "10001:10001"
    volume = tmp_path / "volume"
    volume.mkdir()
    os.chown(volume, 10001, 10001)
    words = [json.dumps([*native.entrypoint, *native.command]), json.dumps(native.healthcheck)]
    command = inside(
        native, ["python", "-c", LIFE, *words], binds={"/var/cache/halfbyte": volume}, read_only=True, alone=True
    )
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    told = json.loads(done.stdout.splitlines()[-1])
    assert "42" in told["answer"]
    assert told["uid"] == 10001
    assert "Read-only file system" in told["root"]
    assert told["ended"] == 0
    assert "cpu.step" in done.stderr, "the entrypoint prints the selection"
    assert list(volume.glob("triton/**/*.so")), "the module of Triton's comes from the image's seed"


def test_it_ends_where_the_doctor_finds_an_error(native: Image) -> None:
    """A model that is not there."""
    command = inside(native, [*native.entrypoint, "serve", "/models/none"], binds={}, read_only=True, alone=True,
                     extra={"CONTAINER_SEED": ""})  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "nothing is served" in done.stderr


def test_triton_finds_its_module_without_a_compiler(builder: Builder, native: Image, tmp_path: Path) -> None:
    """By the cache that the image brings; with an empty one it cannot be had."""
    brought, empty, folder = tmp_path / "brought", tmp_path / "empty", tmp_path / "folder"
    shutil.copytree(native.root / "opt/halfbyte/share/seed/triton", brought / "triton")
    (empty / "triton").mkdir(parents=True)
    shutil.copytree(builder.build("cuda").root / "usr/local/cuda-13.0/lib64/stubs", folder)
    (folder / "look.py").write_text(LOOK)
    for volume, code in ((brought, 0), (empty, 1)):
        subprocess.run(["chown", "-R", "10001:10001", volume], check=True)
        binds = {"/var/cache/halfbyte": volume, "/models": folder}
        command = inside(native, ["python", "/models/look.py"], binds=binds, read_only=True, alone=True)
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
    assert "C compiler" in done.stderr


# ---- what only an engine with gigabytes could run --------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_pip_finds_what_the_image_of_vllm_installs(machine: str, tmp_path: Path) -> None:
    """All of it as wheels: the stage has no compiler."""
    _, stages = parsed(DEPLOY / "Dockerfile")
    steps = stages["vllm-packages"][1]
    pins = dict(one.rest.split("=", 1) for one in steps if one.word == "ARG")
    wanted = [f"vllm=={pins['VLLM_VERSION']}", f"fastsafetensors=={pins['FASTSAFETENSORS_VERSION']}"]
    install = next(one.rest for one in steps if one.word == "RUN" and '"vllm==' in one.rest)
    assert re.findall(r'"(\w+)==', install) == [w.split("==")[0] for w in wanted]
    where = [word for n in range(17, 37) for word in ("--platform", f"manylinux_2_{n}_{machine}")]
    where += ["--platform", f"manylinux2014_{machine}", "--python-version", "3.12", "--target", str(tmp_path)]
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed"]
    done = subprocess.run(
        [*pip, "--use-feature=fast-deps", "--only-binary=:all:", *where, *wanted], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_flashinfers_build_has_the_flags_that_the_image_uses(tmp_path: Path) -> None:
    """In the version that vLLM's wheel asks for."""
    _, stages = parsed(DEPLOY / "Dockerfile")
    pins = dict(one.rest.split("=", 1) for one in stages["vllm-packages"][1] if one.word == "ARG")
    command = next(one.rest for one in stages["vllm-kernels"][1] if "flashinfer.aot" in one.rest)
    used = set(re.findall(r"(--[a-z0-9-]+)", command.split("flashinfer.aot", 1)[1].split("&&")[0]))
    assert len(used) > 8
    with httpx.Client(timeout=60, follow_redirects=True) as client:
        wheels = files_of(client, PYPI, "vllm")
        vllm = next(place for name, place in wheels.items() if name.startswith(f"vllm-{pins['VLLM_VERSION']}-cp"))
        wanted = next(r for r in requirements_of(client, vllm) if r.name == "flashinfer-python")
        wheels = files_of(client, PYPI, wanted.name)
        (place,) = [p for n, p in wheels.items() if n.endswith(".whl") and n.split("-")[1] == str(wanted.specifier)[2:]]
        known = set(re.findall(r"\"(--[a-z0-9-]+)\"", text_in(client, place, "flashinfer/aot.py")))
    assert used - known == set()
