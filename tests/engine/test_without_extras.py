"""The in-process engine needs neither the server's packages nor llguidance and gguf; what needs one says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys

class Absent:
    names = {"llguidance", "gguf", "msgspec", "fastapi", "openai_harmony", "uvicorn", "pydantic", "httpx", "typer"}
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top in self.names:
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)

sys.meta_path.insert(0, Absent())
from halfbyte.engine.python_api import Engine
from halfbyte.engine.request import Constraint, SamplingParams
from halfbyte.errors import CheckpointError, RequestError
from halfbyte.evals.suite import Suite

with Engine(device="cpu", max_context=256) as engine:
    try:
        engine.generate("Once", SamplingParams(max_tokens=4), constraint=Constraint("json_object", ""))
    except RequestError as e:
        print(e)
    print(len(engine.generate("Once", SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))[0].tokens))
try:
    Engine(model=sys.argv[1])
except CheckpointError as e:
    print(e)
"""


def test_the_engine_runs_without_them_and_names_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(file)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    grammar, count, gguf = done.stdout.splitlines()
    assert "pip install llguidance" in grammar
    assert count == "4", "the engine went on after the refusal"
    assert "pip install gguf" in gguf
