"""Warm-up: run everything that requests can need once before an engine reports that it is ready.

Kernels are compiled when they are first used, and graphs are captured when a number of rows first appears. During
traffic each of these would stop every live stream for up to seconds. So a served engine runs them first, on the scratch
page: every graph in both widths of its tables, prompts of every size and depth, every way of sampling. `fast` leaves
out the graphs that only contexts past `graphs.SHORT` need; `off` leaves everything to the first requests. A warm-up
changes no answers and leaves nothing in the caches or counters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from halfbyte.engine.batch import Batch
from halfbyte.engine.device_runner import DeviceRunner
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.options import WARM_UPS
from halfbyte.engine.prefix_tiers import PrefixTiers
from halfbyte.engine.request import Constraint, Request, SamplingParams
from halfbyte.engine.sampling.row import RowSampler
from halfbyte.errors import EngineError

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
# One for each way of choosing a token: on the device, on the host, with logprobs.
WAYS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "sampled": SamplingParams(max_tokens=4, ignore_eos=True),
    "filtered": SamplingParams(top_k=20, top_p=0.9, min_p=0.01, max_tokens=4, ignore_eos=True),
    "logprobs": SamplingParams(logprobs=5, max_tokens=4, ignore_eos=True),
    "penalised": SamplingParams(repetition_penalty=1.1, presence_penalty=0.1, max_tokens=4, ignore_eos=True),
    "biased": SamplingParams(logit_bias={0: -1.0}, max_tokens=4, ignore_eos=True),
}

Report = Callable[[str, int, int], None]  # name of the next piece, pieces done, pieces in all


@dataclass(frozen=True)
class WarmUpTask:
    name: str
    run: Callable[[], None]


def warm_up(core: EngineCore, level: str, report: Report | None = None) -> dict[str, float]:
    """Run all pieces; returns the seconds of each. Replace `core` afterwards: its cache and counters are not clean."""
    assert level in WARM_UPS, level
    if level == "off" or not isinstance(core.runner, DeviceRunner):  # a CPU compiles and captures nothing
        return {}
    named = {p.name: p for p in (*_device_pieces(core, full=level == "full"), *_request_pieces(core))}
    pieces = list(named.values())
    seconds: dict[str, float] = {}
    for done, piece in enumerate(pieces):
        if report is not None:
            report(piece.name, done, len(pieces))
        begin = time.perf_counter()
        piece.run()
        seconds[piece.name] = time.perf_counter() - begin
    if core.tiers is not None:
        _measure_prompt(core, core.tiers)
    if report is not None:
        report("", len(pieces), len(pieces))
    return seconds


def _measure_prompt(core: EngineCore, tiers: PrefixTiers) -> None:
    """Tell the tiers how fast prompts are computed, now that everything is compiled."""
    assert isinstance(core.runner, DeviceRunner)
    rows = min(core.config.max_rows_per_step, core.scheduler.longest)
    batch = idle_batch([rows], [0], core.config.page_size)
    batch.regime = "prefill" if core.config.answer_rows else None
    begin = time.perf_counter()
    core.runner.run_idle(batch)
    tiers.computed(rows, rows / 2, time.perf_counter() - begin)


# ---- graphs and prompts, which only a device has ------------------------------------------------------------------


def _device_pieces(core: EngineCore, *, full: bool) -> list[WarmUpTask]:
    runner, config = core.runner, core.config
    assert isinstance(runner, DeviceRunner)
    page, longest = config.page_size, core.scheduler.longest
    pieces: list[WarmUpTask] = []

    def prompt(rows: int, start: int = 0, decodes: int = 0) -> None:
        """Add a prompt's chunk of `rows` rows at `start`, with `decodes` sequences that decode."""
        batch = idle_batch([rows] + [1] * decodes, [start] + [0] * decodes, page)
        batch.regime = "prefill" if config.answer_rows else None
        pieces.append(
            WarmUpTask(f"prompt of {rows} rows at {start} with {decodes} decodes", partial(runner.run_idle, batch))
        )

    # The largest first: buffers that grow with the rows of a step are then allocated once.
    sizes = prompt_sizes(min(config.max_rows_per_step, longest))
    for rows in sizes:
        prompt(rows)
    prompt(sizes[0], max(0, longest - sizes[0] - 1))
    for rows in (sizes[0], *(s for s in sizes if s in (1, 64))):
        prompt(min(rows, max(1, config.max_rows_per_step - config.max_seqs)), decodes=config.max_seqs - 1)
    for rows, blocks in runner.graph_shapes(config.max_seqs, -(-longest // page), full=full):
        pieces.append(WarmUpTask(f"graph of {rows} rows, {blocks} blocks", partial(runner.capture, rows, blocks)))
    return pieces


def prompt_sizes(most: int) -> list[int]:
    """Chunk sizes from `most` down to 1, with at least one in the range of rows of every kernel."""
    sizes = {1, 2, 3, most}
    rows = 4
    while rows < most:
        sizes |= {rows, min(most, rows + rows // 2)}
        rows *= 2
    return sorted(sizes, reverse=True)


def idle_batch(counts: list[int], starts: list[int], page: int) -> Batch:
    """`counts` rows for each sequence, from `starts` on, all on the scratch page; the last of each is sampled."""
    rows, sequences = sum(counts), len(counts)
    count, start = np.array(counts, np.int32), np.array(starts, np.int32)
    query_start = np.zeros(sequences + 1, np.int32)
    np.cumsum(count, out=query_start[1:])
    kv_lens = start + count
    longest = int(kv_lens.max())
    tables = np.zeros((sequences, -(-longest // page)), np.int32)
    sampler = RowSampler(GREEDY, 0, 1, 0, frozenset())
    return Batch(
        tokens=np.arange(rows, dtype=np.int32) % 16,  # not one expert's alone
        positions=np.arange(rows, dtype=np.int32) + np.repeat(start - query_start[:-1], count),
        query_start=query_start, kv_lens=kv_lens,
        row_sequence=np.repeat(np.arange(sequences, dtype=np.int32), count),
        full_table=tables, sliding_table=tables.copy(), logit_rows=(query_start[1:] - 1).astype(np.int32),
        token_from=None, max_kv_len=longest,
        samplers=[sampler] * sequences, sample_positions=kv_lens.tolist(), slots=list(range(sequences)),
    )  # fmt: skip


# ---- requests ----------------------------------------------------------------------------------------------------


def _request_pieces(core: EngineCore) -> list[WarmUpTask]:
    vocab = core.config.vocab
    # A prompt that repeats itself, so that speculation has something to propose.
    prompt = [t % vocab for t in (11, 12, 13, 14, 15, 16, 17, 18)] * 4
    requests = {name: Request(prompt, params, id=f"warm-up {name}") for name, params in WAYS.items()}
    if core.vocabulary is not None:
        requests["json"] = Request(prompt, GREEDY, Constraint("json_object", "{}"), id="warm-up json")

    def run(*requests: Request) -> None:
        for request in requests:
            core.submit(request)
        while core.has_work:
            for _, delta in core.step():
                if delta.error is not None:
                    raise EngineError(f"the engine failed in its warm-up: {delta.error}")

    pieces = [WarmUpTask(f"{name} request", partial(run, request)) for name, request in requests.items()]
    together = list(requests.values())[: core.config.max_seqs]
    return [*pieces, WarmUpTask("requests of every kind together", partial(run, *together))]
