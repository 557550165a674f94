"""vLLM as an engine: alone, or with halfbyte's plugin in it. Its flags are `vllm_plugin/launch.py`'s to know.

vLLM may live in another environment: `Setup.python` is that one's interpreter, or `Setup.environment` has the
PYTHONPATH. Nothing of vLLM is imported. On a CPU vLLM's own MXFP4 needs AMX, so that vLLM alone is given a copy of the
embedded model in bf16, which has the very same numbers.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import replace

import psutil

from halfbyte.errors import HalfbyteError, PeerError, UsageError
from halfbyte.gates import AXES, Gates, PerRegime, child_environment
from halfbyte.lab.child import run_child
from halfbyte.lab.peers.bf16_copy import bf16_copy
from halfbyte.lab.peers.halfbyte import RECORD, facts_of
from halfbyte.lab.peers.launch import Launch, Progress, Setup, refused
from halfbyte.model import load
from halfbyte.vllm_plugin import layers
from halfbyte.vllm_plugin.launch import Serving, vllm_command
from halfbyte.vllm_plugin.selection import CPU_ATTENTION, Shapes

OLDER_ENTRY = "vllm.entrypoints.openai.api_server"
HOST = ("cpu_instructions", "threads")  # gates of halfbyte's own CPU kernels
CACHE_GIB = "VLLM_CPU_KVCACHE_SPACE"
CACHE_FLAGS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
MOST_CACHE_GIB = 4


class VllmPeer:
    def __init__(self, plugin: bool) -> None:
        self._plugin = plugin
        self._older = False
        self.name = "vllm+halfbyte" if plugin else "vllm"

    def prepare(self, setup: Setup, progress: Progress) -> Setup:
        """vLLM's command line asks for the version of a package `vllm`, which its CPU builds are not called: those are
        started by their older entry."""
        version_command = [setup.python or sys.executable, "-c", "import importlib.metadata as m; m.version('vllm')"]
        environment = child_environment(**setup.environment)
        try:
            self._older = bool(
                run_child(version_command, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, env=environment)
            )
        except PeerError as e:
            raise UsageError(
                f"{version_command[0]} cannot be started ({e}) --engine-python names an interpreter."
            ) from None
        on_cpu = load.resolve_device(setup.device).type == "cpu"
        if on_cpu and CACHE_GIB not in environment and not any(f.startswith(CACHE_FLAGS) for f in setup.flags):
            # By itself vLLM fills nearly all memory of the machine, and level 5 runs two engines at once.
            size = max(1, min(MOST_CACHE_GIB, int(psutil.virtual_memory().available) >> 32))  # a quarter, in GiB
            progress(f"vLLM is given {size} GiB for its cache ({CACHE_GIB})")
            setup = replace(setup, environment={**setup.environment, CACHE_GIB: str(size)})
        own = setup.file is None and load.resolve_model(setup.model).path == load.EMBEDDED
        if own and on_cpu and not self._plugin:
            progress("writing the embedded model in bf16")
            return replace(setup, file=str(bf16_copy(load.EMBEDDED)))
        return setup

    def launch(self, setup: Setup) -> Launch:
        name = load.resolve_model(setup.model)
        if name.path is None and setup.file is None:
            return Launch(
                refusals=(f"{name.text}: vLLM reads a folder or a name on the Hub; write the weights first.",)
            )
        gates = setup.gates
        if not self._plugin and set(gates.moe_kernel) == {"auto"}:  # then it is vLLM's own, with what that can take
            gates = replace(gates, moe_kernel=PerRegime("vllm", "vllm", "vllm"))
        record = setup.folder / RECORD if self._plugin else None
        serving = Serving(host="127.0.0.1", port=setup.port, record=record)
        vllm = vllm_command(
            setup.file or str(name.path), gates, serving=serving, arguments=setup.flags, plugin=self._plugin,
            environment=setup.environment, python=setup.python or sys.executable,
        )  # fmt: skip
        refusals = [*vllm.refusals, *refused(setup.gates, [a.field for a in AXES if a.field not in HOST], "vLLM")]
        on_cpu = load.resolve_device(setup.device).type == "cpu"
        if not self._plugin and on_cpu and gates.attention in layers.VLLM_ATTENTION:
            refusals.append(f"--attention {gates.attention}: {CPU_ATTENTION}.")
        if self._plugin and not refusals and (why := plugin_refusal(setup.model, gates, setup.device)):
            refusals.append(why)
        command = vllm.command
        if self._older:
            at = command.index("serve")
            command = (*command[: at - 1], OLDER_ENTRY, "--model", *command[at + 1 :])
        chat = (
            name.path != load.EMBEDDED
        )  # vLLM renders gpt-oss with OpenAI's vocabulary, which the embedded model has not
        return Launch(command, vllm.environment, tuple(refusals), record=record, renders_chat=chat)


@functools.lru_cache(maxsize=4096)
def plugin_refusal(model: str | None, gates: Gates, device: str | None) -> str:
    """Why the plugin would refuse these gates when vLLM starts with it; empty if it would not. Reads no weights."""
    config, _, arch = facts_of(model, device)
    try:
        layers.choose(Shapes.of_model(config), gates, arch)
    except HalfbyteError as e:
        return str(e)
    return ""
