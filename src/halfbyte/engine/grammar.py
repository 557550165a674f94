"""Structured output: which tokens a constraint allows next. The parsing is llguidance's.

A constraint may sleep until the generated tokens end with one of its triggers, so a harmony model reasons freely and
is held to the grammar from where its final or tool message begins. Once the value is complete only end tokens are
allowed; after one of them the constraint sleeps again. Whitespace between the parts of a JSON value is bounded.

What cannot be used is a RequestError in a sentence, whatever the parser says of its own state. How long any of this
takes is not looked at here (`grammar_work.py` does).
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from halfbyte.engine.request import Constraint
from halfbyte.errors import RequestError, StepError

Bits = NDArray[np.int32]
_ANY_OBJECT = '{"type": "object"}'
# Enough for a value that is laid out over lines, a dozen levels deep; without a bound a model may write nothing else.
_JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
_TOO_COSTLY = ("ParserTooComplex", "LexerTooComplex")


class Vocabulary(Protocol):
    """What is needed of a tokenizer (`halfbyte.model.tokenizer.Tokenizer` has it)."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def special(self) -> dict[str, int]: ...
    def token_bytes(self, id: int) -> bytes: ...
    def encode(self, text: str) -> list[int]: ...


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            "structured output needs the package llguidance, which is not installed here; pip install llguidance, or "
            "send the request without a schema or grammar."
        ) from None
    return llguidance


class _Wrapper:
    """A vocabulary in the shape llguidance asks for."""

    def __init__(self, vocabulary: Vocabulary, eos: int) -> None:
        self.eos_token_id, self.bos_token_id = eos, None
        self.tokens = [vocabulary.token_bytes(i) for i in range(vocabulary.vocab_size)]
        self.special_token_ids = sorted(set(vocabulary.special.values()) | {eos})
        self._encode: Callable[[str], list[int]] = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def too_costly(kind: str) -> RequestError:
    return RequestError(
        f"the {kind} of this request is too costly to follow; make it simpler (fewer alternatives, shorter bounds and "
        f"patterns)."
    )


class GrammarCompiler:
    """Compiles constraints, keeping the last `cache` grammars; a request gets a copy of the fresh matcher.

    May be asked by several threads."""

    def __init__(self, vocabulary: Vocabulary, end_tokens: Sequence[int], *, cache: int = 128) -> None:
        self.vocabulary = vocabulary
        self.end_tokens = tuple(t for t in end_tokens if t < vocabulary.vocab_size)
        self.hits = self.misses = 0
        self._cache: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._size = cache
        self._tokenizer: Any = None
        self._lock = threading.Lock()

    def _ll_tokenizer(self) -> Any:
        with self._lock:
            if self._tokenizer is None:  # takes about a second for gpt-oss's vocabulary, so only if somebody asks
                llguidance = _llguidance()
                ends = list(self.end_tokens) or [self.vocabulary.vocab_size - 1]
                wrapper = llguidance.TokenizerWrapper(_Wrapper(self.vocabulary, ends[0]))
                self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=self.vocabulary.vocab_size, eos_token=ends)
            return self._tokenizer

    def known(self, constraint: Constraint) -> bool:
        """Whether it is compiled already."""
        return _key(constraint) in self._cache

    def matcher(self, constraint: Constraint) -> Any:
        """At the grammar's start, one mask computed: a grammar that allows nothing at all is found here."""
        key = kind, source = _key(constraint)
        with self._lock:
            compiled = self._cache.get(key)
            if compiled is not None:
                self.hits += 1
                self._cache.move_to_end(key)
                return compiled.deep_copy()
            self.misses += 1
        try:
            matcher = self._compile(kind, source)
        except ValueError as e:
            raise RequestError(f"the {kind} of this request cannot be read: {_one_line(str(e))}.") from None
        with self._lock:
            self._cache[key] = matcher
            if len(self._cache) > self._size:
                self._cache.popitem(last=False)
        return matcher.deep_copy()

    def _compile(self, kind: str, source: str) -> Any:
        llguidance = _llguidance()
        if kind in ("json_object", "json_schema"):
            text = _ANY_OBJECT if kind == "json_object" else source
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
        elif kind in ("regex", "ebnf"):
            grammar = llguidance.grammar_from(kind, source)
        else:
            raise RequestError(f"a constraint of kind {kind!r} is not known (json_object, json_schema, regex, ebnf).")
        limits = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
        matcher = llguidance.LLMatcher(self._ll_tokenizer(), grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            first = matcher.deep_copy()
            first.compute_bitmask()
            if first.is_error():
                matcher = first
        if matcher.is_error():
            if matcher.stop_reason() in _TOO_COSTLY:
                raise too_costly(kind)
            text = _one_line(matcher.get_error())
            if "NoExtension" in text:
                text = "there is no value that it allows"
            raise RequestError(f"the {kind} of this request cannot be used: {text}.")
        return matcher

    def compile(self, constraint: Constraint, prompt: Sequence[int]) -> GrammarState:
        ends = constraint.end_tokens or self.end_tokens
        return GrammarState(
            self.matcher(constraint), constraint.triggers, ends, self.end_tokens, prompt, self.vocabulary.vocab_size
        )


class GrammarState:
    """One sequence's place in its grammar. `fresh` stays at the grammar's start, to wake up from."""

    __slots__ = ("_clear", "_fresh", "_matcher", "_set", "_triggers", "_vocab", "_width", "ends")

    def __init__(
        self, fresh: Any, triggers: tuple[tuple[int, ...], ...], ends: Sequence[int], llguidance_ends: Sequence[int],
        prompt: Sequence[int], vocab: int,
    ) -> None:  # fmt: skip
        self._fresh = fresh
        self._triggers = triggers
        self.ends = frozenset(ends)
        self._vocab = vocab
        self._width = (vocab + 31) // 32
        self._clear, self._set = _bits(llguidance_ends, self._width), _bits(self.ends, self._width)
        awake = not triggers or _ends_with(prompt, triggers)
        self._matcher: Any = fresh.deep_copy() if awake else None

    @property
    def awake(self) -> bool:
        return self._matcher is not None

    def wakes(self, tokens: Sequence[int]) -> bool:
        """Whether a constraint that sleeps would be woken by the last of these."""
        return bool(self._triggers) and _ends_with(tokens, self._triggers)

    @property
    def longest_trigger(self) -> int:
        return max((len(t) for t in self._triggers), default=1)

    def copy(self) -> GrammarState:
        """The same place for another choice of the request."""
        new = object.__new__(GrammarState)
        for name in self.__slots__:
            setattr(new, name, getattr(self, name))
        new._matcher = None if self._matcher is None else self._matcher.deep_copy()
        return new

    def observe(self, tokens: Sequence[int]) -> None:
        """`tokens` ends with one newly committed token."""
        token = tokens[-1]
        if self._matcher is not None:
            if token in self.ends and self._matcher.is_accepting():
                self._matcher = None
            elif not self._matcher.consume_token(token):
                raise StepError(f"token {token} is not one that the grammar of this request allows.")
        if self._matcher is None and self._triggers and _ends_with(tokens, self._triggers):
            self._matcher = self._fresh.deep_copy()

    def mask(self) -> Bits | None:
        """One bit per token that may come next; None: all may."""
        if self._matcher is None:
            return None
        bits = np.zeros(self._width, np.int32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():
            if self._matcher.stop_reason() in _TOO_COSTLY:
                raise too_costly("schema")
            raise StepError("the grammar of this request allows no further token.")
        bits &= ~self._clear  # llguidance ends with its own end tokens, we with the constraint's
        if self._matcher.is_accepting():
            bits |= self._set
        return bits

    def trim(self, tokens: Sequence[int], draft: list[int]) -> list[int]:
        """As much of a draft as stays inside the grammar; a trigger is never drafted, because a mask follows it."""
        if self._matcher is not None:
            for i, token in enumerate(draft):
                if token in self.ends:
                    draft = draft[:i]
                    break
            return draft[: self._matcher.validate_tokens(draft)]
        longest = max(len(t) for t in self._triggers) if self._triggers else 0
        recent = list(tokens[-longest:]) if longest else []
        for i, token in enumerate(draft):
            recent.append(token)
            if _ends_with(recent, self._triggers):
                return draft[:i]
        return draft

    def masks(self, draft: list[int]) -> list[Bits | None]:
        """Masks of the next token and of the token after each of `draft`, which `trim` has passed."""
        out: list[Bits | None] = [self.mask()]
        if self._matcher is None:
            return out + [None] * len(draft)
        for token in draft:
            self._matcher.consume_token(token)
            out.append(self.mask())
        if draft:
            self._matcher.rollback(len(draft))
        return out


def _key(constraint: Constraint) -> tuple[str, str]:
    return constraint.kind, "" if constraint.kind == "json_object" else constraint.source


def _ends_with(tokens: Sequence[int], triggers: tuple[tuple[int, ...], ...]) -> bool:
    return any(len(tokens) >= len(t) and tuple(tokens[len(tokens) - len(t) :]) == t for t in triggers if t)


def _bits(tokens: Sequence[int] | frozenset[int], width: int) -> Bits:
    bits = np.zeros(width * 32, np.uint8)
    bits[[t for t in tokens if t < width * 32]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _one_line(text: str) -> str:
    """The reason alone: without the parser's state and its own notation, and not longer than a sentence."""
    if "panic" in text:
        return "the parser failed on it"
    if reason := re.search(r"^error: (.+)$", text, re.MULTILINE):  # after a drawing of the expression
        text = reason[1]
    text = re.sub(r":\s+\(.*", "", " ".join(text.partition("<state>")[0].split()))
    return text.rstrip(".")[:200]
