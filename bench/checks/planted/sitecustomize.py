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

    def shifted(self: Any, token: int, logprob: float | None, top: Any) -> None:
        previous = self.__dict__.get("last_logprob")
        self.last_logprob = logprob
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

        def changed(self: Any, update: Any) -> Any:
            number = self.__dict__.setdefault("number_of_updates", 0)
            self.number_of_updates += 1
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
    users = [i for i, message in enumerate(conversation.messages) if message.role == "user"]
    conversation.messages = conversation.messages[users[-1] if users else 0 :]


def _no_instructions(conversation: Any) -> None:
    conversation.instructions = None


def _no_results(conversation: Any) -> None:
    conversation.messages = [message for message in conversation.messages if message.role != "tool"]


def _lost_pieces(kind: str, every: int) -> Callable[[Any], None]:
    """A streamed conversation loses the first piece of this kind, and every so many-th behind it."""

    def patch(module: Any) -> None:
        pieces = module.ChatWriter._pieces

        def changed(self: Any, update: Any) -> Any:
            left = []
            for piece in update.pieces:
                counted = piece.kind == kind and bool(piece.text)
                number = self.__dict__.setdefault("number_of_pieces", 0)
                self.number_of_pieces += counted
                if not counted or number % every:
                    left.append(piece)
            update.pieces = left
            return pieces(self, update)

        module.ChatWriter._pieces = changed

    return patch


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
    """Streamed requests are answered by the end of their prompts, and all of these is counted."""
    generate, encoded, generation = module.generate_text, module._encoded, module.Generation

    def generate_short(service: Any, body: Any, *args: Any, **more: Any) -> Any:
        lengths: list[int] = []

        def short(service: Any, prompts: Any) -> Any:
            all_ids = encoded(service, prompts)
            lengths.extend(map(len, all_ids))
            return [ids[-32:] for ids in all_ids]

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


def _request(change: Callable[[Any], dict[str, Any]]) -> Callable[[Any], None]:
    """A completion is answered as if its request had other fields; what is only scored stays."""

    def patch(module: Any) -> None:
        generate = module.generate_text

        def generate_other(service: Any, body: Any, *args: Any, **more: Any) -> Any:
            return generate(service, body if body.echo else body.model_copy(update=change(body)), *args, **more)

        module.generate_text = generate_other

    return patch


def _greedy_streams(body: Any) -> dict[str, Any]:
    return {"temperature": 0.0} if body.stream else {}


def _endless_streams(body: Any) -> dict[str, Any]:
    return {"stop": None} if body.stream else {}


def _chat_request(**fields: Any) -> Callable[[Any], None]:
    """A conversation is answered as if its request had these fields."""

    def patch(module: Any) -> None:
        read = module.to_conversation
        module.to_conversation = lambda service, body, *more: read(service, body.model_copy(update=fields), *more)

    return patch


_texts: dict[str, str] = {}


def _normalised(module: Any) -> None:
    """A text is taken for an earlier one of the same letters."""
    encoded = module._encoded

    def earlier_text(service: Any, prompts: Any) -> Any:
        earlier = [_texts.setdefault("".join(p.lower().split()), p) if isinstance(p, str) else p for p in prompts]
        return encoded(service, earlier)

    module._encoded = earlier_text


def _normalised_conversation(conversation: Any) -> None:
    """A message is taken for an earlier one of the same letters."""
    conversation.messages = [
        replace(m, content=_texts.setdefault("".join(m.content.lower().split()), m.content))
        if isinstance(m.content, str)
        else m
        for m in conversation.messages
    ]


_both_ends: dict[tuple[int, ...], list[int]] = {}


def _kept_by_ends(ids: list[int]) -> list[int]:
    return ids if len(ids) < 256 else _both_ends.setdefault((*ids[:64], *ids[-64:]), ids)


def _changed_texts(module: Any) -> None:
    """The last two tokens of a prompt that came as text are exchanged."""
    encoded = module._encoded

    def changed(service: Any, prompts: Any) -> Any:
        ids = encoded(service, prompts)
        return [
            [*one[:-2], one[-1], one[-2]] if isinstance(p, str) and len(one) > 1 else one
            for p, one in zip(prompts, ids)
        ]

    module._encoded = changed


def _finished_as_cut(module: Any) -> None:
    end = module.TextReader.end
    module.TextReader.end = lambda self, reason: end(self, "length" if reason == "stop" else reason)


def _made_up_scores(module: Any) -> None:
    """Log probabilities of streams are those of a model that is surer."""
    chunk, take = module.TextWriter._chunk, module.TextAnswer.take_logprobs

    def scaled(self: Any) -> dict[str, Any]:
        out: dict[str, Any] = take(self)
        return {**out, "token_logprobs": [v and v / 4 - 0.5 for v in out["token_logprobs"]]}

    def streamed(self: Any, update: Any) -> Any:
        module.TextAnswer.take_logprobs = scaled
        try:
            return chunk(self, update)
        finally:
            module.TextAnswer.take_logprobs = take

    module.TextWriter._chunk = streamed


def _sorted_scores(module: Any) -> None:
    """The likeliest tokens come first, whatever was written."""
    take = module.TextAnswer.take_logprobs

    def ordered(self: Any) -> dict[str, Any]:
        out: dict[str, Any] = take(self)
        places = [k for k, v in enumerate(out["token_logprobs"]) if v is not None]
        best = sorted(places, key=lambda k: -out["token_logprobs"][k])
        rows = {name: list(out[name]) for name in ("token_logprobs", "top_logprobs")}
        for k, other in zip(places, best):
            for name in rows:
                rows[name][k] = out[name][other]
        return {**out, **rows}

    module.TextAnswer.take_logprobs = ordered


REPEATED = 256  # tokens of an answer that are its own


def _repeated(module: Any) -> None:
    """An answer goes on with what it had before, which costs nothing."""
    read = module.TextReader.read

    def repeating(self: Any, tokens: list[int], *args: Any, **more: Any) -> Any:
        earlier = self.__dict__.setdefault("written", [])
        for at, token in enumerate(tokens):
            tokens[at] = token if len(earlier) < REPEATED else earlier[len(earlier) - REPEATED // 2]
            earlier.append(tokens[at])
        return read(self, tokens, *args, **more)

    module.TextReader.read = repeating


def _surplus(module: Any) -> None:
    """Usage of Responses has three tokens for two."""
    usage = module.usage
    module.usage = lambda totals: {**usage(totals), "output_tokens": totals.completion * 3 // 2}


def _surplus_text(module: Any) -> None:
    """Usage of completions has two tokens more than were sent."""
    body = module.TextWriter.body

    async def claiming(self: Any) -> Any:
        out = await body(self)
        return {**out, "usage": {**out["usage"], "completion_tokens": out["usage"]["completion_tokens"] + 2}}

    module.TextWriter.body = claiming


_streams = itertools.count()


def _lost_end(module: Any) -> None:
    """One stream in ten loses the last piece of its text."""
    stream = module.TextWriter.stream

    async def losing(self: Any) -> Any:
        lose = next(_streams) % 10 == 9
        if not lose:
            async for part in stream(self):
                yield part
            return
        async for updates in self.generation.batches():
            for update in updates:
                if update.finish or len(self.generation.answers[update.index].ids) >= 15:
                    update.pieces = []
            yield b"".join(self._chunk(update) for update in updates)
        yield self.frame.end(self.generation.totals)

    module.TextWriter.stream = losing


def _certain_later(module: Any) -> None:
    """Only the first token of a sampled answer is drawn; the likeliest ones follow."""
    sample_row, sample_token = module._sample_row, module.sample_token

    def sampled(raw: Any, sampler: Any, row: int, batch: Any, result: Any) -> int:
        if batch.sample_positions[row] > sampler.prompt:
            module.sample_token = lambda logits, *_: int(logits.argmax())
        try:
            return int(sample_row(raw, sampler, row, batch, result))
        finally:
            module.sample_token = sample_token

    module._sample_row = sampled


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
    "streamed calls lose a piece": (CHAT, _lost_pieces("arguments", 3)),
    "streams lose reasoning": (CHAT, _lost_pieces("reasoning", 4)),
    "calls end with stop": (CHAT, _finishes("tool_calls", "stop")),
    "conversations that are cut off end with stop": (CHAT, _finishes("length", "stop")),
    "seeds depend on neighbours": ("halfbyte.engine.request", _seed_of_neighbours),
    "one request in forty is taken for another": (COMPLETIONS, _other_prompt(_now_and_then)),
    "requests of clients that leave go on": ("halfbyte.engine.process", _no_cancel),
    "streamed prompts are cut": (COMPLETIONS, _short_streams),
    "the first token is made up": (COMPLETIONS, _guess_first),
    "only the first token is drawn": ("halfbyte.engine.sampling.host", _certain_later),
    "answers are kept by the letters of a prompt": (COMPLETIONS, _normalised),
    "conversations are kept by their letters": (CONVERSATION, _conversation(_normalised_conversation)),
    "answers are kept by both ends of a prompt": (COMPLETIONS, _other_prompt(_kept_by_ends)),
    "prompts that come as text are changed": (COMPLETIONS, _changed_texts),
    "streams are greedy": (COMPLETIONS, _request(_greedy_streams)),
    "streams ignore stop strings": (COMPLETIONS, _request(_endless_streams)),
    "finished answers say that they were cut off": (COMPLETIONS, _finished_as_cut),
    "scores of streams are made up": (COMPLETIONS, _made_up_scores),
    "scores are sorted": (COMPLETIONS, _sorted_scores),
    "answers repeat themselves after 256 tokens": (COMPLETIONS, _repeated),
    "two tokens more are counted than were sent": (COMPLETIONS, _surplus_text),
    "one stream in ten loses its end": (COMPLETIONS, _lost_end),
    "Responses count three tokens for two": ("halfbyte.server.api.openai_responses", _surplus),
    "finished conversations say that they were cut off": (CHAT, _finishes("stop", "length")),
    "conversations ignore the temperature": (CHAT, _chat_request(temperature=0.0)),
    "conversations ignore the seed": (CHAT, _chat_request(seed=None)),
    "conversations ignore stop strings": (CHAT, _chat_request(stop=None)),
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
