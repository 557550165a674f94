"""Tokens a model emits, back to messages, as they arrive.

On well-formed streams the result is that of OpenAI's StreamableParser. On anything else there is still a result:
nothing raises, every token ends up in a message's text or in its header, what is ambiguous becomes visible content,
and `repairs` counts what had to be put right. docs/harmony.md lists each case. It does not judge content: arguments of
a call are passed on as they are, finished JSON or not.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from halfbyte.harmony.header import Draft, Kind, MessageHeader
from halfbyte.harmony.messages import Message, Role
from halfbyte.harmony.vocabulary import Controls, Vocabulary

__all__ = ["Account", "End", "Event", "Kind", "MessageHeader", "Parser", "ParserTrace"]

End = Literal["end", "return", "call", "endoftext", "implicit", "cut"]


class Event(NamedTuple):
    """`start` and `end` bracket each message; between them `delta`s whose texts add up to its content.

    `message` numbers the messages of a stream. `header.kind` says whether the text is reasoning, visible content or a
    call's arguments. `end` says how a message ended: by which token, `implicit` where another message began instead,
    `cut` where the stream stopped.
    """

    type: Literal["start", "delta", "end"]
    message: int
    header: MessageHeader
    text: str = ""
    end: End | None = None


class ParserTrace(NamedTuple):
    """Where one run of tokens went, for tests: the bytes of all entries but `stray` are the bytes of the stream."""

    destination: Literal[
        "control", "header", "text", "stray"
    ]  # stray: header words shown again as a message of their own
    data: bytes
    message: int = -1  # its number, for text


@dataclass
class Account:
    """Token counts by destination. Every token is counted once."""

    control_tokens: int = 0
    header_tokens: int = 0  # text tokens that arrived inside a header, wherever their text went
    text_tokens: int = 0
    reasoning_tokens: int = 0  # of these, text of reasoning messages

    @property
    def tokens(self) -> int:
        return self.control_tokens + self.header_tokens + self.text_tokens


_BETWEEN, _HEADER, _OPENED, _BODY = range(4)  # _OPENED: <|message|> was seen, no text yet
_Control = Literal["start", "channel", "constrain", "message", "end", "return", "call", "endoftext"]
_MARKS: dict[str, Literal["channel", "constrain"]] = {"channel": "channel", "constrain": "constrain"}
_ENDS: dict[str, End] = {"end": "end", "return": "return", "call": "call", "endoftext": "endoftext"}


class Parser:
    """Feed it tokens in any chunks; the events differ in how text is split, never in what it says.

    The stream begins after `<|start|>assistant`, which the prompt ends with; `role=None` reads a whole conversation
    from its first `<|start|>`. `prefix` holds tokens after `<|start|>assistant` that the prompt already contained: they
    set the state, and their text is not reported.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        role: Role | None = Role.ASSISTANT,
        prefix: Sequence[int] = (),
        trace: list[ParserTrace] | None = None,
    ) -> None:
        controls = Controls.of(vocabulary)
        self._bytes = vocabulary.token_bytes
        self._special = frozenset(vocabulary.special.values())
        self._controls: dict[int, _Control] = {
            controls.start: "start",
            controls.channel: "channel",
            controls.constrain: "constrain",
            controls.message: "message",
            controls.end: "end",
            controls.return_: "return",
            controls.call: "call",
        }
        if (endoftext := vocabulary.special.get("<|endoftext|>")) is not None:
            self._controls[endoftext] = "endoftext"
        self._generating = role is Role.ASSISTANT
        self._trace = trace
        self._draft = Draft(role)
        self._noted = 0  # how many of the draft's segments the trace has
        self._state = _BETWEEN if role is None else _HEADER
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._half = False  # whether the decoder holds part of a character
        self._header = MessageHeader(Role.ASSISTANT)
        self._started = False  # whether the open message's start has been reported
        self._salvaged = False  # whether the open message began without <|message|>
        self._parts: list[str] = []
        self._index = 0
        self._events: list[Event] = []
        self.messages: list[Message] = []
        self.abandoned: list[MessageHeader] = []  # headers that never became a message
        self.repairs: Counter[str] = Counter()
        self.account = Account()
        if prefix:
            self.feed(prefix)
            self._forget()

    @property
    def open(self) -> MessageHeader | None:
        """The header of the message that is being written, once its `<|message|>` has been followed by something."""
        return self._header if self._state == _BODY else None

    @property
    def in_text(self) -> bool:
        """True if a plain token that came now would be text of a message and not part of a header."""
        return self._state in (_OPENED, _BODY)

    @property
    def header(self) -> MessageHeader | None:
        """The header of the message that is being written, as it would be understood if its text began now."""
        if self._state in (_HEADER, _OPENED):
            return self._draft.resolve(Counter())[0]  # not final, so its repairs are not counted
        return self.open

    def feed(self, tokens: Sequence[int]) -> list[Event]:
        special, count = self._special, len(tokens)
        at = 0
        while at < count:
            if self._state == _OPENED and tokens[at] not in special:
                self._open()
            if self._state == _BODY:
                stop = at
                while stop < count and tokens[stop] not in special:
                    stop += 1
                if stop > at:
                    self._count_text(stop - at)
                    self._write(b"".join(map(self._bytes, tokens[at:stop])))
                    at = stop
                    continue
            token = tokens[at]
            at += 1
            control = self._controls.get(token)
            if control is None:
                self._text(token)
            else:
                self._control(control, token)
        return self._take_events()

    def finish(self) -> list[Event]:
        """End the stream in any state. Further calls do nothing."""
        if self._state == _HEADER:
            if not self._draft.blank:
                self.repairs["cut_header"] += 1
            self._salvage("cut", cut=True)
        elif self._state == _OPENED:
            self._open()
            self._close("cut")
        elif self._state == _BODY:
            self._close("cut")
        return self._take_events()

    # ---- tokens -------------------------------------------------------------------------------

    def _text(self, token: int) -> None:
        """A token outside a body's runs of plain text, or a special one that means nothing to the format."""
        data = self._bytes(token)
        if token in self._special:
            self.repairs["special_in_text"] += 1
        if self._state == _BETWEEN:
            self._begin(Role.ASSISTANT)
            if data.strip():
                self.repairs["missing_start"] += 1
        elif self._state == _OPENED:
            self._open()
        if self._state == _BODY:
            self._count_text(1)
            self._write(data)
            return
        self.account.header_tokens += 1
        self._draft.write(data)
        if self._draft.hopeless:
            self.repairs["missing_message"] += 1
            self._salvage(None)

    def _count_text(self, tokens: int) -> None:
        self.account.text_tokens += tokens
        if self._header.kind == "reasoning":
            self.account.reasoning_tokens += tokens

    def _control(self, control: _Control, token: int) -> None:
        if self._state == _BODY and (control == "constrain" or (control == "message" and not self._salvaged)):
            self._text(token)  # inside text they can only be shown
            return
        self.account.control_tokens += 1
        if control in _ENDS:
            self._end(_ENDS[control])
        elif control == "start":
            self._start()
        elif control == "message":
            self._message()
        else:
            self._mark(_MARKS[control])
        if self._trace is not None:
            self._trace.append(ParserTrace("control", self._bytes(token)))

    def _start(self) -> None:
        if self._state == _HEADER:
            blank = self._draft.blank
            self.repairs["doubled_start" if blank else "abandoned_header"] += 1
            self._salvage("implicit")
        elif self._state != _BETWEEN:
            self.repairs["missing_end"] += 1
            if self._state == _OPENED:
                self._open()
            self._close("implicit")
        self._begin(None)

    def _message(self) -> None:
        if self._state == _BODY:
            self.repairs["late_message"] += 1  # the header was given up too early; its text stays where it was shown
            self._salvaged = False
            return
        if self._state == _OPENED:
            self.repairs["doubled_message"] += 1
        elif self._state == _BETWEEN:
            self.repairs["missing_start"] += 1
            self._begin(Role.ASSISTANT)
        self._note_header()
        self._state = _OPENED

    def _mark(self, marker: Literal["channel", "constrain"]) -> None:
        if self._state == _BODY:
            self.repairs["missing_end"] += 1
            self._close("implicit")
            self._begin(Role.ASSISTANT)
        elif self._state == _BETWEEN:
            self.repairs["missing_start"] += 1
            self._begin(Role.ASSISTANT)
        elif self._state == _OPENED:
            self.repairs["doubled_header"] += 1  # the header goes on after its <|message|>
            self._state = _HEADER
        self._note_header()
        self._draft.mark(marker)

    def _end(self, end: End) -> None:
        if self._state == _BETWEEN:
            self.repairs["doubled_end"] += 1
        elif self._state == _HEADER:
            self.repairs["empty_header" if self._draft.blank else "missing_message"] += 1
            self._salvage(end)
        else:
            if self._state == _OPENED:
                self._open()
            self._close(end)

    # ---- headers ------------------------------------------------------------------------------

    def _begin(self, role: Role | None) -> None:
        self._draft = Draft(role)
        self._noted = 0
        self._state = _HEADER

    def _note_header(self) -> None:
        """The trace keeps the order of the stream, so a segment is noted before the marker that follows it."""
        if self._trace is not None:
            for _, text in self._draft.segments[self._noted :]:
                self._trace.append(ParserTrace("header", bytes(text)))
        self._noted = len(self._draft.segments)

    def _open(self) -> None:
        """The header is closed and something follows it."""
        header, stray = self._draft.resolve(self.repairs)
        self._stray(stray)
        self._enter(header)

    def _salvage(self, end: End | None, *, cut: bool = False) -> None:
        """The header was never closed. With `end` the message ends here; without, its text goes on."""
        draft = self._draft
        if draft.blank and end is not None:
            self._note_header()
            self._state = _BETWEEN
            return
        header, stray, rest = draft.salvage(self.repairs, cut=cut)
        if self._trace is not None:
            self._note_salvaged(rest)
        self._stray(stray)
        ended = end not in ("implicit", "cut")
        if rest.strip() or ended:
            self._enter(header)
            self._salvaged = end is None
            if rest:
                self._write(rest)
            if end is not None:
                self._close(end)
        else:
            if self._trace is not None and rest:
                self._trace.append(ParserTrace("header", rest))
            self.abandoned.append(header)
            self._state = _BETWEEN

    def _note_salvaged(self, rest: bytes) -> None:
        assert self._trace is not None
        for _, text in self._draft.segments[self._noted : -1]:
            self._trace.append(ParserTrace("header", bytes(text)))
        last = bytes(self._draft.segments[-1][1])
        assert last.endswith(rest)
        self._trace.append(ParserTrace("header", last[: len(last) - len(rest)]))
        self._noted = len(self._draft.segments)

    def _stray(self, words: bytes) -> None:
        """Show header words that belong to no field as a separate message, before the message of that header."""
        if not words:
            return
        self.repairs["stray_words"] += 1
        if self._trace is not None:
            self._trace.append(ParserTrace("stray", words, self._index))
        self._enter(MessageHeader(Role.ASSISTANT))
        self._report(words.decode("utf-8", "replace"))
        self._close("implicit", stray=True)

    def _enter(self, header: MessageHeader) -> None:
        if self._generating and header.role is not Role.ASSISTANT:
            self.repairs["foreign_role"] += 1
        self._header = header
        self._parts = []
        self._started = False
        self._salvaged = False
        self._state = _BODY

    # ---- bodies -------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        if self._trace is not None:
            self._trace.append(ParserTrace("text", data, self._index))
        if not self._half:
            try:
                self._report(data.decode())
                return
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._half = bool(self._decoder.getstate()[0])
        self._report(text)

    def _report(self, text: str) -> None:
        if not self._started:
            self._started = True
            self._events.append(Event("start", self._index, self._header))
        if text:
            self._parts.append(text)
            self._events.append(Event("delta", self._index, self._header, text))

    def _close(self, end: End, *, stray: bool = False) -> None:
        if self._half:
            self._half = False
            self.repairs["half_character"] += 1
            self._report(self._decoder.decode(b"", final=True))
            self._decoder.reset()
        self._report("")
        header = self._header
        if not stray and header.kind == "call" and end in ("end", "return", "endoftext", "implicit"):
            self.repairs["call_without_call"] += 1
        elif end == "call" and header.recipient is None:
            self.repairs["call_without_recipient"] += 1
        self._events.append(Event("end", self._index, header, "", end))
        self.messages.append(
            Message(
                header.role, "".join(self._parts), header.channel, header.recipient, header.content_type, header.name
            )
        )
        self._index += 1
        self._state = _BETWEEN

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _forget(self) -> None:
        """Forget the results of a prefix and keep the state."""
        self._parts = []
        self._started = False
        self._index = 0
        self.messages.clear()
        self.abandoned.clear()
        self.repairs.clear()
        self.account = Account()
        if self._trace is not None:
            self._trace.clear()
