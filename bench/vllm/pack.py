"""vLLM 0.26.0 from PyPI in pieces that an offline GPU machine can be given, for `bench/vllm/compare.py` there.

    python -m bench run vllm-pack --set to=OUT       writes OUT/part1 … OUT/partN, each under 58 MiB
    python -m bench run vllm-pack --set to=OUT --set flashinfer=yes
                                                     FlashInfer alone: OUT/flashinfer.tar.xz, its kernels compiled

That machine has Python 3.12, torch 2.11.0 for CUDA 13, Triton 3.6 and transformers. There, with all pieces in a folder:

    cat piece.* | xz -dc | tar x -C SITE && PYTHONPATH=SITE:src:. python -m bench run inside-vllm --out OUT.json

Left out, because gpt-oss on an H200 does not need them: FlashAttention 2, FlashMLA, the Rust front end, pictures.
halfbyte's own entry point is written into SITE, so that vLLM finds the plugin without an installation.

FlashInfer compiles its kernels where they are first called. Packed are those that `kernels/borrowed/` calls on an H200,
compiled here with nvcc and ninja: attention with sinks, and of the experts the product of bf16 rows with MXFP4 weights
in the tiles that are taken without its autotuner (two of 29; all of them, and the other number formats, would take
hours). Whatever else is called there says so. OUT/build keeps what was compiled, so a second run goes on from there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from bench.measurement import ROOT, Run, child_command, measurement, option
from bench.vllm.flashinfer_modules import LIBRARIES, compile_modules

VERSION = "0.26.0"
PIECE = "57M"
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 34, 31, 28, 27, 24, 17, 12, 5)] + [
    f"manylinux{n}_x86_64" for n in (2014, 2010, 1)
]
TARGET = ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:", "--no-deps"]
TARGET += [word for platform in PLATFORMS for word in ("--platform", platform)]
NEEDS = """anthropic annotated-types apache-tvm-ffi==0.1.10 astor blake3 cachetools cbor2 compressed-tensors==0.17.0
depyf==0.20.0 dill distro docstring-parser fastapi<0.137,>=0.133 gguf httpcore2 httptools httpx2 httpx-sse ijson
interegular jiter jmespath jsonschema jsonschema-specifications lark==1.2.2 llguidance<1.8,>=1.7
lm-format-enforcer==0.11.3 loguru mcp mcp-types mistral_common model-hosting-container-standards msgspec openai
openai-harmony outlines_core==0.2.14 partial-json-parser prometheus-fastapi-instrumentator pybase64 pycountry
pydantic==2.14.3 pydantic-core==2.50.4 pydantic-extra-types pydantic-settings pyjwt python-dotenv python-json-logger
python-multipart pyzmq referencing rpds-py setproctitle sniffio sse-starlette starlette supervisor truststore
typing-inspection uvicorn watchfiles websockets xgrammar==0.2.1""".split()  # noqa: SIM905
FLASHINFER = "flashinfer-python==0.6.18.post1"
FLASHINFER_NEEDS = ["apache-tvm-ffi==0.1.11", "nvidia-ml-py", "tabulate", "requests", "certifi", "idna", "urllib3"]
FLASHINFER_NEEDS += ["charset-normalizer"]
HEADERS = ["nvidia-cublas==13.1.*", "nvidia-curand==10.4.*", "nvidia-cuda-nvrtc==13.0.*"]  # a compiler of PyPI has none
SKIP = ("_vllm_fa2_C", "vllm-rs", "_flashmla", "_qutlass", "swagger", *(f"cpython-3{n}" for n in (10, 11, 13, 14)))
ENTRY = """[vllm.general_plugins]
halfbyte = halfbyte.vllm_plugin.plugin:register

[vllm.endpoint_plugins]
halfbyte = halfbyte.vllm_plugin.endpoint:KernelsEndpoint
"""


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments], check=True)


# ---- FlashInfer ------------------------------------------------------------------------------------------------------


def pack_flashinfer(out: Path) -> None:
    build = (out / "build").resolve()
    here, site = build / "here", build / "site"  # for the Python that runs this, and for the one that will
    if not here.exists():
        pip("install", "--target", str(here), "--no-deps", FLASHINFER, *FLASHINFER_NEEDS, *HEADERS)
    shutil.rmtree(site, ignore_errors=True)
    pip("install", *TARGET, "--target", str(site), FLASHINFER, *FLASHINFER_NEEDS)
    for dead in (*site.rglob("__pycache__"), *site.glob("bin"),
                 *(site / "flashinfer/data" / name for name in ("cccl", "cutlass", "include", "spdlog"))):  # fmt: skip
        shutil.rmtree(dead)
    for library in compiled(here, build):
        at = site / "flashinfer/data/aot" / library.stem / library.name
        at.parent.mkdir(parents=True)
        subprocess.run(["strip", "-o", str(at), str(library)], check=True)
    packed = out / "flashinfer.tar.xz"
    subprocess.run(f"tar c -C {site} . | xz -T0 -6 > {packed}", shell=True, check=True)
    print(packed, packed.stat().st_size >> 20, "MiB")


def compiled(here: Path, build: Path) -> list[Path]:
    """The libraries of the modules that our calls ask FlashInfer for, from a process that finds it."""
    driver = build / "driver"  # a name to link with where no driver is installed
    driver.mkdir(exist_ok=True)
    stub = ["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(driver / "libcuda.so"), "-x", "c", os.devnull]
    subprocess.run(stub, check=True)
    headers = f"-isystem {here / 'nvidia/cu13/include'}"
    environ = os.environ | {
        "FLASHINFER_WORKSPACE_BASE": str(build), "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_EXTRA_CFLAGS": headers, "FLASHINFER_EXTRA_CUDAFLAGS": headers,
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{driver}",
        "PYTHONPATH": os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    command = child_command(compile_modules, build)
    subprocess.run(command, env=environ, check=True)
    return [Path(line) for line in (build / LIBRARIES).read_text(encoding="utf-8").splitlines()]


@dataclass(frozen=True)
class Options:
    to: Path = option(ROOT / "build" / "vllm-pack", "folder of the pieces")
    flashinfer: bool = option(False, "FlashInfer instead of vLLM, for kernels/borrowed/")


@measurement("vllm-pack", needs=("network",), seconds=7200, receipt=False, routine=False)
def vllm_pack(run: Run, options: Options) -> None:
    if options.flashinfer:
        return pack_flashinfer(options.to)
    with tempfile.TemporaryDirectory() as folder:
        tmp, site = Path(folder), Path(folder) / "site"
        pip("download", *TARGET, "-d", folder, f"vllm=={VERSION}")
        with zipfile.ZipFile(next(tmp.glob("vllm-*.whl"))) as wheel:
            wheel.extractall(site, [n for n in wheel.namelist() if not any(s in n for s in SKIP)])
        pip("install", *TARGET, "--target", str(site), *NEEDS)
        info = site / "halfbyte-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: halfbyte\nVersion: 0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(ENTRY, encoding="utf-8")
        for dead in (*site.rglob("__pycache__"), *site.glob("bin"), *site.glob("pycountry/locales"),
                     *site.glob("mistral_common/data"), *site.glob("xgrammar/lib")):  # fmt: skip
            shutil.rmtree(dead, ignore_errors=True)
        for library in site.glob("xgrammar/*.so"):
            subprocess.run(["strip", "--strip-debug", str(library)], check=True)
        packed = f"tar c -C {site} . | xz -T0 -3 | split -b {PIECE} -d - {tmp}/piece."
        subprocess.run(packed, shell=True, check=True)
        for i, piece in enumerate(sorted(tmp.glob("piece.*")), 1):
            part = options.to / f"part{i}"
            part.mkdir(parents=True, exist_ok=True)
            shutil.move(piece, part / piece.name)
            print(part / piece.name, (part / piece.name).stat().st_size >> 20, "MiB")
