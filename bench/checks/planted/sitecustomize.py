"""Plants one fault into every Python process that finds this folder on its path: the name stands in PLANTED_FAULT.

A module is patched when it is imported, so that nothing is imported that would not be anyway. Used by
`bench/checks/faults.py` alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import itertools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from typing import Any

COMPLETIONS, CHAT = "halfbyte.server.api.openai_completions", "halfbyte.server.api.openai_chat"
CONVERSATION = "halfbyte.server.answer.conversation"


def _page_early(module: Any) -> None:
    first_needed = module.PagePool.first_needed
    module.PagePool.first_needed = lambda self, length: min(first_needed(self, length) + 1, length // self.page_size)


def _unchained(module: Any) -> None:
    def hash_blocks(self: Any, tables: Any, tokens: Any, length: int) -> None:
        for i in range(len(tables.hashes), length // self.page_size):
            block = repr(list(tokens[i * self.page_size : (i + 1) * self.page_size])).encode()
            tables.hashes.append(blake2b(tables.salt + block, digest_size=16).digest())

    module.PagePool.hash_blocks = hash_blocks


def _second_chunk(module: Any) -> None:
    pack = module.BatchBuilder._pack

    def shifted(self: Any, *args: Any) -> Any:
        batch = pack(self, *args)
        if batch.positions[0] >= 2048 and len(batch.positions) > 1:
            batch.positions[:] -= 1
        return batch

    module.BatchBuilder._pack = shifted


def _swapped(module: Any) -> None:
    init = module.StepResult.__init__

    def swapped(self: Any, tokens: list[int], *args: Any, **more: Any) -> None:
        if len(tokens) > 8:
            tokens = [tokens[1], tokens[0], *tokens[2:]]
        init(self, tokens, *args, **more)

    module.StepResult.__init__ = swapped


def _parameter(name: str, value: Any) -> Callable[[Any], None]:
    def patch(module: Any) -> None:
        init = module.SamplingParams.__init__

        def fixed(self: Any, *args: Any, **more: Any) -> None:
            init(self, *args, **more)
            object.__setattr__(self, name, value)

        module.SamplingParams.__init__ = fixed

    return patch


def _logprobs(module: Any) -> None:
    add = module.TextAnswer._add

    def scaled(self: Any, token: int, logprob: float | None, top: dict[str, float] | None) -> None:
        add(self, token, logprob and 1.5 * logprob, top and {k: 1.5 * v for k, v in top.items()})

    module.TextAnswer._add = scaled


def _letters(module: Any) -> None:
    add = module.Detokenizer.add
    module.Detokenizer.add = lambda self, ids: add(self, ids).replace("e", "")


def _cache_format(module: Any) -> None:
    values_of = module.values_of

    def ignoring(gates: Any, *args: Any, **more: Any) -> Any:
        return values_of(replace(gates, kv_dtype="auto"), *args, **more)

    module.values_of = ignoring


def _no_proposer(module: Any) -> None:
    module.make_proposer = lambda *_: None


def _no_sinks(module: Any) -> None:
    spec_of = module.spec_of

    def without(*args: Any, **more: Any) -> Any:
        spec = spec_of(*args, **more)
        features = {k: v - {"sinks"} for k, v in spec.features.items()}
        return replace(spec, features=features)

    module.spec_of = without


def _no_temperature(module: Any) -> None:
    frequencies = module.yarn_frequencies
    module.yarn_frequencies = lambda *args: (frequencies(*args)[0], 1.0)


def _misspelt(module: Any) -> None:
    add = module.Detokenizer.add

    def misspelt(self: Any, ids: Any) -> str:
        text: str = add(self, ids)
        return text.replace("4", "5")

    module.Detokenizer.add = misspelt


def _shifted_scores(module: Any) -> None:
    add = module.TextAnswer._add
    last: dict[int, float | None] = {}

    def shifted(self: Any, token: int, logprob: float | None, top: Any) -> None:
        previous, last[id(self)] = last.get(id(self)), logprob
        add(self, token, previous if logprob is not None and previous is not None else logprob, top)

    module.TextAnswer._add = shifted


def _no_stop(module: Any) -> None:
    init = module.TextReader.__init__
    module.TextReader.__init__ = lambda self, tokenizer, index, stop, *more: init(self, tokenizer, index, (), *more)


def _no_constraint(module: Any) -> None:
    init = module.Request.__init__

    def free(self: Any, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        object.__setattr__(self, "constraint", None)

    module.Request.__init__ = free


def _lost_preempted(module: Any) -> None:
    preempt = module.Scheduler.preempt

    def losing(self: Any, seq: Any, *args: Any) -> Any:
        result = preempt(self, seq, *args)
        if len(seq.tokens) > seq.num_prompt_tokens:
            seq.tokens[-1] = (seq.tokens[-1] + 1) % 200
        return result

    module.Scheduler.preempt = losing


def _warm(module: Any) -> None:
    init = module.SamplingParams.__init__

    def fixed(self: Any, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        if self.temperature > 0:
            object.__setattr__(self, "temperature", 1.0)

    module.SamplingParams.__init__ = fixed


def _other_prompt(choose: Callable[[list[int]], list[int]]) -> Callable[[Any], None]:
    """Another prompt is answered than the one that was sent; what is only scored stays."""

    def patch(module: Any) -> None:
        generate, encoded = module.generate_text, module._encoded

        def generate_other(service: Any, body: Any, *args: Any, **more: Any) -> Any:
            def chosen(service: Any, prompts: Any) -> Any:
                return [choose(ids) for ids in encoded(service, prompts)]

            module._encoded = encoded if body.echo else chosen
            try:
                return generate(service, body, *args, **more)
            finally:
                module._encoded = encoded

        module.generate_text = generate_other

    return patch


_seen: dict[tuple[int, ...], list[int]] = {}


def _cached(ids: list[int]) -> list[int]:
    return ids if len(ids) < 256 else _seen.setdefault(tuple(ids[:256]), ids)


def _counted_twice(module: Any) -> None:
    generation = module.Generation
    module.Generation = lambda *args, prompt_tokens, **more: generation(*args, prompt_tokens=2 * prompt_tokens, **more)


def _always_stop(module: Any) -> None:
    end = module.TextReader.end
    module.TextReader.end = lambda self, reason: end(self, "stop")


def _chunks(change: Callable[[Any, int], None]) -> Callable[[Any], None]:
    """Changes every update of a streamed completion; it gets the number of those before."""

    def patch(module: Any) -> None:
        chunk = module.TextWriter._chunk
        sent: dict[int, int] = {}

        def changed(self: Any, update: Any) -> Any:
            number = sent[id(self)] = sent.get(id(self), -1) + 1
            change(update, number)
            return chunk(self, update)

        module.TextWriter._chunk = changed

    return patch


def _lose(update: Any, number: int) -> None:
    if number == 6:
        update.pieces = []


def _make_up(update: Any, number: int) -> None:
    update.tokens = [300 + (number + k) % 50 for k in range(len(update.tokens))]


def _conversation(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Changes what was said before the model reads it, whatever the API."""

    def patch(module: Any) -> None:
        init = module.Conversation.__init__

        def changed(self: Any, *args: Any, **more: Any) -> None:
            init(self, *args, **more)
            change(self)

        module.Conversation.__init__ = changed

    return patch


def _last_turn(conversation: Any) -> None:
    questions = [i for i, message in enumerate(conversation.messages) if message.role == "user"]
    conversation.messages = conversation.messages[questions[-1] if questions else 0 :]


def _no_instructions(conversation: Any) -> None:
    conversation.instructions = None


def _no_results(conversation: Any) -> None:
    conversation.messages = [message for message in conversation.messages if message.role != "tool"]


def _chat_pieces(lose: Callable[[list[Any], int], list[Any]]) -> Callable[[Any], None]:
    """Changes the pieces of a streamed conversation; `lose` gets them with the number of updates before."""

    def patch(module: Any) -> None:
        pieces = module.ChatWriter._pieces
        seen: dict[int, int] = {}

        def changed(self: Any, update: Any) -> Any:
            number = seen[id(self)] = seen.get(id(self), -1) + 1
            update.pieces = lose(update.pieces, number)
            return pieces(self, update)

        module.ChatWriter._pieces = changed

    return patch


def _lose_kind(kind: str, every: int) -> Callable[[list[Any], int], list[Any]]:
    return lambda pieces, number: [p for p in pieces if p.kind != kind or number % every]


def _finishes(was: str, now: str) -> Callable[[Any], None]:
    """Answers of conversations name another reason why they ended, in one piece and as streams."""

    def patch(module: Any) -> None:
        body, finish_json = module.ChatWriter._choice, module.finish_json

        def choice(self: Any, *args: Any) -> dict[str, Any]:
            out: dict[str, Any] = body(self, *args)
            return {**out, "finish_reason": now if out["finish_reason"] == was else out["finish_reason"]}

        module.ChatWriter._choice = choice
        module.finish_json = lambda finish: finish_json(now if finish == was else finish)

    return patch


def _seed_of_neighbours(module: Any) -> None:
    init = module.SamplingParams.__init__
    last = [0.0, 0]

    def neighbouring(self: Any, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        now = time.monotonic()
        last[1] = last[1] + 1 if now - last[0] < 0.01 else 0
        last[0] = now
        if self.seed is not None:
            object.__setattr__(self, "seed", self.seed + int(last[1]))

    module.SamplingParams.__init__ = neighbouring


_requests = itertools.count()


def _now_and_then(ids: list[int]) -> list[int]:
    """One short prompt in forty is taken for another."""
    return ids if len(ids) != 24 or next(_requests) % 40 else [*ids[:-1], ids[-1] ^ 1, 7]


def _no_cancel(module: Any) -> None:
    send = module.EngineProcess._send

    def sending(self: Any, message: Any) -> None:
        if not isinstance(message, module.messages.Cancel):
            send(self, message)

    module.EngineProcess._send = sending


def _short_streams(module: Any) -> None:
    """The model reads only the end of a streamed request's prompt; the usage counts all of it."""
    generate, encoded, generation = module.generate_text, module._encoded, module.Generation

    def generate_short(service: Any, body: Any, *args: Any, **more: Any) -> Any:
        lengths: list[int] = []

        def short(service: Any, prompts: Any) -> Any:
            prompt_ids = encoded(service, prompts)
            lengths.extend(map(len, prompt_ids))
            return [ids[-32:] for ids in prompt_ids]

        def counting(*args: Any, prompt_tokens: int, **more: Any) -> Any:
            return generation(*args, prompt_tokens=sum(lengths), **more)

        if not body.stream:
            return generate(service, body, *args, **more)
        module._encoded, module.Generation = short, counting
        try:
            return generate(service, body, *args, **more)
        finally:
            module._encoded, module.Generation = encoded, generation

    module.generate_text = generate_short


def _guess_first(module: Any) -> None:
    """A token is made up and sent before anything was computed; the real one is left out."""
    stream = module.TextWriter.stream

    async def guessing(self: Any) -> Any:
        if not self._with_ids:
            async for part in stream(self):
                yield part
            return
        choice = b'{"index":0,"text":" the","logprobs":null,"finish_reason":null,"token_ids":[300]}'
        yield self.frame.chunk(choice, self.generation.totals)
        first = True
        async for updates in self.generation.batches():
            for update in updates:
                if first:
                    update.tokens, update.pieces, first = update.tokens[1:], [], False
            yield b"".join(self._chunk(update) for update in updates)
        yield self.frame.end(self.generation.totals)

    module.TextWriter.stream = guessing


def _burst(module: Any) -> None:
    stream = module.TextWriter.stream

    async def delayed(self: Any) -> Any:
        for part in [part async for part in stream(self)]:
            yield part

    module.TextWriter.stream = delayed


PATCHES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "a page is given back early": ("halfbyte.kv.pages", _page_early),
    "prefix hashes are not chained": ("halfbyte.kv.pages", _unchained),
    "positions of the second chunk are off by one": ("halfbyte.engine.batch", _second_chunk),
    "tokens are swapped among more than 8 streams": ("halfbyte.engine.runner", _swapped),
    "top_p is ignored": ("halfbyte.engine.request", _parameter("top_p", 1.0)),
    "top_k is ignored": ("halfbyte.engine.request", _parameter("top_k", 0)),
    "min_p is ignored": ("halfbyte.engine.request", _parameter("min_p", 0.0)),
    "the seed is ignored": ("halfbyte.engine.request", _parameter("seed", None)),
    "the temperature is ignored": ("halfbyte.engine.request", _parameter("temperature", 0.0)),
    "log probabilities are multiplied by 1.5": (COMPLETIONS, _logprobs),
    "texts lose letters": ("halfbyte.model.tokenizer", _letters),
    "--kv-dtype is ignored": ("halfbyte.plan.select", _cache_format),
    "--speculate is ignored": ("halfbyte.engine.speculative.methods", _no_proposer),
    "sinks are left out": ("halfbyte.model.gpt_oss", _no_sinks),
    "the temperature of YaRN is left out": ("halfbyte.ops.rope", _no_temperature),
    "a figure is misspelt": ("halfbyte.model.tokenizer", _misspelt),
    "scores belong to the token before": (COMPLETIONS, _shifted_scores),
    "grammars are ignored": ("halfbyte.engine.request", _no_constraint),
    "preempted requests change a token": ("halfbyte.engine.scheduler", _lost_preempted),
    "penalties are ignored": ("halfbyte.engine.request", _parameter("presence_penalty", 0.0)),
    "bias is ignored": ("halfbyte.engine.request", _parameter("logit_bias", {})),
    "stop strings are ignored": (COMPLETIONS, _no_stop),
    "n is ignored": ("halfbyte.engine.request", _parameter("n", 1)),
    "the frequency penalty is ignored": ("halfbyte.engine.request", _parameter("frequency_penalty", 0.0)),
    "every temperature is 1": ("halfbyte.engine.request", _warm),
    "prompts are cut to 1024 tokens": (COMPLETIONS, _other_prompt(lambda ids: ids[-1024:])),
    "answers are kept by the beginning of a prompt": (COMPLETIONS, _other_prompt(_cached)),
    "prompts count twice": (COMPLETIONS, _counted_twice),
    "every answer ends with stop": (COMPLETIONS, _always_stop),
    "streams lose a piece": (COMPLETIONS, _chunks(_lose)),
    "streamed tokens are made up": (COMPLETIONS, _chunks(_make_up)),
    "streams are held back": (COMPLETIONS, _burst),
    "earlier turns are dropped": (CONVERSATION, _conversation(_last_turn)),
    "instructions are dropped": (CONVERSATION, _conversation(_no_instructions)),
    "results of tools are dropped": (CONVERSATION, _conversation(_no_results)),
    "streamed calls lose a piece": (CHAT, _chat_pieces(_lose_kind("arguments", 3))),
    "streams lose reasoning": (CHAT, _chat_pieces(_lose_kind("reasoning", 4))),
    "calls end with stop": (CHAT, _finishes("tool_calls", "stop")),
    "conversations that are cut off end with stop": (CHAT, _finishes("length", "stop")),
    "seeds depend on neighbours": ("halfbyte.engine.request", _seed_of_neighbours),
    "one request in forty is taken for another": (COMPLETIONS, _other_prompt(_now_and_then)),
    "requests of clients that leave go on": ("halfbyte.engine.process", _no_cancel),
    "streamed prompts are cut": (COMPLETIONS, _short_streams),
    "the first token is made up": (COMPLETIONS, _guess_first),
}


class PatchingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any, patch: Callable[[Any], None]) -> None:
        self._loader, self._patch = loader, patch

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        self._patch(module)


class PatchingFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        module, patch = PATCHES[os.environ["PLANTED_FAULT"]]
        if name != module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        spec.loader = PatchingLoader(spec.loader, patch)
        return spec


if os.environ.get("PLANTED_FAULT") in PATCHES:
    sys.meta_path.insert(0, PatchingFinder())
