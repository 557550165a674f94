"""`halfbyte check quality` on the embedded model, with short texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from halfbyte import gates as gates_
from halfbyte.cli import options as cli_options
from halfbyte.cli.app import app
from halfbyte.errors import UsageError
from halfbyte.gates import Gates, Preset
from halfbyte.lab.levels import quality, quality_report
from halfbyte.lab.levels.quality import check_quality
from halfbyte.lab.levels.quality_report import FAIL, INCONCLUSIVE, OWN, PASS, QualityReport
from halfbyte.lab.options import QualityOptions
from halfbyte.lab.statistics import Estimate, block_mean
from halfbyte.model import load, quality_record
from halfbyte.model.gpt_oss import arch_of, choose
from halfbyte.model.load import EMBEDDED
from halfbyte.plan.phase import ARCHES

SHORT = QualityOptions(presets=("fast",), lengths=(512,))
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    compiled = gates_.cache_folder("cpu")
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", str(tmp_path / "cache"))
    if compiled.is_dir():
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "cpu").symlink_to(compiled)
    monkeypatch.setattr(quality, "SHORT_PASSAGES", 1)
    monkeypatch.setattr(quality, "NEEDLES", 1)
    return tmp_path / "cache" / quality_record.KIND


def copy_of(folder: Path) -> Path:
    shutil.copytree(EMBEDDED, folder)
    return folder


def check(
    model: Path | None = None, options: QualityOptions = SHORT, progress: list[str] | None = None
) -> QualityReport:
    steps = [] if progress is None else progress
    return check_quality(None if model is None else str(model), Gates(), options, "cpu", steps.append)


def test_fast_on_the_embedded_model(tmp_path: Path) -> None:
    folder = copy_of(tmp_path / "m")
    report = check(folder)
    (fast,) = report.candidates
    assert (fast.label, fast.verdict, report.verdict) == ("fast", PASS, PASS)
    by_name = {c.section: c for c in fast.comparisons}
    own, text = by_name[OWN], by_name["text at 512"]
    assert own.judged
    assert 0 < own.kl.low <= own.kl.value <= own.kl.high < 1e-3
    assert own.same.value == 1.0
    assert not text.judged  # English, of which the embedded model has seen none
    assert text.exact_perplexity > 2048
    assert text.kl.value > own.kl.value
    assert fast.answers[0] == fast.answers[3] > 10
    assert report.record == folder / ".halfbyte-quality.json"
    assert [r.cell.preset for r in fast.results("m")] == ["fast", "fast"]
    level = json.loads(json.dumps(report.as_dict()))
    assert {"level", "name", "verdict", "seconds", "reasons", "notes", "results", "candidates"} <= set(level)
    # A second run measures nothing again.
    steps: list[str] = []
    again = check(folder, progress=steps)
    assert steps == []
    assert again.candidates[0].comparisons == fast.comparisons


def test_a_worse_preset_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks switched off and activations in four bits, in the disguise of a preset."""
    gates = Gates(sinks="off", activation="mxfp4", moe_kernel="reference", linear_kernel="reference")
    monkeypatch.setitem(gates_.PRESETS, "worse", Preset(gates, "planted"))
    report = check(options=QualityOptions(presets=("worse",), lengths=(512,)))
    assert report.verdict == FAIL
    assert OWN in report.candidates[0].worst
    assert report.as_dict()["reasons"][0].startswith("worse: ")
    assert not report.ok


def test_a_run_that_was_ended_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended in the middle of exact's answers, and again while the candidate reads; nothing is done twice."""

    class Ended(BaseException):
        pass

    def run(end: Callable[[str], bool]) -> tuple[list[str], QualityReport | None]:
        steps: list[str] = []

        def progress(step: str) -> None:
            if end(step):
                raise Ended
            steps.append(step)

        try:
            return steps, check_quality(None, Gates(), SHORT, "cpu", progress)
        except Ended:
            return steps, None

    first, _ = run(lambda s: s.startswith("exact: answers 5 "))
    second, _ = run(lambda s: s.startswith(f"fast: {OWN}, passage 3,"))
    third, report = run(lambda s: False)
    assert report is not None
    assert report.reused > 3
    assert "exact: answers 4 of 13" in first
    assert "exact: answers 4 of 13" not in second
    assert "exact: answers 5 of 13" in second
    assert any(s.startswith("fast: text at 512") for s in second)
    assert not any(s.startswith(("exact", "fast: text at 512")) for s in third)
    plain = check().candidates[0]
    assert report.candidates[0].comparisons == plain.comparisons


def test_a_folder_that_cannot_be_written(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the folder's record is a folder itself."""
    folder = copy_of(tmp_path / "m")
    quality_record.path_beside(folder).mkdir()
    report = check(folder)
    assert report.record is not None
    assert report.record.parent == cache
    facts = load.read_facts(load.resolve_model(str(folder)))
    arch = arch_of("cpu")
    spec = choose(facts.config, gates_.PRESETS["fast"].gates, arch, facts.formats).spec
    entry = quality_record.find(folder, spec, arch)
    assert entry is not None
    assert entry.label == "fast"
    other = choose(facts.config, gates_.PRESETS["balanced"].gates, arch, facts.formats).spec
    assert quality_record.find(folder, other, arch) is None


def test_a_record_holds_for_its_content(tmp_path: Path) -> None:
    """Touched files are still the same; other weights are not."""
    folder = copy_of(tmp_path / "m")
    measure = quality_record.Measure(0.1, 0.0, 0.2)
    entry = quality_record.QualityEntry("x", PASS, "", measure, measure, measure, (1, 1, 1), (1, 1, 1), "", "")
    assert quality_record.store(folder, {"key": entry}) == folder / ".halfbyte-quality.json"
    (file, _) = sorted(folder.glob("*.safetensors"))
    file.touch()
    kept = quality_record.read(folder)
    assert kept is not None
    assert kept.entries == {"key": entry}
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert quality_record.read(folder) is None


def test_a_users_text_is_compared_and_not_kept(tmp_path: Path, cache: Path) -> None:
    text = tmp_path / "private-notes.txt"
    text.write_text("What is 17 + 25? The answer is 42, and Ada keeps the red box. " * 60)
    report = check(options=QualityOptions(presets=("balanced",), texts=(str(text),), lengths=(512,)))
    assert [c.section for c in report.candidates[0].comparisons] == ["text at 512", "your text 1", OWN]
    assert len(list(cache.glob("*/exact-*.safetensors"))) == 2  # the bundled text's and the answers'
    everything = json.dumps(report.as_dict()) + "".join(p.read_text() for p in cache.rglob("*.json"))
    assert "private-notes" not in everything
    assert "Ada keeps" not in everything
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(UsageError, match=r"short\.txt"):
        check(options=QualityOptions(texts=(str(tmp_path / "short.txt"),), lengths=(512,)))
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00" * 100)
    with pytest.raises(UsageError, match="UTF-8"):
        check(options=QualityOptions(texts=(str(tmp_path / "bytes.txt"),), lengths=(512,)))


def test_the_start_says_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(tmp_path / "m")
    name, fast = load.resolve_model(str(folder)), gates_.PRESETS["fast"].gates
    facts, device, arch = load.read_facts(name), torch.device("cpu"), arch_of("cpu")

    def line(gates: Gates) -> str:
        with cli_options.err.capture() as printed:
            cli_options.announce_model(facts, gates, device, verbose=True)
        return printed.get()

    assert "halfbyte check quality" not in line(Gates())
    assert f"halfbyte check quality {folder}" in line(fast)
    kl, same = quality_record.Measure(0.0123, 0.01, 0.02), quality_record.Measure(0.987, 0.98, 0.99)
    ratio = quality_record.Measure(1.004, 1.0, 1.01)
    entry = quality_record.QualityEntry("fast", PASS, "", kl, same, ratio, (7, 8, 8), (9, 9, 9), "2026-01-01", "cpu")
    key = quality_record.numerics_key(choose(facts.config, fast, arch, facts.formats).spec, arch)
    quality_record.store(folder, {key: entry})
    assert line(fast).count("\n") == 1
    for part in ("0.012", "0.01 to 0.02", "98.7%", "+0.40%", "7 of 8", "PASS", "2026-01-01"):
        assert part in line(fast)
    assert "not measured" in line(gates_.PRESETS["balanced"].gates)


def test_one_line_names_the_default_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense layers in 8 bits by default, with the verdict once one is stored; a file that has them so is `exact`."""
    folder = copy_of(tmp_path / "m")
    facts, arch = load.read_facts(load.resolve_model(str(folder))), ARCHES["sm121"]
    monkeypatch.setattr("halfbyte.model.gpt_oss.arch_of", lambda _: arch)

    def line(gates: Gates) -> str:
        with cli_options.err.capture() as printed:
            cli_options.announce_model(facts, gates, torch.device("cuda"))
        return printed.get()

    assert "preset balanced, the default here: dense layers in 8 bits" in line(Gates())
    assert "--preset exact" in line(Gates())
    assert line(Gates()).count("\n") == 1
    assert "measured" not in line(Gates())
    assert "the default" not in line(gates_.PRESETS["exact"].gates)
    measure = quality_record.Measure(1.0, 1.0, 1.0)
    entry = quality_record.QualityEntry(
        "balanced", PASS, "", measure, measure, measure, (8, 8, 8), (9, 9, 9), "2026-01-01", "sm121"
    )
    key = quality_record.numerics_key(choose(facts.config, gates_.PRESETS["balanced"].gates, arch).spec, arch)
    quality_record.store(folder, {key: entry})
    assert "balanced on this model: PASS" in line(Gates())
    assert line(Gates()).count("\n") == 1
    facts = replace(facts, formats=facts.formats | {"qkv": "q8", "o": "q8", "lm_head": "q8"})
    assert "preset exact, the default here" in line(Gates())


def test_serve_prints_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the point where the server would start."""
    folder = copy_of(tmp_path / "m")
    monkeypatch.setattr("halfbyte.cli.serve.run_server", lambda *_: None)
    words = ["serve", str(folder), "--preset", "fast", "--device", "cpu", "--port", "0"]
    check(folder)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "preset fast: every layer in MXFP4 · fast on this model: PASS" in result.stderr
    assert "KL" not in result.stderr
    shutil.copy(EMBEDDED / "config.json", folder / "config.json")
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")  # another content
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "PASS" not in result.stderr


def test_without_a_text_that_exact_can_predict_nothing_passes() -> None:
    """An engine of random tokens loses no answer that exact has right."""
    value = Estimate(0.0, 0.0, 0.0, 9)
    comparison = quality_report.Comparison("t", 100, value, value, value, 1e6, False)
    assert quality_report.CandidateReport("x", Gates(), [comparison], (0, 0, 4), (0, 0, 0, 3)).verdict == INCONCLUSIVE


def test_verdicts_come_from_whole_intervals() -> None:
    def report(low: float, value: float, high: float) -> quality_report.CandidateReport:
        same, ratio = Estimate(0.99, 0.98, 1.0, 9), Estimate(1.0, 0.99, 1.01, 9)
        comparison = quality_report.Comparison("t", 100, Estimate(value, low, high, 9), same, ratio, 5.0, True)
        return quality_report.CandidateReport("x", Gates(), [comparison], (4, 4, 4), (3, 3, 3, 3))

    assert report(0.01, 0.02, 0.049).verdict == PASS
    assert report(0.04, 0.045, 0.06).verdict == INCONCLUSIVE
    assert report(0.051, 0.06, 0.07).verdict == FAIL
    assert "KL on t" in report(0.051, 0.06, 0.07).worst
    lost = report(0.01, 0.02, 0.03)
    lost.needles = (2, 4, 4)
    assert lost.verdict == FAIL
    assert "needles lost: 2" in lost.worst


def test_intervals_over_blocks_cover_the_mean() -> None:
    """Positions of a block share an offset: the interval must be as wide as blocks are far apart."""
    covered = 0
    for seed in range(200):
        g = torch.Generator().manual_seed(seed)
        offsets = torch.randn(60, 1, generator=g)
        values = 3.0 + offsets + 0.1 * torch.randn(60, 64, generator=g)
        e = block_mean(values.sum(1).tolist(), [64] * 60)
        covered += e.low <= 3.0 <= e.high
    assert 180 <= covered <= 199


def test_the_command(run: Run, tmp_path: Path) -> None:
    words = ("--presets", "balanced", "--lengths", "512", "--device", "cpu")
    code, out, err = run("check", "quality", "tiny", *words, "--json", "--out", str(tmp_path / "out"))
    assert code == 0, err
    raw = json.loads(out)
    assert (raw["ok"], raw["levels"][0]["level"], raw["levels"][0]["verdict"]) == (True, "quality", PASS)
    assert raw["files"] == [str(tmp_path / "out" / "results.json")]
    code, out, err = run("check", "quality", *words)
    assert code == 0, err
    assert "balanced" in out
    assert "PASS" in out
    for wrong, said in (
        (("quality", "tiny", "1"), "checked alone"),
        (("quality", "random:20b"), "random weights"),
        (("quality", "--presets", "quick"), "there is no preset"),
        (("quality", "/nowhere"), "does not exist"),
    ):
        code, _, err = run("check", *wrong, "--device", "cpu")
        assert (code, said in err, "Traceback" in err) == (2, True, False), err
