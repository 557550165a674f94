"""The terminal: what a person types, what is printed, and that a mistake is one sentence and exit code 2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from halfbyte.cli.app import COMMANDS, PANELS, docstring_of
from halfbyte.cli.conversation import Piece
from halfbyte.cli.explain import ARCHES as ARCH_NAMES
from halfbyte.cli.generate import Printer
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.sizing import check_start
from halfbyte.gates import Gates
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
        ("sm121", ["--preset", "fast"], ["bf16 tensor cores", "run on no such machine"]),
        ("sm121", ["--preset", "fast", "--activation", "mxfp8"], ["--activation prefill=mxfp8 keeps it", "no such"]),
        ("sm120", ["--preset", "fast", "--activation", "prefill=mxfp4"], ["run on no such machine"]),
        ("sm100", ["--preset", "fast"], ["every kernel here is Triton's", "bf16 tensor cores", "no such machine"]),
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
        ("sm120", [r"RTX 5090 \(32 GB\), gpt-oss-120b: .* does not fit", r"RTX 5090 .* gpt-oss-20b: .* left for KV",
                   r"RTX PRO 6000 \(96 GB\), gpt-oss-120b: .* GiB are left for KV"]),
        ("sm121", [r"GB10 .* gpt-oss-120b: .* GiB are left for KV"]),
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
    weights = load.weight_bytes(load.resolve_model("random:120b"), Gates())
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
    assert lines[0] == "What runs"
    assert [line.split()[0] for line in lines[1:5]] == ["decode", "batch", "prefill", "long"]
    assert "cuda.decode_step" in lines[1]
    assert out.index("Why nothing else") > out.index("weights ")
    assert tuple(ARCHES) == ARCH_NAMES
    code, out, _ = run("explain", "--help")
    assert "Without it: gpt-oss-120b" in " ".join(out.replace("│", " ").split())


def test_gates_are_explained_where_they_are_first_met(run: Run) -> None:
    _, out, _ = run("chat", "--help")
    assert "Gates: switches that say which kernels and number formats may run" in out


def test_reasoning_and_answer_are_apart(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer(silent=False, reasoning=True)
    printer.take(
        [Piece("reasoning", "Adding"), Piece("reasoning", " up."), Piece("content", "4"), Piece("content", "2")]
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
        assert (result.cell.path, result.cell.model, result.cell.preset) == ("engine", "small", "exact")
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
