"""Test doubles: a model whose logits are a hash of what it reads back through the pages, and a tiny vocabulary.

The fake keeps token ids where a model keeps keys and values: one store for both kinds of pages. Logits depend on the
whole prefix as read through the full table and on the window as read through the sliding table, so any page that is
lost, shared wrongly, reused too early or read outside its window shows up as a wrong token. Steps run when their
result is asked for, as late as possible, so a batch that aliases host memory shows up too.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
import torch

from halfbyte.engine.batch import Batch
from halfbyte.engine.request import Request
from halfbyte.engine.runner import StepResult
from halfbyte.engine.sampling.host import sample_on_host
from halfbyte.engine.sampling.row import RowSampler

EOS = 1
PIECES = [
    b"",
    b"<eos>",
    b"<go>",
    b"{",
    b"}",
    b'"',
    b":",
    b",",
    b" ",
    b"\n",
    b"true",
    b"null",
    b'"a"',
    b'":',
    b"ab",
    b"ba",
]
PIECES += [bytes((c,)) for c in b"0123456789abcdefghijklmnopqrstuvwxyz"] + ["é".encode()[:1], "é".encode()[1:]]
VOCAB = len(PIECES)
GO = 2


class FakeVocabulary:
    vocab_size = VOCAB
    special = {"": 0, "<eos>": EOS, "<go>": GO}

    def token_bytes(self, id: int) -> bytes:
        return PIECES[id]

    def encode(self, text: str) -> list[int]:
        out, data = [], text.encode()
        while data:
            best = max((i for i, p in enumerate(PIECES) if p and data.startswith(p)), key=lambda i: len(PIECES[i]))
            out.append(best)
            data = data[len(PIECES[best]) :]
        return out


def fake_logits(prefix: Sequence[int], window: Sequence[int], vocab: int = VOCAB, tame: float = 0.7) -> np.ndarray:
    """Deterministic; mostly continues in a cycle (so drafts are sometimes right), sometimes does as the hash says."""
    digest = blake2b(array("i", prefix).tobytes() + b"/" + array("i", window).tobytes(), digest_size=16).digest()
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    logits = rng.standard_normal(vocab).astype(np.float32)
    if rng.random() < tame:
        logits[(prefix[-1] * 5 + 3) % vocab] += 6.0
    logits[EOS] -= 2.0
    return logits


class FakeRunner:
    def __init__(
        self, pages: int, page_size: int, window: int, *, vocab: int = VOCAB, tame: float = 0.7,
        fault: Callable[[Batch], None] | None = None, on_host: bool = False,
    ) -> None:  # fmt: skip
        self.store = np.full((pages, page_size), -1, np.int64)
        self.page_size, self.window, self.vocab, self.tame, self.fault = page_size, window, vocab, tame, fault
        self.on_host = on_host  # a step runs when it is asked for; one that nobody asks for never does
        self.queue: list[_FakeHandle] = []
        self.last: list[int] = []
        self.launches = self.computed_rows = 0

    def launch(self, batch: Batch) -> _FakeHandle:
        handle = _FakeHandle(self, batch)
        self.queue.append(handle)
        self.launches += 1
        return handle

    def launched_steps(self) -> object:
        return None

    def read_pages(self, pages: list[int], behind: object) -> tuple[list[memoryview], float]:
        return [memoryview(self.store[page].copy()).cast("B") for page in pages], 1e-9 * len(pages)

    def stage_page(self, content: memoryview) -> memoryview:
        return content

    def page_buffer(self) -> memoryview:
        return memoryview(bytearray(self.store[0].nbytes))

    def write_pages(self, pages: list[int], contents: list[memoryview]) -> list[tuple[int, float]]:
        for page, content in zip(pages, contents, strict=True):
            self.store[page] = np.frombuffer(content, np.int64)
        return []

    def close(self) -> None:
        pass

    def run(self, batch: Batch) -> StepResult:
        if self.fault is not None:
            self.fault(batch)
        tokens = batch.tokens.astype(np.int64)
        if batch.token_from is not None:
            for r, source in enumerate(batch.token_from.tolist()):
                if source >= 0:
                    tokens[r] = self.last[source]
        size = self.page_size
        self.computed_rows += batch.rows
        for kind, table in enumerate((batch.full_table, batch.sliding_table)):
            pages = table[batch.row_sequence, batch.positions // size]
            assert (pages != 0).all(), "a real row would be written to the scratch page"
            self.store[pages, batch.positions % size] = self.stored(tokens, batch) * 2 + kind
        logits = np.stack([self._read(batch, r) for r in batch.logit_rows.tolist()]) if len(batch.logit_rows) else None
        result = StepResult([]) if logits is None else sample_on_host(torch.from_numpy(logits), batch)
        self.last = result.tokens
        return result

    def stored(self, tokens: np.ndarray, batch: Batch) -> np.ndarray:
        """What stands in the pages for these tokens."""
        return tokens

    def _read(self, batch: Batch, row: int) -> np.ndarray:
        s, p, size = int(batch.row_sequence[row]), int(batch.positions[row]), self.page_size
        assert batch.query_start[s] <= row < batch.query_start[s + 1]
        assert batch.kv_lens[s] == batch.positions[batch.query_start[s + 1] - 1] + 1
        at = np.arange(p + 1)
        prefix = self.store[batch.full_table[s, at // size], at % size]
        at = at[max(0, p - self.window + 1) :]
        window = self.store[batch.sliding_table[s, at // size], at % size]
        assert min(prefix.min(), window.min()) >= 0, "read a slot that was never written"
        assert not (prefix % 2).any(), "read a page of the other kind"
        assert (window % 2).all(), "read a page of the other kind"
        return fake_logits((prefix // 2).tolist(), (window // 2).tolist(), self.vocab, self.tame)


class _FakeHandle:
    def __init__(self, runner: FakeRunner, batch: Batch) -> None:
        self.runner, self.batch = runner, batch
        self.answer: StepResult | None = None
        self.error: Exception | None = None

    def result(self) -> StepResult:
        while self.answer is None and self.error is None:
            first = self if self.runner.on_host else self.runner.queue.pop(0)
            try:
                first.answer = self.runner.run(first.batch)
            except Exception as e:
                first.error = e
        if self.error is not None:
            raise self.error
        assert self.answer is not None
        return self.answer


def oracle(request: Request, index: int, limit: int, window: int, allowed: Callable[[list[int]], list[int] | None]
           | None = None, tame: float = 0.7) -> tuple[list[int], str]:  # fmt: skip
    """One request at a time, no pages, no batches: what the engine must give. -> tokens, reason."""
    params = request.sampling
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {EOS})
    assert params.seed is not None or params.temperature == 0
    sampler = RowSampler(params, index, len(request.prompt), params.seed or 0, stop_ids)
    tokens = list(request.prompt)
    while True:
        row = torch.from_numpy(fake_logits(tokens, tokens[-window:], tame=tame))[None]
        batch = one_row(sampler, len(tokens), tokens)
        if allowed is not None:
            ids = allowed(tokens[len(request.prompt) :])
            if ids is not None:
                bits = np.zeros((VOCAB + 31) // 32 * 32, np.uint8)
                bits[ids] = 1
                batch.masks[0] = np.packbits(bits, bitorder="little").view(np.int32)
        token = sample_on_host(row, batch).tokens[0]
        tokens.append(token)
        out = tokens[len(request.prompt) :]
        if token in stop_ids:
            return out, "stop"
        if len(out) > params.min_tokens and any(s.encode() in text_of(out[params.min_tokens :]) for s in params.stop):
            return out, "stop"
        if len(tokens) >= limit:
            return out, "length"


def text_of(tokens: Sequence[int]) -> bytes:
    return b"".join(PIECES[t] for t in tokens)


def one_row(sampler: RowSampler, position: int, history: list[int]) -> Batch:
    zero = np.zeros(1, np.int32)
    table = np.zeros((1, 1), np.int32)
    return Batch(
        tokens=zero, positions=zero, query_start=zero, kv_lens=zero, row_sequence=zero,
        full_table=table, sliding_table=table, logit_rows=zero, token_from=None, max_kv_len=1, samplers=[sampler],
        sample_positions=[position], slots=[0],
        histories={0: list(history)},
    )  # fmt: skip


def random_prompt(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(rng.randint(low, high))]


class ExpertCost:
    """Bytes a step reads: dense weights once, each expert that any row is routed to, and the keys and values.

    Experts touched under uniform routing: E (1 - (1 - k/E)^rows).
    """

    def __init__(self, *, dense: float, expert: float, experts: int, top_k: int, layers: int, kv_token: float) -> None:
        self.dense, self.expert, self.kv_token = dense, expert, kv_token
        self.experts, self.top_k, self.layers = experts, top_k, layers

    def __call__(self, rows: int, context: int) -> float:
        touched = self.experts * (1.0 - (1.0 - self.top_k / self.experts) ** rows)
        return self.dense + self.layers * touched * self.expert + context * self.kv_token
