"""The scripted engine as a peer: what the tests of processes and of levels start."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from halfbyte.lab.peers.launch import Launch, Progress, Setup
from halfbyte.lab.peers.process import Limits

PROGRAM = Path(__file__).with_name("scripted_engine.py")
# Generous where something is waited for that happens, short where it is waited for what never does.
LIMITS = Limits(start_s=120.0, request_s=60.0, stop_s=30.0)


@dataclass(frozen=True)
class ScriptedPeer:
    fault: str = "none"
    after: int = 0
    pace: float = 0.0
    first: float = 0.0
    moe: str = "cutlass"
    name: str = "scripted"

    def prepare(self, setup: Setup, progress: Progress) -> Setup:
        return setup

    def launch(self, setup: Setup) -> Launch:
        if setup.gates.tile != "auto":
            return Launch(refusals=(f"--tile {setup.gates.tile}: the script has no tiles.",))
        command = [sys.executable, "-S", str(PROGRAM), "--port", str(setup.port), "--fault", self.fault]
        command += ["--after", str(self.after), "--pace", str(self.pace), "--first", str(self.first), "--moe", self.moe]
        return Launch((*command, *setup.flags))
