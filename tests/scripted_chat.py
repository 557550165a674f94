"""A chat in this terminal whose model plays a script: what `test_chat_terminal.py` runs in a pseudo terminal."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence

from halfbyte import gates
from halfbyte.cli.chat import Chat
from halfbyte.cli.conversation import AnswerText, Exchange, Manner
from halfbyte.errors import ContextError, HalfbyteError, PeerDiedError

TABLE = "| layer | sees |\n|---|---|\n| even | 128 |"
LIFETIME = 600  # seconds: whatever happens to the test, no process stays behind
MARKDOWN = f"# Windows\n\nA layer sees **128 tokens**.\n\n{TABLE}\n\n```python\nx = 1\n```\n"


class Script:
    label = "scripted"

    def pieces(self, before: Sequence[Exchange], question: str, manner: Manner) -> Iterator[AnswerText]:
        if question == "long":
            for n in range(10_000):
                yield AnswerText("content", f"word{n} ")
                time.sleep(0.01)
        if question == "gone":
            yield AnswerText("content", "half an answer")
            raise PeerDiedError("the server at http://127.0.0.1:9 does not answer (ConnectError).")
        if question == "too much":
            raise ContextError("prompt and answer are longer than the context.")
        yield AnswerText("reasoning", f"I was asked {question!r}.")
        if question == "markdown":
            while not (gates.cache_folder("chat") / "go").exists():  # the test has seen the spinner
                time.sleep(0.02)
            for at in range(0, len(MARKDOWN), 5):
                yield AnswerText("content", MARKDOWN[at : at + 5])
            return
        told = [e.question for e in before]
        yield AnswerText(
            "content", f"lines={question.count(chr(10)) + 1} before={told} effort={manner.effort} [{question}]"
        )


if __name__ == "__main__":
    signal.alarm(LIFETIME)
    try:
        Chat(Script(), Manner(), reasoning="--reasoning" in sys.argv).run()
    except HalfbyteError as e:
        sys.stderr.write(f"{e}\n")
        sys.exit(e.exit_code)
