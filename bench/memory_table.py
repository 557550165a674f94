"""`python -m bench print memory`: which model and which context fit a card, for docs/install.md."""

from __future__ import annotations

from dataclasses import replace

from halfbyte.engine.options import EngineOptions
from halfbyte.engine.placement import find_placement
from halfbyte.explanation import card_state, fits
from halfbyte.gates import PRESETS, Gates
from halfbyte.memory import GIB, MemoryState
from halfbyte.model import load
from halfbyte.model.load import CheckpointFacts
from halfbyte.plan.phase import Arch

CARDS = (12, 16, 24, 32, 48, 80)  # GiB


def longest_context(facts: CheckpointFacts, gates: Gates, state: MemoryState, arch: Arch) -> int:
    """The most tokens, in thousands of 1024, of one context beside all weights on the GPU; 0: they do not fit."""
    alone, weights = replace(gates, experts_in_host="0"), facts.weight_bytes(gates, arch)
    low, high = 0, facts.config.max_context // 1024
    while low < high:
        middle = (low + high + 1) // 2
        if fits(facts, EngineOptions(gates=alone, max_context=middle * 1024), state, arch, weights):
            low = middle
        else:
            high = middle - 1
    return low * 1024


def memory_table(arch: Arch) -> list[str]:
    """What fits cards with a memory of their own, as lines of Markdown (docs/install.md has them)."""
    small, large = (load.read_facts(load.resolve_model(f"{load.RANDOM}{name}")) for name in ("20b", "120b"))
    presets = ("exact", "balanced", "fast")
    longest_of = f"20b, all of it on the card: longest context, {' / '.join(presets)}"
    at = f"at {small.config.max_context:,} tokens, balanced"
    lines = [f"| memory | {longest_of} | 20b {at} | 120b {at} |", "|---|---|---|---|"]
    for size in CARDS:
        state = card_state(size << 30)
        longest = [longest_context(small, PRESETS[name].gates, state, arch) for name in presets]
        cells = [" / ".join(f"{tokens:,}" if tokens else "none" for tokens in longest)]
        for facts in (small, large):
            options = EngineOptions(gates=PRESETS["balanced"].gates)
            placement = find_placement(facts, options, state, arch)
            options = replace(options, gates=placement.gates)
            if not fits(facts, options, state, arch, placement.device_bytes):
                cells.append("does not fit")
            elif not placement.host_layers:
                cells.append("all on the card")
            else:
                share = f"{placement.host_layers} of {placement.layers} layers"
                cells.append(f"experts of {share} in host memory, {placement.host_bytes / GIB:.0f} GiB")
        lines.append(f"| {size} GB | {' | '.join(cells)} |")
    return lines
