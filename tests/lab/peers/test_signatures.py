"""Known failures in logs: every row is found in the words that engines really use, and not in a healthy log."""

from __future__ import annotations

import pytest

from halfbyte.lab.peers.signatures import SIGNATURES, find

SAID = {
    "SM100-only MoE kernel": "RuntimeError: No supported CUDA architectures found for major versions [10].",
    "architecture without its suffix": ("ptxas error   : Feature 'cvt.e2m1x2.f32' not supported on .target 'sm_121'"),
    "compiler killed": '/bin/bash: line 1: 80034 Killed  "$CICC_PATH/cicc" --c++17 --gnu_version=130300',
    "NGC torch without assume_32bit_indexing": (
        "TypeError: unexpected keyword: torch._inductor.config.assume_32bit_indexing does not exist"
    ),
    "CUDA graph capture failed": "torch.AcceleratorError: CUDA error: launch failure (cudaErrorLaunchFailure)",
    "illegal memory access": "CUDA error: an illegal memory access was encountered",
    "GPU fault": "NVRM: Xid (PCI:000f:01:00): 31, pid=1234, name=python3",
    "out of GPU memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "out of host memory": "Out of memory: Killed process 4242 (python3) total-vm:120000000kB",
    "vocabulary missing": "openai_harmony.HarmonyError: error downloading or loading vocab file",
    "attention sinks unsupported": "ValueError: Selected backend does not support attention sinks",
    "wrong FlashInfer": "ImportError: cannot import name 'mxfp4_quantize' from 'flashinfer'",
    "AMX needed": "NotImplementedError: MXFP4 MoE on CPU needs AMX",
    "choice not supported": (
        "ERROR 11-19 18:54:52 [multiproc_executor.py:953] ValueError: moe_backend='marlin' is not supported for "
        "unquantized MoE. Expected one of ['triton', 'batched_triton', 'flashinfer_trtllm', 'aiter']."
    ),
    "choice needs a package": (
        "ImportError: Arctic Inference is required for suffix decoding. Install via `pip install arctic-inference`."
    ),
    "port in use": "OSError: [Errno 98] Address already in use",
    "model not found": "OSError: openai/gpt-oss does not appear to have a file named config.json",
    "unknown model architecture": "llama_model_load: error loading model: unknown model architecture: 'gpt-oss'",
    "unknown flag": "vllm: error: unrecognized arguments: --moe-backend",
    "package missing": "ModuleNotFoundError: No module named 'vllm'",
    "driver too old": "CUDA error: no kernel image is available for execution on the device",
}
HEALTHY = """
INFO 11-16 Starting vLLM API server on http://127.0.0.1:8000
INFO Using 'MARLIN' Mxfp4 MoE backend, attention sinks enabled
INFO Capturing CUDA graphs: 100%|###| 67/67
INFO Graph capturing finished in 12 secs
INFO KV cache memory available: 30.1 GiB; loading safetensors: model-00001.safetensors
main: server is listening on http://127.0.0.1:8080 - starting the main loop
"""


@pytest.mark.parametrize("signature", SIGNATURES, ids=[s.name for s in SIGNATURES])
def test_each_is_found_with_its_cause_and_fix(signature: object) -> None:
    name = signature.name  # type: ignore[attr-defined]
    found = find(["all is well", SAID[name], SAID[name]])
    mine = next(f for f in found if f.signature.name == name)
    assert (mine.number, mine.line) == (2, SAID[name].strip())
    assert mine.signature.cause.endswith(".")
    assert mine.signature.fix.endswith(".")


def test_a_healthy_log_shows_none() -> None:
    assert find(HEALTHY.splitlines()) == []
