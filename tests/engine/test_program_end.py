"""A program ends with its own exit status, whatever it left open: no abort, no traceback of ours, no waiting.

Each script runs in a process of its own, with the embedded model, and leaves requests that would take minutes. What was
registered before an engine is called after it has ended, and says which of its threads are left: they would abort the
process if Python stopped them within native code, which is a matter of chance.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from halfbyte.model.load import EMBEDDED

pytestmark = pytest.mark.skipif(
    not (EMBEDDED / "config.json").exists(), reason="the embedded model is not in this installation"
)
PATIENCE = 120  # seconds; a request that is waited for takes longer
START = """
import asyncio, atexit, sys, threading
atexit.register(lambda: print("left:", [t.name for t in threading.enumerate() if t.name.startswith("halfbyte")]))
from halfbyte import Engine, SamplingParams
from halfbyte.engine.request import Constraint
LONG = SamplingParams(max_tokens=7000, ignore_eos=True, n=4)
engine = Engine(max_seqs=16)
def forever(started):
    for delta in engine.iterate("The capital of", LONG):
        started.set()
"""
SCRIPTS = {
    "left within": (0, 'for delta in engine.iterate("The capital of", LONG): break'),
    "suspended": (0, 'deltas = engine.iterate("The capital of", LONG)\nnext(deltas)'),
    "suspended under a grammar": (
        0, 'deltas = engine.iterate("The capital of", LONG, constraint=Constraint("regex", "[a-z ]*"))\nnext(deltas)',
    ),
    "exit status": (7, 'for delta in engine.iterate("The capital of", LONG): sys.exit(7)'),
    "exception": (1, 'for delta in engine.iterate("The capital of", LONG): raise ValueError("mine")'),
    "idle": (0, "engine.generate('The', SamplingParams(max_tokens=1))"),
    "daemon thread": (
        3, "started = threading.Event()\n"
        "threading.Thread(target=forever, args=(started,), daemon=True).start()\nstarted.wait()\nsys.exit(3)",
    ),
    "daemon thread in generate": (
        0, "threading.Thread(target=engine.generate, args=('The', LONG), daemon=True).start()\n"
        "engine.generate('The', SamplingParams(max_tokens=3))",
    ),
    "other loop closed": (
        0, "loop = asyncio.new_event_loop()\n"
        "deltas = engine.stream('The capital of', LONG)\nloop.run_until_complete(anext(deltas))\nloop.close()\n"
        "assert engine.generate('The', SamplingParams(max_tokens=1))[0].tokens",
    ),
    "thread outlives the main one": (
        0, "def ask():\n"
        "    threading.main_thread().join()\n"
        "    done = engine.generate('The', SamplingParams(max_tokens=8), constraint=Constraint('regex', '[a-z]{3}'))\n"
        "    print(len(done[0].text))\n"
        "threading.Thread(target=ask).start()",
    ),
}  # fmt: skip


QUICK = (
    "suspended under a grammar",
    "exit status",
    "daemon thread",
    "other loop closed",
    "thread outlives the main one",
)


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in SCRIPTS])
def test_a_program_ends_with_its_own_status(case: str) -> None:
    status, script = SCRIPTS[case]
    command = [sys.executable, "-c", START + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == status, done.stderr
    assert "halfbyte" not in done.stderr
    assert done.stderr.strip().rpartition("\n")[2] == ("ValueError: mine" if case == "exception" else "")
    printed = "3\n" if case == "thread outlives the main one" else ""
    assert done.stdout == f"{printed}left: []\n"
