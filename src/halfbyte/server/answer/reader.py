"""The one reader of a choice's tokens: each is read once, through the harmony parser.

What it learns goes two ways. The updates it returns are what a client gets; `header`, `called`, `answer_begins` and
`answered` tell `requests.py` what to ask the engine next. Nothing the model emits is lost: text that belongs to no part
of an answer is content, and where content must be JSON it is reasoning.
"""

from __future__ import annotations

from halfbyte.engine.request import Logprob
from halfbyte.engine.stops import TextStopMatcher
from halfbyte.harmony.header import MessageHeader
from halfbyte.harmony.messages import COMMENTARY
from halfbyte.harmony.parse import Event, Parser
from halfbyte.server.answer.answer import AnswerItem, AnswerPiece, Call, TokenLogprob, Update
from halfbyte.server.answer.harmony_tokens import HarmonyTokens
from halfbyte.server.answer.prompt import Prompt


class ChoiceReader:
    def __init__(self, harmony: HarmonyTokens, prompt: Prompt, index: int, *, bound: bool) -> None:
        self.index = index
        self.done = False  # nothing the model still says can matter
        self.called = False  # the last message ended with <|call|>
        self.answered = False  # a JSON answer was owed, and has begun
        self._harmony = harmony
        self._tools = prompt.tools
        self._bound = bound  # only offered functions may be called
        self._parallel_calls = prompt.conversation.parallel_calls
        self._parser = Parser(harmony.tokenizer, prefix=prompt.prefill)
        self._stop = TextStopMatcher(prompt.conversation.stop_strings)
        self._update = Update(index)
        self._item_count = 0
        self._open: tuple[int, int, AnswerItem] | None = None  # the parser's message, the number of its item, the item
        self._calls: list[int] = []  # numbers of the items that are calls
        self._without_arguments: dict[int, Call] = {}
        # A JSON answer begins only where the grammar was awake; anything else the model says is thinking aloud. The
        # engine wakes it at these very tokens, so they are what is compared, not the header the parser makes of them.
        self._triggers = prompt.constraint.triggers if prompt.constraint else ()
        self._tail_length = max(map(len, self._triggers), default=0)
        self._tail = tuple(prompt.prefill)
        self._awake = self.answer_begins
        self._marks: list[tuple[int, TokenLogprob]] = []  # log probabilities not yet shown, with where they begin
        self._content_bytes = self._shown_bytes = 0

    # ---- what the next request depends on -----------------------------------------------------

    @property
    def header(self) -> MessageHeader | None:
        """The header of the message that is being written, as far as it has been read."""
        return self._parser.header

    @property
    def answer_begins(self) -> bool:
        """Whether the last tokens are those after which a JSON answer stands."""
        return any(self._tail[-len(trigger) :] == trigger for trigger in self._triggers)

    @property
    def repairs(self) -> dict[str, int]:
        return dict(self._parser.repairs)

    # ---- tokens -------------------------------------------------------------------------------

    def read(self, tokens: list[int], logprobs: list[Logprob] | None, *, forced: bool = False) -> Update:
        """`forced` tokens were put into the prompt by the server; the client never pays for them. Nor does it for what
        follows the token that ends the answer, so that the count does not depend on how many a step brings."""
        count = len(tokens)
        if self.done:
            count = 0
        elif self._stop.stops:
            for at in range(count):
                self._read(tokens[at : at + 1], None if logprobs is None else logprobs[at : at + 1], forced)
                if self.done:
                    count = at + 1
                    break
        elif tokens:
            count = self._read(tokens, logprobs, forced)
        update, self._update = self._update, Update(self.index)
        if not forced:
            update.tokens = tokens[:count]
        return update

    def _read(self, tokens: list[int], logprobs: list[Logprob] | None, forced: bool) -> int:
        """Read the tokens; returns how many, since nothing after the one that ends the answer is read."""
        structural = self._harmony.structural
        if logprobs is None and structural.isdisjoint(tokens):
            self._text(tokens, forced)
            return len(tokens)
        start = 0
        for at, token in enumerate(tokens):
            # With log probabilities every token travels alone, so that it is known which message it was for.
            if token in structural or logprobs is not None:
                if at > start:
                    self._text(tokens[start:at], forced)
                if token in structural:
                    self._watch([token])
                    self._take(self._parser.feed((token,)))
                else:
                    self._text([token], forced, logprobs[at] if logprobs else None)
                start = at + 1
            if self.done:
                return at + 1
        if start < len(tokens):
            self._text(tokens[start:], forced)
        return len(tokens)

    def _text(self, tokens: list[int], forced: bool, logprob: Logprob | None = None) -> None:
        """Tokens without structure: they all belong to one message, or to a header."""
        self._watch(tokens)
        events = self._parser.feed(tokens)
        header = self._parser.open
        if header is not None:
            if header.kind == "reasoning" and not forced:
                self._update.reasoning_tokens += len(tokens)
            elif header.kind == "content" and logprob is not None and (self._awake or not self._triggers):
                self._mark(logprob)
        if events:
            self._take(events)

    def _watch(self, tokens: list[int]) -> None:
        if self._triggers:
            self.answered = self.answered or self._awake
            self._tail = (*self._tail, *tokens)[-self._tail_length :]
            self._awake = self._awake or self.answer_begins

    def end(self, reason: str) -> Update:
        """The model has stopped, or it has no tokens left."""
        if not self.done:
            self._take(self._parser.finish())
            self._flush_stop()
        for number, call in self._without_arguments.items():
            if reason != "length":
                # A call without arguments is a call with none; clients parse this field.
                self._add(AnswerPiece("arguments", "{}", number, call))
        update, self._update = self._update, Update(self.index)
        update.stop_match = self._stop.matched
        if update.stop_match is not None or reason != "length":
            update.finish = "tool_calls" if self._calls and update.stop_match is None else "stop"
            update.complete_items = list(range(self._item_count))
        else:
            update.finish = "length"
        return update

    # ---- events -------------------------------------------------------------------------------

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if self.done:
                return
            self.called = event.end == "call" and self._may_call(event.header)
            if event.type == "delta":
                self._delta(event)
            elif event.type == "end":
                self._message_end(event)
            elif event.header.kind == "call" and self._may_call(event.header):
                self._begin_call(event)

    def _may_call(self, header: MessageHeader) -> bool:
        """If not, there is nobody to call, and what the model wrote is shown as it comes. The grammar of recipients
        sleeps in a malformed header, so a name that was not offered can still be read."""
        if not self._bound:
            return bool(self._tools)
        return header.recipient is None or self._tools.offered(header.recipient) is not None

    def _begin(self, event: Event, item: AnswerItem) -> int:
        number = self._item_count
        self._item_count += 1
        self._update.new_items.append(item)
        self._open = (event.message, number, item)
        return number

    def _begin_call(self, event: Event) -> None:
        assert event.header.recipient is not None
        call = Call(self._tools.find(event.header.recipient), len(self._calls))
        number = self._begin(event, AnswerItem("call", call=call))
        self._calls.append(number)
        self._without_arguments[number] = call
        self._update.pieces.append(AnswerPiece("call", item=number, call=call))

    def _delta(self, event: Event) -> None:
        number, item = self._item(event)
        if item.kind == "call":
            if event.text.strip():
                self._without_arguments.pop(number, None)
            self._add(AnswerPiece("arguments", event.text, number, item.call))
            return
        text = event.text
        if item.kind == "content":
            text = self._stop.feed(text)
        if text:
            self._show(number, item, text)
        if self._stop.matched is not None:
            self.done = True

    def _item(self, event: Event) -> tuple[int, AnswerItem]:
        if self._open is not None and self._open[0] == event.message:
            return self._open[1:]
        header = event.header
        visible = header.kind != "reasoning" and (not self._triggers or self._awake)
        item = AnswerItem("content" if visible else "reasoning", preamble=header.channel == COMMENTARY)
        return self._begin(event, item), item

    def _message_end(self, event: Event) -> None:
        if self._open is None or self._open[0] != event.message:
            return
        _, number, item = self._open
        if item.kind == "content":
            self._flush_stop()
        self._open = None
        if event.end != "cut":
            self._update.complete_items.append(number)
            if item.kind == "call" and not self._parallel_calls:
                self.done = True

    def _flush_stop(self) -> None:
        """A stop string does not span two messages: what was held back belongs to the one that ends."""
        text = self._stop.flush()
        if text and self._open is not None:
            self._show(*self._open[1:], text)

    # ---- pieces -------------------------------------------------------------------------------

    def _show(self, number: int, item: AnswerItem, text: str) -> None:
        if item.kind == "content":
            self._add(AnswerPiece("content", text, number, logprobs=self._due(text) if self._marks else None))
        else:
            self._add(AnswerPiece("reasoning", text, number))

    def _add(self, piece: AnswerPiece) -> None:
        pieces = self._update.pieces
        last = pieces[-1] if pieces else None
        if last is not None and last.kind == piece.kind and last.item == piece.item:
            last.text += piece.text
            if piece.logprobs:
                last.logprobs = (last.logprobs or []) + piece.logprobs
        else:
            pieces.append(piece)

    def _mark(self, lp: Logprob) -> None:
        data = self._harmony.tokenizer.token_bytes
        entry = TokenLogprob(data(lp.token), lp.logprob, [(data(t), value) for t, value in lp.top])
        self._marks.append((self._content_bytes, entry))
        self._content_bytes += len(entry.data)

    def _due(self, text: str) -> list[TokenLogprob]:
        """Log probabilities of the tokens that are at least partly shown; a stop string takes its own with it."""
        self._shown_bytes += len(text.encode("utf-8", "replace"))
        count = sum(1 for start, _ in self._marks if start < self._shown_bytes)
        due, self._marks = self._marks[:count], self._marks[count:]
        return [entry for _, entry in due]
