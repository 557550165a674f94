"""FlashInfer's modules that `kernels/borrowed/` calls on an H200, compiled without a GPU; `pack.py` starts it.

FlashInfer is asked as on an H200 and stopped where it would compile; what it asked for is compiled here. Of its experts
those sources that our call reaches: all of them would take hours.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

LIBRARIES = "libraries.txt"  # one a line
WINDOWS = (-1, 127)  # attention over everything, and within a window
TILES = {(64, 16, 128): "Pingpong", (128, 64, 256): "Cooperative"}  # what runs, and what is asked for its workspace
RUNNER = """#include "fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh"
#include "moe_kernels.h"

namespace tensorrt_llm::kernels::cutlass_kernels {
template class CutlassMoeFCRunner<__nv_bfloat16, Fp4Type>;
INSTANTIATE_FINALIZE_MOE_ROUTING(__nv_bfloat16, __nv_bfloat16, __nv_bfloat16);
}
"""
MISSING = """#include <stdexcept>
extern "C" void halfbyte_not_packed() {
  throw std::runtime_error("this pack holds FlashInfer's experts of bf16 rows and MXFP4 weights, in its first tile");
}
"""


class SourcesCollected(Exception):
    """FlashInfer would compile now."""


def modules() -> list[Any]:
    """What our calls make FlashInfer compile."""
    specs: list[Any] = []

    def record(spec: Any) -> None:
        specs.append(spec)
        raise SourcesCollected

    importlib.import_module("flashinfer.jit.core").JitSpec.build_and_load = record
    flashinfer = importlib.import_module("flashinfer")
    with contextlib.suppress(SourcesCollected):
        importlib.import_module("flashinfer.fused_moe.core").get_cutlass_fused_moe_module("90")
    for window in WINDOWS:
        with contextlib.suppress(SourcesCollected):
            flashinfer.BatchAttentionWithAttentionSinkWrapper(
                torch.zeros(1024, dtype=torch.uint8), kv_layout="HND", backend="fa2", head_dim_qk=64, head_dim_vo=64,
                window_left=window,
            )  # fmt: skip
    return specs


def build_experts(spec: Any, build: Path) -> None:
    """Builds those of FlashInfer's 247 sources that our call reaches; names from the others throw when called."""
    additions = {"runner.cu": RUNNER, "missing.cpp": MISSING}
    rest = [s for s in spec.sources if not s.name.endswith(".generated.cu")]
    for source in (s for s in spec.sources if s not in rest):
        text = source.read_text(encoding="utf-8")
        for launcher in re.findall(r"template void .*?;\n", text, re.DOTALL):
            tile = tuple(int(n) for n in re.findall(r"Int<(\d+)>", launcher))
            schedule = re.findall(r"KernelTmaWarpSpecialized(\w+)", launcher)
            if "<__nv_bfloat16, SafeFP4," in launcher and [TILES.get(tile[:3])] == schedule and tile[3:] == (1, 1, 1):
                head, tail = text.partition("template ")[0], text[text.rindex("} // namespace cutlass_kernels_oss") :]
                additions["x".join(map(str, tile[:3])) + ".cu"] = f"{head}\n{launcher}\n{tail}"
    folder = build / "experts"
    folder.mkdir(exist_ok=True)
    for name, text in additions.items():
        at = folder / name
        if not at.exists() or at.read_text(encoding="utf-8") != text:  # or it would be compiled anew
            at.write_text(text, encoding="utf-8")
    other = re.compile(r"moe_gemm_kernels_(?!bf16_fp4)|cutlass_fused_moe_instantiation|fp8_blockscale_gemm")
    spec.sources = [s for s in rest if not other.match(s.name)] + [folder / name for name in additions]
    spec.extra_ldflags = []
    spec.build(verbose=True)
    named = subprocess.run(["nm", "-D", "-u", spec.jit_library_path], capture_output=True, text=True, check=True).stdout
    missing = [word for word in named.split() if re.search("tensorrt_llm|deep_gemm|nvrtc", word)]
    (folder / "missing.ld").write_text("".join(f"--defsym={word}=halfbyte_not_packed\n" for word in missing))
    spec.extra_ldflags = [f"-Wl,@{folder / 'missing.ld'}", "-Wl,-z,now"]
    spec.build(verbose=True)


def compile_modules(folder: str) -> None:
    build, specs = Path(folder), modules()
    for spec in specs:
        if spec.name.startswith("fused_moe"):
            build_experts(spec, build)
        else:
            spec.build(verbose=True)
    (build / LIBRARIES).write_text("".join(f"{spec.jit_library_path}\n" for spec in specs), encoding="utf-8")
