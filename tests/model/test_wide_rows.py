"""Rows whose MXFP4 scales a chosen kernel cannot hold together are named before weights are laid out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from halfbyte.kernels.cuda.prefill.layer import Fp8PrefillLayer
from halfbyte.model import checkpoint, load, synthetic
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import choose
from halfbyte.plan.phase import ARCHES
from tests.reference import REFERENCE

SMALL = NAMED["small"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    weights = synthetic.make(SMALL, 0)
    weights.layers[2].down.scales[1, 3, 0] = 100  # type: ignore[union-attr]
    weights.layers[2].down.scales[1, 3, 1] = 140  # type: ignore[union-attr]
    checkpoint.save_safetensors(weights, tmp_path / "wide")
    return tmp_path / "wide"


def test_rows_too_wide_for_a_chosen_kernel_are_named(folder: Path) -> None:
    with load.OpenCheckpoint(load.resolve_model(str(folder))) as opened:
        choice = choose(SMALL, REFERENCE, ARCHES["cpu"], opened.facts.formats)
        assert load.wide_rows(opened, choice) == []  # no kernel of the plan has a limit, and nothing is read
        fp8 = replace(choice, chosen={**choice.chosen, "long": [Fp8PrefillLayer()]})
        assert load.wide_rows(opened, fp8) == ["layer 2 down (40 octaves)"]
