"""Parses the header before `<|message|>`: role, recipient, channel and content type, in any order.

`Draft.resolve` reads a header that `<|message|>` closed. `Draft.salvage` reads one that was never closed: there, only
known words belong to the header and everything else is content. Neither raises, and neither loses a word: words that
belong to no field are returned, so that they can be shown.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from halfbyte.harmony.messages import ANALYSIS, COMMENTARY, FINAL, Role
from halfbyte.harmony.vocabulary import CONSTRAIN

Kind = Literal["reasoning", "content", "call"]
Marker = Literal["role", "channel", "constrain"]

CHANNELS = (ANALYSIS.encode(), COMMENTARY.encode(), FINAL.encode())
ROLES = {role.value.encode(): role for role in Role}
FORMATS = (b"json", b"code", b"text")
_NOT_TOOLS = (None, "all", "user", "assistant")  # recipients that are not tools
_BUILTIN = (b"python", b"browser")

# A header that grows past this is not a header: the longest true one is a role, a recipient and a content type.
_MOST_BYTES, _MOST_WORDS = 256, 4
# A model may talk between the recipient and the arguments; they are waited for, but not for ever.
_MOST_BEFORE_ARGUMENTS = 4096

_TO = re.compile(rb"\s*to=([^\s{\[]*)")
_FORMAT = re.compile(rb"\s*(json|code|text)(?=[\s{\[\"]|$)")
# Where arguments begin: at once, or at an object that words stand before. (A list in words may be prose.)
_ARGUMENTS = re.compile(rb"(?:\A|to=[^\s{\[]*)\s*(?:(?:json|code|text)\s*)?[{\[]|\{")
_EDGES = re.compile(rb"\A[^A-Za-z]+|[^A-Za-z]+\Z")
_TOOL_NAME = re.compile(rb"(?:[\w-]+\.)+[\w-]+")


@dataclass(frozen=True, slots=True)
class MessageHeader:
    role: Role
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    name: str | None = None
    kind: Kind = "content"  # what the message is to a client: reasoning, visible content, or a tool call
    discarded: tuple[str, ...] = ()  # words of a doubled field that another one overruled


@dataclass
class Draft:
    """A header being read. `role` is the one the stream implies; None after a `<|start|>`, which must name its own."""

    role: Role | None
    segments: list[tuple[Marker, bytearray]] = field(default_factory=lambda: [("role", bytearray())])

    def mark(self, marker: Marker) -> None:
        self.segments.append((marker, bytearray()))

    def write(self, data: bytes) -> None:
        self.segments[-1][1].extend(data)

    @property
    def blank(self) -> bool:
        return len(self.segments) == 1 and not self.segments[0][1].strip()

    @property
    def hopeless(self) -> bool:
        """Whether the text since the last marker can no longer be part of a header."""
        text = self.segments[-1][1]
        if any(b"to=" in segment for _, segment in self.segments):
            # What follows a recipient is shown to a program, so be sure: either arguments have begun, or wait.
            return _ARGUMENTS.search(text.strip()) is not None or len(text) > _MOST_BEFORE_ARGUMENTS
        if len(text) > _MOST_BYTES:
            return True
        text = text.strip()
        # A recipient may stand on a line of its own.
        line = text.rpartition(b"\n")[2].strip() if b"\n" in text else b""
        return not b"to=".startswith(line) or len(text.split()) > _MOST_WORDS

    def resolve(self, repairs: Counter[str]) -> tuple[MessageHeader, bytes]:
        """The header that `<|message|>` closed, and the words that belong to no field."""
        fields = _Fields(self.role, repairs)
        bare: list[bytes] = []
        for marker, text in self.segments:
            words = [bytes(word) for word in text.split()]
            if marker == "channel":
                fields.take_channel(words)
            elif marker == "constrain":
                fields.take_format(words)
            elif self.role is None:
                fields.take_role(words)
            elif words and words[0] == self.role.encode():
                repairs["doubled_role"] += 1
                words.pop(0)
            bare += fields.take_recipient(words)
        bare = fields.take_bare(bare)
        return fields.header(), b" ".join(bare)

    def salvage(self, repairs: Counter[str], *, cut: bool = False) -> tuple[MessageHeader, bytes, bytes]:
        """A header that was never closed: its known words, then the stray words of earlier parts, then its text.

        `cut`: the stream ended here, so the last word may be half of a known one.
        """
        fields = _Fields(self.role, repairs)
        stray: list[bytes] = []
        rest = b""
        for index, (marker, segment) in enumerate(self.segments):
            last = index == len(self.segments) - 1
            rest = fields.known_front(marker, bytes(segment), alone=len(self.segments) == 1, cut=cut and last)
            if last and fields.calls_with_json and (begin := rest.find(b"{")) > 0:
                stray, rest = stray + rest[:begin].split(), rest[begin:]  # what was said on the way
            elif not last:
                stray += rest.split()
        return fields.header(), b" ".join(stray), rest


class _Fields:
    """Collects the parts of one header; a later value of the same field wins."""

    def __init__(self, role: Role | None, repairs: Counter[str]) -> None:
        self.role = role
        self.repairs = repairs
        self.name: bytes | None = None
        self.stranger: bytes | None = None  # an unknown role
        self.values: dict[str, bytes] = {}
        self.discarded: list[bytes] = []

    def set(self, field: str, value: bytes) -> None:
        old = self.values.get(field)
        if old is not None:
            self.repairs[f"doubled_{field}"] += 1
            if old != value:
                self.discarded.append(old)
        self.values[field] = value

    # ---- closed headers -----------------------------------------------------------------------

    def take_role(self, words: list[bytes]) -> None:
        word = _pop_word(words)
        if word is None:
            self.repairs["missing_role"] += 1
            self.role = Role.ASSISTANT
            return
        role, _, name = word.partition(b":")
        if role in ROLES:
            self.role = ROLES[role]
            self.name = name or (word if self.role is Role.TOOL else None)
        elif (channel := _glued(word, Role.ASSISTANT.encode(), CHANNELS)) is not None:
            self.repairs["glued_role"] += 1
            self.role = Role.ASSISTANT
            self.set("channel", channel)
        else:
            self.stranger = word

    def take_channel(self, words: list[bytes]) -> None:
        word = _pop_word(words)
        if word is None:
            self.repairs["empty_channel"] += 1
            return
        for channel in CHANNELS:
            tail = word.removeprefix(channel)
            if tail and tail != word and (_TO.match(tail) or _TOOL_NAME.fullmatch(tail) or tail in FORMATS):
                self.repairs["glued_channel"] += 1
                words.insert(0, tail)
                word = channel
        if word not in CHANNELS and (clean := _EDGES.sub(b"", word).lower()) in CHANNELS:
            self.repairs["unclean_channel"] += 1  # `commentary?`, `Analysis`: seen in the wild
            self.discarded.append(word)
            word = clean
        if word in CHANNELS or "channel" not in self.values:
            self.set("channel", word)
        elif word in FORMATS:
            self.set("content_type", word)
        else:
            self.repairs["doubled_channel"] += 1  # an unknown channel does not overrule a known one
            self.discarded.append(word)

    def take_format(self, words: list[bytes]) -> None:
        # Several words are no format but prose, unless the first is one.
        spoken = [word for word in words if not word.startswith(b"to=")]
        word = b"" if len(spoken) > 1 and spoken[0] not in FORMATS else _pop_word(words) or b""
        if _TOOL_NAME.fullmatch(word):  # `<|constrain|>functions.x`: the recipient went astray
            words.insert(0, word)
            word = b""
        self.set("content_type", CONSTRAIN.encode() + word)

    def take_recipient(self, words: list[bytes]) -> list[bytes]:
        """Takes `to=` words and returns the others."""
        bare = []
        pending = False
        for word in words:
            if pending:
                self.set("recipient", word)
                pending = False
            elif word == b"to=":
                self.repairs["spaced_recipient"] += 1
                pending = True
            elif word.startswith(b"to="):
                self.set("recipient", word[3:])
            else:
                bare.append(word)
        return bare

    def take_bare(self, words: list[bytes]) -> list[bytes]:
        """Words without a marker: a channel, a tool's name, a content type. Returns what is none of them."""
        values = self.values
        if words and "channel" not in values and words[0] in CHANNELS:
            self.repairs["bare_channel"] += 1
            self.set("channel", words.pop(0))
        if words and "recipient" not in values and (_TOOL_NAME.fullmatch(words[0]) or words[0] in _BUILTIN):
            self.repairs["bare_recipient"] += 1
            self.set("recipient", words.pop(0))
        addressed = "recipient" in values and len(words) == 1
        if words and "content_type" not in values and (addressed or words[0] in FORMATS):
            self.set("content_type", words.pop(0))
        return words

    # ---- headers that were never closed -------------------------------------------------------

    def known_front(self, marker: Marker, text: bytes, *, alone: bool, cut: bool) -> bytes:
        """Takes the known words at the front of a segment and returns the rest."""
        rest = text
        if marker == "role":
            rest = self._known_role(text, alone=alone, cut=cut)
        elif marker == "channel":
            rest = self._known_channel(text, cut=cut)
        rest = self._known_recipients(rest)
        addressed = "recipient" in self.values
        if (marker == "constrain" or addressed) and (format := _FORMAT.match(rest)):
            self.set("content_type", (CONSTRAIN.encode() if marker == "constrain" else b"") + format[1])
            rest = self._known_recipients(rest[format.end() :])
        elif marker == "constrain":
            self.set("content_type", CONSTRAIN.encode())
            if cut and _is_half(rest, FORMATS):
                rest = b""
        return rest.lstrip() if len(rest) < len(text) else rest

    def _known_recipients(self, text: bytes) -> bytes:
        while to := _TO.match(text):
            self.set("recipient", to[1])
            text = text[to.end() :]
        return text

    @property
    def calls_with_json(self) -> bool:
        """Whether it is a call whose arguments are an object: a built-in tool's may be code."""
        recipient = self.values.get("recipient", b"")
        tool = b"." in recipient and recipient.partition(b".")[0] not in _BUILTIN
        return tool and not self.values.get("content_type", b"").endswith(b"code")

    def _known_role(self, text: bytes, *, alone: bool, cut: bool) -> bytes:
        words = text.split(maxsplit=1)
        if not words:
            return b""
        rest = words[1] if len(words) > 1 else b""
        if self.role is not None:
            # Bare text may well begin with the word "assistant"; only in front of a channel is it surely a role.
            return rest if words[0] == self.role.encode() and not alone else text
        if words[0] in ROLES:
            self.role = ROLES[words[0]]
            return rest
        if (channel := _glued(words[0], Role.ASSISTANT.encode(), CHANNELS)) is not None:
            self.role = Role.ASSISTANT
            self.set("channel", channel)
            return rest
        return b"" if cut and _is_half(text, tuple(ROLES)) else text

    def _known_channel(self, text: bytes, *, cut: bool) -> bytes:
        stripped = text.lstrip()
        for channel in CHANNELS:
            if stripped.startswith(channel):
                self.set("channel", channel)
                return stripped[len(channel) :]
        return b"" if cut and _is_half(text, CHANNELS) else text

    # ---- the outcome --------------------------------------------------------------------------

    def header(self) -> MessageHeader:
        role, name, recipient = self.role, self.name, self.values.get("recipient")
        if self.stranger is not None:
            word = self.stranger
            if recipient is not None or "content_type" in self.values or b"." in word or word in _BUILTIN:
                role, name = Role.TOOL, word  # a tool speaks under its own name
            else:
                self.repairs["unknown_role"] += 1
                self.discarded.append(word)
        role = role or Role.ASSISTANT
        texts = {key: value.decode("utf-8", "replace") for key, value in self.values.items()}
        channel, to = texts.get("channel"), texts.get("recipient")
        if channel is not None and channel.encode() not in CHANNELS:
            self.repairs["unknown_channel"] += 1
        kind: Kind = "content"
        if role is Role.ASSISTANT and to not in _NOT_TOOLS:
            kind = "call"
        elif channel is not None and channel.lower() == ANALYSIS:
            kind = "reasoning"
        return MessageHeader(
            role=role,
            channel=channel,
            recipient=to,
            content_type=texts.get("content_type"),
            name=None if name is None else name.decode("utf-8", "replace"),
            kind=kind,
            discarded=tuple(word.decode("utf-8", "replace") for word in self.discarded),
        )


def _pop_word(words: list[bytes]) -> bytes | None:
    """Remove and return the word that a marker introduces, unless it is a recipient."""
    return words.pop(0) if words and not words[0].startswith(b"to=") else None


def _glued(word: bytes, front: bytes, tails: tuple[bytes, ...]) -> bytes | None:
    """`assistantfinal`: two known words with the token between them missing."""
    tail = word.removeprefix(front)
    return tail if tail != word and tail in tails else None


def _is_half(text: bytes, candidates: tuple[bytes, ...]) -> bool:
    word = text.strip()
    return any(candidate.startswith(word) for candidate in candidates)
