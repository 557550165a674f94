"""halfbyte itself as an engine among others: `halfbyte serve` with the same gates, as a user starts it.

What its plan refuses is refused here, with every reason and without a start; the rest it says itself.
"""

from __future__ import annotations

import functools
import sys

from halfbyte.engine.speculative.methods import HEADS, find_head
from halfbyte.errors import HalfbyteError, PlanError, UsageError
from halfbyte.formats.matrices import Formats
from halfbyte.gates import AXES, Gates
from halfbyte.lab.peers.launch import Launch, Progress, Setup
from halfbyte.model import load
from halfbyte.model.config import ModelConfig
from halfbyte.model.gpt_oss import arch_of, choose
from halfbyte.plan.phase import Arch

RECORD = "kernels.json"


class HalfbytePeer:
    name = "halfbyte"

    def prepare(self, setup: Setup, progress: Progress) -> Setup:
        load.resolve_model(setup.model)
        return setup

    def launch(self, setup: Setup) -> Launch:
        refusal = plan_refusal(setup.model, setup.gates, setup.device)
        if not refusal and "--draft" not in setup.flags:
            refusal = head_refusal(setup.model, setup.gates)
        if refusal:
            return Launch(refusals=(refusal,))
        record = setup.folder / RECORD
        command = [sys.executable, "-m", "halfbyte", "serve"]
        command += [*([setup.model] if setup.model else []), "--port", str(setup.port), "--no-page"]
        command += ["--record", str(record), *gate_flags(setup.gates), *setup.flags]
        command += ["--device", setup.device] if setup.device else []
        return Launch(tuple(command), record=record)


def gate_flags(gates: Gates) -> list[str]:
    """The flags that make these gates out of the default."""
    axes = {axis.field: axis for axis in AXES}
    flags = []
    for name, value in gates.changes().items():
        flags += [axes[name].flag] if axes[name].switch else [axes[name].flag, str(value)]
    return flags


@functools.lru_cache(maxsize=4096)
def plan_refusal(model: str | None, gates: Gates, device: str | None) -> str:
    """Why no plan serves these gates on this device; empty if one does. Reads no weights."""
    config, stored, arch = facts_of(model, device)
    try:
        choose(config, gates, arch, stored)
    except PlanError as e:
        return str(e)
    except HalfbyteError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def head_refusal(model: str | None, gates: Gates) -> str:
    """Why there is no head for what is speculated with; empty if there is, or none is needed."""
    if gates.speculate in HEADS:
        try:
            find_head(gates.speculate, load.config_of(load.resolve_model(model)).layers, None)
        except UsageError as e:
            return str(e)
    return ""


@functools.lru_cache(maxsize=16)
def facts_of(model: str | None, device: str | None) -> tuple[ModelConfig, Formats, Arch]:
    """What the plan of a model on a device is chosen by."""
    name = load.resolve_model(model)
    facts = load.read_facts(name)
    return facts.config, facts.formats, arch_of(load.resolve_device(device))
