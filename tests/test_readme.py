"""What a newcomer tries first works: README's Python example, and the suggestions of the chat page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halfbyte import Engine
from halfbyte.engine.python_api import ChatMessage

ROOT = Path(__file__).parents[1]


def test_the_example_prints_the_right_answer(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    exec(compile(example, "README.md", "exec"), {})
    (said,) = re.findall(r"\)  # (.*)$", example, re.M)
    assert capsys.readouterr().out == f"{said}\n"
    assert "17 + 25 = 42" in said


def test_the_embedded_model_answers_what_the_page_suggests() -> None:
    page = (ROOT / "src" / "halfbyte" / "server" / "static" / "index.html").read_text(encoding="utf-8")
    (group,) = re.findall(r'<div class="starters".*?</div>', page, re.S)
    right = {
        "What is 17 + 25?": "17 + 25 = 42.",
        "Sort these numbers from smallest to largest: 31, 4, 15.": "Sorted: 4, 15, 31.",
        "What can you do?": "I can calculate with small numbers, sort and reverse lists",
        "Tell me a joke.": "Why did the byte sleep so well? It was only half awake.",
    }
    questions = re.findall(r"<button[^>]*>(.*?)</button>", group)
    assert set(questions) == set(right)
    with Engine() as engine:
        for question in questions:
            assert engine.chat(question).text.startswith(right[question])
        for first in range(len(questions)):  # all of them in one conversation, each once in front
            asked = questions[first:] + questions[:first]
            for order in (asked, asked[::-1]):
                messages: list[ChatMessage] = []
                for question in order:
                    messages.append({"role": "user", "content": question})
                    answer = engine.chat(messages).text
                    assert answer.startswith(right[question]), messages
                    messages.append({"role": "assistant", "content": answer})
