"""Where a model's experts go: on the GPU as far as they fit, the others in host memory. Decided before a byte is read.

Layers are placed whole, the first ones in host memory. `--experts-in-host` names their number; `auto` takes as few as
leave room for the KV cache of one context, workspace and the reserve. A GPU that shares the host's memory, and a CPU,
have one memory only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from halfbyte.engine.options import EngineOptions
from halfbyte.engine.sizing import memory_account, page_limits
from halfbyte.errors import NotEnoughMemoryError, UsageError
from halfbyte.gates import Gates
from halfbyte.memory import GIB, MemoryState, gib, read_memory
from halfbyte.model.gpt_oss import arch_of, choose, page_bytes
from halfbyte.model.load import CheckpointFacts
from halfbyte.plan.phase import Arch

HOST_RESERVE = 2 * GIB  # of host memory, for the rest of the machine


@dataclass(frozen=True)
class Placement:
    gates: Gates  # with the number of layers in --experts-in-host, where there is a choice
    layers: int
    host_layers: int
    device_bytes: int  # of the weights
    host_bytes: int

    @property
    def line(self) -> str:
        """One clause for people, empty where every weight is on the device."""
        if not self.host_layers:
            return ""
        return (
            f"experts of {self.host_layers} of {self.layers} layers in host memory ({gib(self.host_bytes)}), "
            f"{gib(self.device_bytes)} of weights on the GPU"
        )


def find_placement(facts: CheckpointFacts, options: EngineOptions, memory: MemoryState, arch: Arch) -> Placement:
    """The placement that the options ask for, or the one that fits."""
    gates, layers = options.gates, facts.config.layers
    total = facts.weight_bytes(gates, arch)
    if not arch.is_gpu or memory.shared:
        if gates.experts_in_host not in ("auto", "0"):
            raise UsageError(
                "--experts-in-host is for a GPU with a memory of its own; here all weights are in the host's memory, "
                "so leave it out."
            )
        return Placement(gates, layers, 0, total, 0)
    if gates.experts_in_host == "auto":
        counts = range(layers + 1)
    else:
        count = layers if gates.experts_in_host == "all" else int(gates.experts_in_host)
        if count > layers:
            raise UsageError(f"--experts-in-host is {count}, but the model has {layers} layers; give at most that.")
        counts = range(count, count + 1)
    size = page_bytes(facts.config, choose(facts.config, replace(gates, experts_in_host="auto"), arch).spec)
    placement = None
    for count in counts:
        host_bytes = facts.expert_bytes(gates, arch, count)
        placed = replace(options, gates=replace(gates, experts_in_host=str(count)))
        placement = Placement(placed.gates, layers, count, total - host_bytes, host_bytes)
        limits = page_limits(facts.config, placed, memory, size)
        account = memory_account(facts.config, placed, memory, weights=placement.device_bytes)
        if (limits.least if options.kv_gib is None else limits.most) * size <= account.kv_room:
            break  # where no number of layers fits, `check_start` refuses the last one with its numbers
    assert placement is not None
    if placement.host_bytes + HOST_RESERVE > memory.available:
        raise NotEnoughMemoryError(
            f"not enough memory: {placement.host_layers} of {layers} layers' experts ({gib(placement.host_bytes)}) do "
            f"not fit on the GPU ({memory.source} {gib(memory.free)}) and would stay in host memory, where "
            f"{gib(memory.available)} are available and {gib(HOST_RESERVE)} stay free; choose a smaller model, lower "
            "--max-context, or free memory."
        )
    return placement


def placed_gates(facts: CheckpointFacts, gates: Gates, device: torch.device, gpu_memory: int | None = None) -> Gates:
    """The gates with the placement that fits this machine, for a model that is loaded without an engine."""
    memory = read_memory(device).limited_to(gpu_memory)
    return find_placement(facts, EngineOptions(gates=gates, gpu_memory=gpu_memory), memory, arch_of(device)).gates
