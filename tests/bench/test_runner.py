"""Every measurement is registered once, takes options one way, says what it needs, and leaves one kind of receipt."""

from __future__ import annotations

import ast
import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import typer

from bench import catalog, runner
from bench.__main__ import main
from bench.measurement import (
    MEASUREMENTS,
    NEEDS,
    ROOT,
    Measurement,
    Run,
    bench_results,
    child_command,
    last_line,
    option,
    value_text,
)
from halfbyte.cli.app import app
from halfbyte.errors import PeerError, UsageError
from halfbyte.lab import receipts
from halfbyte.lab.result import UNITS, Cell, Check, Result, from_json

catalog.load()
BENCH = ROOT / "bench"
ENTRIES = {"bench/__main__.py", "bench/packages/wheels.py", "bench/vllm/install.py"}  # the latter two: the Makefile's


def test_the_catalog_names_every_module_that_registers_something() -> None:
    found = {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for path in BENCH.rglob("*.py")
        if path.name != "measurement.py"
        and ("@measurement(" in (text := path.read_text("utf-8")) or "commands(__name__)" in text)
    }
    assert found <= set(catalog.MODULES)
    assert len(set(catalog.MODULES)) == len(catalog.MODULES)


def test_there_is_one_entry() -> None:
    """No parser of its own, no main, and no change to where Python looks."""
    for path in BENCH.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.relative_to(ROOT).as_posix() not in ENTRIES:
            assert "argparse" not in text, path
            assert "__main__" not in text, path
        assert "sys.path" not in text, path


@pytest.mark.parametrize("each", MEASUREMENTS.values(), ids=lambda m: m.name)
def test_every_measurement_is_whole(each: Measurement, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(each.needs) <= set(NEEDS)
    assert each.seconds > 0
    options = each.parse([])  # its settings are options of it
    assert type(options).__dataclass_params__.frozen  # type: ignore[attr-defined]
    for field in dataclasses.fields(options):  # what is printed as a default can be typed
        value = getattr(options, field.name)
        assert getattr(each.parse([f"{field.name}={value_text(value)}"]), field.name) == value
    assert main(["list", each.name]) == 0
    assert each.name in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it would be measured")
@pytest.mark.parametrize("name", [m.name for m in MEASUREMENTS.values() if "gpu" in m.needs])
def test_without_a_gpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", name]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1, printed.err
    assert "GPU" in printed.err
    assert not printed.out


@pytest.mark.parametrize(
    "each", [m for m in MEASUREMENTS.values() if m.command_line[:1] == ("halfbyte",)], ids=lambda m: m.name
)
def test_commands_are_taken_by_halfbyte(each: Measurement) -> None:
    group = typer.main.get_command(app)
    command = group.get_command(None, each.command_line[1])  # type: ignore[attr-defined, arg-type]
    context = command.make_context(each.command_line[1], [*each.command_line[2:], "--out", "x.json"])
    assert Path("x.json") in [v for v in context.params.values() if isinstance(v, Path)]


# ---- options --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    count: int = option(3, "how many")
    rows: tuple[int, ...] = (1, 2)
    names: tuple[str, ...] = ()
    share: float = 0.5
    folder: Path | None = None
    fast: bool = False


def example(run: Run, options: Options) -> None:
    run.sources |= {"a.cu": "hash"}
    for i in range(options.count):
        run.add(Result(Cell("example", shape={"i": i}), refused="not tried" if options.fast else ""))


EXAMPLE = Measurement("example", example, __name__, 10.0, settings={"count": 2})


def test_options_are_typed_by_their_record() -> None:
    assert EXAMPLE.parse([]) == Options(count=2)
    words = ["count=5", "rows=8,32", "names=a,b", "share=0.25", "folder=x/y", "fast=yes"]
    assert EXAMPLE.parse(words) == Options(5, (8, 32), ("a", "b"), 0.25, Path("x/y"), True)
    assert EXAMPLE.parse(["rows=", "folder="]) == Options(count=2, rows=())


@pytest.mark.parametrize("word", ["rows", "nothing=1", "count=many", "fast=1", "rows=1,x"])
def test_a_wrong_option_is_one_sentence(word: str) -> None:
    with pytest.raises(UsageError, match="example"):
        EXAMPLE.parse([word])


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_a_receipt_is_written_after_every_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.json"
    run = Run(EXAMPLE, out, ["count=1"])
    run.sources |= {"a.cu": "hash"}
    run.add(Result(Cell("example"), checks=(Check("right", True),)))
    file = from_json(json.loads(out.read_text(encoding="utf-8")))
    assert (file.tool, file.command) == ("python -m bench", ("run", "example", "--set", "count=1"))
    assert (dict(file.measured), len(file.results)) == ({"a.cu": "hash"}, 1)
    assert run.finish() == 0
    assert from_json(json.loads(capsys.readouterr().out.splitlines()[-1])) == file
    run.add(Result(Cell("example"), targets=(Check("fast enough", False),)))
    assert run.finish() == 1
    assert Run(EXAMPLE).finish() == 1, "nothing was measured"


def test_a_function_in_another_process() -> None:
    done = subprocess.run(child_command(echo, 1, Path("a")), capture_output=True, text=True, cwd=ROOT, check=True)
    assert last_line(done.stdout) == ["a", 1]


def echo(number: int, path: str) -> list[object]:
    return [path, number]


def test_stale_runs_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is current is skipped, what fails is named, what this machine lacks is left out."""
    write = "import sys; from pathlib import Path; from halfbyte.lab import receipts; " \
            "from halfbyte.lab.result import Cell, Result; receipts.result_file('x', [Result(Cell('x'))], " \
            "receipts.measured(['triton.moe'])).write(Path(sys.argv[2]))"  # fmt: skip
    commands = {"good": write, "bad": "raise SystemExit(3)", "slow": "import time; time.sleep(60)"}
    started: list[str] = []

    def popen(command: list[str], **more: object) -> subprocess.Popen[bytes]:
        started.append(command[4])
        return real([sys.executable, "-c", commands[command[4]], *command[5:]], **more)  # type: ignore[call-overload,no-any-return]

    real = subprocess.Popen
    monkeypatch.setattr(runner.subprocess, "Popen", popen)
    monkeypatch.setitem(NEEDS, "a unicorn", lambda: "there is no unicorn")
    listed = (
        Measurement("good", example, __name__, 60.0),
        Measurement("bad", example, __name__, 60.0),
        Measurement("slow", example, __name__, 0.2),
        Measurement("never", example, __name__, 60.0, needs=("a unicorn",)),
        Measurement("other", example, __name__, 60.0, routine=False),
    )
    known = {m.name: m for m in listed}
    monkeypatch.setattr(runner, "MEASUREMENTS", known)
    lines: list[str] = []
    assert runner.run_many([], tmp_path, stale=True, report=lines.append) == ["bad", "slow"]
    assert started == ["good", "bad", "slow"]
    assert ["done" in lines[0], "FAILED (3)" in lines[1], "unicorn" in lines[3]] == [True] * 3
    assert runner.run_many(["good"], tmp_path, stale=True, report=lines.append) == []
    assert "is current" in lines[-1]
    receipts.result_file("x", [Result(Cell("x"))], {"gone.cu": "0"}).write(tmp_path / "good.json")
    assert not runner.is_current(known["good"], tmp_path)
    with pytest.raises(UsageError, match="nonsense"):
        runner.run_many(["nonsense"], tmp_path)


def test_correctness_comes_before_figures() -> None:
    assert {m.name for m in MEASUREMENTS.values() if m.is_check} >= {"gpu-tests", "sanitizer", "stress", "embedded"}
    assert not MEASUREMENTS["serving"].is_check


@pytest.mark.parametrize(
    "words", [["run"], ["run", "host", "server"], ["run", "host", "server", "--set", "steps=1", "--out", "x"]]
)
def test_a_run_that_says_too_little(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_bench_in_another_process() -> None:
    file = bench_results(["--device", "cpu", "--pp", "", "--tg", "4", "--repeats", "1", "--eager"])
    assert {r.cell.path for r in file.results} >= {"eager"}
    with pytest.raises(PeerError, match="no-such-option"):
        bench_results(["--no-such-option"])


def test_the_order_is_that_of_the_catalog() -> None:
    known = [m.module for m in MEASUREMENTS.values()]
    assert known == sorted(known, key=catalog.MODULES.index)


def test_every_figure_of_a_measurement_has_a_unit_that_the_schema_knows() -> None:
    """What only a GPU runs would be found out there, when the run is over."""
    unknown = []
    for path in sorted((ROOT / "bench").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "figure":
                unit = call.args[1]
                if isinstance(unit, ast.Constant) and unit.value not in UNITS:
                    unknown.append(f"{path.name}:{call.lineno} {unit.value}")
    assert not unknown
