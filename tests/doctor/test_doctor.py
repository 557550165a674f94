"""The doctor on recorded and composed machines: the findings that are expected, and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from halfbyte.doctor.diagnosis import STUMBLED, diagnose, exit_status
from halfbyte.doctor.finding import CHECKS, SEVERITIES, Finding, Purpose, table
from halfbyte.doctor.live import ANSWERS, this_machine
from halfbyte.doctor.machine import LABELS, from_record, read_records

HERE = Path(__file__).parent
FIXTURES = sorted((HERE / "fixtures").glob("*.json"))
Run = Callable[..., tuple[int, str, str]]


def content(path: Path) -> dict[str, object]:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def judged(path: Path) -> list[Finding]:
    machine, *peers = read_records(path)
    told = content(path)
    return diagnose(machine, Purpose(**{**told["purpose"], "peers": tuple(peers)}))  # type: ignore[dict-item]


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: p.stem)
def test_expected_findings_and_no_others(path: Path) -> None:
    found = judged(path)
    assert sorted(f"{f.id} {f.severity}" for f in found) == sorted(content(path)["expected"])  # type: ignore[call-overload]
    assert exit_status(found) == (1 if any(f.severity == "error" for f in found) else 0)


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: p.stem)
def test_every_question_has_an_answer_in_the_record(path: Path) -> None:
    """Or a check would find nothing for want of looking."""
    machine, *peers = read_records(path)
    told = content(path)
    diagnose(machine, Purpose(**{**told["purpose"], "peers": tuple(peers)}))  # type: ignore[dict-item]
    assert not machine.unanswered


def test_the_fixtures_are_labelled_and_many() -> None:
    labels = [content(path)["label"] for path in FIXTURES]
    assert set(labels) <= set(LABELS)
    assert len(labels) >= 8
    assert labels.count("recorded") >= 2
    assert sum(not content(path)["expected"] for path in FIXTURES) >= 3, "healthy machines are judged, too"
    assert all(len(str(content(path)["about"])) > 20 for path in FIXTURES)


def test_every_check_has_a_fixture_that_it_complains_of() -> None:
    """Or a line here that says why there is none."""
    without = {
        "wsl.version", "gpu.xid", "cuda.packages", "cuda.ptxas", "install.python", "cpu.governor",
        "triton.compiler", "disk.swapfile", "processes.compilers", "model.headers",
    }  # fmt: skip
    complained = {f.id for path in FIXTURES for f in judged(path)}
    assert set(CHECKS) - complained == without  # each of these has a case in test_checks.py or test_model_contents.py
    cases = "".join((HERE / f"test_{name}.py").read_text(encoding="utf-8") for name in ("checks", "model_contents"))
    assert all(f'"{id}"' in cases for id in without)


def test_no_finding_is_worse_than_its_check_says_and_each_is_whole() -> None:
    for path in FIXTURES:
        for f in judged(path):
            assert SEVERITIES.index(f.severity) <= SEVERITIES.index(CHECKS[f.id].worst), f.id
            assert f.evidence
            assert f.fix
            assert not f.evidence.endswith("."), "a clause: the printer ends it"


def test_a_check_that_stumbles_is_told_and_hides_nothing() -> None:
    told = content(HERE / "fixtures" / "gb10-port-taken.json")
    machine = read_records(HERE / "fixtures" / "gb10-port-taken.json")[0]
    assert told["expected"]
    machine.ask("limits")
    machine.answers["limits"][""] = {"files": "many", "locked": -1}
    found = diagnose(machine, Purpose())
    assert [f.id for f in found if f.id == STUMBLED] == [STUMBLED]
    assert "port.free" in {f.id for f in found}


def test_a_record_holds_everything_that_was_asked(tmp_path: Path) -> None:
    """What is asked live can be judged elsewhere, with the same result."""
    live = this_machine()
    live.answers["torch"] = {"": {"version": "0", "cuda": None, "available": False, "archs": []}}  # seconds otherwise
    first = diagnose(live, Purpose())
    replayed = from_record(json.loads(json.dumps(live.record("here"))))
    assert diagnose(replayed, Purpose()) == first
    assert not replayed.unanswered
    assert not [f for f in first if f.id == STUMBLED]


def test_a_record_tells_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_API_KEY", "hunter2")
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    monkeypatch.setenv("TRITON_CACHE_DIR", f"{Path.home()}/elsewhere")
    told = ANSWERS["variables"]("")
    assert "hunter2" not in json.dumps(told)
    assert told["TRITON_CACHE_DIR"] == "~/elsewhere"
    for path in FIXTURES:
        assert not re.search(r"/home/|/root/\w|_KEY\"|_TOKEN\"", path.read_text(encoding="utf-8")), path.name


def test_the_page_has_the_table_of_the_checks() -> None:
    page = (HERE.parents[1] / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in page


# ---- the command ----------------------------------------------------------------------------------------------------


def replay(run: Run, name: str, *more: str) -> tuple[int, str, str]:
    return run("doctor", "--replay", str(HERE / "fixtures" / f"{name}.json"), *more)


def test_the_exit_status_is_1_for_an_error_and_0_for_a_warning(run: Run) -> None:
    code, out, _ = replay(run, "gb10-kexec-handover", "openai/gpt-oss-120b", "--json")
    told = json.loads(out)
    assert (code, told["status"], told["counts"]["warning"]) == (0, 0, 2)
    code, out, _ = replay(run, "gb10-throttled", "--json")
    told = json.loads(out)
    assert (code, told["status"]) == (1, 1)
    assert {"id", "severity", "evidence", "fix", "commands"} <= set(told["findings"][0])
    assert told["findings"][0]["id"] == "gpu.clocks", "the worst first"


def test_people_read_what_was_seen_and_what_to_do(run: Run) -> None:
    code, out, _ = replay(run, "gb10-swap-and-cgroup", "openai/gpt-oss-120b")
    assert code == 1
    assert "memory.swap" in out
    assert "16.0 GiB of swap" in out
    assert "→ disable swap" in out


def test_fix_prints_commands_and_runs_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was run")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    code, out, _ = replay(run, "gb10-swap-and-cgroup", "openai/gpt-oss-120b", "--fix")
    assert code == 1
    assert "sudo swapoff -a" in out.splitlines()
    assert all(line.startswith("# ") or line for line in out.splitlines())


def test_two_machines_are_compared_by_record(run: Run, tmp_path: Path) -> None:
    fixture = str(HERE / "fixtures" / "two-sparks-mismatched.json")
    code, out, _ = run("doctor", "--replay", str(HERE / "fixtures" / "two-sparks-healthy.json"), "--cluster", "--json")
    assert (code, json.loads(out)["findings"]) == (0, [])
    code, out, _ = run("doctor", "--replay", fixture, "--cluster", "--json")
    assert {"cluster.mtu", "cluster.equal", "cluster.names"} <= {f["id"] for f in json.loads(out)["findings"]}
    code, _, err = run("doctor", "--peer", fixture)
    assert (code, "add --cluster" in err) == (2, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [("no json", "cannot be read"), ("[]", "not a machine record"), ('{"schema": 9}', "not a machine record")],
)
def test_a_file_that_is_no_record_is_one_sentence(run: Run, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    code, _, err = run("doctor", "--replay", str(path))
    assert code == 2
    assert said in err
