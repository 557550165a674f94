"""A process in which grammars are tried before the engine compiles them: `python -m halfbyte.engine.grammar_trial`.

A compiler's time and memory have no bound that can be seen in a schema (a `multipleOf` of five digits takes half a
minute), and native code cannot be stopped from outside but by ending its process. So a schema is compiled there first,
under the kernel's own limits of processor time and memory. What passes is cheap enough to be compiled again in the
engine; what does not ends that process alone, and the next trial starts another.
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
from dataclasses import dataclass
from typing import IO

from halfbyte.engine.grammar import GrammarCompiler, Vocabulary, too_costly
from halfbyte.engine.request import Constraint
from halfbyte.errors import CapacityError, HalfbyteError, RequestError
from halfbyte.gates import child_environment

CPU_SECONDS = 4
WALL_SECONDS = 120.0  # for one that waits for something else; a busy machine may need many seconds for four of its own
MEMORY = 1 << 30  # bytes beyond what the process has before a trial
STACK = 4 << 20  # less than the engine's threads have
_SIZE = struct.Struct("<I")


@dataclass(frozen=True)
class Words:
    """A vocabulary, as much of it as a parser needs, and the tokens that may end a text."""

    tokens: list[bytes]
    special: dict[str, int]
    ends: list[int]


class TrialVocabulary:
    """Encodes by the longest match: where a grammar forces text, any encoding serves a trial."""

    def __init__(self, words: Words) -> None:
        self._tokens, self.special, self.vocab_size = words.tokens, words.special, len(words.tokens)
        self._ids = {token: id for id, token in enumerate(words.tokens) if token}
        self._longest = max(map(len, self._ids))

    def token_bytes(self, id: int) -> bytes:
        return self._tokens[id]

    def encode(self, text: str) -> list[int]:
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
    """The parent's side. One trial at a time: whoever wants more has several of these."""

    def __init__(self, vocabulary: Vocabulary, end_tokens: tuple[int, ...]) -> None:
        self._vocabulary, self._ends = vocabulary, end_tokens
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, constraint: Constraint) -> None:
        """Raises RequestError if the grammar is wrong or takes too much to compile."""
        try:
            process = self._process or self._start()
        except OSError as e:
            raise CapacityError(f"no process could be started to try a grammar in ({e}); try again later.") from None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(WALL_SECONDS, process.kill)
        timer.start()
        try:
            _write(process.stdin, pickle.dumps(constraint))
            answer = _read(process.stdout)
        except OSError:
            answer = None
        finally:
            timer.cancel()
        if answer is None:
            self.close()
            raise too_costly(constraint.kind)
        if error := json.loads(answer):
            raise RequestError(str(error))

    def _start(self) -> subprocess.Popen[bytes]:
        v = self._vocabulary
        words = Words([v.token_bytes(i) for i in range(v.vocab_size)], dict(v.special), list(self._ends))
        command = [sys.executable, "-m", "halfbyte.engine.grammar_trial", str(CPU_SECONDS)]
        path = ":".join(p for p in sys.path if p)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=child_environment(PYTHONPATH=path),
        )  # fmt: skip
        assert self._process.stdin is not None
        _write(self._process.stdin, pickle.dumps(words))
        return self._process

    def close(self) -> None:
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
    """From now on. The hard limits stay, so that the next trial can set its own."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = math.ceil(usage.ru_utime + usage.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (used + cpu_seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as f:
            pages = int(f.read().split()[0])
        space = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (space, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main(cpu_seconds: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: an engine that is killed leaves no trial behind
    threading.stack_size(STACK)
    first = _read(sys.stdin.buffer)
    if first is None:
        return 0
    words = pickle.loads(first)
    compiler = GrammarCompiler(TrialVocabulary(words), words.ends, cache=0)
    while (body := _read(sys.stdin.buffer)) is not None:
        constraint: Constraint = pickle.loads(body)
        _limit(cpu_seconds)
        error = ["the grammar of this request cannot be used."]  # if the attempt says nothing

        def attempt(constraint: Constraint = constraint, error: list[str] = error) -> None:
            try:
                compiler.matcher(constraint)
                error[0] = ""
            except HalfbyteError as e:
                error[0] = str(e)

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        _write(sys.stdout.buffer, json.dumps(error[0]).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
