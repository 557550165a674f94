"""Which model and which context fit a card: the table of docs/install.md is what the account of memory says."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.memory_table import longest_context, memory_table
from halfbyte.engine.options import EngineOptions
from halfbyte.explanation import card_state, fits
from halfbyte.gates import PRESETS
from halfbyte.model import load
from halfbyte.plan.phase import ARCHES

PAGE = Path(__file__).parents[1] / "docs" / "install.md"


def test_the_page_has_the_table() -> None:
    lines = memory_table(ARCHES["sm86"])
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8")
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| 12 GB", "| 16 GB", "| 24 GB"]


@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89"])
def test_the_longest_context_fits_and_a_longer_one_does_not(arch: str) -> None:
    facts = load.read_facts(load.resolve_model(f"{load.RANDOM}20b"))
    gates, state = PRESETS["balanced"].gates, card_state(16 << 30)
    weights = facts.weight_bytes(gates, ARCHES[arch])
    longest = longest_context(facts, gates, state, ARCHES[arch])
    assert 32_768 < longest < facts.config.max_context
    for context, fit in ((longest, True), (longest + 1024, False)):
        assert fits(facts, EngineOptions(gates=gates, max_context=context), state, ARCHES[arch], weights) == fit
    assert longest_context(facts, gates, card_state(12 << 30), ARCHES[arch]) == 0
    assert longest_context(facts, gates, card_state(24 << 30), ARCHES[arch]) == facts.config.max_context
