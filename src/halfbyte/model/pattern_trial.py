"""A process in which the patterns of a tokenizer.json are tried: `python -m halfbyte.model.pattern_trial`.

A pattern says how text is cut before it is merged into tokens. One that backtracks makes the regular expression engine
give up with a panic, or take minutes, on text as plain as a row of letters. Neither can be stopped in this process, and
a panic writes its own lines to the terminal. So patterns other than gpt-oss's are tried first in a child process, on
text that makes them backtrack, within a limit of processor time.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from halfbyte.errors import CapacityError, CheckpointError
from halfbyte.gates import child_environment
from halfbyte.model.plain_file import is_failure, one_line, quote

CPU_SECONDS = 5
WALL_SECONDS = 120.0  # a busy machine may need many seconds for five seconds of processor time
UNITS = ("a", "A", "aA", "ab", "1", "a1", " ", "a ", "\n", " \n", "\t", ".", "-", "_", "'", "é", "字", "\u0301")
ENDS = ("", "!", "a", "1", " ", "\n")
REPEATS = 40  # a match that doubles its work with each character exceeds the engine's limit
MANY_REPEATS = 2048  # for work that grows with the square or the cube
MAX_LITERALS = 64
# Signals that a pattern does not cause: the system's when memory is short, and what people and supervisors send.
FOREIGN_ENDS = frozenset(-s for s in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))


def patterns(part: Any) -> Iterator[str]:
    """All regular expressions in a part of a tokenizer.json."""
    if isinstance(part, dict):
        if isinstance(pattern := part.get("Regex"), str):
            yield pattern
        part = list(part.values())
    if isinstance(part, list):
        for value in part:
            yield from patterns(value)


def try_patterns(raw: dict[str, Any], where: str, trusted: str) -> None:
    """Raise CheckpointError if a pattern of `raw` other than `trusted` cannot cut text within the limit."""
    steps = {name: raw.get(name) for name in ("normalizer", "pre_tokenizer")}
    foreign = sorted(set(patterns(list(steps.values()))) - {trusted})
    if not foreign:
        return
    tokenizer = {"version": "1.0", **steps, "model": {"type": "BPE", "vocab": {}, "merges": []}}
    command = [sys.executable, "-m", "halfbyte.model.pattern_trial"]
    environment = child_environment(PYTHONPATH=":".join(p for p in sys.path if p))
    task = json.dumps({"tokenizer": json.dumps(tokenizer), "texts": list(_texts("".join(foreign)))}).encode()
    try:
        child = subprocess.run(
            command, input=task, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
            timeout=WALL_SECONDS,
        )  # fmt: skip
        problem, status = child.stdout.decode("utf-8", "replace"), child.returncode
    except OSError as e:
        raise CapacityError(f"no process could be started to try the patterns of {where} ({e}).") from None
    except subprocess.TimeoutExpired:
        problem, status = "", -signal.SIGXCPU
    if status == 0:
        return
    if status in FOREIGN_ENDS:
        raise CapacityError(f"the process that tries the patterns of {where} was ended by the system; try again.")
    if status == -signal.SIGXCPU:
        problem = f"it takes more than {CPU_SECONDS} s for some thousand characters"
    reason = problem or f"the process that tried it ended with status {status}"
    raise CheckpointError(
        f"{where}: the pattern {quote(foreign[0])} cannot cut text ({reason}); replace the file with the "
        "tokenizer.json that was published with the model."
    )


def _texts(literals: str) -> Iterator[str]:
    """Repeated text that patterns backtrack on, with the letters and digits that the patterns name themselves."""
    units = dict.fromkeys([*UNITS, *[c for c in dict.fromkeys(literals) if c.isalnum()][:MAX_LITERALS]])
    for repeats in (REPEATS, MANY_REPEATS):
        yield from (unit * repeats + end for unit in units for end in ENDS)


def _child() -> int:
    import tokenizers

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    task = json.load(sys.stdin.buffer)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(task["tokenizer"])
        for text in task["texts"]:
            tokenizer.encode_batch_fast([text], add_special_tokens=False)
    except BaseException as e:  # the tokenizers package raises bare Exception, and panics
        if not is_failure(e):
            raise
        sys.stdout.write(one_line(e))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_child())
