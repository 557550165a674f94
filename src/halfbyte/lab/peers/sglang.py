"""SGLang as an engine: gates as its flags, and what it has no flag for refused.

Its names, and what it takes for gpt-oss, were read in the sources of SGLang 0.5.23 (PyPI), which has never been started
from here; a version that does not know one says so when it starts, and that is the refusal. Nothing of it is imported.
"""

from __future__ import annotations

import sys

from halfbyte.gates import Gates
from halfbyte.lab.peers.launch import Launch, Progress, Setup, refused
from halfbyte.model import load

MOE = {"triton": "triton_kernel", "cutlass": "flashinfer_mxfp4", "marlin": "marlin"}
ATTENTION = {"triton": "triton", "flash_attn": "fa3"}  # FlashInfer's has no sinks there, and is refused for gpt-oss
KV = {"bf16": "bf16", "fp8": "fp8_e4m3"}
NO_GRAPHS = ("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled")
HEADS = {
    "eagle3-short": "nvidia/gpt-oss-120b-Eagle3-short-context",
    "eagle3-long": "nvidia/gpt-oss-120b-Eagle3-long-context",
    "eagle3-throughput": "nvidia/gpt-oss-120b-Eagle3-throughput",
}
SUPPORTED_GATES = ("moe_kernel", "attention", "kv_dtype", "speculate", "graphs", "sinks", "activation")


class SglangPeer:
    name = "sglang"

    def prepare(self, setup: Setup, progress: Progress) -> Setup:
        return setup

    def launch(self, setup: Setup) -> Launch:
        name = load.resolve_model(setup.model)
        if name.path is None:
            return Launch(
                refusals=(f"{name.text}: SGLang reads a folder or a name on the Hub; write the weights first.",)
            )
        flags, refusals = sglang_flags(setup.gates)
        command = [setup.python or sys.executable, "-m", "sglang.launch_server", "--model-path", str(name.path)]
        command += ["--host", "127.0.0.1", "--port", str(setup.port), *flags, *setup.flags]
        if setup.device:
            command += ["--device", setup.device]
        return Launch(tuple(command), refusals=tuple(refusals))


def sglang_flags(gates: Gates) -> tuple[list[str], list[str]]:
    flags: list[str] = []
    refusals = refused(gates, SUPPORTED_GATES, "SGLang")
    kernels = set(gates.moe_kernel)
    if kernels != {"auto"}:
        kernel = gates.moe_kernel.decode
        if len(kernels) > 1:
            refusals.append(f"--moe-kernel {gates.moe_kernel}: SGLang has one for all regimes.")
        elif kernel not in MOE:
            refusals.append(f"--moe-kernel {kernel}: of these SGLang has {', '.join(MOE)} for MXFP4.")
        else:
            flags += ["--moe-runner-backend", MOE[kernel]]
    if gates.activation not in ("auto", "float", "bf16"):
        refusals.append(f"--activation {gates.activation}: SGLang's MXFP4 kernels choose their own; use auto or bf16.")
    if gates.attention != "auto":
        if gates.attention in ATTENTION:
            flags += ["--attention-backend", ATTENTION[gates.attention]]
        else:
            refusals.append(f"--attention {gates.attention}: of these SGLang has {', '.join(ATTENTION)}.")
    if gates.kv_dtype != "auto":
        if gates.kv_dtype in KV:
            flags += ["--kv-cache-dtype", KV[gates.kv_dtype]]
        else:
            refusals.append(f"--kv-dtype {gates.kv_dtype}: SGLang has {', '.join(KV)}.")
    if gates.sinks == "off":
        refusals.append("--sinks off: SGLang has no such switch, and gpt-oss writes garbage without sinks.")
    if gates.graphs == "off":
        flags += NO_GRAPHS
    if gates.speculate == "ngram":
        flags += ["--speculative-algorithm", "NGRAM"]
    elif gates.speculate in HEADS:
        flags += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", HEADS[gates.speculate]]
        flags += [
            "--speculative-num-steps",
            "3",
            "--speculative-eagle-topk",
            "1",
            "--speculative-num-draft-tokens",
            "4",
        ]
    elif gates.speculate != "off":
        refusals.append(f"--speculate {gates.speculate}: of these SGLang has ngram, {', '.join(HEADS)}.")
    return flags, refusals
