"""OpenAI's chat messages and tools, as dicts or as objects with the same fields, read into harmony's.

    {"role": "user", "content": "What is 17 + 25?"}

A field that is missing, of another type or without a meaning for gpt-oss is refused with its place. The server does not
use this module: it validates whole request bodies first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from halfbyte.errors import RequestError
from halfbyte.harmony.messages import FUNCTION_NAME, Message, Tool, assistant_turn

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(messages: Sequence[Any]) -> tuple[str | None, list[Message]]:
    """(instructions, messages): the instructions that open the conversation, and everything after them.

    Harmony messages may stand among the others.
    """
    if not messages:
        raise RequestError("messages is empty; give at least one message.")
    instructions: list[str] = []
    out: list[Message] = []
    call_names: dict[str, str] = {}
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        if isinstance(message, Message):
            out.append(message)
            continue
        role = _field(message, "role")
        if role not in ROLES:
            raise RequestError(
                f"{where} is {message!r:.80}; give a dict or an object with a role ({', '.join(ROLES)}) and a content."
            )
        content = _field(message, "content")
        if content is None and role != "assistant":  # an assistant that calls has none
            raise RequestError(f"{where} has no content; give text.")
        text = _text(content, f"{where}.content")
        if role in ("system", "developer"):
            if out:
                out.append(Message.developer(text))
            else:
                instructions.append(text)
        elif role == "user":
            out.append(Message.user(text))
        elif role == "assistant":
            out += _assistant(message, text, call_names, where)
        else:
            out.append(Message.result(_function_of(message, call_names, where), text))
    return "\n\n".join(instructions) or None, out


def read_tools(tools: Sequence[Any] | None) -> list[Tool]:
    """Functions in OpenAI's form ({"type": "function", "function": {...}}), bare ({"name": ...}), or harmony's Tool."""
    if isinstance(tools, Mapping | str) or not isinstance(tools, Sequence | None):
        raise RequestError(f"tools is of type {type(tools).__name__}; give a list of functions.")
    out: list[Tool] = []
    for position, tool in enumerate(tools or ()):
        where = f"tools[{position}]"
        if isinstance(tool, Tool):
            out.append(tool)
            continue
        function = _field(tool, "function") or tool
        name, parameters = _field(function, "name"), _field(function, "parameters")
        if not isinstance(name, str) or not name:
            raise RequestError(f"{where} has no name; give a function with a name, a description and parameters.")
        if not FUNCTION_NAME.fullmatch(name):
            raise RequestError(f"{where}.name is {name!r:.80}; use letters, digits, '_', '-' and '.', at most 128.")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise RequestError(f"{where}.parameters is a {type(parameters).__name__}; give a JSON schema as a dict.")
        out.append(Tool(name, _text(_field(function, "description"), f"{where}.description"), parameters))
    names = [tool.name for tool in out]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"two tools are called {twice!r}; names must differ.")
    return out


def _assistant(message: Any, text: str, call_names: dict[str, str], where: str) -> list[Message]:
    reasoning = _field(message, "reasoning_content") or _field(message, "reasoning")
    calls: list[tuple[str, str]] = []
    for number, call in enumerate(_field(message, "tool_calls") or ()):
        function = _field(call, "function") or call
        name, arguments = _field(function, "name"), _field(function, "arguments")
        if not isinstance(name, str):
            raise RequestError(f"{where}.tool_calls[{number}] has no function name.")
        if (id := _field(call, "id")) is not None:
            call_names[id] = name
        calls.append((name, arguments if isinstance(arguments, str) else json.dumps(arguments or {})))
    return assistant_turn(text, _text(reasoning, f"{where}.reasoning"), calls)


def _function_of(message: Any, call_names: dict[str, str], where: str) -> str:
    """The function whose result a message is: by the id of its call, or by name."""
    id = _field(message, "tool_call_id")
    name = call_names.get(id) if id is not None else _field(message, "name")
    if not isinstance(name, str):
        raise RequestError(
            f"{where}.tool_call_id is {id!r}, but no earlier assistant message made that call; give the id of one of "
            "its tool_calls, or the function's name."
        )
    return name


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _text(content: Any, where: str) -> str:
    """Text, or a list of text parts; None is the empty text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"{where} is a {type(content).__name__}; give text.")
    parts: list[str] = []
    for part in content:
        text = part if isinstance(part, str) else _field(part, "text")
        if not isinstance(text, str):
            kind = _field(part, "type") or type(part).__name__
            raise RequestError(f"{where} has a part of type {kind!r}; gpt-oss reads text only.")
        parts.append(text)
    return "".join(parts)
