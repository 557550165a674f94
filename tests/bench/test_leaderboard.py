"""The leaderboard's run: contenders in turn, each with its own kernel path, written down as they end."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from scripted_peer import ScriptedPeer
from tokenizers import Tokenizer as HuggingFaceTokenizer

from bench import leaderboard
from bench.leaderboard import CONTENDERS, Leaderboard, run_all, setup_of
from bench.measurement import MEASUREMENTS, Run
from bench.vllm import dummy_model, spread, trace
from halfbyte.errors import UsageError
from halfbyte.lab import receipts
from halfbyte.lab.kernel_table import read_table
from halfbyte.lab.peers.engines import engine_named
from halfbyte.lab.peers.launch import Launch, Peer, Setup
from halfbyte.lab.report.content import boards, kernels, measurements
from halfbyte.lab.report.sources import collect
from halfbyte.lab.result import Cell, Result, ResultFile, figure, from_json
from halfbyte.model.tokenizer import Tokenizer

TRACE = Path(__file__).parents[1] / "lab" / "traces" / "torch-cpu-attention-block.json.gz"
NAMES = ("halfbyte-fast", "vllm-triton", "vllm-marlin")


class Scripted(ScriptedPeer):
    """In place of an engine whose flags it does not know."""

    def launch(self, setup: Setup) -> Launch:
        return super().launch(replace(setup, flags=()))


def written(folder: Path) -> ResultFile:
    return from_json(json.loads((folder / "leaderboard.json").read_text()))


def small(folder: Path) -> Leaderboard:
    return Leaderboard(None, "cpu", folder, streams=(1, 2), prompt=8, tokens=4, depth=0)


def test_contenders_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One shows the kernel that was asked for, one another, one crashes; the fourth has no time left."""
    peers: dict[str, list[Peer]] = {
        "halfbyte": [Scripted("crash at start")],
        "vllm": [Scripted(moe="triton"), Scripted(moe="cutlass")],
    }
    monkeypatch.setattr(leaderboard, "engine_named", lambda name: peers[name].pop(0))
    results = run_all(small(tmp_path), NAMES, 300.0)
    assert written(tmp_path).results == tuple(results)
    crashed, *others = results
    assert crashed.invalid
    assert "SM100 only" in crashed.refused
    triton, marlin = others[:2], others[2:]
    assert [r.cell.label for r in triton] == [
        "pp8 + tg4, workload synthetic", "pp8 + tg4, c=2, workload synthetic",
    ]  # fmt: skip
    assert all(r.figure("speed").value > 0 for r in triton)
    assert [r.state for r in marlin] == ["INVALID", "INVALID"]
    assert all("wrong kernel path: moe_kernel marlin:" in r.refused for r in marlin)
    assert triton[0].cell.gates == {"moe_kernel": "triton"}
    both = boards(measurements(collect([tmp_path])), [])
    assert {b.test for b in both} >= {"pp8 + tg4", "pp8 + tg4, c=2"}
    assert [r.detail["contender"] for r in results] == ["halfbyte-fast", *2 * ["vllm-triton"], *2 * ["vllm-marlin"]]
    late, *kept = run_all(small(tmp_path), NAMES[:1], 1.0)
    assert "were left of 1" in late.refused
    assert kept == others


def test_a_second_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first call measured stays, in the order of the contenders; what is whole is not asked for again."""
    peers: list[Peer] = [Scripted(moe="triton"), Scripted(moe="marlin")]
    asked: list[str] = []

    def engine(name: str) -> Peer:
        asked.append(name)
        return peers.pop()

    monkeypatch.setattr(leaderboard, "engine_named", engine)
    first = run_all(small(tmp_path), ["vllm-marlin"], 300.0)
    before = written(tmp_path)
    both = run_all(small(tmp_path), ["vllm-marlin", "vllm-triton"], 300.0, missing=True)
    assert asked == ["vllm", "vllm"]
    assert [r.detail["contender"] for r in both] == ["vllm-triton", "vllm-triton", "vllm-marlin", "vllm-marlin"]
    assert both[2:] == first
    after = written(tmp_path)
    assert after.results == tuple(both)
    assert after.command == (*before.command, "then", *before.command)
    for result in both:
        assert result.detail["rounds"] == (5 if result.cell.shape["concurrency"] == 1 else 3)
        plays = result.detail["warm_up_s"]
        assert 2 <= len(plays) <= leaderboard.WARM_MOST
        assert result.detail["requests"] == result.detail["rounds"] * result.cell.shape["concurrency"]
        assert {f.name for f in result.figures} >= {
            "speed", "ttft_p50", "ttft_p99", "itl_p99", "ttft_first_wave_p99", "ttft_after_first_wave_p99",
        }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda f: replace(f, measured={**f.measured, "engine/build.py": "0"}), "tree"),
        (lambda f: replace(f, environment={**f.environment, "sources": "0"}), "tree"),
        (lambda f: replace(f, environment={**f.environment, "gpus": [{"name": "another"}]}), "GPU"),
        (lambda f: replace(f, environment={**f.environment, "driver": {"version": "1"}}), "driver"),
        (lambda f: replace(f, results=(replace(f.results[0], cell=replace(f.results[0].cell, model="20b")),)), "model"),
    ],
)
def test_boards_are_not_mixed(tmp_path: Path, change: Callable[[ResultFile], ResultFile], named: str) -> None:
    run_all(small(tmp_path), NAMES[:1], 1.0)
    change(written(tmp_path)).write(tmp_path / "leaderboard.json")
    before = (tmp_path / "leaderboard.json").read_bytes()
    with pytest.raises(UsageError, match=named):
        play(tmp_path)
    assert (tmp_path / "leaderboard.json").read_bytes() == before


def test_a_board_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "leaderboard.json").write_text("{")
    with pytest.raises(UsageError, match=re.escape(str(tmp_path))):
        play(tmp_path)


def play(folder: Path) -> None:
    each = MEASUREMENTS["leaderboard"]
    leaderboard.leaderboard(Run(each), each.parse(["model=", f"folder={folder}", "device=cpu", "seconds=1"]))


def test_prompt_and_decode_speed_come_first_and_every_phase_has_its_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaderboard, "engine_named", lambda name: Scripted(moe="triton"))
    run = replace(small(tmp_path), depth=8, decode=8, repeats=1)
    results = run_all(run, ["vllm-triton"], 300.0)
    assert [r.cell.kind for r in results] == ["prompt", "decode", "serving", "serving"]
    for result in results:
        phases = result.detail["phases_s"]
        assert list(phases) == ["start", "warm-up c=2", "warm-up c=1", "depth", "c=1", "c=2", "end"]
        assert sum(phases.values()) <= result.detail["took_s"] + 0.1
    assert results[-1].detail["phases_s"]["warm-up c=2"] == pytest.approx(
        sum(results[-1].detail["warm_up_s"]), abs=0.01
    )


def test_a_trace_that_an_engine_cannot_make_costs_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaderboard, "engine_named", lambda name: Scripted(moe="triton"))
    run = replace(small(tmp_path), streams=(1,), trace=True)
    played, traced = run_all(run, ["vllm-triton"], 300.0)
    assert not played.refused
    assert "made no trace" in traced.refused
    assert (traced.cell.kind, traced.cell.path) == (trace.KIND, "trace")


def test_a_trace_becomes_a_table_of_the_report(tmp_path: Path) -> None:
    """A real trace, of a CPU's operators."""
    cell = Cell("decode", "120b", path="http", shape={"tg": 32, "depth": 2048, "concurrency": 1}, engine="vllm 0.26.0")
    assert trace.result_of(tmp_path, cell, 32).refused == "the engine wrote no trace"
    shutil.copy(TRACE, tmp_path)
    result = trace.result_of(tmp_path, cell, 3)
    (out := tmp_path / "out").mkdir()
    receipts.result_file("bench/leaderboard.py", [result], {}).write(out / "leaderboard.json")
    found = measurements(collect([out]))
    (shown,) = kernels(found)
    assert shown.table.rows == read_table(TRACE).rows
    assert "vllm 0.26.0" in shown.title
    assert not boards(found, [])


def test_a_cell_that_would_end_too_late_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five sessions took ten seconds: twenty of them are not begun with thirty left, and fifteen with forty."""
    now = 100.0
    monkeypatch.setattr(leaderboard.time, "monotonic", lambda: now)
    player = leaderboard.ServerRun(small(tmp_path), "vllm", 130.0)
    assert not player.late(1000)  # nothing is known yet
    player.last = 5, 10.0
    assert player.late(20)
    assert not player.late(10)
    now = 131.0
    assert player.late()


def test_what_was_never_measured_comes_before_what_is_there_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a second try that gives less than the first does not replace it."""
    run = small(tmp_path)
    asked: list[str] = []
    cell = Cell("serving", run.model_name, shape={"concurrency": 1})
    good = Result(cell, (figure("speed", "tok/s", 1.0),))
    found = {
        "halfbyte-fast": [[good, Result(cell, refused="no time was left for it")], [Result(cell, refused="crashed")]],
        "vllm-triton": [[Result(cell, refused="crashed")], [good, good]],
    }

    def measure(run: Leaderboard, name: str, seconds: float) -> list[Result]:
        asked.append(name)
        return found[name].pop(0)

    monkeypatch.setattr(leaderboard, "measure", measure)
    first = run_all(run, list(found), 300.0)
    second = run_all(run, list(found), 300.0, missing=True)
    assert asked == ["halfbyte-fast", "vllm-triton", "vllm-triton", "halfbyte-fast"]
    assert second[:2] == first[:2]
    assert [r.refused for r in second[2:]] == ["", ""]


def test_our_own_latencies_at_many_streams_have_their_rounds() -> None:
    run = Leaderboard(None, "cpu", Path())
    assert [(n.streams, n.sessions) for n in run.loops("halfbyte")] == [(1, 5), (8, 24), (32, 96), (64, 384)]
    assert run.loops("vllm")[-1].sessions == 192


def test_vllm_is_started_with_spread_weights_and_nothing_to_fetch(tmp_path: Path) -> None:
    run = Leaderboard(None, "cpu", tmp_path, vllm_path="/packages/vllm")
    for name, backend in (("vllm-triton", "triton"), ("vllm-marlin", "marlin")):
        setup = setup_of(run, CONTENDERS[name], tmp_path / "trace")
        made = engine_named("vllm").launch(setup)
        assert not made.refusals
        words = " ".join(made.command)
        assert f"--moe-backend {backend}" in words
        assert f"serve {tmp_path / 'model'} " in words
        assert "--load-format dummy" in words
        told = json.loads(made.command[made.command.index("--profiler-config") + 1])
        assert told["torch_profiler_dir"] == str(tmp_path / "trace")
        assert "--max-num-seqs 64" in words
        assert "--max-cudagraph-capture-size 64" in words
        assert made.environment["VLLM_PLUGINS"] == spread.NAME
        assert "/packages/vllm" in setup.environment["PYTHONPATH"].split(":")
    (found,) = metadata.distributions(name="halfbyte_spread", path=[str(tmp_path / "plugin")])
    (point,) = found.entry_points
    assert (point.group, point.name) == ("vllm.general_plugins", spread.NAME)
    assert point.load() is spread.register
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert "quantization_config" not in config  # the embedded model's experts in bf16
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_the_plugin_finds_all_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a stand-in for vLLM's loader: an import that fails would show here, and not on a GPU."""

    class DummyModelLoader:
        def load_weights(self, model: object, model_config: object) -> None:
            raise AssertionError("vLLM's own filling")

    name = "vllm"
    for part in ("", ".model_executor", ".model_executor.model_loader", ".model_executor.model_loader.dummy_loader"):
        monkeypatch.setitem(sys.modules, name + part, ModuleType(name + part))
    monkeypatch.setattr(sys.modules[f"{name}.model_executor.model_loader.dummy_loader"], "DummyModelLoader",
                        DummyModelLoader, raising=False)  # fmt: skip
    spread.register()
    spread.register()
    config = SimpleNamespace(num_local_experts=2, intermediate_size=64, hidden_size=64)
    model = torch.nn.Module()
    model.router = torch.nn.Linear(64, 2)
    DummyModelLoader().load_weights(model, SimpleNamespace(hf_config=config))
    assert float(model.router.weight.detach().abs().max()) > 0


@pytest.mark.slow
def test_the_vocabulary_decodes_as_ours(tmp_path: Path) -> None:
    dummy_model.write("random:120b", tmp_path)
    ours, theirs = Tokenizer.gpt_oss(), HuggingFaceTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.get_vocab_size() == ours.vocab_size
    draw = random.Random(0)
    for _ in range(50):
        ids = [draw.randrange(ours.vocab_size) for _ in range(20)]
        assert theirs.decode(ids, skip_special_tokens=False) == ours.decode(ids)
    assert json.loads((tmp_path / "config.json").read_text())["num_local_experts"] == 128
    assert (tmp_path / dummy_model.RANKS).stat().st_size > 3_000_000
