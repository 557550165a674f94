"""The table of what formats cost measures what it says: batched equals alone, nothing changed costs nothing."""

from __future__ import annotations

from dataclasses import replace

import costs
import torch

from halfbyte.gates import AXES, LAYER_FORMATS, Gates
from halfbyte.model import load
from halfbyte.model.single_sequence import SingleSequence


def test_conversations_side_by_side_equal_each_alone() -> None:
    samples = costs.conversations(load.tokenizer_of(load.resolve_model(None)), 1, 8)[5:8]
    network = load.load_model(load.resolve_model(None), costs.EXACT)
    joined = costs.together(network, samples)
    for (tokens, prompt), got in zip(samples, joined, strict=True):
        alone = SingleSequence(network, len(tokens)).feed(tokens[:-1], all_logits=True)[prompt - 1 :]
        assert got.shape == alone.shape
        assert torch.allclose(got, alone, rtol=1e-5, atol=1e-4)


def test_a_coarser_format_moves_the_next_tokens_further() -> None:
    samples = costs.conversations(load.tokenizer_of(load.resolve_model(None)), 1, 8)[:2]
    gates_by_name = {
        name: gates for name, gates in costs.formats() if name in ("as shipped", "qkv in q8", "qkv in mxfp4")
    }
    got = {name: costs.distributions(gates, None, samples) for name, gates in gates_by_name.items()}
    costs_by_name = {
        name: costs.cost(name, gates_by_name[name], samples, got["as shipped"], d) for name, d in got.items()
    }
    assert costs_by_name["as shipped"].kl == 0
    assert costs_by_name["as shipped"].same_top == 1
    assert 0 < costs_by_name["qkv in q8"].kl < costs_by_name["qkv in mxfp4"].kl / 10
    assert costs_by_name["qkv in mxfp4"].changed == {"layers": "qkv=mxfp4"}


def test_every_value_of_the_gates_has_a_row() -> None:
    """A format added to the gates appears in the table by itself, or this fails."""
    named = dict(costs.formats())
    assert named.pop(costs.CPU_KERNELS) == Gates()
    rows = list(named.values())
    for field in ("kv_dtype", "activation"):
        values = next(a for a in AXES if a.field == field).values
        assert {v for v in values if v not in ("auto", "f32")} <= {getattr(g, field) for g in rows}
    for group in costs.DENSE:
        assert {getattr(g.layers, group) for g in rows} == set(LAYER_FORMATS)
    assert rows[0] == costs.EXACT
    assert all(replace(g, layers=costs.EXACT.layers, kv_dtype="auto", activation="auto") == costs.EXACT for g in rows)
