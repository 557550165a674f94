"""A model by its name: what `pull` fetched is found by every spelling, listed, offered where it is missing, removed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from halfbyte.cli import models
from halfbyte.errors import CheckpointError
from halfbyte.model import load, pulled, synthetic
from halfbyte.model.checksums import RECORD, FileRecord, PullRecord, write_record
from halfbyte.model.config import NAMED

Run = Callable[..., tuple[int, str, str]]


def as_pulled(folder: Path, repo: str) -> Path:
    """A folder as a pull leaves it: the record knows every file."""
    files = {p.name: FileRecord(p.stat().st_size) for p in folder.iterdir() if p.name != RECORD}
    write_record(folder, PullRecord(repo, "c0ffee", files))
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A models folder with openai/gpt-oss-20b in it, of a small shape."""
    folder = tmp_path / "models" / "openai--gpt-oss-20b"
    synthetic.write_safetensors(NAMED["small"], 0, folder)
    as_pulled(folder, "openai/gpt-oss-20b")
    monkeypatch.setenv("HALFBYTE_MODELS_DIR", str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.mark.parametrize("name", ["20b", "20B", "gpt-oss-20b", "gpt-oss:20b", "openai/gpt-oss-20b"])
def test_every_spelling_finds_what_was_pulled(home: Path, name: str) -> None:
    found = load.resolve_model(name)
    assert found.path == home / "openai--gpt-oss-20b"
    assert (found.label, found.repo) == ("gpt-oss-20b", "openai/gpt-oss-20b")
    assert load.config_of(found).layers == NAMED["small"].layers


def test_a_path_wins_over_a_name(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "20b").mkdir()
    (tmp_path / "20b" / "config.json").write_text("{}")
    assert load.resolve_model("20b").path == Path("20b")
    assert load.resolve_model("tiny").path == load.EMBEDDED


def test_what_is_not_here_says_how_to_get_it(home: Path) -> None:
    with pytest.raises(CheckpointError, match="`halfbyte pull 120b`"):
        load.resolve_model("120b")
    with pytest.raises(CheckpointError, match="does not exist; give a model folder"):
        load.resolve_model("/no/such/model")
    (home / "openai--gpt-oss-20b" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="has not been pulled"):  # not to its end
        load.resolve_model("20b")


def test_a_model_pulled_elsewhere_is_known_by_its_name(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "data" / "big"
    synthetic.write_safetensors(NAMED["small"], 0, other)
    (other / "notes.txt").write_text("mine")
    as_pulled(other, "openai/gpt-oss-120b")
    record = pulled.read_record(other)
    del record.files["notes.txt"]
    write_record(other, record)
    pulled.link("openai/gpt-oss-120b", other, home)
    found = load.resolve_model("120b")
    assert found.path is not None
    assert found.path.resolve() == other
    model = pulled.find("120b", home)
    assert model is not None
    assert pulled.remove(model) == [other / "notes.txt"]
    assert [p.name for p in other.iterdir()] == ["notes.txt"]
    assert pulled.find("120b", home) is None


def test_files_of_a_gguf_repository(home: Path) -> None:
    folder = home / "someone--gpt-oss-GGUF"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(b"GGUF")
    as_pulled(folder, "someone/gpt-oss-GGUF")
    assert pulled.path_of("someone/gpt-oss-GGUF", home) == folder / "a.gguf"
    (folder / "b.gguf").write_bytes(b"GGUF")
    as_pulled(folder, "someone/gpt-oss-GGUF")
    with pytest.raises(CheckpointError, match=r"add the name of one: a\.gguf, b\.gguf"):
        pulled.path_of("someone/gpt-oss-GGUF", home)
    assert pulled.path_of("someone/gpt-oss-GGUF/b.gguf", home) == folder / "b.gguf"
    assert pulled.path_of("someone/gpt-oss-GGUF/c.gguf", home) is None
    for file in folder.iterdir():
        file.unlink()
    for number in (1, 2):
        (folder / f"m-0000{number}-of-00002.gguf").write_bytes(b"GGUF")
    as_pulled(folder, "someone/gpt-oss-GGUF")
    assert pulled.path_of("someone/gpt-oss-GGUF", home) == folder / "m-00001-of-00002.gguf"


def test_list_and_rm(run: Run, home: Path) -> None:
    half = home / "openai--gpt-oss-120b"
    half.mkdir()
    (half / "model-00000-of-00014.safetensors.0123456789ab.part").write_bytes(b"x" * 1000)
    (home / "not--ours").mkdir()
    code, out, _ = run("list", "--json")
    assert code == 0
    found = {m["name"]: m for m in json.loads(out)["models"]}
    assert set(found) == {"openai/gpt-oss-20b", "openai/gpt-oss-120b"}
    assert (found["openai/gpt-oss-20b"]["short"], found["openai/gpt-oss-20b"]["complete"]) == ("20b", True)
    assert (found["openai/gpt-oss-120b"]["bytes"], found["openai/gpt-oss-120b"]["complete"]) == (1000, False)
    code, out, _ = run("list")
    assert "tiny" in out
    assert "pull it again to go on" in out
    code, _, err = run("rm", "20b")
    assert code == 2
    assert "--yes" in err
    assert (home / "openai--gpt-oss-20b").is_dir()
    code, _, err = run("rm", "20b", "openai/gpt-oss-20b", "120b", "--yes")
    assert code == 0
    assert sorted(p.name for p in home.iterdir()) == ["not--ours"]
    code, _, err = run("rm", "20b", "--yes")
    assert code == 2
    assert "was not pulled" in err


def test_commands_take_a_name(run: Run, home: Path) -> None:
    code, out, _ = run("explain", "20b", "--arch", "cpu", "--json")
    assert code == 0
    assert json.loads(out)["model"] == "gpt-oss-20b"
    code, out, _ = run("explain", "120b", "--arch", "sm121", "--json")  # not pulled: its published shape
    assert code == 0
    assert "are not on this machine" in json.loads(out)["notes"][0]
    code, _, err = run("bench", "120b")
    assert code == 2
    assert "halfbyte pull 120b" in err


def test_a_person_is_offered_to_pull(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    fetched: list[str] = []

    def confirm(text: str, **_: object) -> bool:
        asked.append(text)
        return len(asked) > 1

    monkeypatch.setattr(models.typer, "confirm", confirm)
    monkeypatch.setattr(models, "fetch", lambda repo, file=None: fetched.append(repo))
    assert models.offer_to_pull("120b") == "120b"  # nobody is at the terminal
    assert not asked
    for stream in (models.sys.stdin, models.sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert models.offer_to_pull("20b") == "20b"
    assert models.offer_to_pull("random:20b") == "random:20b"
    assert models.offer_to_pull("/no/such/model") == "/no/such/model"
    assert not asked
    models.offer_to_pull("120b")
    assert asked == ["openai/gpt-oss-120b is not on this machine yet. Pull it now (65 GB)?"]
    assert not fetched
    models.offer_to_pull("120b")
    assert fetched == ["openai/gpt-oss-120b"]


def test_the_hub_gets_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert models.hub().token == "hf_x"


def test_the_doctor_looks_at_what_a_name_means(home: Path, run: Run) -> None:
    config = home / "openai--gpt-oss-20b" / "config.json"
    config.unlink()
    code, out, _ = run("doctor", "20b", "--json")
    assert code == 1
    (finding,) = [f for f in json.loads(out)["findings"] if f["severity"] == "error"]
    assert finding["id"] == "model.headers"
    assert "config.json" in finding["evidence"]
    code, _, err = run("doctor", "no-such-model")
    assert (code, "does not exist" in err) == (2, True)
    assert "has not been pulled" in run("doctor", "120b")[2]
