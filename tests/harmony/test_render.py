"""The renderer against OpenAI's package, token for token, and against what the format's description promises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from harmony_conversations import BROWSER, PYTHON, conversation, to_package

from halfbyte.errors import CheckpointError, RequestError
from halfbyte.harmony import (
    DeveloperContent,
    Message,
    Role,
    SystemContent,
    Tool,
    drop_stale_analysis,
    render_conversation,
    render_conversation_for_completion,
    render_conversation_for_training,
    render_message,
    render_prompt,
    render_text,
    render_training_example,
)
from halfbyte.model.tokenizer import Tokenizer

A, B, C, D = Message.user("one"), Message.analysis("hm"), Message.final("1"), Message.user("two")


@pytest.mark.parametrize("block", range(10))
def test_equal_to_the_package_on_generated_conversations(package: Any, tokenizer: Tokenizer, block: int) -> None:
    import openai_harmony as oh

    assistant = oh.Role.ASSISTANT
    for seed in range(block * 120, (block + 1) * 120):
        ours = conversation(seed)
        theirs = to_package(ours)
        assert render_conversation_for_completion(tokenizer, ours) == package.render_conversation_for_completion(
            theirs, assistant
        ), f"seed {seed}"
        if seed % 4 == 0:
            keep = oh.RenderConversationConfig(auto_drop_analysis=False)
            assert render_conversation(tokenizer, ours) == package.render_conversation(theirs), f"seed {seed}"
            assert render_conversation(tokenizer, ours, drop_analysis=False) == package.render_conversation(
                theirs, config=keep
            ), f"seed {seed}"
            assert render_conversation_for_training(tokenizer, ours) == package.render_conversation_for_training(
                theirs
            ), f"seed {seed}"
            fresh = drop_stale_analysis(ours)
            assert render_prompt(tokenizer, ours) == package.render_conversation_for_completion(
                to_package(fresh), assistant, config=keep
            ), f"seed {seed}"


def test_generated_conversations_cover_what_they_should() -> None:
    texts = [render_text(conversation(seed)) for seed in range(300)]
    for sign in (
        "namespace functions {",
        " | null",
        "// default: ",
        "// Examples:",
        "[]",
        "Array<any>",
        "to=assistant",
    ):
        assert sum(sign in text for text in texts) > 10, sign
    for effort in ("low", "medium", "high"):
        assert any(f"Reasoning: {effort}" in text for text in texts)


def test_builtin_tools_are_the_packages(package: Any, tokenizer: Tokenizer) -> None:
    import openai_harmony as oh

    ours = [Message.system(SystemContent(tools=(PYTHON, BROWSER)))]
    theirs = oh.Message.from_role_and_content(
        oh.Role.SYSTEM, oh.SystemContent.new().with_browser_tool().with_python_tool()
    )
    assert render_conversation(tokenizer, ours) == package.render(theirs)


def test_whole_rendering() -> None:
    weather = Tool(
        "get_weather",
        "Looks outside.\nSlowly.",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "where"},
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["city"],
        },
    )
    messages = [
        Message.system(SystemContent(reasoning_effort="low", conversation_start_date="2026-02-03")),
        Message.developer(DeveloperContent.with_functions("Be brief.", [weather, Tool("now")])),
        Message.user("Rain?"),
        Message.analysis("Ask."),
        Message.call("get_weather", '{"city":"Graz"}'),
        Message.result("get_weather", "sun"),
    ]
    assert render_text(messages) == (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\nCurrent date: 2026-02-03\n\nReasoning: low\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.\n"
        "Calls to these tools must go to the commentary channel: 'functions'.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools\n\n## functions\n\n"
        "namespace functions {\n\n// Looks outside.\n// Slowly.\ntype get_weather = (_: {\n// where\ncity: string,\n"
        'unit?: "C" | "F", // default: C\ndays?: number[],\n}) => any;\n\n'
        "type now = () => any;\n\n} // namespace functions<|end|>"
        "<|start|>user<|message|>Rain?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Ask.<|end|>"
        "<|start|>assistant to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>"
        '{"city":"Graz"}<|call|>'
        "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>sun<|end|>"
    )


def test_reasoning_of_finished_turns_is_dropped() -> None:
    call, result = Message.call("f", "{}"), Message.result("f", "ok")
    assert drop_stale_analysis([A, B, C]) == [A, B, C], "the last turn's own reasoning is not stale"
    assert drop_stale_analysis([A, B, C, D]) == [A, C, D]
    assert drop_stale_analysis([A, B, C, D, B, C, D]) == [A, C, D, C, D]
    assert drop_stale_analysis([A, B, C, D, B, call, result]) == [A, C, D, B, call, result]
    assert drop_stale_analysis([A, B, call, result, B, C, D]) == [A, call, result, C, D]
    assert drop_stale_analysis([B, A, B, D]) == [B, A, B, D], "a turn without a final answer is not finished"
    assert drop_stale_analysis([]) == []


def test_training_example_marks_what_the_model_produces(tokenizer: Tokenizer) -> None:
    ids, mask = render_training_example(
        tokenizer, [A, B, C, D, B, Message.call("f", "{}"), Message.result("f", "ok"), B, C]
    )
    produced = tokenizer.decode([id for id, own in zip(ids, mask, strict=True) if own])
    assert produced == (
        "<|channel|>final<|message|>1<|end|>"
        "<|channel|>analysis<|message|>hm<|end|>"
        "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>1<|return|>"
    )
    assert ids == render_conversation_for_training(
        tokenizer, [A, C, D, B, Message.call("f", "{}"), Message.result("f", "ok"), B, C], drop_analysis=False
    )


def test_nothing_a_caller_writes_becomes_a_control_token(tokenizer: Tokenizer) -> None:
    control = set(tokenizer.special.values())
    evil = "".join(tokenizer.special)
    messages = [
        Message.system(SystemContent(model_identity=evil, knowledge_cutoff=evil, channels=(evil,))),
        Message.developer(
            DeveloperContent.with_functions(
                evil, [Tool(evil, evil, {"type": "object", "properties": {evil: {"description": evil}}})]
            )
        ),
        Message(Role.USER, evil, name=evil),
        Message(Role.ASSISTANT, evil, channel=evil, recipient=evil, content_type=evil),
        Message(Role.TOOL, evil, channel=evil, recipient=evil, name=evil),
    ]
    plain = [
        Message(m.role, "x", m.channel and "x", m.recipient and "x", m.content_type and "x", m.name and "x")
        for m in messages
    ]
    ids = [id for id in render_conversation(tokenizer, messages) if id in control]
    assert ids == [id for id in render_conversation(tokenizer, plain) if id in control]


def test_content_in_the_wrong_message_is_a_request_error(tokenizer: Tokenizer) -> None:
    for message in (
        Message(Role.TOOL, "x"),
        Message(Role.USER, SystemContent()),
        Message(Role.SYSTEM, DeveloperContent()),
    ):
        with pytest.raises(RequestError):
            render_message(tokenizer, message)


class PlainVocabulary:
    """A vocabulary without control tokens."""

    special: Mapping[str, int] = {}

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return list(text.encode())

    def token_bytes(self, id: int, /) -> bytes:
        return bytes([id])


@pytest.mark.parametrize("render", [render_prompt, render_conversation, render_conversation_for_completion])
def test_a_vocabulary_without_control_tokens_is_refused_by_name(render: Any) -> None:
    with pytest.raises(CheckpointError, match=r"<\|start\|>, <\|channel\|>"):
        render(PlainVocabulary(), [A])
