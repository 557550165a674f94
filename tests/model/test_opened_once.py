"""A process opens each file of its model once to read it, and at most once more to hash its content.

Every file of a model goes through `plain_file.open_regular`. The engine of `halfbyte serve` is a process of its own, so
the counts are written by each process, under its id, when it opens a file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from halfbyte.model import checkpoint
from halfbyte.model.load import EMBEDDED

# Installed by Python when it starts, in the engine's process, too.
COUNTER = """
import os, sys
import importlib.abc, importlib.machinery

class Counting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "halfbyte.model.plain_file":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def counted(module):
            execute(module)
            plain = module.open_regular

            def open_regular(path):
                with open(os.environ["OPENED"], "a") as log:
                    hashing = sys._getframe(1).f_code.co_name == "content_id"
                    log.write(f"{os.getpid()} {path}{' hashed' * hashing}\\n")
                return plain(path)

            module.open_regular = open_regular

        spec.loader.exec_module = counted
        return spec

import importlib.util
sys.meta_path.insert(0, Counting())
"""

CLI = "from halfbyte.cli import main; main()"
LOAD = "from halfbyte.model.load import load_model, resolve_model; import sys; load_model(resolve_model(sys.argv[1]))"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    checkpoint.save_gguf(checkpoint.load(EMBEDDED), path, tokenizer=EMBEDDED / "tokenizer.json")
    return path


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sitecustomize.py").write_text(COUNTER, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OPENED", str(tmp_path / "opened"))
    return tmp_path / "opened"


def check(opened: Path, model: Path, processes: int) -> None:
    lines = opened.read_text(encoding="utf-8").splitlines()
    counts = Counter(line for line in lines if str(model) in line)
    assert len({line.split()[0] for line in counts}) == processes, lines
    assert max(counts.values()) == 1, counts
    weights = "model.safetensors" if model.is_dir() else model.name
    assert sum(weights in line and not line.endswith(" hashed") for line in counts) == processes


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("command", ["load_model", "run"])
def test_in_one_process(command: str, kind: str, opened: Path, gguf: Path) -> None:
    model = EMBEDDED if kind == "folder" else gguf
    argv = {
        "load_model": ["-c", LOAD, str(model)],
        "run": ["-c", CLI, "run", str(model), "1+1=", "--max-tokens", "1", "--device", "cpu"],
    }[command]
    subprocess.run([sys.executable, *argv], check=True, timeout=300, stdin=subprocess.DEVNULL, capture_output=True)
    check(opened, model, processes=1)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_serve(kind: str, opened: Path, gguf: Path, tmp_path: Path) -> None:
    model = EMBEDDED if kind == "folder" else gguf
    argv = ["serve", str(model), "--device", "cpu", "--port", "0", "--warm-up", "off", "--max-context", "256"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-c", CLI, *argv], stderr=log, stdout=log)
    try:
        deadline = time.monotonic() + 120
        while "serving" not in (tmp_path / "log").read_text(encoding="utf-8"):
            assert server.poll() is None, (tmp_path / "log").read_text(encoding="utf-8")
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    check(opened, model, processes=2)
