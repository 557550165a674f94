"""Structured output: which tokens a constraint allows next. llguidance does the parsing.

A constraint may sleep until the generated tokens end with one of its triggers, so a harmony model reasons freely and
has to follow the grammar from where its final or tool message begins. Once the value is complete only end tokens are
allowed; after one of them the constraint sleeps again. Whitespace between the parts of a JSON value is bounded, and so
are digits in a row (`digit_runs.py`).

An unusable grammar is a RequestError of one sentence, whatever the parser reports. `grammar_work.py` bounds the time
that all of this takes.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from halfbyte.byte_cache import ByteCache
from halfbyte.engine.digit_runs import DigitRun
from halfbyte.engine.request import Constraint
from halfbyte.errors import RequestError, StepError
from halfbyte.harmony.vocabulary import Vocabulary

Bits = NDArray[np.int32]
_JSON = ("json_object", "json_schema")
_ANY_OBJECT = '{"type": "object"}'
# Enough for an indented value a dozen levels deep; without a bound a model may write nothing but whitespace.
_JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
CACHE_BYTES = 128 << 20  # of compiled grammars
LEAST_BYTES = 128 << 10  # a compiled grammar takes
_BYTES_PER_CHARACTER = 32  # of a source whose grammar's size has not been measured
_TOO_COSTLY = ("ParserTooComplex", "LexerTooComplex")


class GrammarVocabulary(Vocabulary, Protocol):
    """The part of a tokenizer that grammars need (see `halfbyte.model.tokenizer.Tokenizer`)."""

    @property
    def vocab_size(self) -> int: ...


class _Wrapper:
    """A vocabulary in the form that llguidance requires."""

    def __init__(self, vocabulary: GrammarVocabulary, eos: int) -> None:
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
    """Compiles constraints and keeps grammars of `cache_bytes`; a request gets a copy of the fresh matcher.

    Thread-safe."""

    def __init__(
        self, vocabulary: GrammarVocabulary, end_tokens: Sequence[int], *, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self.vocabulary = vocabulary
        self.end_tokens = tuple(t for t in end_tokens if t < vocabulary.vocab_size)
        self.hits = self.misses = 0
        self._cache: ByteCache[bytes, Any] = ByteCache(cache_bytes)
        self._tokenizer: Any = None
        self._digits: Bits | None = None  # tokens that begin with a digit
        self._lock = threading.Lock()

    def _ll_tokenizer(self) -> Any:
        import llguidance  # here and below: it takes 0.2 s, and few engines meet a grammar

        with self._lock:
            if self._tokenizer is None:  # takes about a second for gpt-oss's vocabulary, so only when needed
                ends = list(self.end_tokens) or [self.vocabulary.vocab_size - 1]
                wrapper = llguidance.TokenizerWrapper(_Wrapper(self.vocabulary, ends[0]))
                self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=self.vocabulary.vocab_size, eos_token=ends)
            return self._tokenizer

    def has(self, constraint: Constraint) -> bool:
        """True if the constraint is compiled already."""
        return grammar_key(constraint) in self._cache

    def matcher(self, constraint: Constraint, size: int | None = None) -> Any:
        """A matcher at the start of the grammar. Computes one mask, to refuse a grammar that allows nothing at all.
        `size` is the memory that the grammar takes, if that was measured."""
        key, kind, source = grammar_key(constraint), constraint.kind, constraint.source
        with self._lock:
            compiled = self._cache.get(key)
            if compiled is not None:
                self.hits += 1
                return compiled.deep_copy()
            self.misses += 1
        try:
            matcher = self._compile(kind, source)
        except ValueError as e:
            raise RequestError(f"the {kind} of this request cannot be read: {_one_line(str(e))}.") from None
        size = _BYTES_PER_CHARACTER * len(source) if size is None else size
        with self._lock:
            self._cache.put(key, matcher, max(size, LEAST_BYTES))
        return matcher.deep_copy()

    def _compile(self, kind: str, source: str) -> Any:
        import llguidance

        if kind in _JSON:
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
            raise _failure(matcher, kind)
        return matcher

    def compile(self, constraint: Constraint, prompt: Sequence[int], size: int | None = None) -> GrammarState:
        ends = constraint.end_tokens or self.end_tokens
        return GrammarState(
            self.matcher(constraint, size),
            constraint.triggers,
            ends,
            self.end_tokens,
            prompt,
            self.vocabulary.vocab_size,
            self._digit_run() if constraint.kind in _JSON else None,
        )

    def _digit_run(self) -> DigitRun:
        vocabulary = self.vocabulary
        if self._digits is None:
            numbers = [t for t in range(vocabulary.vocab_size) if vocabulary.token_bytes(t)[:1].isdigit()]
            self._digits = token_bits(numbers, (vocabulary.vocab_size + 31) // 32)
        return DigitRun(vocabulary.token_bytes, self._digits)


class GrammarState:
    """The position of one sequence in its grammar. `fresh` stays at the start of the grammar, for the next trigger."""

    __slots__ = (
        "_clear", "_fresh", "_fresh_run", "_last_tokens", "_late_tokens", "_matcher", "_run", "_set", "_triggers",
        "_vocab", "_width", "ends",
    )  # fmt: skip

    def __init__(
        self, fresh: Any, triggers: tuple[tuple[int, ...], ...], ends: Sequence[int], llguidance_ends: Sequence[int],
        prompt: Sequence[int], vocab: int, fresh_run: DigitRun | None = None,
    ) -> None:  # fmt: skip
        self._fresh, self._fresh_run = fresh, fresh_run
        self._triggers = triggers
        # Almost every token is ruled out by one look: it neither ends a trigger nor stands one or two before its end.
        # None: a trigger is so short that any token may stand there.
        self._last_tokens = frozenset(t[-1] for t in triggers if t)
        any_token = any(0 < len(t) <= 2 for t in triggers)
        self._late_tokens = None if any_token else frozenset(t[-n] for t in triggers if t for n in (2, 3))
        self.ends = frozenset(ends)
        self._vocab = vocab
        self._width = (vocab + 31) // 32
        self._clear, self._set = token_bits(llguidance_ends, self._width), token_bits(self.ends, self._width)
        self._matcher: Any = None
        self._run: DigitRun | None = None
        if not triggers or _ends_with(prompt, triggers):
            self._wake()

    def _wake(self) -> None:
        self._matcher = self._fresh.deep_copy()
        self._run = None if self._fresh_run is None else self._fresh_run.copy()

    @property
    def awake(self) -> bool:
        return self._matcher is not None

    def wakes(self, tokens: Sequence[int]) -> bool:
        """True if the last of these tokens completes a trigger."""
        return tokens[-1] in self._last_tokens and _ends_with(tokens, self._triggers)

    def may_wake_soon(self, tokens: Sequence[int]) -> bool:
        """True if one of the next two tokens could complete a trigger."""
        if self._late_tokens is not None and tokens[-1] not in self._late_tokens:
            return False
        return any(len(t) <= n or _ends_with(tokens, (t[:-n],)) for t in self._triggers for n in (1, 2))

    @property
    def longest_trigger(self) -> int:
        return max((len(t) for t in self._triggers), default=1)

    def copy(self) -> GrammarState:
        """A copy at this position, for another choice of the request."""
        new = object.__new__(GrammarState)
        for name in self.__slots__:
            setattr(new, name, getattr(self, name))
        new._matcher = None if self._matcher is None else self._matcher.deep_copy()
        new._run = None if self._run is None else self._run.copy()
        return new

    def observe(self, tokens: Sequence[int]) -> None:
        """Advance by one committed token, the last of `tokens`."""
        token = tokens[-1]
        if self._matcher is not None:
            if token in self.ends and self._matcher.is_accepting():
                self._matcher = None
            elif not self._matcher.consume_token(token):
                if _is_costly(self._matcher):
                    raise too_costly("grammar")
                raise StepError(f"the grammar of this request does not allow token {token}.")
            elif self._run is not None:
                self._run.observe(token)
        if self._matcher is None and self.wakes(tokens):
            self._wake()

    def mask(self) -> Bits | None:
        """One bit for each token that may come next; None if all may."""
        if self._matcher is None:
            return None
        bits = np.zeros(self._width, np.int32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():
            raise _failure(self._matcher, "grammar")
        bits &= ~self._clear  # llguidance ends with its own end tokens, we with the constraint's
        if self._matcher.is_accepting():
            bits |= self._set
        return bits if self._run is None else self._run.limit(bits)

    def trim(self, tokens: Sequence[int], draft: list[int]) -> list[int]:
        """Cut a draft where it leaves the grammar, or before it completes a trigger, because a mask follows that."""
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
        """Masks for the next token and for the token after each token of `draft`, which `trim` has returned."""
        out: list[Bits | None] = [self.mask()]
        if self._matcher is None:
            return out + [None] * len(draft)
        run = self._run
        for token in draft:
            self._matcher.consume_token(token)
            if self._run is not None:
                self._run = self._run.copy()
                self._run.observe(token)
            out.append(self.mask())
        self._run = run
        if draft:
            self._matcher.rollback(len(draft))
        return out


def grammar_key(constraint: Constraint) -> bytes:
    """What tells one grammar from another, in a few bytes: a source may have megabytes."""
    source = "" if constraint.kind == "json_object" else constraint.source
    return hashlib.blake2b(f"{constraint.kind}\0{source}".encode("utf-8", "surrogatepass"), digest_size=32).digest()


def _ends_with(tokens: Sequence[int], triggers: tuple[tuple[int, ...], ...]) -> bool:
    return any(len(tokens) >= len(t) and tuple(tokens[len(tokens) - len(t) :]) == t for t in triggers if t)


def token_bits(tokens: Iterable[int], width: int) -> Bits:
    """A mask of `width` words with one bit for each of the tokens."""
    bits = np.zeros(width * 32, np.uint8)
    bits[[t for t in tokens if t < width * 32]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _failure(matcher: Any, kind: str) -> RequestError:
    """Why a grammar cannot be followed, at its start or at a point that an answer has reached."""
    if _is_costly(matcher):
        return too_costly(kind)
    text = _one_line(matcher.get_error())
    if "NoExtension" in text:
        text = "there is no value that it allows"
    return RequestError(f"the {kind} of this request cannot be used: {text}.")


def _is_costly(matcher: Any) -> bool:
    return matcher.stop_reason() in _TOO_COSTLY or "lexer error: too many" in matcher.get_error()


def _one_line(text: str) -> str:
    """The reason as one short line, without the parser's state and notation."""
    if "panic" in text:
        return "the parser failed on it"
    if reason := re.search(r"^error: (.+)$", text, re.MULTILINE):  # after a drawing of the expression
        text = reason[1]
    text = re.sub(r":\s+\(.*", "", " ".join(text.partition("<state>")[0].split()))
    return text.rstrip(".")[:200]
