"""Speculation: proposers on their own, the controller's promises, and models that draft for a real gpt-oss."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_fakes import VOCAB, ExpertCost
from engine_heads import write_head
from fake_core import drain, make
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from halfbyte.engine.batch import Batch
from halfbyte.engine.build import core_for
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.engine.sequence import Sequence
from halfbyte.engine.speculative.controller import LARGEST_CREDIT, PLAIN_STEPS, Controller, Pace, TimeLedger
from halfbyte.engine.speculative.draft import DraftModelProposer
from halfbyte.engine.speculative.eagle3 import Eagle3Head, Eagle3Proposer
from halfbyte.engine.speculative.head_config import HeadConfig, read_config
from halfbyte.engine.speculative.methods import BytesRead, find_head, make_proposer
from halfbyte.engine.speculative.ngram import NgramProposer
from halfbyte.engine.speculative.proposer import Proposal
from halfbyte.engine.speculative.suffix import SuffixProposer
from halfbyte.errors import CheckpointError, UsageError
from halfbyte.gates import Gates
from halfbyte.model import checkpoint
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import CHECKPOINT_FORMATS, GptOss
from halfbyte.model.load import load_model, resolve_model
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.roofline import decode_traffic

COST = ExpertCost(dense=3.1, expert=0.0132, experts=128, top_k=4, layers=36, kv_token=0.0)  # about gpt-oss-120b's GB


def seq_of(tokens: list[int]) -> Sequence:
    return Sequence(Request(tokens), 0, 10_000)


# ---- guesses from text --------------------------------------------------------------------------


def test_ngram_follows_the_latest_longest_match() -> None:
    proposer = NgramProposer(Controller(COST))
    seq = seq_of([1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 7, 8, 2, 3, 4])
    assert proposer.propose([(seq, 3)])[0].tokens == [6, 7, 8]
    seq.tokens += [5]  # now 2 3 4 5 was followed by 9
    assert proposer.propose([(seq, 2)])[0].tokens == [9, 2]
    assert proposer.propose([(seq_of([1, 2, 3]), 4)])[0].tokens == []
    assert proposer.propose([(seq_of([7, 8, 7, 8, 7, 8]), 5)])[0].tokens == [7, 8, 7, 8, 7]
    proposer.forget(seq)
    assert id(seq) not in proposer._indexes


def test_suffix_learns_across_requests_and_stays_bounded() -> None:
    proposer = SuffixProposer(Controller(COST), nodes=2000)
    first = seq_of([1])
    for token in [5, 6, 7, 8, 9, 10]:
        first.tokens.append(token)
        proposer.observe(first, 1)
    proposer.forget(first)
    second = seq_of([40, 41, 5, 6])
    assert proposer.propose([(second, 3)])[0].tokens == [7, 8, 9]
    assert proposer.propose([(seq_of([40, 41]), 3)])[0].tokens == []
    rng = random.Random(0)
    noisy = seq_of([1])
    for _ in range(3000):
        noisy.tokens.append(rng.randrange(500))
        proposer.observe(noisy, 1)
    assert proposer._size <= 2000 + proposer.depth


# ---- the controller -----------------------------------------------------------------------------


def simulate(rate: float, batch: int = 1, tokens: int = 4000, seed: int = 0) -> tuple[float, float]:
    """Drafts accepted with this chance each. -> (cost of all steps in tokens without speculation, mean draft)."""
    rng = random.Random(seed)
    controller = Controller(COST, longest=8)
    pace = controller.pace()
    generated, spent, lengths = 0, 0.0, []
    while generated < tokens:
        k = pace.length(batch, batch, 0)
        lengths.append(k)
        spent += 1.0 + controller.extra(batch, batch, 0, k)
        if k == 0:
            pace.rested(1)
            generated += 1
            continue
        accepted = 0
        while accepted < k and rng.random() < rate:
            accepted += 1
        pace.learned(k, accepted)
        generated += 1 + accepted
    return spent / generated, sum(lengths) / len(lengths)


def test_the_cost_of_verifying_is_that_of_the_experts() -> None:
    """Facts: four rows touch about 3.8 times the experts of one on gpt-oss-120b."""
    one, four = (decode_traffic(NAMED["120b"], CHECKPOINT_FORMATS, 0, rows).experts for rows in (1, 4))
    assert four / one == pytest.approx(3.8, abs=0.05)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("batch", [1, 8])
def test_never_more_than_three_percent_worse_than_off(rate: float, batch: int) -> None:
    cost, _ = simulate(rate, batch)
    assert cost <= 1.03


def test_good_drafts_pay_and_get_longer_bad_ones_are_switched_off() -> None:
    cost, length = simulate(1.0)
    assert cost < 0.6
    assert length > 5
    cost, length = simulate(0.05)
    assert length < 0.2
    changing = Controller(COST)
    pace = changing.pace()
    for _ in range(400):
        pace.rested(1)
    for _ in range(30):
        if k := pace.length(1, 1, 0):
            pace.learned(k, 0)
        else:
            pace.rested(1)
    assert pace.resting
    rate = pace.rate
    while pace.resting:
        pace.rested(1)
    for _ in range(60):
        if k := pace.length(1, 1, 0):
            pace.learned(k, k)
        else:
            pace.rested(1)
    assert pace.rate > rate + 0.3


def test_a_short_life_is_never_speculated_on_credit() -> None:
    controller = Controller(COST)
    assert controller.pace().length(1, 1, 0) == 0


def test_bytes_read_grow_with_rows_and_context() -> None:
    model = load_model(resolve_model("random:small"))
    cost = BytesRead(model)
    assert cost(1, 0) < cost(2, 0) < cost(8, 0)
    assert cost(1, 1000) > cost(1, 0)


class Timed:
    """Drafts of the cycle that the fake model mostly follows, which take time that no estimate knows of."""

    def __init__(self, now: list[float], seconds: float, right: float, ledger: TimeLedger | None) -> None:
        self.now, self.seconds, self.right, self.rng = now, seconds, right, random.Random(0)
        self.controller = Controller(lambda rows, context: 1.0, longest=4, ledger=ledger)
        self.controller.tokens = 10**9  # so that counts alone allow every draft

    def propose(self, wants: list[tuple[Sequence, int]]) -> list[Proposal]:
        out = []
        for seq, most in wants:
            tokens = list(seq.tokens)
            for _ in range(most):
                self.now[0] += self.seconds
                right = self.rng.random() < self.right
                tokens.append((tokens[-1] * 5 + 3) % VOCAB if right else self.rng.randrange(VOCAB))
            out.append(Proposal(tokens[len(seq.tokens) :]))
        return out

    def observe(self, seq: Sequence, new: int) -> None: ...

    def forget(self, seq: Sequence) -> None: ...

    def pace(self, seq: Sequence) -> Pace:
        return self.controller.pace()


def seconds_on_fake_core(streams: int, seconds: float, right: float, ledger: TimeLedger | None, tokens: int) -> float:
    """How long `streams` answers take if a step takes 10 ms and 1 ms a row, and a drafted token `seconds`."""
    now = [0.0]

    def step(batch: Batch) -> None:
        now[0] += 0.01 + 0.001 * batch.rows

    core = make(pages=4000, fault=step, clock=lambda: now[0], host_steps=True, run_ahead=False, max_context=2048)
    core.proposer = Timed(now, seconds, right, ledger)
    for i in range(streams):
        core.submit(Request([5 + i], SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), id=f"{i}"))
    drain(core)
    return now[0]


@pytest.mark.parametrize("streams", [1, 3, 8])
@pytest.mark.parametrize("seconds", [0.01, 0.2])
def test_drafts_that_take_long_cost_at_most_the_allowance(streams: int, seconds: float) -> None:
    """However cheap the estimate says they are: without the ledger this is up to a hundred times slower."""
    tokens = 400
    plain = tokens * (0.01 + 0.001 * streams)
    without = seconds_on_fake_core(streams, seconds, 0.6, None, 60) / 60 * tokens
    held = seconds_on_fake_core(streams, seconds, 0.6, TimeLedger(), tokens)
    one_step = 4 * streams * (seconds + 0.001)
    assert without > 1.3 * plain, "nothing was there to lose"
    assert held <= 1.02 * plain + LARGEST_CREDIT + 2 * one_step


def test_drafts_that_pay_are_not_suspended() -> None:
    for streams in (1, 2):
        plain = 400 * (0.01 + 0.001 * streams)
        assert seconds_on_fake_core(streams, 0.0001, 1.0, TimeLedger(), 400) < 0.75 * plain


def test_speculation_comes_back_when_its_cost_falls() -> None:
    ledger = TimeLedger()
    for _ in range(10):
        ledger.add(4, 4, 0.01, drafted=False, suspended=ledger.suspended)
    assert not ledger.suspended
    while not ledger.suspended:
        ledger.add(4, 4, 0.2, drafted=True, suspended=False)
    steps = 0
    while ledger.suspended:
        ledger.add(4, 4, 0.01, drafted=False, suspended=True)
        steps += 1
    assert 50 <= steps <= 2000
    for _ in range(200):
        ledger.add(4, 9, 0.012, drafted=True, suspended=False)
        assert not ledger.suspended


def test_an_unknown_number_of_sequences_is_timed_without_speculation_first() -> None:
    ledger = TimeLedger(follows=True)
    assert ledger.suspended
    for _ in range(PLAIN_STEPS):
        assert ledger.suspended
        ledger.add(1, 1, 0.01, drafted=False, suspended=True)
    assert not ledger.suspended
    ledger.add(64, 64, 5.0, drafted=True, suspended=False)  # not known: neither counted as lost nor continued
    assert ledger.suspended
    for _ in range(PLAIN_STEPS):
        ledger.add(64, 64, 0.1, drafted=False, suspended=True)
    assert not ledger.suspended


# ---- models that draft --------------------------------------------------------------------------


def small(options: str = "") -> GptOss:
    return load_model(resolve_model(f"random:small{options}"), page_size=16)


def run(core: EngineCore, requests: list[Request]) -> list[list[int]]:
    got: dict[str, list[int]] = {r.id: [] for r in requests}
    for r in requests:
        core.submit(r)
    while core.has_work:
        for id, delta in core.step():
            assert delta.finish != "error", delta.error
            got[id] += delta.tokens
        core.check()
    assert core.pages.available == core.pages.capacity
    return [got[r.id] for r in requests]


def requests(count: int = 3, tokens: int = 14, temperature: float = 0.0) -> list[Request]:
    rng = random.Random(1)
    return [
        Request(
            [rng.randrange(2, 1024) for _ in range(rng.randint(1, 40))],
            SamplingParams(temperature=temperature, seed=i, max_tokens=tokens, ignore_eos=True),
            id=f"s{i}",
        )
        for i in range(count)
    ]


def core_with(model: GptOss, **kw) -> EngineCore:
    options = EngineOptions(max_context=256, max_rows_per_step=64, page_size=16, kv_gib=0.05, reserve_gib=0.0, **kw)
    return core_for(model, Tokenizer.gpt_oss(), options)[0]


def eager(controller: Controller) -> None:
    """Draft from the first token on, whatever it costs."""
    controller.tokens = 10**9
    controller.ledger = None


@pytest.mark.exact
def test_a_draft_model_equal_to_the_target_is_always_right() -> None:
    """The strictest test of its cache: every key and value must be the target's own, or a guess would be wrong."""
    model = small()
    wanted = run(core_with(model), requests())
    core = core_with(model, gates=Gates(speculate="draft"), draft="random:small", max_draft=3)
    proposer = core.proposer
    assert isinstance(proposer, DraftModelProposer)
    eager(proposer.controller)
    proposer.controller.draft_cost = 0.0
    assert run(core, requests()) == wanted
    stats = core.stats()
    assert stats.drafted_tokens >= 20
    assert stats.accepted_tokens == stats.drafted_tokens
    proposer.pool.check()
    assert proposer.pool.available == proposer.pool.capacity
    core.close()


@pytest.mark.exact
def test_a_sampled_draft_equal_to_the_target_is_always_accepted() -> None:
    model = small()
    core = core_with(model, gates=Gates(speculate="draft"), draft="random:small", max_draft=3)
    proposer = core.proposer
    assert isinstance(proposer, DraftModelProposer)
    proposer.sampled = True
    eager(proposer.controller)
    proposer.controller.draft_cost = 0.0
    run(core, requests(2, 10, temperature=1.0))
    assert core.stats().drafted_tokens >= 8
    assert core.stats().accepted_tokens == core.stats().drafted_tokens  # p == q: nothing is ever rejected
    core.close()


@pytest.mark.exact
def test_a_head_that_missed_a_step_is_not_asked_for_that_sequence(tmp_path: Path) -> None:
    model = small()
    wanted = run(core_with(model), requests(4, 12))
    head = write_head(tmp_path / "head", model)
    core = core_with(model, gates=Gates(speculate="eagle3"), draft=str(head), max_draft=3)
    proposer = core.proposer
    assert isinstance(proposer, Eagle3Proposer)
    proposer.controller.tokens, proposer.controller.draft_cost = 10**9, 0.0
    ledger = proposer.controller.ledger = TimeLedger(allowance=math.inf, follows=True)
    first, *others = requests(4, 12)
    assert run(core, [first]) == wanted[:1]
    assert core.stats().drafted_tokens == 0, "it guessed for a sequence whose prompt it had not followed"
    ledger.suspended = False
    ledger.add = lambda *_, **__: None  # type: ignore[method-assign]
    assert run(core, others) == wanted[1:]
    assert core.stats().drafted_tokens > 5
    core.close()


HEADS = [
    {},
    {"prefix": "layers.0.", "flags": ("norm_before_fc",)},
    {"aux": False, "own_vocab": None},
]
# As published: NVIDIA's v3 (the last boundary is behind the last layer; neither embedding nor output layer of its own),
# RedHat's in the form of speculators, and one with a norm for each state and the state behind the last norm.
PUBLISHED = {
    "nvidia": {"ids": (2, 3, 4), "flags": ("norm_before_fc",), "own_vocab": None},
    "redhat": {
        "speculators": True, "prefix": "layers.0.", "own_embedding": True, "ids": (2, 1),
        "flags": ("norm_before_fc", "norm_before_residual"),
    },
    "specdrift": {"flags": ("fc_norm", "norm_output"), "own_vocab": 500},
    "speculators 3.1": {
        "speculators": True, "prefix": "layers.0.", "flags": ("norm_before_fc", "norm_before_residual", "norm_output"),
    },
}  # fmt: skip


@pytest.mark.exact
@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eagle3_changes_no_token(kind: int, temperature: float, tmp_path: Path) -> None:
    model = small()
    asked = requests(3, 10, temperature)
    wanted = run(core_with(model), asked)
    head = write_head(tmp_path / "head", model, **HEADS[kind])
    core = core_with(model, gates=Gates(speculate="eagle3"), draft=str(head), max_draft=3)
    proposer = core.proposer
    assert isinstance(proposer, Eagle3Proposer)
    eager(proposer.controller)
    proposer.controller.draft_cost = 0.0
    assert run(core, requests(3, 10, temperature)) == wanted
    assert core.stats().drafted_tokens > 5
    core.close()


def naive_guesses(
    head: Eagle3Head, taps: torch.Tensor, tokens: list[int], k: int, flags: Collection[str],
    norms: Mapping[str, torch.Tensor],
) -> list[int]:  # fmt: skip
    """EAGLE-3 written down again, over whole sequences and without a cache: taps [n, 3H] of positions 0 .. n - 1.
    `norms` are those in front of `fc`, as the file has them."""
    w, c = head._w, head.config

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, c.eps)

    def rotated(x: torch.Tensor) -> torch.Tensor:  # [n, heads, D]
        angle = torch.arange(x.shape[0])[:, None] * (10000.0 ** (-torch.arange(0, c.head_dim, 2) / c.head_dim))
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    if "norm_before_fc" in flags:
        taps = norm(taps, norms["input_norm.weight"])
    if "fc_norm" in flags:
        parts = taps.split(head.config.hidden, -1)
        taps = torch.cat([norm(part, norms[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
    hidden = F.linear(taps, head._fc)
    out: list[int] = []
    known = list(tokens)
    for _ in range(k):
        n = hidden.shape[0]
        embedded = norm(F.embedding(torch.tensor(known[1 : n + 1]), head._embed).float(), w["input_layernorm.weight"])
        x = torch.cat((embedded, norm(hidden, w["hidden_norm.weight"])), -1)
        q = rotated(F.linear(x, w["self_attn.q_proj.weight"]).view(n, c.heads, c.head_dim))
        key = rotated(F.linear(x, w["self_attn.k_proj.weight"]).view(n, c.kv_heads, c.head_dim))
        v = F.linear(x, w["self_attn.v_proj.weight"]).view(n, c.kv_heads, c.head_dim)
        a = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], key.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True, enable_gqa=True
        )[0].transpose(0, 1).reshape(n, -1)  # fmt: skip
        residual = norm(hidden, w["hidden_norm.weight"]) if "norm_before_residual" in flags else hidden
        h = residual + F.linear(a, w["self_attn.o_proj.weight"])
        y = norm(h, w["post_attention_layernorm.weight"])
        mlp = F.silu(F.linear(y, w["mlp.gate_proj.weight"])) * F.linear(y, w["mlp.up_proj.weight"])
        h = h + F.linear(mlp, w["mlp.down_proj.weight"])
        best = int(F.linear(norm(h[-1:], head._norm), head._lm_head).argmax())
        out.append(best if head._ids is None else int(head._ids[best]))
        known.append(out[-1])
        last = h[-1:]
        hidden = torch.cat((hidden, norm(last, head._norm) if "norm_output" in flags else last))
    return out


@pytest.mark.parametrize("kind", ["plain", *PUBLISHED])
def test_eagle3_guesses_what_the_paper_says(kind: str, tmp_path: Path) -> None:
    """Through pages, chunks, a batch and rejected drafts: the guesses of a computation without any of them."""
    model = small()
    options = PUBLISHED.get(kind, {})
    folder = write_head(tmp_path / "h", model, **options)
    file = load_file(folder / "model.safetensors")
    norms = {name: t.float() for name, t in file.items() if name.startswith(("fc_norm.", "input_norm."))}
    core = core_with(model, gates=Gates(speculate="eagle3"), draft=str(folder), max_draft=3)
    proposer = core.proposer
    assert isinstance(proposer, Eagle3Proposer)
    eager(proposer.controller)
    proposer.controller.draft_cost = 0.0
    drafts: list[tuple[list[int], list[int]]] = []
    real = proposer.propose

    def spy(wants):
        out = real(wants)
        drafts.extend((list(seq.tokens), p.tokens) for (seq, _), p in zip(wants, out))
        return out

    proposer.propose = spy  # type: ignore[method-assign]
    run(core, requests(3, 8))
    core.close()
    assert len(drafts) >= 6
    from halfbyte.plan.step import Step

    model.allocate_kv(1 + 2 * 16)
    flags = options.get("flags", ())
    # A norm behind the last one changes little where the layer begins with one.
    telling = {"norm_before_residual"} | ({"norm_output"} if "norm_before_residual" not in flags else set())
    compared, seen = 0, {name: False for name in telling if name not in flags}
    for tokens, guesses in drafts[::2]:
        n = len(tokens) - 1  # the last token's hidden states are not computed yet

        def ints(values) -> torch.Tensor:
            return torch.tensor(list(values), dtype=torch.int32)

        pages = torch.arange(1, 33, dtype=torch.int32).view(2, 1, 16)
        step = Step(
            tokens=ints(tokens[:n]), positions=ints(range(n)), query_start=ints([0, n]), kv_lens=ints([n]),
            row_sequence=ints([0] * n), block_tables={"full": pages[0], "sliding": pages[1]},
            logit_rows=ints([n - 1]), max_kv_len=n,
        )  # fmt: skip
        with torch.inference_mode():
            _, taps = proposer.tap(step)
            assert guesses == naive_guesses(proposer.head, taps.float(), tokens, len(guesses), flags, norms)
            compared += len(guesses)
            for other in seen:  # what the head does not want would be seen
                wrong = naive_guesses(proposer.head, taps.float(), tokens, len(guesses), {*flags, other}, norms)
                seen[other] |= guesses != wrong
    assert compared >= 6
    assert all(seen.values()), seen


@pytest.mark.parametrize(("weights", "error", "ones"), [("tame", 0.01, 1.0), ("real", 0.02, 0.9)])
def test_a_borrowed_output_layer_has_no_norm_in_it(weights: str, error: float, ones: float, tmp_path: Path) -> None:
    """Quantising moves the final norm into the model's head, but for powers of two in front of small columns; a draft
    head has a norm of its own in front of it. Where norms are uneven, columns behind small ones lose bits."""
    plain = small(f"?weights={weights}")
    quantised = GptOss(checkpoint.assemble(checkpoint.MemorySource(plain.weights), layer_formats={"lm_head": "q8"}))
    norm = quantised.weights.final_norm.float()
    assert bool((torch.frexp(norm).mantissa == 0.5).all())
    assert float((norm == 1).float().mean()) >= ones
    folder = write_head(tmp_path / "h", plain, aux=False, own_vocab=None)
    theirs, ours = Eagle3Head(folder, plain), Eagle3Head(folder, quantised)
    assert (ours._lm_head - theirs._lm_head).norm() < error * theirs._lm_head.norm()
    x = torch.randn(3, plain.config.hidden, generator=torch.Generator().manual_seed(0))
    assert ours.features(x).equal(theirs.features(x))


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = small()
    with pytest.raises(CheckpointError, match="hidden size 7"):
        Eagle3Head(write_head(tmp_path / "a", model, hidden_size=7), model)
    with pytest.raises(CheckpointError, match="3 layers"):
        Eagle3Head(write_head(tmp_path / "b", model, num_hidden_layers=3), model)
    folder = write_head(tmp_path / "c", model)
    save_file({"strange.weight": torch.zeros(1)}, folder / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"strange\.weight"):
        Eagle3Head(folder, model)
    folder = write_head(tmp_path / "d", model, flags=("norm_before_fc",))
    raw = json.loads((folder / "config.json").read_text())
    raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 2, 9]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="4 layers"):
        Eagle3Head(folder, model)


def test_published_configs_are_read(tmp_path: Path) -> None:
    """Fields as those files name them; the sizes are gpt-oss-120b's."""
    layer = {"num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
    nvidia = {
        "hidden_size": 2880, **layer, "draft_vocab_size": None, "rope_theta": 150000.0,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [24, 30, 36], "use_aux_hidden_state": True, "norm_before_fc": True,
            "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
        },
    }  # fmt: skip
    redhat = {
        "speculators_model_type": "eagle3", "norm_before_fc": True, "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": None, "target_hidden_size": None, "draft_vocab_size": 64000,
        "transformer_layer_config": {"hidden_size": 2880, "model_type": "llama", **layer},
    }  # fmt: skip

    def read(raw: dict) -> HeadConfig:
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return read_config(tmp_path, 36, 2880)

    v3 = read(nvidia)
    assert (v3.boundaries, v3.norm_before_fc, v3.norm_before_residual) == ((24, 30, 36), True, False)
    theirs = read(redhat)
    assert (theirs.boundaries, theirs.norm_before_fc, theirs.norm_before_residual) == ((2, 18, 33), True, True)
    assert (theirs.heads, theirs.kv_heads, theirs.head_dim, theirs.eps) == (64, 8, 64, 1e-6)
    assert not theirs.norm_output
    redhat["eagle_aux_hidden_state_layer_ids"] = [2, 18, 33]
    redhat["transformer_layer_config"] = {"hidden_size": 2880, "num_hidden_layers": 1, "head_dim": 64}
    assert (read(redhat).heads, read(redhat).kv_heads) == (32, 32), "what a Llama config has by itself is left out"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"speculators_model_type": "dflash"}, "a head of the kind 'dflash'; EAGLE-3 heads are read"),
        ({"norm_before_residual": None}, "norm_before_residual is None|does not say norm_before_residual"),
        ({"norm_output": "yes"}, "norm_output is 'yes' in its config, neither true nor false"),
        ({"target_hidden_size": 77}, "hidden size 77"),
        ({"transformer_layer_config": {"model_type": "qwen3"}}, "a layer of 'qwen3'"),
        ({"transformer_layer_config": {}}, "hidden size 4096"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc\.weight is \[\d+, \d+\], but its config asks for"),
        ({"norm_before_fc": False}, r"holds input_norm\.weight, but its config does not say what for"),
        ({"fc_norm": True}, r"lacks fc_norm\.0\.weight, fc_norm\.1\.weight, fc_norm\.2\.weight"),
    ],
)
def test_a_head_in_the_form_of_speculators_that_is_not_known_is_one_sentence(
    change: dict, said: str, tmp_path: Path
) -> None:
    model = small()
    folder = write_head(tmp_path / "h", model, speculators=True, prefix="layers.0.", flags=("norm_before_fc",))
    assert Eagle3Head(folder, model).config.norm_before_fc
    raw = json.loads((folder / "config.json").read_text()) | change
    raw = {name: value for name, value in raw.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=said) as e:
        Eagle3Head(folder, model)
    assert str(e.value).count(". ") == 0


def test_heads_are_found_by_the_name_of_their_use(tmp_path: Path) -> None:
    for name in (
        "gpt-oss-120b-Eagle3-v3", "nvidia/gpt-oss-120b-Eagle3-long-context",
        "RedHatAI--gpt-oss-20b-speculator.eagle3",
    ):  # fmt: skip
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    assert find_head("eagle3", 36, None, tmp_path).name == "gpt-oss-120b-Eagle3-v3"
    assert find_head("eagle3", 24, None, tmp_path).name == "RedHatAI--gpt-oss-20b-speculator.eagle3"
    assert find_head("eagle3-long", 36, None, tmp_path).name == "gpt-oss-120b-Eagle3-long-context"
    with pytest.raises(UsageError, match=r"gpt-oss-120b-Eagle3-short-context in .*halfbyte pull nvidia/"):
        find_head("eagle3-short", 36, None, tmp_path)
    with pytest.raises(UsageError, match="not a folder"):
        find_head("eagle3", 36, str(tmp_path / "nothing"))
    assert find_head("eagle3", 8, None).name == "tiny-eagle3"
    for method in ("eagle3-short", "eagle3-long", "eagle3-throughput"):
        with pytest.raises(UsageError, match="published for gpt-oss-120b and gpt-oss-20b only"):
            find_head(method, 8, None)
        assert find_head(method, 8, str(tmp_path)) == tmp_path  # named: that one


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(UsageError, match="not known"):
        make_proposer("magic", small(), None, 4, 8, 256)


@pytest.mark.slow
def test_rejection_in_the_engine_keeps_the_distribution() -> None:
    """First two sampled tokens of many requests, with sampled drafts from another model and without: same histogram."""
    model = small()
    bias = dict.fromkeys((10, 11, 12, 13, 14), 6.0)  # few likely tokens, so that a few hundred requests tell

    def pairs(core: EngineCore, offset: int) -> np.ndarray:
        asked = [
            Request(
                [5, 6, 7], SamplingParams(seed=offset + i, max_tokens=4, logit_bias=bias, ignore_eos=True), id=f"d{i}"
            )
            for i in range(240)
        ]
        counts = np.zeros(1024)
        for tokens in run(core, asked):
            counts[tokens[1]] += 1
            counts[tokens[2]] += 1
        return counts

    plain = pairs(core_with(model), 0)
    core = core_with(model, gates=Gates(speculate="draft"), draft="random:small", max_draft=2)
    proposer = core.proposer
    assert isinstance(proposer, DraftModelProposer)
    proposer.sampled = True
    proposer.controller.draft_cost = 0.0
    eager(proposer.controller)
    # the draft model proposes without the bias, so it is often wrong and rejection has work to do
    drafted = pairs(core, 10_000)
    assert 0 < core.stats().accepted_tokens < core.stats().drafted_tokens
    core.close()
    both = plain + drafted
    seen = both >= 10
    chi2 = float((((plain - drafted) ** 2) / np.where(both > 0, both, 1))[seen].sum())
    freedom = int(seen.sum())
    assert freedom >= 3
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5, f"chi2 {chi2:.1f} with {freedom} degrees of freedom"
