"""The list of running servers: who is in it, who is thrown out of it, and how one of them is stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from halfbyte.cli import servers
from halfbyte.cli.servers import RunningServer
from halfbyte.errors import UsageError

Run = Callable[..., tuple[int, str, str]]
SLEEPER = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nprint('up', flush=True)\n"
STUBBORN = (
    "import signal, sys, time\ncount = 0\n"
    "def end(*_):\n    global count\n    count += 1\n    count > 1 and sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, end)\nprint('up', flush=True)\n"
)
WAIT = "while True: time.sleep(0.05)\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(servers, "folder", lambda: tmp_path / "servers")
    (tmp_path / "servers").mkdir()
    return tmp_path / "servers"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A process that passes for a server: it ends when it is asked to."""
    begun: list[subprocess.Popen[str]] = []

    def go(code: str = SLEEPER) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", code + WAIT], stdout=subprocess.PIPE, text=True)
        begun.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield go
    for process in begun:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def enter(folder: Path, pid: int, model: str = "gpt-oss-20b", port: int = 8000, **more: object) -> RunningServer:
    born = psutil.Process(pid).create_time() if psutil.pid_exists(pid) else 1.0
    names = (model, "20b", "openai/gpt-oss-20b")
    server = RunningServer(pid, born, socket.gethostname(), model, names, None, "cpu", f"http://127.0.0.1:{port}", 1.0)
    server = replace(server, **more)  # type: ignore[arg-type]
    (folder / f"{server.host}-{pid}.json").write_text(json.dumps(asdict(server)))
    return server


def test_a_server_is_listed_while_it_runs(folder: Path) -> None:
    with servers.listed("m", ("m", "20b"), "/models/m", "cpu") as listing:
        (found,) = servers.running()
        assert (found.pid, found.model, found.state, found.url) == (os.getpid(), "m", "loading", None)
        listing.started("http://127.0.0.1:8000")
        (found,) = servers.running()
        assert (found.state, found.url) == ("serving", "http://127.0.0.1:8000")
    assert servers.running() == []
    assert list(folder.iterdir()) == []


def test_what_a_killed_server_left_is_not_listed(folder: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start()
    enter(folder, process.pid)
    assert len(servers.running()) == 1
    process.kill()
    process.wait()
    assert servers.running() == []
    assert list(folder.iterdir()) == []
    enter(folder, os.getpid(), born=1.0)  # the number belongs to another process by now
    assert servers.running() == []
    enter(folder, os.getpid(), host="elsewhere")  # a machine that shares the folder looks after its own
    assert servers.running() == []
    assert len(list(folder.iterdir())) == 1
    (folder / "broken.json").write_text("{")
    assert servers.running() == []


def test_a_server_is_meant_by_any_of_its_names(folder: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    first, second = start(), start()
    a, b = enter(folder, first.pid, port=8000), enter(folder, second.pid, model="tiny", port=8001, names=("tiny",))
    for text in ("20b", "openai/gpt-oss-20b", "8000", str(first.pid), "http://127.0.0.1:8000"):
        assert servers.choose(text) == a
    assert servers.choose("8001") == b
    for text in ("000", "1", "120b"):
        with pytest.raises(UsageError, match="no running server is called"):
            servers.choose(text)
    with pytest.raises(UsageError, match="several servers are running"):
        servers.choose(None)


def test_ps_and_stop(run: Run, folder: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    code, _, err = run("ps")
    assert (code, "no server is running" in err) == (0, True)
    code, _, err = run("stop")
    assert (code, "no server of this machine is running" in err) == (2, True)
    process = start()
    enter(folder, process.pid, since=time.time() - 7300)
    code, out, _ = run("ps")
    assert code == 0
    assert all(text in out for text in ("gpt-oss-20b", str(process.pid), "serving", "2 h", "http://127.0.0.1:8000"))
    code, out, _ = run("ps", "--json")
    assert json.loads(out)["servers"][0]["pid"] == process.pid
    code, _, err = run("stop", "20b")
    assert code == 0, err
    assert "stopped gpt-oss-20b" in err
    assert process.wait(10) == 0


def test_stop_says_who_is_still_busy_and_can_insist(
    run: Run, folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start(STUBBORN)
    enter(folder, process.pid)
    code, _, err = run("stop", "--wait", "0.2")
    assert code == 1
    assert "still running after 0.2 s" in err
    code, _, err = run("stop", "--all", "--now", "--json")
    assert code == 0, err
    assert process.wait(10) == 0
    code, _, err = run("stop", "20b", "--all")
    assert (code, "leave out --all" in err) == (2, True)


def test_a_model_that_is_served_is_not_removed(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halfbyte.model.checksums import FileRecord, PullRecord, write_record

    model = tmp_path / "models" / "openai--gpt-oss-20b"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    write_record(model, PullRecord("openai/gpt-oss-20b", "c", {"config.json": FileRecord(2)}))
    monkeypatch.setenv("HALFBYTE_MODELS_DIR", str(tmp_path / "models"))
    enter(folder, os.getpid(), path=str(model))
    code, _, err = run("rm", "20b", "--yes")
    assert code == 2
    assert "is being served" in err
    assert model.is_dir()


def test_signals_are_only_for_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfbyte.cli import stop

    def refuse(pid: int, number: int) -> None:
        assert (pid, number) == (77, signal.SIGTERM)
        raise PermissionError

    monkeypatch.setattr(stop.os, "kill", refuse)
    with pytest.raises(UsageError, match="another user"):
        stop._signal(77)
