"""Engines as processes: started, watched and stopped without a trace, whatever they do. All of them are real ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from scripted_peer import LIMITS, ScriptedPeer

from halfbyte.errors import AskError, PeerDiedError, PeerRefusedError, UsageError
from halfbyte.gates import Gates, parse
from halfbyte.lab.peers import keeper
from halfbyte.lab.peers.asker import Question, Reply
from halfbyte.lab.peers.engines import engine_named
from halfbyte.lab.peers.halfbyte import gate_flags
from halfbyte.lab.peers.launch import Launch, Setup
from halfbyte.lab.peers.process import PeerProcess

SETUP = Setup(None)


def started(tmp_path: Path, fault: str = "none", *, debug: bool = False, **script: object) -> PeerProcess:
    limits = replace(LIMITS, **{k: script.pop(k) for k in list(script) if k in ("start_s", "request_s", "stop_s")})
    return PeerProcess(ScriptedPeer(fault, **script), SETUP, tmp_path / "run", limits, debug=debug)  # type: ignore[arg-type]


def children_named(text: str) -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if text in " ".join(p.cmdline())]


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_an_engine_answers_and_leaves_nothing(tmp_path: Path) -> None:
    with started(tmp_path) as engine:
        assert 0 < engine.startup.healthy_s <= engine.startup.first_token_s
        reply = engine.asker.ask(Question("2 + 2 =", tokens=5, exactly=True))
        assert reply.completion_tokens == 5
        assert reply.tokens is not None
        assert len(reply.tokens) == 5
        assert reply == replace(engine.asker.ask(Question("2 + 2 =", tokens=5, exactly=True)), seconds=reply.seconds)
        assert (engine.memory_bytes() or 0) > 1 << 20
        assert engine.zombies() == []
        (line,) = engine.processes()
        pid = int(line.split()[0])
        assert os.getpgid(pid) == pid != os.getpgid(0)
        assert "scripted engine" in engine.log.read_text()
    assert engine.ending.clean
    assert engine.ending.exit == 0
    assert gone([pid])
    assert not engine.diagnostics
    assert [a.outcome for a in engine.asker.last][1:] == ["5 tokens, length"] * 2


@pytest.mark.slow
def test_many_questions_at_once_each_have_their_answer(tmp_path: Path) -> None:
    with started(tmp_path) as engine:
        questions = [Question(f"number {i}", tokens=4, exactly=True) for i in range(12)]
        together = engine.asker.ask_all(questions, 6)
        alone = [engine.asker.ask(q) for q in questions]
    assert [r.tokens for r in together if isinstance(r, Reply)] == [r.tokens for r in alone]


def test_a_crash_at_start_says_its_cause_and_leaves_diagnostics(tmp_path: Path) -> None:
    engine = started(tmp_path, "crash at start")
    with (
        pytest.raises(PeerDiedError, match=r"exit status 1 before it was ready.*SM100 only.*cutlass_fused_moe"),
        engine,
    ):
        pass
    (folder,) = engine.diagnostics
    names = {p.name for p in folder.iterdir()}
    assert names == {
        "server_log.txt", "exit.json", "causes.md", "requests.jsonl", "kernel_log.txt", "gpu.txt", "memory.json",
        "processes.txt", "environment.json",
    }  # fmt: skip
    assert "No supported CUDA architectures" in (folder / "server_log.txt").read_text()
    assert json.loads((folder / "exit.json").read_text())["exit"] == 1
    assert "cutlass_fused_moe" in (folder / "causes.md").read_text()
    assert json.loads((folder / "memory.json").read_text())["memory"]["total"] > 0


def test_a_crash_in_a_request(tmp_path: Path) -> None:
    with started(tmp_path, "crash in request", after=2) as engine:
        engine.asker.ask(Question("well"))
        with pytest.raises(AskError, match="connection failed"):
            engine.asker.ask(Question("badly"))
        for _ in range(200):
            if not engine.alive:
                break
            time.sleep(0.05)
        assert not engine.alive
        error = engine.failure("it crashed")
    assert "outside of its memory" in str(error)
    (folder,) = engine.diagnostics
    asked = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert [a["prompt"] for a in asked] == ["Hello", "well", "badly"]
    assert "connection failed" in asked[-1]["outcome"]
    assert "scripted_engine" in (folder / "processes.txt").read_text()  # as it was seen last


def test_a_hang_ends_in_time(tmp_path: Path) -> None:
    with started(tmp_path, "hang", after=1, request_s=3.0) as engine:
        with pytest.raises(AskError, match="no answer within 3 s"):
            engine.asker.ask(Question("?"))
        assert engine.alive
    assert engine.ending.clean


@pytest.mark.parametrize(
    ("fault", "start_s", "said"),
    [
        ("slow start", 1.0, "not healthy within 1 s"),
        ("first token never", 60.0, "no first token: no answer within 1 s"),
    ],
)
def test_an_engine_that_is_never_ready(tmp_path: Path, fault: str, start_s: float, said: str) -> None:
    engine = started(tmp_path, fault, start_s=start_s, request_s=1.0)
    with pytest.raises(PeerDiedError, match=said), engine:
        pass
    assert engine.diagnostics
    assert not children_named("scripted_engine")


def test_one_that_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, "ignores SIGTERM", stop_s=0.5) as engine:
        pid = int(engine.processes()[0].split()[0])
    assert engine.ending.how == "killed: it did not end within 0.5 s of being asked"
    assert engine.ending.exit == -signal.SIGKILL
    assert not engine.ending.clean
    assert gone([pid])


def test_children_that_are_left_are_ended_and_named(tmp_path: Path) -> None:
    """Both ignore SIGTERM, and one has a session of its own: neither its group nor its parent leads to it."""
    with started(tmp_path, "leaves children", stop_s=3.0) as engine:
        pids = [int(line.split()[0]) for line in engine.processes()]
        assert len(pids) == 3
    assert len(engine.ending.left) == 2
    assert all("time.sleep" in text for text in engine.ending.left)
    assert not engine.ending.stuck
    assert gone(pids)


@pytest.mark.slow
def test_zombies_are_seen(tmp_path: Path) -> None:
    with started(tmp_path, "zombies", after=1) as engine:
        engine.asker.ask(Question("?"))
        for _ in range(200):
            if engine.zombies():
                break
            time.sleep(0.05)
        assert len(engine.zombies()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is told by Linux")
def test_a_lab_that_is_killed_leaves_no_engine(tmp_path: Path) -> None:
    """kill -9 of whoever started it; the engine has children that ignore everything but that."""
    program = f"""
import sys, time
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from pathlib import Path
from scripted_peer import LIMITS, ScriptedPeer
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.peers.process import PeerProcess
from dataclasses import replace
limits = replace(LIMITS, stop_s=1.0)
with PeerProcess(ScriptedPeer("leaves children"), Setup(None), Path({str(tmp_path)!r}), limits) as e:
    print(*[line.split()[0] for line in e.processes()], flush=True)
    time.sleep(600)
"""
    lab = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert lab.stdout is not None
    pids = [int(word) for word in lab.stdout.readline().split()]
    assert len(pids) == 3
    lab.kill()
    lab.communicate()
    for _ in range(400):
        if gone(pids):
            break
        time.sleep(0.05)
    assert gone(pids)


def test_refusals_start_nothing(tmp_path: Path) -> None:
    refused = PeerProcess(ScriptedPeer(), replace(SETUP, gates=parse({"tile": "64x128"}, env={})), tmp_path, LIMITS)
    with pytest.raises(PeerRefusedError, match="no tiles"), refused:
        pass
    engine = started(tmp_path, "refuses")  # exit status 2, as command lines say it
    with pytest.raises(PeerRefusedError, match="no kernel for these gates"), engine:
        pass
    assert not engine.diagnostics


def test_an_engine_that_says_what_it_does_not_support_refuses(tmp_path: Path) -> None:
    """vLLM ends with a traceback and status 1; what else went wrong is no refusal."""
    engine = started(tmp_path, "does not support it")
    with pytest.raises(PeerRefusedError, match=r"refused to start: moe_backend='marlin' is not supported for"), engine:
        pass
    assert not engine.diagnostics
    with pytest.raises(PeerDiedError, match="memory"), started(tmp_path, "has no memory for it"):
        pass


@pytest.mark.slow
def test_a_program_that_is_not_there_is_a_refusal(tmp_path: Path) -> None:
    class Absent(ScriptedPeer):
        def launch(self, setup: Setup) -> Launch:
            return Launch(("no-such-engine", "--port", str(setup.port)))

    with pytest.raises(PeerRefusedError, match="no-such-engine could not be started"):
        PeerProcess(Absent(), SETUP, tmp_path, LIMITS).__enter__()


def test_debug_sets_the_switches_and_secrets_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-private")
    monkeypatch.setenv("HTTP_PROXY_OF_MINE", "http://me:pass@proxy:80")
    monkeypatch.setenv("HALFBYTE_MOE_KERNEL", "reference")  # a gate of this process is none of the engine's
    with started(tmp_path, debug=True) as engine:
        engine.failure("asked for")
    written = json.loads((engine.diagnostics[0] / "environment.json").read_text())
    assert written["CUDA_LAUNCH_BLOCKING"] == written["TORCH_SHOW_CPP_STACKTRACES"] == "1"
    assert written["NCCL_DEBUG"] == "INFO"
    assert written["FLASHINFER_LOGLEVEL"] == "3"
    assert written["FLASHINFER_LOGDEST"].endswith("flashinfer_api.log")
    assert "HALFBYTE_MOE_KERNEL" not in written
    text = "".join(p.read_text() for p in engine.diagnostics[0].iterdir())
    assert "sk-private" not in text
    assert "me:pass" not in text


def test_an_engine_elsewhere_is_asked_and_not_stopped(tmp_path: Path) -> None:
    with started(tmp_path) as engine:
        with PeerProcess(engine_named(f"{engine.url}/v1"), SETUP, tmp_path / "url", LIMITS) as other:
            assert other.asker.ask(Question("hi", tokens=2, exactly=True)).completion_tokens == 2
            assert other.memory_bytes() is None
        assert engine.alive
        assert engine.asker.ask(Question("hi", tokens=2, exactly=True)).completion_tokens == 2


def test_names_of_engines() -> None:
    assert engine_named("HalfByte").name == "halfbyte"
    assert engine_named("llama.cpp").name == engine_named("llamacpp").name
    with pytest.raises(UsageError, match="there is no engine 'ollama'"):
        engine_named("ollama")
    with pytest.raises(UsageError, match="no address"):
        engine_named("ftp://host")


def test_gates_as_flags() -> None:
    gates = parse({"moe_kernel": "decode=gemv", "graphs": "off", "layers": "qkv=q8"}, env={})
    assert gate_flags(gates) == ["--moe-kernel", "decode=gemv", "--layers", "qkv=q8", "--enforce-eager"]
    assert gate_flags(Gates()) == []


def test_what_halfbytes_plan_refuses_is_refused_without_a_start() -> None:
    peer = engine_named("halfbyte")
    marlin = peer.launch(Setup(None, parse({"moe_kernel": "marlin"}, env={}), "cpu", 1))
    assert "borrowed.marlin_moe" in marlin.refusals[0]
    assert not marlin.command
    fine = peer.launch(Setup(None, parse({"attention": "reference"}, env={}), "cpu", 1))
    assert "--attention" in fine.command


def test_the_keeper_imports_nothing_of_ours() -> None:
    text = Path(keeper.__file__).read_text()
    assert "import halfbyte" not in text
    assert "from halfbyte" not in text
