"""llama.cpp's own server as an engine, built by `llamacpp.py`. It reads GGUF: other weights are written as one first.

llama.cpp chooses its kernels itself, so that gates of kernels are refused; threads, KV format and CUDA graphs are flags
or variables of its own. Formats of layers are the file's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from halfbyte.errors import UsageError
from halfbyte.lab.machine import cores
from halfbyte.lab.peers import llamacpp, shared_weights
from halfbyte.lab.peers.launch import Launch, Progress, Setup, refused
from halfbyte.model import load

KV = {"f32": "f32", "bf16": "bf16"}
REASONS = {
    "moe_kernel": "llama.cpp chooses its kernels itself",
    "linear_kernel": "llama.cpp chooses its kernels itself",
    "activation": "llama.cpp quantises activations to q8 in front of quantised matrices, always",
    "attention": "llama.cpp chooses its kernels itself",
    "layers": "llama.cpp runs the formats that are in the file; give a GGUF that has these",
    "sinks": "llama.cpp runs the model's sinks, always",
    "speculate": "name llama.cpp's draft model with its own flags (--engine-flag=-md --engine-flag FILE)",
    "experts_in_host": "name the layers with llama.cpp's own flag (--engine-flag=--n-cpu-moe --engine-flag N)",
    "cpu_instructions": "llama.cpp was built for every instruction of this processor",
}
SUPPORTED_GATES = ("threads", "kv_dtype", "graphs")
SLOTS = 10  # requests at once: the protocol's most


class LlamaCppPeer:
    name = "llamacpp"

    def prepare(self, setup: Setup, progress: Progress) -> Setup:
        """Builds the server, and writes the embedded model as a GGUF if that is what it should serve."""
        llamacpp.build(progress=progress)
        name = load.resolve_model(setup.model)
        if name.path == load.EMBEDDED:
            file = shared_weights.write(shared_weights.model_named("tiny"), progress)
            return replace(setup, file=str(file))
        if name.path is None or name.path.suffix != ".gguf":
            raise UsageError(f"llama.cpp reads GGUF files, and {name.text} is none; `halfbyte quantize` writes one.")
        return setup

    def launch(self, setup: Setup) -> Launch:
        gates = setup.gates
        refusals = refused(gates, SUPPORTED_GATES, "llama.cpp", REASONS)
        if gates.kv_dtype not in ("auto", *KV):
            refusals.append(f"--kv-dtype {gates.kv_dtype}: llama.cpp has {', '.join(KV)}.")
        if refusals:
            return Launch(refusals=tuple(refusals))
        file = Path(setup.file or setup.model or "")
        context = load.config_of(load.resolve_model(setup.model)).max_context
        threads = str(cores() if gates.threads == "auto" else gates.threads)
        command = [str(llamacpp.built() / "llama-server"), "-m", str(file), "--host", "127.0.0.1"]
        command += ["--port", str(setup.port), "-t", threads, "--parallel", str(SLOTS), "--kv-unified"]
        command += ["-c", str(min(context, 8192) * 2), "--no-webui", "--metrics"]
        command += ["-lv", "4"]  # so that its log says what computes, and in which format the cache is
        command += ["--cache-ram", "0"]  # else it keeps every prompt in memory, which looks like a leak
        if gates.kv_dtype in KV:
            command += ["-ctk", KV[gates.kv_dtype], "-ctv", KV[gates.kv_dtype]]
        if setup.device == "cpu":
            command += ["-ngl", "0"]
        environment = {"GGML_CUDA_DISABLE_GRAPHS": "1"} if gates.graphs == "off" else {}
        own = (
            setup.file is not None
        )  # a GGUF of the embedded model, which `shared_weights.py` writes without a template
        return Launch((*command, *setup.flags), environment, dialect="llama.cpp", renders_chat=not own)
