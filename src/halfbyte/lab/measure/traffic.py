"""A workload played to a server, and what its clients saw: first tokens, gaps, whole answers, and how many were in
time.

    ttft         from sending a request to the first token that a reader can use
    ttft_first_wave, ttft_after_first_wave
                 of a closed loop: the same of the requests that all begin at once, and of every one sent after the last
                 of these had its first token, to the end of the run
    first_answer the same to the first that is no reasoning, where the server tells them apart
    tpot         of a request: from its first token to its last, divided by the tokens after the first
    itl          between two arrivals of tokens of one request
    gap_longest  the longest of these; the detail says when
    e2e          from sending a request to its last token
    goodput      requests a second that kept every stated limit; `in_time` is their share
    speed        tokens a second of all together, prompts not counted

Steady state only: a closed loop leaves out the time in which the first sessions all begin at once and the time after
the last one has begun. Tokens are the server's usage. A request that failed, or whose answer has another length than
was asked for, makes the cell INVALID: a server that stops early looks fast. So does a prompt found in a server's cache
where all of them are different. `measure_traffic` can be given a clock and a way to connect, so that a test can have a
time of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfbyte.errors import EngineError, InvalidFigureError, UsageError
from halfbyte.lab.measure.event_stream import (
    HEADER_SLACK,
    HEADER_TOKENS,
    SLACK,
    StreamReading,
    check_claims,
    exchange,
    read_blocks,
    verify,
)
from halfbyte.lab.measure.http_client import HttpClient
from halfbyte.lab.measure.power import PowerMeter
from halfbyte.lab.result import WRITTEN_SAMPLES, Cell, Check, Figure, Result, figure
from halfbyte.lab.statistics import quantile
from halfbyte.lab.workloads.arrivals import Arrivals, ClosedLoop, Poisson, Staircase, saturation
from halfbyte.lab.workloads.workload import Session, Turn, Workload
from halfbyte.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Limits:
    """What a request must keep to count as good, in milliseconds; 0: no limit."""

    ttft: float = 0.0
    tpot: float = 0.0
    e2e: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Limits:
        """`ttft=1000,tpot=50`."""
        values: dict[str, float] = {}
        for part in (p.strip() for p in text.split(",") if p.strip()):
            name, _, number = part.partition("=")
            try:
                value = float(number)
            except ValueError:
                value = float("nan")
            if name not in cls.__dataclass_fields__ or not 0 < value < float("inf"):
                raise UsageError(f"a limit looks like ttft=1000,tpot=50,e2e=20000, in milliseconds, not {part!r}.")
            values[name] = value
        return cls(**values)

    @property
    def stated(self) -> dict[str, float]:
        return {k: v for k, v in self.__dict__.items() if v}


@dataclass
class SentRequest:
    """One request as its client saw it; seconds since the measurement began."""

    turn: Turn
    session: int
    number: int  # of its turn
    sent: float
    blocks: list[tuple[float, bytes]] = field(default_factory=list)
    reading: StreamReading | None = None
    error: str = ""

    def read(self, tokenizer: Tokenizer | None) -> None:
        """After the measurement, which parsing would disturb."""
        if self.error:
            return
        try:
            self.reading = read_blocks(self.blocks)
            self.blocks = []
            verify(self.reading, tokenizer, HEADER_SLACK if "chat" in self.turn.path else SLACK)
            if not self.reading.arrivals or self.reading.usable_at is None:
                self.error = "an answer without a token"
        except (EngineError, InvalidFigureError) as e:
            self.error = str(e)

    @property
    def answer(self) -> StreamReading:
        assert self.reading is not None
        return self.reading

    @property
    def ttft(self) -> float:
        assert self.answer.usable_at is not None
        return self.answer.usable_at - self.sent

    @property
    def e2e(self) -> float:
        return self.answer.last - self.sent

    @property
    def tpot(self) -> float | None:
        """None where all tokens came at once."""
        arrivals = self.answer.arrivals
        after = sum(n for _, n in arrivals[1:])
        return (self.answer.last - self.answer.first) / after if after else None

    @property
    def gaps(self) -> list[float]:
        times = [at for at, _ in self.answer.arrivals]
        return [b - a for a, b in itertools.pairwise(times)]

    def keeps(self, limits: Limits) -> bool:
        times = {"ttft": self.ttft, "tpot": self.tpot or 0.0, "e2e": self.e2e}
        return all(1e3 * times[name] <= most for name, most in limits.stated.items())


class Player:
    """Sends sessions when they are due and keeps every request."""

    def __init__(self, client: HttpClient, workload: Workload) -> None:
        self.client, self.workload = client, workload
        self.requests: list[SentRequest] = []
        self._begin = client.clock()

    def now(self) -> float:
        return self.client.clock() - self._begin

    async def play(self, arrivals: Arrivals | Staircase) -> None:
        if isinstance(arrivals, Staircase):  # its first request is the server's first
            await self._climb(arrivals)
        else:
            other = self.workload.session(sessions_of(arrivals) - 1).turns[0]
            await self.client.learn(other.path, other.body)
            # drawn before the clock runs: a client that draws a prompt sees no token arrive
            sessions = [self.workload.session(k) for k in range(arrivals.sessions)]
            self._begin = self.client.clock()
            if isinstance(arrivals, ClosedLoop):
                waiting = iter(enumerate(sessions))

                async def stream() -> None:
                    for k, session in waiting:
                        await self._session(k, session)

                await asyncio.gather(*(stream() for _ in range(arrivals.streams)))
            else:

                async def due(k: int, at: float) -> None:
                    await asyncio.sleep(max(0.0, at - self.now()))
                    await self._session(k, sessions[k])

                await asyncio.gather(*(due(k, at) for k, at in enumerate(arrivals.times())))
        for request in self.requests:
            request.read(self.client.tokenizer)

    async def _climb(self, stairs: Staircase) -> None:
        self._begin = self.client.clock()
        tasks: set[asyncio.Task[None]] = set()
        numbers = itertools.count()
        while self.now() < stairs.seconds:
            while len(tasks) < stairs.level(self.now()):
                k = next(numbers)
                tasks.add(asyncio.create_task(self._session(k, self.workload.session(k))))
            done, tasks = await asyncio.wait(tasks, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        await asyncio.gather(*tasks)

    async def _session(self, k: int, session: Session) -> None:
        for number, turn in enumerate(session.turns):
            if turn.think_s:
                await asyncio.sleep(turn.think_s)
            request = self.client.request(turn.path, turn.request())
            played = SentRequest(turn, k, number, self.now())
            try:
                link = await self.client.connect()
                played.sent = self.now()
                self.requests.append(played)
                played.blocks = await exchange(link, request, self.now)
            except (EngineError, OSError) as e:
                played.error = f"{e}"[:400] or type(e).__name__
                if played not in self.requests:
                    self.requests.append(played)
                return  # what follows in a session is said on top of an answer that it has not got


# ---- figures --------------------------------------------------------------------------------------------------------


def measure_traffic(
    client: HttpClient,
    workload: Workload,
    arrivals: Arrivals | Staircase,
    cell: Cell,
    limits: Limits | None = None,
    run: Callable[[Any], Any] = asyncio.run,
    meter: Callable[[], PowerMeter] = PowerMeter,
) -> Result:
    player = Player(client, workload)
    with meter() as power:
        run(player.play(arrivals))
    return traffic_result(player.requests, workload, arrivals, cell, limits or Limits(), power)


def traffic_result(
    requests: Sequence[SentRequest], workload: Workload, arrivals: Arrivals | Staircase, cell: Cell, limits: Limits,
    power: PowerMeter,
) -> Result:  # fmt: skip
    errors = [a.error for a in requests if a.error]
    checks = [Check("every request was answered", not errors, len(errors), 0, errors[0] if errors else "")]
    good = [a for a in requests if not a.error]
    wrong = [a for a in good if a.turn.tokens is not None and a.answer.completion_tokens != a.turn.tokens]
    note = "" if not wrong else f"{wrong[0].answer.completion_tokens} tokens instead of {wrong[0].turn.tokens}"
    checks.append(Check("every answer has the length that was asked for", not wrong, len(wrong), 0, note))
    if note := _too_short(good):
        checks.append(Check("texts and prompts are as long as they are said to be", False, note=note))
    if workload.all_new:
        cached = sum(a.answer.cached for a in good)
        note = "" if not cached else f"{cached} tokens of prompts that are all different were in the server's cache"
        checks.append(Check("no prompt was in the cache", not cached, cached, 0, note))
    detail: dict[str, Any] = {
        "requests": len(requests), "sessions": len({a.session for a in requests}), "workload": workload.name,
        "counted_by": sorted({a.answer.counted_by for a in good}), "limits_ms": limits.stated,
        "prompt_tokens": sum(a.answer.prompt_tokens or 0 for a in good),
        "cached_tokens": sum(a.answer.cached for a in good),
        "completion_tokens": sum(a.answer.completion_tokens or 0 for a in good),
    }  # fmt: skip
    if workload.note:
        detail["note"] = workload.note
    ids = [t for a in good for t in a.answer.tokens]
    if ids:  # answers that go round in circles choose few experts, and a batch of them looks fast
        detail["distinct_tokens"] = round(len(set(ids)) / len(ids), 4)
    if any(not c.ok for c in checks):
        return power.judge(Result(cell, checks=tuple(checks), detail=detail))
    begin, end = window(good, arrivals)
    inside = [a for a in good if begin <= a.sent and a.answer.last <= end] or list(good)
    tokens = sum(n for a in good for at, n in a.answer.arrivals if begin < at <= end)
    seconds = end - begin
    if seconds <= 0 or not tokens:
        return Result(cell, checks=tuple(checks), detail=detail, refused="too few requests for a steady state.")
    detail |= {"steady_s": seconds, "steady_requests": len(inside)}
    cold = ""
    if not isinstance(arrivals, Staircase):  # which looks for what happens while a server warms up
        cold = stall(good)
        checks.append(Check(WAS_WARM, not cold, note=cold))
    if cold:
        return power.judge(
            Result(cell, checks=tuple(checks), detail=detail, refused=f"the server was not warm: {cold}")
        )
    figures = [
        figure("speed", "tok/s", tokens / seconds),
        figure("requests", "requests/s", len([a for a in good if begin < a.answer.last <= end]) / seconds),
    ]
    figures += _quantiles("ttft", [a.ttft for a in inside])
    if has_waves(arrivals) and begin > min(a.sent for a in good):
        figures += _quantiles("ttft_first_wave", [a.ttft for a in good if a.sent < begin])
        figures += _quantiles("ttft_after_first_wave", [a.ttft for a in good if a.sent >= begin])
    answered = [a.answer.answer_at - a.sent for a in inside if a.answer.answer_at is not None]
    if answered and len(answered) == len(inside) and answered != [a.ttft for a in inside]:
        figures += _quantiles("first_answer", answered)
    figures += _quantiles("tpot", [t for a in inside if (t := a.tpot) is not None])
    figures += _quantiles("itl", [g for a in inside for g in a.gaps])
    gaps = sorted((g, at) for a in inside for g, (at, _) in zip(a.gaps, a.answer.arrivals))
    if gaps:
        figures.append(figure("gap_longest", "ms", 1e3 * gaps[-1][0]))
        detail["longest_gaps"] = [{"ms": round(1e3 * g, 1), "at_s": round(at, 2)} for g, at in gaps[:-9:-1]]
    figures += _quantiles("e2e", [a.e2e for a in inside])
    if limits.stated:
        in_time = [a for a in inside if a.keeps(limits)]
        figures.append(figure("goodput", "requests/s", len(in_time) / len(inside) * figures[1].value))
        figures.append(figure("in_time", "%", 100 * len(in_time) / len(inside)))
    targets = []
    if isinstance(arrivals, Poisson):
        by_session = {k: [a for a in good if a.session == k] for k in {a.session for a in good}}
        why = saturation([min(a.sent for a in s) for s in by_session.values()],
                         [max(a.answer.last for a in s) for s in by_session.values()])  # fmt: skip
        targets.append(Check("the server keeps up with the arrivals", not why, note=why))
    figures += power.figures(tokens, seconds)
    return power.judge(Result(cell, tuple(figures), tuple(checks), tuple(targets), detail=detail))


def _too_short(requests: Sequence[SentRequest]) -> str:
    """Why texts are too short for their tokens, or a prompt was not read to its end; empty where neither is so."""
    for a in requests:
        prompt, read = a.turn.body.get("prompt"), a.answer.prompt_tokens
        if isinstance(prompt, list) and read and read < len(prompt):
            return f"the server read {read} of a prompt's {len(prompt)} tokens"
    counted = [a.answer for a in requests if a.answer.spelled is not None]
    try:
        claimed = sum(answer.completion_tokens or 0 for answer in counted)
        slack = HEADER_TOKENS if any("chat" in a.turn.path for a in requests) else 0
        check_claims(claimed, sum(answer.spelled or 0 for answer in counted), len(counted), slack)
    except InvalidFigureError as e:
        return str(e)
    return ""


def sessions_of(arrivals: Arrivals) -> int:
    """That a server has seen afterwards: the played ones, and one more, by which the client learnt how it answers."""
    return arrivals.sessions + 1


def window(requests: Sequence[SentRequest], arrivals: Arrivals | Staircase) -> tuple[float, float]:
    """From the last first token of the sessions that began together to the first token of the session
    that began last: whole turns of the loop, prompts as well as answers. Of open arrivals all of it: how they begin and
    end is the traffic itself."""
    everything = min(a.sent for a in requests), max(a.answer.last for a in requests)
    if not isinstance(arrivals, ClosedLoop) or not has_waves(arrivals):
        return everything
    firsts = [min(a.answer.first for a in requests if a.session == k) for k in range(arrivals.sessions)]
    begin, end = max(firsts[: arrivals.streams]), firsts[-1]
    return (begin, end) if end > begin else everything


def has_waves(arrivals: Arrivals | Staircase) -> bool:
    """Whether sessions begin in the place of others."""
    return isinstance(arrivals, ClosedLoop) and arrivals.sessions >= 2 * arrivals.streams


WAS_WARM = "the server was warm"
STALL_S, STALL = 1.0, 50.0  # seconds, and times the usual gap: a pause that needs a reason
ONCE = 4  # requests for each such pause, at least: what belongs to serving comes back with every prompt


def stall(requests: Sequence[SentRequest]) -> str:
    """What shows that a server was not warm: pauses between two tokens far beyond the usual, of which there are far
    fewer than requests. Waiting for others' prompts comes back with every one of them. Empty where there are none."""
    pairs = [(a, b) for request in requests for (a, _), (b, _) in itertools.pairwise(request.answer.arrivals)]
    if not pairs:
        return ""
    usual = quantile([b - a for a, b in pairs], 0.5)
    long = sorted((a, b) for a, b in pairs if b - a > max(STALL_S, STALL * usual))
    times: list[tuple[float, float]] = []  # of all streams together
    for begin, end in long:
        if times and begin < times[-1][1]:
            times[-1] = times[-1][0], max(end, times[-1][1])
        else:
            times.append((begin, end))
    if not times or ONCE * len(times) > len(requests):
        return ""
    lost = sum(end - begin for begin, end in times)
    return f"{len(times)} times nothing came for {lost:.3g} s in all, where {1e3 * usual:.3g} ms are usual; warm it up"


def _quantiles(name: str, seconds: Sequence[float]) -> list[Figure]:
    """Median with every sample where they are few, and the 99th of a hundred."""
    if not seconds:
        return []
    values = [1e3 * s for s in seconds]
    samples = tuple(values) if 1 < len(values) <= WRITTEN_SAMPLES else ()
    figures = []
    for label, share in (("p50", 0.5), ("p99", 0.99)):
        at = quantile(values, share)
        figures.append(Figure(f"{name}_{label}", "ms", at, min(values), max(values), len(values),
                            values=samples if label == "p50" else ()))  # fmt: skip
    return figures
