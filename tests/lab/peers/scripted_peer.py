"""The scripted engine as a peer: what the tests of processes and of levels start."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from halfbyte.lab.levels.own_answers import TEXTS
from halfbyte.lab.peers.launch import Launch, Progress, Setup
from halfbyte.lab.peers.process import TimeLimits
from halfbyte.model import load

PROGRAM = Path(__file__).with_name("scripted_engine.py")
# Generous where something is waited for that happens, short where it is waited for what never does.
LIMITS = TimeLimits(start_s=120.0, request_s=60.0, stop_s=30.0)


@functools.cache
def files() -> Path:
    """Tokens of the embedded model that are words, and the tokens of level 2's texts, as the program reads them."""
    tokenizer = load.tokenizer_of(load.resolve_model(None))
    words = {i: tokenizer.decode([i]) for i in range(300, 1500)}
    folder = Path(tempfile.mkdtemp(prefix="scripted-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    vocabulary = {i: w for i, w in words.items() if w.strip().isalpha() and w.isascii()}
    (folder / "vocabulary.json").write_text(json.dumps(vocabulary))
    (folder / "texts.json").write_text(json.dumps({text: tokenizer.encode(text) for text in TEXTS}))
    return folder


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
        command += ["--vocab", str(files() / "vocabulary.json"), "--texts", str(files() / "texts.json")]
        return Launch((*command, *setup.flags))
