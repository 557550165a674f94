"""The terminal: what a person types, what is printed, and that a mistake is one sentence and exit code 2."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from halfbyte.cli.app import COMMANDS, MAIN_OPTIONS, PANELS, app, docstring_of
from halfbyte.cli.conversation import AnswerText
from halfbyte.cli.generate import LEAST_TIMED, Printer
from halfbyte.cli.options import Activity
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.python_api import Engine
from halfbyte.engine.sizing import check_start
from halfbyte.gates import Gates
from halfbyte.kernels import prebuilt
from halfbyte.lab.result import from_json
from halfbyte.memory import MemoryState, gib
from halfbyte.model import load, synthetic
from halfbyte.model.checksums import FileRecord, PullRecord, write_record
from halfbyte.model.config import NAMED
from halfbyte.plan.phase import ARCHES
from halfbyte.roofline import GPUS

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    synthetic.write_safetensors(NAMED["small"], 0, folder)
    return folder


def test_explain_says_what_runs_and_why_not_for_every_architecture(run: Run) -> None:
    for arch in ARCHES:
        code, out, err = run("explain", "--arch", arch, "--json")
        if code == 0:
            found = json.loads(out)
            assert set(found["chosen"]) == {"decode", "batch", "prefill", "long"}
            assert found["arch"] == arch
            if arch != "cpu":
                assert not [p for r in found["chosen"].values() for p in r if p.startswith("reference.")]
        else:
            assert code == 2
            assert f"on {arch}" in err
            assert len(err.splitlines()) > 1, "refused without a reason"


@pytest.mark.parametrize(
    ("arch", "more", "said"),
    [
        ("sm90", ["--preset", "fast"], []),
        ("sm121", ["--preset", "fast"], ["bf16 tensor cores", "not run on such"]),
        (
            "sm121",
            ["--preset", "fast", "--activation", "mxfp8"],
            ["--activation prefill=mxfp8 keeps it", "not run on such"],
        ),
        ("sm120", ["--preset", "fast", "--activation", "prefill=mxfp4"], ["not run on such"]),
        ("sm103", ["--preset", "fast"], ["every kernel here is Triton's", "bf16 tensor cores", "not run on such"]),
        ("sm100", ["--preset", "fast"], ["every kernel here is Triton's", "bf16 tensor cores", "not run on such"]),
    ],
)
def test_explain_notes_what_an_owner_should_know(run: Run, arch: str, more: list[str], said: list[str]) -> None:
    code, out, _ = run("explain", "--arch", arch, "--json", *more)
    notes = json.loads(out)["notes"]
    assert code == 0
    assert len(notes) == len(said)
    assert all(text in note for text, note in zip(said, notes)), notes


@pytest.mark.parametrize(
    ("arch", "said"),
    [
        ("sm120", [r"RTX 5090 \(32 GB\), gpt-oss-120b: experts of \d+ of 36 layers in host memory .* left for KV",
                   r"RTX 5090 .* gpt-oss-20b: .* left for KV",
                   r"RTX PRO 6000 \(96 GB\), gpt-oss-120b: .* GiB are left for KV"]),
        ("sm121", [r"GB10 .* gpt-oss-120b: .* GiB are left for KV"]),
        ("sm103", [r"B300 \(288 GB\), gpt-oss-120b: .* GiB are left for KV"]),
        ("sm100", [r"B200 \(180 GB\), gpt-oss-120b: .* GiB are left for KV"]),
        ("cpu", []),
    ],
)  # fmt: skip
def test_explain_says_what_fits_on_which_card(run: Run, arch: str, said: list[str]) -> None:
    code, out, _ = run("explain", "--arch", arch, "--json")
    assert code == 0
    found = json.loads(out)
    assert len(found["memory"]) >= len(said)
    for pattern in said:
        assert any(re.search(pattern, line) for line in found["memory"]), (pattern, found["memory"])
    assert ("first load there" in found["self_test"]) == (arch != "cpu")


@pytest.mark.parametrize(
    ("gpu", "model", "arch", "said"),
    [
        ("rtx5090", "random:20b", "sm120", "RTX 5090 (32 GB), random:20b: weights"),
        ("RTX PRO 6000", "random:120b", "sm120", "RTX PRO 6000 (96 GB), random:120b: weights"),
        ("b200", "random:120b", "sm100", "B200 (180 GB), random:120b: weights"),
        ("NVIDIA B300 SXM6 AC", "random:120b", "sm103", "B300 (288 GB), random:120b: weights"),
    ],
)
def test_explain_takes_a_gpu_by_its_name(run: Run, gpu: str, model: str, arch: str, said: str) -> None:
    code, out, _ = run("explain", model, "--arch", gpu, "--json")
    found = json.loads(out)
    assert (code, found["arch"]) == (0, arch)
    (room,) = found["memory"]
    assert room.startswith(said)
    assert "left for KV" in room


def test_explain_leaves_as_much_room_as_serve_would_find(run: Run) -> None:
    """On unified memory the engine's own process takes from the same plate."""
    code, out, _ = run("explain", "--arch", "sm121", "--json")
    assert code == 0
    (told,) = [line for line in json.loads(out)["memory"] if "gpt-oss-120b" in line]
    gpu = next(gpu for gpu in GPUS.values() if gpu.arch == "sm121")
    state = MemoryState(total=int(gpu.memory), available=int(gpu.memory), unified=True)
    weights = load.weight_bytes(load.resolve_model("random:120b"), Gates(), ARCHES["sm121"])
    account = check_start(NAMED["120b"], EngineOptions(model="random:120b"), state, ARCHES["sm121"], weights)
    assert f" {gib(account.kv_room)} are left for KV" in told


def test_a_proof_that_fails_says_so_and_exits_with_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from halfbyte.kernels import prove

    def evidence(name: str, arch: str, *_: object) -> list[prove.Evidence]:
        bad = ("64 bytes of registers are spilled",) if name == "cuda.decode_step" else ()
        return [prove.Evidence(name, f"k of {name}"[:12], arch, "sm_121a", "x", {}, 9, 8, 0, "", 0, 1, "", "", bad)]

    unequal = {"cuda.decode_step": "3 of 9 instructions"}
    monkeypatch.setattr(prove, "prove", evidence)
    monkeypatch.setattr(prove, "compare_siblings", lambda name, *_: [prove.Sibling(f"k of {name}", "")])
    code, out, _ = run("explain", "--arch", "sm121", "--preset", "fast", "--prove")
    assert code == 1
    assert "64 bytes of registers are spilled" in out
    assert "1 are not as promised" in out
    assert "kernels are equal, instruction for instruction" in out
    monkeypatch.setattr(prove, "compare_siblings", lambda n, *_: [prove.Sibling(f"k of {n}", unequal.get(n, ""))])
    code, out, _ = run("explain", "--arch", "sm121", "--preset", "fast", "--prove")
    assert "sm121 and sm120 differ in k of cuda.decode_step (3 of 9 instructions)" in out
    code, out, _ = run("explain", "--arch", "sm100", "--preset", "fast", "--prove")
    assert code == 0
    assert "all as promised" in out


def test_explain_reads_a_model_and_gates(run: Run, small: Path) -> None:
    code, out, _ = run("explain", str(small), "--arch", "cpu", "--layers", "qkv=q8", "--kv-dtype", "fp8", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["formats"]["qkv"] == "q8"
    assert found["formats"]["gate_up"] == "mxfp4"
    assert found["gates"]["kv_dtype"] == "fp8"


def test_explain_sinks_off_is_loud(run: Run) -> None:
    code, out, _ = run("explain", "--arch", "cpu", "--sinks", "off")
    assert code == 0
    assert "SINKS ARE OFF" in out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["explain", "--arch", "sm75"], "sm75"),
        (["explain", "--moe-kernel", "cuda"], "--moe-kernel"),
        (["explain", "--arch", "cpu", "--moe-kernel", "marlin"], "borrowed.marlin_moe: runs on a GPU"),
        (["explain", "--preset", "quick"], "no preset"),
        (["bench", "/no/such/model"], "does not exist"),
        (["bench", "random:7b"], "no shape"),
        (["bench", "random:small", "--pp", "many"], "--pp takes numbers"),
        (["bench", "random:small", "--tg", "1"], "at least 2"),
        (["bench", "random:small", "--pp", "9000"], "context"),
        (["bench", "random:small", "--device", "cuda:x"], "device"),
        (["bench", "random:small", "--concurrency", "0"], "at least 1"),
        (["bench", "random:small", "--graph"], "CUDA"),
        (["bench", "--url", "https://example.org"], "--url takes an address"),
        (["bench", "random:small", "--served", "--eager"], "compares the engine with a server"),
        (["quantize", "/no/such/model", "/tmp/x"], "say what to quantise"),
        (["quantize", "/no/such/model", "/tmp/x", "--layers", "q8"], "does not exist"),
    ],
)
def test_mistakes_are_one_sentence(run: Run, args: list[str], said: str) -> None:
    code, out, err = run(*args)
    assert code == 2
    assert said in err
    assert "Traceback" not in out + err


def test_help_lists_every_command(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for command in COMMANDS:
        assert command in out
    for panel in PANELS:
        assert panel in out
    assert "Print the record of this machine" in out


HEAVY = ("torch", "fastapi", "transformers", "triton")
HELP = """
import sys, time
start = time.perf_counter()
sys.argv = ["halfbyte", "--help"]
from halfbyte.cli import main
try: main()
except SystemExit: pass
seconds, cpu = time.perf_counter() - start, time.process_time()
from halfbyte.cli.app import COMMANDS, app
import typer
group = typer.main.get_command(app)
def heavy(): return [m for m in %r if m in sys.modules]
loaded = {"--help": heavy()}
for name in COMMANDS:
    command = group.get_command(None, name)
    command.get_help(typer.Context(command, info_name=name))
    loaded[name] = heavy()
import json
print(json.dumps({"seconds": seconds, "cpu": cpu, "loaded": loaded}), file=sys.stderr)
"""


def test_help_imports_nothing_heavy_of_any_command(record_property: Callable[[str, object], None]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP % (HEAVY,)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stderr.splitlines()[-1])
    record_property("shown", f"time halfbyte --help: {found['seconds']:.2f} s, {found['cpu']:.2f} s of them CPU")
    assert found["loaded"] == {name: [] for name in ("--help", *COMMANDS)}


def test_the_shell_completes_commands_models_and_gates(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HALFBYTE_MODELS_DIR", str(tmp_path))
    folder = tmp_path / "openai--gpt-oss-20b"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_record(folder, PullRecord("openai/gpt-oss-20b", "c", {"config.json": FileRecord(2)}))

    def complete(words: str) -> list[str]:
        monkeypatch.setenv("_HALFBYTE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
        code, out, err = run()
        assert code == 0, err
        return out.split()

    assert complete("halfbyte ser") == ["serve"]
    assert set(complete("halfbyte ")) == set(COMMANDS)
    assert complete("halfbyte serve op") == ["openai/gpt-oss-20b"]
    assert complete("halfbyte explain 2") == ["20b"]
    assert complete("halfbyte serve /no/such") == []  # the shell goes on with file names
    assert complete("halfbyte serve --max-mod") == ["--max-model-len"]
    assert complete("halfbyte bench --preset ba") == ["balanced", "baseline"]
    assert complete("halfbyte chat --effort h") == ["high"]
    assert complete("halfbyte explain --arch sm12") == ["sm120", "sm121"]


def test_explain_begins_with_what_runs(run: Run) -> None:
    code, out, _ = run("explain", "--arch", "sm121")
    assert code == 0
    lines = out.splitlines()
    assert re.match(r"gpt-oss-120b fits GB10.*about \d+ tokens/s", lines[0])
    assert lines[1].startswith("gpt-oss-20b fits GB10")
    assert lines[2:4] == ["", "What runs"]
    assert [line.split()[0] for line in lines[4:8]] == ["decode", "batch", "prefill", "long"]
    assert "cuda.decode_step" in lines[4]
    assert "cuda.batch_layer:" not in out
    code, long, _ = run("explain", "--arch", "sm121", "--why")
    assert long.index("Why nothing else") > long.index("weights ")
    assert "reference.*: the reference is never chosen" in long
    code, out, _ = run("explain", "120b", "--arch", "rtx5090")
    assert re.match(
        r"gpt-oss-120b fits RTX 5090 \(32 GB\) with experts of \d+ of 36 layers in host", out.splitlines()[0]
    )
    code, out, _ = run("explain", "120b", "--arch", "rtx5090", "--experts-in-host", "0")
    assert out.splitlines()[0] == "gpt-oss-120b does not fit RTX 5090 (32 GB)"
    code, out, _ = run("explain", "tiny")
    assert out.startswith("tiny fits this machine")
    code, out, _ = run("explain", "--help")
    assert "Without it: gpt-oss-120b" in " ".join(out.replace("│", " ").split())


def test_gates_are_explained_where_they_are_first_met(run: Run) -> None:
    _, out, _ = run("chat", "--help-all")
    assert "Gates: switches that say which kernels and number formats may run" in out


@pytest.mark.parametrize("command", MAIN_OPTIONS)
def test_help_is_short_and_cuts_no_name(run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    group = typer.main.get_command(app)
    options = [p for p in group.get_command(None, command).params if p.opts[0].startswith("-")]  # type: ignore[attr-defined]
    _, brief, _ = run(command, "--help")
    _, full, _ = run(command, "--help-all")
    assert len(brief.splitlines()) <= 35
    shown = re.findall(r"^  (--[a-z0-9-]+)", brief.partition("\nOptions:")[2], re.M)
    assert shown == list(MAIN_OPTIONS[command])
    assert len(MAIN_OPTIONS[command]) <= 10
    assert "--help-all" in brief
    for option in options:
        for name in (*option.opts, *option.secondary_opts):
            assert re.search(rf"{name}(?![\w-])", full), name
    assert max(map(len, [*brief.splitlines(), *full.splitlines()])) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_no_help_is_longer_than_a_screen(run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(command, "--help")
    assert len(out.splitlines()) <= 35
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(("command", "instead"), [("run", "run tiny"), ("generate", "generate --prompt")])
def test_a_question_where_the_model_should_be(run: Run, command: str, instead: str) -> None:
    """It is told what to write, without waiting for more."""
    code, _, err = run(command, "What is 17 + 25?")
    assert code == 2
    assert f"halfbyte {instead} 'What is 17 + 25?'" in " ".join(err.split())


def test_one_line_says_what_runs_in_plain_words(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    _, _, err = run("run", "tiny", "What is 17 + 25?", "--here", "--device", "cpu")
    assert len(err.strip().splitlines()) == 1, err
    assert "tiny on cpu" in err
    assert "nats" not in err
    _, _, err = run("run", "tiny", "What is 17 + 25?", "--here", "--device", "cpu", "--verbose")
    assert "nats" in err


def test_work_says_what_it_does_when_piped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("halfbyte.cli.options.time.monotonic", lambda: clock[0])
    with Activity("compiling") as activity:
        activity.update("compiling, 1 of 9")
        clock[0] = 11.0
        activity.update("compiling, 2 of 9")
        activity.update("compiling, 3 of 9")
    assert capsys.readouterr().err.splitlines() == ["compiling", "compiling, 2 of 9"]


def test_short_work_says_nothing_when_piped_and_long_work_does(capsys: pytest.CaptureFixture[str]) -> None:
    with Activity("short", after=60) as activity:
        activity.update("still short")
    assert capsys.readouterr().err == ""
    with Activity("long", after=0.01) as activity:
        assert activity._first is not None
        activity._first.join(60)
    assert capsys.readouterr().err == "long\n"


INTERRUPTED = """
import threading, time
import halfbyte.cli.app as cli
def command(**_):
    threading.Thread(target=time.sleep, args=(600,)).start()  # as a compiler that cannot be interrupted
    raise KeyboardInterrupt
cli.app = command
cli.main()
"""


def test_an_interrupted_command_waits_for_no_thread() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupted_engine_is_not_waited_for() -> None:
    waits: list[bool] = []
    engine = Engine.__new__(Engine)
    engine._source = SimpleNamespace(shutdown=lambda *, wait: waits.append(wait))  # type: ignore[assignment]
    engine.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    engine.__exit__(ValueError, ValueError(), None)
    engine.__exit__(None, None, None)
    assert waits == [False, True, True]


def test_an_interrupted_prebuild_waits_for_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end, begun, left = threading.Event(), threading.Event(), []

    def build(program: str, target: str) -> tuple[bytes, str]:
        if program == "b":
            begun.set()
            left.append(end.wait(60))
        return b"", ""

    def report(name: str, done: int, of: int) -> None:
        begun.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(prebuilt, "build_program", build)
    monkeypatch.setattr(prebuilt, "prebuilt_name", lambda program, target: program)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    programs: Any = [("a", "sm90"), ("b", "sm90"), ("c", "sm90")]
    with pytest.raises(KeyboardInterrupt):
        prebuilt.prebuild(programs, tmp_path, report)
    assert left == [], "the compilation that ran was waited for"
    end.set()


def test_no_more_cores_are_busy_than_there_are() -> None:
    code = "import json; from halfbyte.lab import environment; print(json.dumps(environment.use()))"
    use = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0 < use["cores_busy"] <= (os.cpu_count() or 1)


def test_reasoning_and_answer_are_apart(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer(silent=False, reasoning=True)
    printer.take(
        [
            AnswerText("reasoning", "Adding"),
            AnswerText("reasoning", " up."),
            AnswerText("content", "4"),
            AnswerText("content", "2"),
        ]
    )
    out, err = capsys.readouterr()
    assert out == "42"
    assert err == "Adding up.\n\n"
    assert printer.texts == {"reasoning": "Adding up.", "content": "42"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"halfbyte {command}" in out
    assert docstring_of(command).splitlines()[0][:40] in " ".join(out.split())
    assert not re.search(r"<(bool|str|int|float|list|path)|\[\[", out), "words of Python's, or brackets twice"


def test_unknown_option_is_exit_code_2(run: Run) -> None:
    assert run("bench", "--nonsense")[0] == 2
    assert run("nonsense")[0] == 2


def test_retired_variable(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_ATTENTION_SINKS", "1")
    code, _, err = run("env")
    assert code == 2
    assert "--sinks" in err


def test_bench_prints_figures_beside_their_ceiling(run: Run, tmp_path: Path) -> None:
    receipt = tmp_path / "bench.json"
    code, out, _ = run(
        "bench", "random:small", "--pp", "16", "--tg", "64", "--depth", "0,64", "--concurrency", "1,2",
        "--repeats", "1", "--json", "--out", str(receipt),
    )  # fmt: skip
    assert code == 0
    file = from_json(json.loads(out))
    labels = [
        "pp16",
        "tg64",
        "pp16, c=2",
        "tg64, c=2",
        "pp16 @ d64",
        "tg64 @ d64",
        "pp16 @ d64, c=2",
        "tg64 @ d64, c=2",
    ]
    assert [r.cell.label for r in file.results] == labels
    for result in file.results:
        share = result.figure("speed").share
        assert share is not None
        assert 0 < share < 1
        assert (result.cell.path, result.cell.model, result.cell.preset) == ("engine", "small", "int8")
        assert result.record is not None
        assert "decode" in result.record["regimes"]
    assert "ops/moe.py" in file.measured or any(name.startswith("engine/") for name in file.measured)
    assert from_json(json.loads(receipt.read_text(encoding="utf-8"))).results == file.results


def test_bench_steps_a_single_sequence_if_asked(run: Run) -> None:
    code, out, _ = run("bench", "random:small", "--pp", "16", "--tg", "3", "--eager", "--repeats", "1")
    assert code == 0
    assert "pp16" in out
    assert "tg3" in out
    code, out, err = run("bench", "random:small", "--pp", "", "--tg", "3", "--eager", "--concurrency", "2")
    assert code == 1
    assert "REFUSED" in out
    assert "one sequence at a time" in err


def test_quantize_writes_what_it_says(run: Run, small: Path, tmp_path: Path) -> None:
    target = tmp_path / "more"
    code, out, _ = run("quantize", str(small), str(target), "--mxfp4-layers", "qkv,o", "--json")
    assert code == 0
    assert json.loads(out)["bytes"] > 0
    code, out, _ = run("explain", str(target), "--arch", "cpu", "--json")
    formats = json.loads(out)["formats"]
    assert (formats["qkv"], formats["o"], formats["lm_head"]) == ("mxfp4", "mxfp4", "bf16")
    code, _, err = run("quantize", str(small), str(target), "--mxfp4-layers", "qkv,o")
    assert code == 2
    assert "exists" in err


def test_env_is_a_record(run: Run) -> None:
    code, out, _ = run("env", "--json")
    assert code == 0
    record = json.loads(out)
    assert record["packages"]["torch"]
    assert len(record["sources"]) == 16


def test_serve_refuses_what_would_not_fit_before_it_loads_anything(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_nothing(*args: object) -> None:
        pytest.fail("an engine was started")

    monkeypatch.setattr("halfbyte.engine.process.EngineProcess.start", load_nothing)
    monkeypatch.setattr("halfbyte.server.run.serve", load_nothing)
    code, _, err = run("serve", "--device", "cpu", "--reserve", "1000000")
    assert (code, "not enough memory: weights" in err.replace("\n", " ")) == (1, True), err
    code, _, err = run("serve", "--device", "cpu", "--kv-memory", "0.000001")
    assert (code, "holds no page" in err.replace("\n", " ")) == (2, True), err


@pytest.mark.parametrize("most", [4, LEAST_TIMED])
def test_no_speed_is_told_of_a_few_tokens(run: Run, most: int) -> None:
    """They may have come together: four tokens were told as 24,163 a second."""
    words = ("generate", "--prompt", "Count from one to a hundred.", "--max-tokens", str(most))
    code, _, err = run(*words)
    assert code == 0
    assert f"{most} generated, finish" in " ".join(err.split())
    _, out, _ = run(*words, "--json")
    assert json.loads(out)["tokens_per_second"] is None
