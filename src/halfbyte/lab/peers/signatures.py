"""What an engine's log says when it fails, what that means, and what to do: one row for each known failure.

The first rows are the failures that MXFP4 stacks on SM12x are known for; then those of any engine. A row is found by a
regular expression over single lines. Nothing is guessed: a log in which no row is found has no cause here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    name: str
    pattern: str  # over one line, case ignored
    cause: str
    fix: str
    refusal: bool = False  # the engine says that it does not run what was asked for


@dataclass(frozen=True)
class LogFinding:
    signature: Signature
    line: str  # the first that shows it
    number: int  # of that line, from 1

    @property
    def message(self) -> str:
        """The line without what a logger put in front of the error."""
        error = re.search(r"\b\w+Error: (.*)", self.line)
        return error[1] if error else self.line

    def __str__(self) -> str:
        return f"{self.signature.name} (line {self.number}): {self.signature.cause} {self.signature.fix}"


SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "SM100-only MoE kernel",
        r"No supported CUDA architectures found for major versions",
        "a kernel that exists for SM100 only (trtllm_fp4_block_scale_moe) was asked for on another GPU.",
        "Ask for the CUTLASS path (--moe-kernel cutlass: cutlass_fused_moe), or for Marlin.",
    ),
    Signature(
        "architecture without its suffix",
        r"cvt\.?[\w.]*e2m1x2.*not supported|Feature 'cvt[\w.]*e2m1x2",
        "the code was compiled for sm_120 or sm_121 without the suffix a, which has no FP4 conversion.",
        "Set FLASHINFER_CUDA_ARCH_LIST=12.1a (12.0a on SM120), clear ~/.cache/flashinfer, and start again.",
    ),
    Signature(
        "compiler killed",
        r"Killed\b.*\bcicc\b|\bcicc\b.*(Killed|signal 9)|"
        r"nvcc error\s*:.*(died due to signal 9|Killed)",
        "the kernel killed nvcc's cicc: CUTLASS takes 5 to 10 GB for each file that is compiled at once.",
        "Set MAX_JOBS to (MemAvailable - 16 GiB) / 8 GiB, at least 1, and start again; what is compiled is kept.",
    ),
    Signature(
        "NGC torch without assume_32bit_indexing",
        r"assume_32bit_indexing",
        "this torch (an NGC build) has another torch.compile option list than the engine expects.",
        "Use the torch that the engine's release names, or start with --enforce-eager.",
    ),
    Signature(
        "CUDA graph capture failed",
        r"cudaErrorLaunchFailure|[Cc]apturing CUDA graphs?.*(fail|error)|"
        r"operation not permitted when stream is capturing|cudaErrorStreamCapture",
        "a kernel failed while CUDA graphs were captured.",
        "Start with --enforce-eager to see whether it runs at all, then with --debug to see which kernel it is.",
    ),
    Signature(
        "illegal memory access",
        r"illegal memory access|cudaErrorIllegalAddress",
        "a kernel read or wrote outside of its memory; what the log names is where it was noticed.",
        "Start with --debug (CUDA_LAUNCH_BLOCKING=1) and look for the kernel; dmesg has an Xid 13 or 31.",
    ),
    Signature(
        "GPU fault",
        r"\bXid\b",
        "the driver reports a fault of the GPU.",
        "Look the number up in NVIDIA's list of Xid errors; 79 and 119 need a reboot.",
    ),
    Signature(
        "out of GPU memory",
        r"CUDA out of memory|cudaErrorMemoryAllocation|torch\.(cuda\.)?OutOfMemoryError|"
        r"cudaMalloc failed: out of memory|No available memory for the cache blocks",
        "the GPU's memory does not hold weights, KV cache and workspace together.",
        "Lower --gpu-memory-utilization, --max-model-len or --max-num-seqs (halfbyte: --kv-memory, --max-context).",
    ),
    Signature(
        "out of host memory",
        r"oom-kill|oom_reaper|Out of memory: Killed process|std::bad_alloc|"
        r"MemoryError\b|Cannot allocate memory",
        "the host's memory ran out; where GPU and host share one memory, the KV cache counts, too.",
        "Leave more free: a smaller KV cache, fewer compile jobs (MAX_JOBS), no mmap of the weights.",
    ),
    Signature(
        "vocabulary missing",
        r"tiktoken.*(error|not found|fail|HTTPError|ConnectionError)|TIKTOKEN_ENCODINGS_BASE|"
        r"HarmonyError: error downloading|error downloading or loading vocab file",
        "gpt-oss's vocabulary (o200k) is fetched when first needed, and was not.",
        "Put o200k_base.tiktoken where TIKTOKEN_ENCODINGS_BASE points.",
    ),
    Signature(
        "attention sinks unsupported",
        r"(does not|not) support.*(attention )?sinks?\b|sinks? (is|are) not supported",
        "this attention backend has no sinks, without which gpt-oss writes garbage.",
        "Choose another one: --attention triton, or FlashInfer with FA2 sinks.",
        refusal=True,
    ),
    Signature(
        "wrong FlashInfer",
        r"No module named 'flashinfer|cannot import name .* from 'flashinfer|"
        r"flashinfer.*version.*(mismatch|does not match)",
        "FlashInfer is missing, or another copy than the intended one is first on the path.",
        "See which one is imported (python -c 'import flashinfer; print(flashinfer.__file__)') and correct PYTHONPATH.",
    ),
    Signature(
        "AMX needed",
        r"(mxfp4|MXFP4).*(AMX|amx)|AMX.*required",
        "vLLM's own MXFP4 on a CPU needs AMX.",
        "Use a bf16 copy of the model there, or halfbyte's plugin.",
        refusal=True,
    ),
    Signature(
        "choice not supported",
        r"\b(ValueError|NotImplementedError): .*(\bnot supported\b|\bunsupported\b|\b(does|do) not support\b|"
        r"\bnot valid for this configuration\b|\bNo \S+ .*backend supports\b)",
        "the engine does not support a choice that it was given.",
        "Choose other gates; its log names the ones that it has.",
        refusal=True,
    ),
    Signature(
        "choice needs a package",
        r"ImportError: .*\bis required for\b",
        "a choice that the engine was given needs a package that is not installed.",
        "Install it into the engine's environment, or choose other gates.",
        refusal=True,
    ),
    Signature(
        "port in use",
        r"[Aa]ddress already in use|cannot listen on|EADDRINUSE|couldn't bind",
        "another process listens on the port.",
        "Choose another port, or end that process.",
    ),
    Signature(
        "model not found",
        r"does not appear to have a file named|Repository Not Found|"
        r"no such file or directory.*(gguf|safetensors)|failed to open .*gguf|does not exist; give a model folder",
        "the model is not where the engine looks.",
        "Name a folder or file that exists; `halfbyte pull` fetches one.",
    ),
    Signature(
        "unknown model architecture",
        r"unknown model architecture|[Mm]odel architectures? \[.*\] (are|is) not supported",
        "this version of the engine does not know gpt-oss.",
        "Use a newer version of it.",
    ),
    Signature(
        "unknown flag",
        r"unrecognized arguments|No such option|error: invalid argument|unknown argument",
        "this version of the engine does not know a flag that it was given.",
        "The launch command stands in exit.json; compare it with the engine's --help.",
        refusal=True,
    ),
    Signature(
        "package missing",
        r"ModuleNotFoundError: No module named|ImportError: (?!.*\bis required for\b)",
        "a package that the engine needs is missing or of another version.",
        "Install it into the engine's environment.",
    ),
    Signature(
        "driver too old",
        r"CUDA driver version is insufficient|forward compatibility was attempted|"
        r"no kernel image is available for execution",
        "the driver, or the build of the engine, is not made for this GPU.",
        "Update the driver, or take a build with this GPU's architecture.",
    ),
)
_COMPILED = [(s, re.compile(s.pattern, re.IGNORECASE)) for s in SIGNATURES]


def find(lines: Iterable[str]) -> list[LogFinding]:
    """Every signature that a log shows, each once, in the order in which they came."""
    matches: dict[str, LogFinding] = {}
    for number, line in enumerate(lines, 1):
        for signature, pattern in _COMPILED:
            if signature.name not in matches and pattern.search(line):
                matches[signature.name] = LogFinding(signature, line.strip()[:400], number)
    return list(matches.values())
