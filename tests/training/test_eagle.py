"""Unrolled training of the EAGLE-3 head is what drafting token by token does; acceptance counts as an engine does."""

from __future__ import annotations

from pathlib import Path

import eagle
import torch
import torch.nn.functional as F
from network import Packed
from safetensors.torch import save_file

from halfbyte.model.config import ModelConfig


@torch.no_grad()
def test_unrolling_equals_drafting_token_by_token() -> None:
    torch.manual_seed(0)
    H, S, vocab = 16, 12, 40
    head = eagle.Head(H, 4, 2, 8, 24, 20, 1e-5)
    taps, embed = torch.randn(1, S, 3 * H), torch.randn(vocab, H)
    token, position = torch.randint(0, vocab, (1, S)), torch.arange(S)[None]
    mask = torch.ones(S, S, dtype=torch.bool).tril()[None, None]
    unrolled = head.unroll(taps, embed, token, position, mask)
    for root in (0, 3, 7):
        fused = F.linear(taps[:, : root + 1], head.fc)
        q, k, v = head.project(F.embedding(token[:, 1 : root + 2], embed), fused, position[:, : root + 1])
        q, h = q[:, :, -1:], fused[:, -1:]
        for j in range(eagle.STEPS):
            keys, values = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            h = head.rest(h, F.scaled_dot_product_attention(q, keys, values))
            logits = F.linear(head.norm(h), head.lm_head)[0, 0]
            assert torch.allclose(logits, unrolled[j][0, root], atol=1e-5)
            following = F.embedding(token[:, root + 2 + j : root + 3 + j], embed)
            q, more_k, more_v = head.project(following, h, position[:, root + 1 + j : root + 2 + j])
            k, v = torch.cat((k, more_k), 2), torch.cat((v, more_v), 2)


def packed(weight: list[int], document: list[int]) -> Packed:
    w, d = torch.tensor([weight]), torch.tensor([document])
    return Packed(w, w, w, w, d, d)


def test_acceptance_walks_as_an_engine_does() -> None:
    batch = packed([0, 2, 2, 2, 2, 2, 0, 0], [0] * 7 + [1])
    every = [torch.ones(1, 8, dtype=torch.bool)] * 3
    none = [torch.zeros(1, 8, dtype=torch.bool)] * 3
    # five tokens to write: 1 + 3 accepted, then the last alone
    assert eagle.acceptance(every, batch) == (2.5, [1.0, 1.0, 1.0])
    length, shares = eagle.acceptance(none, batch)
    assert length == 1.0
    assert shares[0] == 0.0
    # only the first guess of every root is right: 2 + 2 + 1
    first = [every[0], none[0], every[0]]
    assert eagle.acceptance(first, batch)[0] == 5 / 3


def test_exported_vocabulary_maps_draft_ids_to_target_ids() -> None:
    head = eagle.Head(16, 4, 2, 8, 24, 5, 1e-5)
    draft_ids = torch.tensor([1, 4, 7, 8, 30])
    tensors = head.tensors(draft_ids, 40)
    assert (torch.arange(5) + tensors["d2t"]).tolist() == draft_ids.tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == draft_ids.tolist()
    assert tensors["fc.weight"].shape == (16, 48)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 32)


def test_a_shipped_head_is_read_back_as_it_was(tmp_path: Path) -> None:
    c = ModelConfig(
        layers=2, hidden=16, intermediate=32, experts=4, top_k=2, heads=4, kv_heads=2, head_dim=8, vocab=40,
        max_context=64, eos_tokens=(39,), pad_token=38,
    )  # fmt: skip
    head = eagle.Head(16, 4, 2, 8, 32, 5, c.norm_eps)
    with torch.no_grad():
        for p in head.parameters():
            p.add_(torch.randn_like(p)).copy_(p.bfloat16())
    draft_ids = torch.tensor([1, 4, 7, 8, 30])
    save_file(head.tensors(draft_ids, c.vocab), tmp_path / "model.safetensors")
    again, ids = eagle.load_head(tmp_path, c)
    assert ids.tolist() == draft_ids.tolist()
    want = dict(head.named_parameters())
    assert all(torch.equal(p, want[name]) for name, p in again.named_parameters())
