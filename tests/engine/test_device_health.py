"""A device that is gone is told from a step that failed, at the first error; its kernel's own words are handed on."""

from __future__ import annotations

import pytest
import torch

from halfbyte.engine.device_health import raise_if_dead
from halfbyte.errors import EngineDiedError
from halfbyte.plan import stopped

CUDA = torch.device("cuda")


def test_a_device_that_answers_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append(device))
    raise_if_dead(CUDA, RuntimeError("one step"))
    assert asked == [CUDA]


def test_a_device_that_does_not_answer_is_dead_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(device: torch.device) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch.cuda, "synchronize", gone)
    monkeypatch.setattr(stopped, "_reports", [lambda: None, lambda: "wait 0x400 was given up in block 3, thread 7"])
    with pytest.raises(EngineDiedError, match=r"unspecified launch failure; wait 0x400 was given up in block 3") as e:
        raise_if_dead(CUDA, RuntimeError("a step"))
    assert "TORCH_USE" not in str(e.value)


def test_a_cpu_is_never_dead() -> None:
    raise_if_dead(torch.device("cpu"), RuntimeError("a step"))
