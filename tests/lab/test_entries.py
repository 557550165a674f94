"""Every `python -m halfbyte.lab...` entry explains itself anywhere, without the packages of the command line; one that
needs a GPU says so in a sentence where there is none."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import halfbyte
from halfbyte.lab import remeasure

LAB = Path(halfbyte.__file__).parent / "lab"
NO_ENTRY = LAB / "peers" / "keeper.py"  # runs by its path, without our packages; nobody types it
ENTRIES = {
    "halfbyte." + path.relative_to(LAB.parent).with_suffix("").as_posix().replace("/", "."): path.read_text("utf-8")
    for path in sorted(LAB.rglob("*.py"))
    if path != NO_ENTRY and '__name__ == "__main__"' in path.read_text("utf-8")
}
GPU = [name for name, text in ENTRIES.items() if "environment.need_gpu()" in text]
ARGUMENTS = {"halfbyte.lab.levels.embedded": ["--eval", "--answers", "x"]}


def test_entries_are_found() -> None:
    assert {"halfbyte.lab.bench", "halfbyte.lab.measure.host", "halfbyte.lab.levels.stress"} <= set(ENTRIES)
    assert len(GPU) >= 7


@pytest.mark.parametrize("name", ENTRIES)
def test_help_names_the_command(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == 0
    assert f"python -m {name}" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it would be measured")
@pytest.mark.parametrize("name", GPU)
def test_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS.get(name, [])])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.err.count("\n") == 1, printed.err
    assert "GPU" in printed.err
    assert not printed.out


def test_they_need_neither_typer_nor_the_server() -> None:
    """A machine that only measures has torch and the kernels' packages."""
    names = [n for n in ENTRIES if n not in ("halfbyte.lab.measure.host",)]  # which measures the messages' encoder
    banned = ("typer", "rich", "fastapi", "uvicorn", "httpx", "pydantic", "msgspec", "halfbyte.cli", "halfbyte.server")
    code = (
        f"import sys\nfor name in {banned!r}: sys.modules[name] = None\n"
        f"import importlib\nfor name in {names!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it would be measured")
@pytest.mark.parametrize(
    "part", [p for p in remeasure.PARTS if p.gpu and p.arguments[1] != "pytest"], ids=lambda p: p.name
)
def test_every_part_is_a_command_that_its_tool_takes(
    part: remeasure.Part, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its arguments are read; then the tool finds no GPU, or would begin to load."""
    module = importlib.import_module(part.arguments[1])
    arguments = [*part.arguments[2:], "--out", "x.json"]
    if part.arguments[1] == "halfbyte.lab.bench":
        assert module.parser().parse_args(arguments).out == Path("x.json")
        return
    monkeypatch.setattr(sys, "argv", [part.name, *arguments, *(["--answers", "x"] if part.needs_answers else [])])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    assert "torch sees none" in capsys.readouterr().err


def test_parts_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part whose receipt is current is skipped, a failed one is named, an unknown one is a mistake."""
    from halfbyte.errors import UsageError
    from halfbyte.lab import receipts
    from halfbyte.lab.result import Cell, Result

    write = (
        "-c",
        "import sys; from halfbyte.lab import receipts; from halfbyte.lab.result import Cell, Result; "
        "receipts.result_file('x', [Result(Cell('x'))], receipts.measured(['triton.moe'])).write("
        "__import__('pathlib').Path(sys.argv[2]))",
    )
    bad = ("-c", "raise SystemExit(3)")
    parts = (remeasure.Part("good", 60, write, gpu=False), remeasure.Part("bad", 60, bad, gpu=False))
    monkeypatch.setattr(remeasure, "PARTS", parts)
    monkeypatch.setattr(remeasure, "BY_NAME", {p.name: p for p in parts})
    told: list[str] = []
    assert remeasure.run_parts(tmp_path, report=told.append) == ["bad"]
    assert "done" in told[0]
    assert "FAILED (3)" in told[1]
    assert remeasure.run_parts(tmp_path, ["good"], report=told.append) == []
    assert "is current" in told[2]
    receipts.result_file("x", [Result(Cell("x"))], {"gone.cu": "0"}).write(tmp_path / "good.json")
    assert not remeasure.is_current(parts[0], tmp_path)
    with pytest.raises(UsageError, match="no part nonsense"):
        remeasure.run_parts(tmp_path, ["nonsense"])
