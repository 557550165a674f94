"""vLLM 0.26.0 from PyPI in pieces that an offline GPU machine can be given, for `bench/vllm/compare.py` there.

    python -m bench.vllm.pack OUT [--flashinfer]      writes OUT/part1 … OUT/partN, each under 58 MiB

That machine has Python 3.12, torch 2.11.0 for CUDA 13, Triton 3.6 and transformers. There, with all pieces in a folder:

    cat piece.* | xz -dc | tar x -C SITE && PYTHONPATH=SITE:src:. python -m bench.vllm.compare 120b --out OUT.json

Left out, because gpt-oss on an H200 does not need them: FlashAttention 2, FlashMLA, the Rust front end, pictures.
halfbyte's own entry point is written into SITE, so that vLLM finds the plugin without an installation.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

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
FLASHINFER = ["flashinfer-python", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "tabulate", "einops"]
SKIP = ("_vllm_fa2_C", "vllm-rs", "_flashmla", "_qutlass", "swagger", *(f"cpython-3{n}" for n in (10, 11, 13, 14)))
ENTRY = """[vllm.general_plugins]
halfbyte = halfbyte.vllm_plugin.plugin:register

[vllm.endpoint_plugins]
halfbyte = halfbyte.vllm_plugin.endpoint:KernelsEndpoint
"""


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *words], check=True)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--flashinfer", action="store_true", help="with FlashInfer, for kernels/borrowed/")
    asked = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        tmp, site = Path(folder), Path(folder) / "site"
        pip("download", *TARGET, "-d", folder, f"vllm=={VERSION}")
        with zipfile.ZipFile(next(tmp.glob("vllm-*.whl"))) as wheel:
            wheel.extractall(site, [n for n in wheel.namelist() if not any(s in n for s in SKIP)])
        pip("install", *TARGET, "--target", str(site), *NEEDS, *(FLASHINFER if asked.flashinfer else ()))
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
            part = asked.out / f"part{i}"
            part.mkdir(parents=True, exist_ok=True)
            shutil.move(piece, part / piece.name)
            print(part / piece.name, (part / piece.name).stat().st_size >> 20, "MiB")


if __name__ == "__main__":
    main()
