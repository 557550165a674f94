"""Rotary frequencies: the bits of transformers' float32 computation, which follows OpenAI's order of operations."""

from __future__ import annotations

import pytest
import torch
from transformers import GptOssConfig
from transformers.modeling_rope_utils import _compute_yarn_parameters

from halfbyte.ops.rope import rope_table, yarn_frequencies

RELEASED = (64, 150000.0, 32.0, 4096, 32.0, 1.0, False)  # gpt-oss-20b and gpt-oss-120b
CASES = [RELEASED, (64, 150000.0, 16.0, 512, 32.0, 1.0, False), (64, 150000.0, 64.0, 4096, 32.0, 1.0, False),
         (128, 500000.0, 8.0, 8192, 32.0, 1.0, True)]  # fmt: skip


def transformers_yarn(
    head_dim: int, theta: float, factor: float, context: int, fast: float, slow: float, truncate: bool
) -> tuple[torch.Tensor, float]:
    parameters = {
        "rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": context,
        "beta_fast": fast, "beta_slow": slow, "truncate": truncate,
    }  # fmt: skip
    config = GptOssConfig(head_dim=head_dim, max_position_embeddings=int(factor * context), rope_parameters=parameters)
    return _compute_yarn_parameters(config)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_frequencies_have_the_bits_of_transformers(case: tuple[int, float, float, int, float, float, bool]) -> None:
    inverse, temperature = yarn_frequencies(*case)
    expected, expected_temperature = transformers_yarn(*case)
    assert torch.equal(inverse, expected)
    assert temperature == pytest.approx(expected_temperature, abs=1e-12)


def test_angles_at_the_end_of_the_context() -> None:
    inverse, temperature = yarn_frequencies(*RELEASED)
    positions = torch.tensor([0, 4095, 65_536, 100_000, 131_071])
    expected = positions.float()[:, None] * transformers_yarn(*RELEASED)[0]
    cos, sin = rope_table(inverse, temperature, positions)
    assert (cos / temperature - expected.double().cos()).abs().max() < 1e-7
    assert (sin / temperature - expected.double().sin()).abs().max() < 1e-7


def test_a_frequency_does_not_depend_on_how_many_there_are() -> None:
    """Vector code and scalar tails of a library round powers differently."""
    long, _ = yarn_frequencies(256, 150000.0, 1.0, 4096, 32.0, 1.0, False)
    for head_dim in (8, 16, 32, 64, 128):
        inverse, _ = yarn_frequencies(head_dim, 150000.0, 1.0, 4096, 32.0, 1.0, False)
        assert torch.equal(inverse, long[:: 256 // head_dim])
