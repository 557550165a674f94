"""A process in which grammars are tried before the engine compiles them: `python -m halfbyte.engine.grammar_trial`.

A schema does not show how much time and memory its compilation takes (a `multipleOf` of five digits takes half a
minute), and native code can only be stopped by ending its process. So a schema is first compiled in a child process,
under the kernel's limits on processor time and memory. A schema that passes is cheap enough to be compiled again in the
engine, and the memory it takes is known; one that does not pass ends only the child, and the next trial starts another.

Only an end that the grammar can cause (a limit, a crash of the compiler) is a verdict on it. A process ended by
something else, such as the kernel when memory is short, says nothing: the grammar is tried again in another one.
"""

from __future__ import annotations

import ctypes
import json
import math
import pickle
import resource
import signal
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from halfbyte.engine.grammar import GrammarCompiler, GrammarVocabulary, too_costly
from halfbyte.engine.request import Constraint
from halfbyte.errors import CapacityError, HalfbyteError, RequestError
from halfbyte.gates import child_environment

CPU_SECONDS = 4
WALL_SECONDS = 120.0  # a busy machine may need many seconds for four seconds of processor time
MEMORY = 1 << 30  # bytes beyond what the process has before a trial
STACK = 4 << 20  # less than the engine's threads have
ATTEMPTS = 2
ENDING_SECONDS = 5.0  # for a process that has closed its pipe to be gone
# Signals that a grammar does not cause: the system's when memory is short, and what people and supervisors send.
FOREIGN_ENDS = frozenset(-s for s in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGBUS))
_SIZE = struct.Struct("<I")


@dataclass(frozen=True)
class TrialTokens:
    """The part of a vocabulary that a parser needs, and the tokens that may end a text."""

    tokens: list[bytes]
    special: dict[str, int]
    ends: list[int]


class TrialVocabulary:
    """Encodes by the longest match: any encoding will do for the text that a grammar forces."""

    def __init__(self, vocabulary: TrialTokens) -> None:
        self._tokens, self.special, self.vocab_size = vocabulary.tokens, vocabulary.special, len(vocabulary.tokens)
        self._ids = {token: id for id, token in enumerate(vocabulary.tokens) if token}
        self._longest = max(map(len, self._ids))

    def token_bytes(self, id: int) -> bytes:
        return self._tokens[id]

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        out: list[int] = []
        data = text.encode("utf-8", "surrogatepass")
        while data:
            head = next((data[:n] for n in range(self._longest, 0, -1) if data[:n] in self._ids), None)
            if head is None:
                return out  # a vocabulary without this byte
            out.append(self._ids[head])
            data = data[len(head) :]
        return out


class Trials:
    """The parent's side. Runs one trial at a time; several instances run several."""

    def __init__(self, vocabulary: GrammarVocabulary, end_tokens: tuple[int, ...]) -> None:
        self._vocabulary, self._ends = vocabulary, end_tokens
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def check(self, constraint: Constraint) -> int:
        """The bytes that the compiled grammar takes. Raises RequestError if it is invalid or too costly to compile."""
        for _ in range(ATTEMPTS):
            answer = None if self._closed else self._try(constraint)
            if answer is not None:
                error, size = json.loads(answer)
                if error:
                    raise RequestError(str(error))
                return int(size)
        raise CapacityError("the process that tries grammars was ended by the system; try again later.")

    def _try(self, constraint: Constraint) -> bytes | None:
        """The answer of the process; None if something else ended it. Raises if the grammar ended it."""
        try:
            process = self._process or self._start()
        except OSError as e:
            raise CapacityError(f"no process could be started to check the grammar ({e}); try again later.") from None
        assert process.stdin is not None
        assert process.stdout is not None
        too_late = threading.Event()

        def end() -> None:
            too_late.set()
            process.kill()

        timer = threading.Timer(WALL_SECONDS, end)
        timer.start()
        try:
            _write(process.stdin, pickle.dumps(constraint))
            answer = _read(process.stdout)
        except OSError:
            answer = None
        finally:
            timer.cancel()
        if answer is not None:
            return answer
        self._process = None
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)  # it ends by itself, with the status that says why
        process.kill()
        process.communicate()
        if process.returncode in FOREIGN_ENDS and not too_late.is_set():
            return None
        raise too_costly(constraint.kind)

    def _start(self) -> subprocess.Popen[bytes]:
        v = self._vocabulary
        tokens = TrialTokens([v.token_bytes(i) for i in range(v.vocab_size)], dict(v.special), list(self._ends))
        command = [sys.executable, "-m", "halfbyte.engine.grammar_trial", str(CPU_SECONDS)]
        path = ":".join(p for p in sys.path if p)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=child_environment(PYTHONPATH=path),
        )  # fmt: skip
        assert self._process.stdin is not None
        _write(self._process.stdin, pickle.dumps(tokens))
        return self._process

    def close(self) -> None:
        """For good: a trial that runs ends without a verdict."""
        self._closed = True
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _write(stream: IO[bytes], body: bytes) -> None:
    stream.write(_SIZE.pack(len(body)) + body)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes | None:
    head = stream.read(_SIZE.size)
    if len(head) < _SIZE.size:
        return None
    return stream.read(_SIZE.unpack(head)[0])


def _limit(cpu_seconds: int) -> None:
    """Limit the next trial. The hard limits stay, so that a later trial can set its own."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = math.ceil(usage.ru_utime + usage.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (used + cpu_seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    if sys.platform == "linux":
        space = _memory()[0] + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (space, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _memory() -> tuple[int, int]:
    """Bytes of address space and of memory that this process has, without what it has freed."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as f:
        space, resident, *_ = (int(pages) * resource.getpagesize() for pages in f.read().split())
    return space, resident


def main(cpu_seconds: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: an engine that is killed leaves no trial behind
    threading.stack_size(STACK)
    first = _read(sys.stdin.buffer)
    if first is None:
        return 0
    vocabulary: TrialTokens = pickle.loads(first)
    compiler = GrammarCompiler(TrialVocabulary(vocabulary), vocabulary.ends, cache_bytes=0)
    with suppress(HalfbyteError):  # the first trial reports what is wrong
        compiler.matcher(Constraint("json_object", ""))  # what is built once does not count for the first grammar
    while (body := _read(sys.stdin.buffer)) is not None:
        constraint: Constraint = pickle.loads(body)
        _limit(cpu_seconds)
        before = _memory()[1] if sys.platform == "linux" else 0
        error, size = ["the grammar of this request cannot be used."], [0]  # if the attempt leaves no message

        def attempt(
            constraint: Constraint = constraint, error: list[str] = error, size: list[int] = size, before: int = before
        ) -> None:
            try:
                grammar = compiler.matcher(constraint)
                error[0] = ""
                size[0] = _memory()[1] - before if sys.platform == "linux" else len(constraint.source)
                del grammar
            except HalfbyteError as e:
                error[0] = str(e)

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        _write(sys.stdout.buffer, json.dumps([error[0], size[0]]).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
