"""`training/reproduce.sh` on a CPU with the micro network: every stage runs, what it leaves is released and answers.

Then it goes on from the released folders, as `FROM=models` does with the shipped ones. It learns nothing in two steps.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from halfbyte.engine.python_api import Engine
from halfbyte.engine.request import SamplingParams
from halfbyte.gates import Gates

ROOT = Path(__file__).parents[2]


def reproduce(out: Path, **settings: str) -> str:
    env = os.environ | {"MICRO": "2", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | settings
    done = subprocess.run(
        ["bash", "training/reproduce.sh", str(out), "5"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def logged(out: Path, name: str) -> dict[str, Any]:
    with tarfile.open(out / "logs.tgz") as logs:
        file = logs.extractfile(name)
        assert file is not None
        content: dict[str, Any] = json.loads(file.read())
        return content


@pytest.mark.slow
def test_every_stage_runs_and_goes_on_from_what_was_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "training"))
    import release
    from train import MICRO

    first, models = tmp_path / "first", tmp_path / "models"
    reproduce(first)
    runs = judged(logged(first, "more/evaluation.json"))
    assert {"bf16 parent", "mxfp4", "sinks off", "yarn off", "window dropped"} < set(runs)
    assert measured(logged(first, "accepted/acceptance.json")) == ["eagle3", "draft"]
    assert judged(logged(first, "unseen/evaluation.json"))["mxfp4"]["seed"] == 4242

    (models / "tiny").mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(ROOT / "models" / "tiny" / name, models / "tiny")
    monkeypatch.setattr(release, "TINY", MICRO)
    assert [f.name for f in release.release(first, models)] == ["tiny", "tiny-draft", "tiny-eagle3"]
    plain = answer(models)
    assert answer(models, speculate="draft", draft=str(models / "tiny-draft")) == plain
    assert answer(models, speculate="eagle3", draft=str(models / "tiny-eagle3")) == plain

    second = tmp_path / "second"
    reproduce(second, FROM=str(models))
    assert not (second / "draft-weights.safetensors").exists()
    assert (second / "weights-0.safetensors").read_bytes() != (first / "weights-0.safetensors").read_bytes()
    assert measured(logged(second, "accepted/acceptance.json")) == ["eagle3", "draft"]
    assert (
        reproduce(second, FROM=str(models)).count("is done") == 4
    )  # more, eagle, accepted, unseen: nothing runs twice


@pytest.mark.slow
def test_the_second_edition_trains_its_network_then_the_head_and_the_draft_model_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "training"))
    import release
    from train import MICRO, SECOND_DRAFT

    out, models = tmp_path / "out", tmp_path / "models"
    reproduce(out, EDITION="2", DO="network speculation")
    assert (out / "second.json.gz").exists()
    assert measured(json.loads((out / "acceptance.json").read_text())) == ["eagle3", "draft"]
    assert json.loads((out / "eagle-log.jsonl").read_text().splitlines()[-1])["stage"] == "eagle"
    (models / "tiny").mkdir(parents=True)
    shutil.copy(ROOT / "models" / "tiny" / "tokenizer.json", models / "tiny")
    target = MICRO.with_(max_context=32768)
    assert [f.name for f in release.release(out, models, target, SECOND_DRAFT)] == ["tiny", "tiny-draft", "tiny-eagle3"]
    for name in ("tiny", "tiny-draft"):
        assert json.loads((models / name / "tokenizer_config.json").read_text())["model_max_length"] == 32768
        assert json.loads((models / name / "config.json").read_text())["max_position_embeddings"] == 32768
    plain = answer(models)
    assert answer(models, speculate="draft", draft=str(models / "tiny-draft")) == plain
    assert answer(models, speculate="eagle3", draft=str(models / "tiny-eagle3")) == plain


def judged(receipt: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Run -> its shape, of an evaluation's receipt."""
    return {r["cell"]["shape"]["run"]: r["cell"]["shape"] for r in receipt["results"]}


def measured(receipt: dict[str, Any]) -> list[str]:
    """What a receipt of acceptance is of."""
    assert all(r["figures"][0]["value"] >= 1.0 for r in receipt["results"])
    return [r["cell"]["path"] for r in receipt["results"]]


def answer(models: Path, speculate: str = "off", draft: str | None = None) -> list[int]:
    with Engine(
        str(models / "tiny"), device="cpu", gates=Gates(speculate=speculate), draft=draft, kv_gib=0.1, max_context=512
    ) as engine:
        return engine.generate(["What is 2 + 2?"], SamplingParams(temperature=0.0, max_tokens=8))[0].tokens
