"""KL from kept logits against KL from all of them, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from halfbyte.errors import UsageError
from halfbyte.lab import kept_logits
from halfbyte.lab.kept_logits import BEST, KeptLogits


def true_kl(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    p, q = (torch.log_softmax(t.double(), -1) for t in (x, y))
    return (p.exp() * (p - q)).sum(-1)


def drawn(vocab: int, sharpness: float, noise: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(40, vocab, generator=g) * sharpness
    y = x + torch.randn(40, vocab, generator=g) * noise
    return x, y, torch.randint(0, vocab, (40,), generator=g)


@pytest.mark.parametrize(("sharpness", "noise", "bound"), [(8.0, 0.1, 1e-3), (4.0, 0.3, 0.2), (8.0, 2.0, 0.01)])
def test_kl_is_never_above_the_true_one_and_close_to_it(sharpness: float, noise: float, bound: float) -> None:
    """Real logits are sharp (a language model's 256 best tokens hold nearly all mass); flat ones lose more."""
    x, y, following = drawn(20_000, sharpness, noise)
    kept = kept_logits.keep(x, following)
    found = kept_logits.compare(kept, y, following)
    exact = true_kl(x, y)
    assert (found.kl <= exact + 1e-6).all()
    assert (exact.sum() - found.kl.sum()) / exact.sum() < bound
    assert torch.equal(found.same.bool(), x.argmax(-1) == y.argmax(-1))
    p, q = (torch.log_softmax(t.double(), -1).gather(1, following[:, None])[:, 0] for t in (x, y))
    assert torch.allclose(found.loss, p - q, atol=1e-5)


def test_a_small_vocabulary_loses_nothing() -> None:
    x, y, following = drawn(BEST, 2.0, 1.0)
    found = kept_logits.compare(kept_logits.keep(x, following), y, following)
    assert torch.allclose(found.kl, true_kl(x, y), atol=1e-5)


def test_a_model_against_itself_is_zero() -> None:
    x, _, following = drawn(5000, 3.0, 0.0)
    found = kept_logits.compare(kept_logits.keep(x, following), x, following)
    assert found.kl.abs().max() < 1e-6
    assert found.same.min() == 1.0


def test_files_come_back_and_damaged_ones_do_not(tmp_path: Path) -> None:
    x, y, following = drawn(5000, 3.0, 0.5)
    kept = kept_logits.join([kept_logits.keep(x[:7], following[:7]), kept_logits.keep(x[7:], following[7:])])
    kept.write(tmp_path / "k.safetensors")
    again = KeptLogits.read(tmp_path / "k.safetensors")
    assert again is not None
    assert torch.equal(kept_logits.compare(again, y, following).kl, kept_logits.compare(kept, y, following).kl)
    raw = (tmp_path / "k.safetensors").read_bytes()
    (tmp_path / "k.safetensors").write_bytes(raw[: len(raw) // 2])
    assert KeptLogits.read(tmp_path / "k.safetensors") is None
    assert KeptLogits.read(tmp_path / "none") is None
    with pytest.raises(UsageError, match="HALFBYTE_CACHE_DIR"):
        kept.write(tmp_path / "k.safetensors" / "inside")
