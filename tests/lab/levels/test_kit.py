"""The kit's archive: results that can be read back, and nothing of whoever made it."""

from __future__ import annotations

import getpass
import json
import socket
import zipfile
from pathlib import Path

import psutil
import pytest
from scripted_peer import ScriptedPeer

from halfbyte.lab import receipts
from halfbyte.lab.levels import kit as kit_
from halfbyte.lab.levels.kit import Kit, make_kit, private_words, without_private, write_archive
from halfbyte.lab.levels.protocol import Outcome, ProtocolReport
from halfbyte.lab.result import Cell, Result, figure, from_json


def filled(folder: Path) -> Path:
    place = folder / "embedded" / "001-smoke"
    place.mkdir(parents=True)
    result = Result(Cell("decode", "tiny", path="http", shape={"tg": 32}), (figure("speed", "tok/s", 12.0),))
    file = receipts.result_file("halfbyte check", [result], {}, [])
    file.write(folder / "embedded" / "results.json")
    home, machine = Path.home(), socket.gethostname()
    text = f"loading {home}/models/x from {folder} on {machine}, 192.168.7.20 and 127.0.0.1:8000, mail me@there.org\n"
    (place / "server.log").write_text(text)
    (place / "keeper.json").write_text("{}")
    (place / "weights.bin").write_bytes(b"\0" * 100)
    (folder / "facts.txt").write_text("cpu: fast\n")
    return folder


def test_the_archive_holds_results_and_nothing_private(tmp_path: Path) -> None:
    folder = filled(tmp_path / "kit")
    names = write_archive(folder, tmp_path / "kit.zip")
    assert names == ["embedded-001-smoke-server.log", "embedded-results.json", "facts.txt"]
    with zipfile.ZipFile(tmp_path / "kit.zip") as made:
        everything = "".join(made.read(n).decode() for n in made.namelist())
        assert from_json(json.loads(made.read("embedded-results.json"))).results[0].figure("speed").value == 12.0
    for private in (str(folder), str(tmp_path), "192.168.7.20", "me@there.org", *private_words(folder)):
        assert private not in everything
    assert "127.0.0.1:8000" in everything  # everybody's


def test_versions_are_no_addresses() -> None:
    assert (
        without_private("torch 2.13.0, driver 580.65.06, 10.0.0.7", {}) == "torch 2.13.0, driver 580.65.06, (address)"
    )


def test_a_user_may_be_called_like_a_part_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the schema's fields stay, and so do longer words that only contain the name."""
    monkeypatch.setattr(getpass, "getuser", lambda: "cell")
    folder = filled(tmp_path / "kit")
    (folder / "facts.txt").write_text("cell wrote /data/cell/x of a cellar")
    write_archive(folder, tmp_path / "kit.zip")
    with zipfile.ZipFile(tmp_path / "kit.zip") as made:
        assert from_json(json.loads(made.read("embedded-results.json"))).results[0].cell.model == "tiny"
        assert made.read("facts.txt") == b"(user) wrote /data/(user)/x of a cellar"


def test_an_engine_is_ended_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A level that hangs does not take longer than the kit may, and gives no verdict."""
    monkeypatch.setattr(kit_, "HalfbytePeer", lambda: ScriptedPeer("hang", 4))
    monkeypatch.setattr(Kit, "has_time", lambda kit, *_: kit.left_s > 0)
    kit = Kit(tmp_path / "kit", budget_s=3.0, device="cpu")
    monkeypatch.setattr(Kit, "profile", lambda *_: None)
    monkeypatch.setattr(Kit, "doctor", lambda _: None)
    make_kit(kit, tmp_path / "kit.zip")
    assert any("the time was over while it ran" in text for text in kit.left_out), kit.left_out
    assert -20.0 < kit.left_s <= 0  # an engine has time to end when it is asked
    assert not [p for p in psutil.Process().children(recursive=True) if "scripted_engine" in " ".join(p.cmdline())]


def test_a_named_model_is_inspected_without_any_text_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands that run, and that what they print is in the archive; one that fails is named."""
    commands: list[list[str]] = []

    def child(kit: Kit, words: list[str], name: str, limit_s: float) -> int:
        commands.append(words)
        (kit.folder / name).write_text('{"schema": "x"}')
        return 1 if "quality" in words else 2 if "fails" in words else 0

    monkeypatch.setattr(Kit, "child", child)
    kit = Kit(tmp_path / "kit", device="cpu", model="m")
    kit.folder.mkdir()
    kit.inspection()
    assert [words[2:] for words in commands] == [
        ["inspect", "m", "--device", "cpu", "--json"],
        ["check", "quality", "m", "--device", "cpu", "--lengths", "2048", "--json"],
    ]
    assert kit.left_out == []
    assert write_archive(kit.folder, tmp_path / "kit.zip") == ["inspect.txt", "quality.txt"]
    kit.model = "fails"
    kit.inspection()
    assert [text.split(":")[0] for text in kit.left_out] == ["inspection"]


def test_the_report_reads_it(tmp_path: Path) -> None:
    sources = pytest.importorskip("halfbyte.lab.report.sources")
    write_archive(filled(tmp_path / "kit"), tmp_path / "kit.zip")
    found = sources.collect([tmp_path / "kit.zip"])
    assert [entry.models for entry, _ in found.files] == [("tiny",)]
    assert not found.unreadable


def test_what_does_not_fit_into_the_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def levels(subject: object, numbers: list[str], options: object) -> ProtocolReport:
        ran.extend(numbers)
        kit.begun -= 70.0  # each takes more than a minute
        return ProtocolReport(subject, [Outcome(numbers[0], [Result(Cell("smoke"), (figure("start", "s", 1.0),))])])  # type: ignore[arg-type]

    monkeypatch.setattr(kit_, "run_levels", levels)
    monkeypatch.setattr(Kit, "doctor", lambda _: None)
    kit = Kit(tmp_path / "kit", budget_s=200.0, device="cpu")
    names = make_kit(kit, tmp_path / "kit.zip")
    assert ran == ["1", "1.5"]
    assert [text.split(":")[0] for text in kit.left_out] == [
        "level 2 of embedded", "level 3 of embedded", "level 4 of embedded", "inspection", "quality", "kernel profile",
    ]  # fmt: skip
    assert {"facts.txt", "embedded-results.json", "embedded-test_log.md"} <= set(names)
    with zipfile.ZipFile(tmp_path / "kit.zip") as made:
        assert "left out: level 4 of embedded" in made.read("facts.txt").decode()
    assert getpass.getuser() == "root" or getpass.getuser() not in "".join(names)
