"""The items of /v1/responses as harmony messages: of one request, and of the stored ones it continues.

An output of a call that nobody made is refused by its place.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from halfbyte.harmony.messages import COMMENTARY, FUNCTIONS, JSON, Message, Role
from halfbyte.server.answer.tools import CUSTOM_FIELD, Toolbox
from halfbyte.server.api.carried_reasoning import decode_reasoning
from halfbyte.server.api.openai_responses_schema import (
    AdditionalToolsItem,
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    LocalShellCallItem,
    LocalShellOutputItem,
    MessageItem,
    ReasoningItem,
    ToolSearchCallItem,
    ToolSearchOutputItem,
    WebSearchCallItem,
    text_of,
    toolbox,
)
from halfbyte.server.http import sse
from halfbyte.server.http.errors import bad_request


@dataclass
class ResponseHistory:
    """A conversation in the making: opening instructions, messages, and which call each id was."""

    opening: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    calls: dict[str, str] = field(default_factory=dict)
    tools: list[Any] = field(default_factory=list)  # that came with the input, as they came

    @property
    def size(self) -> int:
        """How many characters it has, or so."""
        return sum(map(len, self.opening)) + sum(len(m.text) for m in self.messages)

    def copy(self) -> ResponseHistory:
        return ResponseHistory(list(self.opening), list(self.messages), dict(self.calls), list(self.tools))

    def add_tools(self, items: str | list[Any] | None) -> None:
        """Adds the tools that the input brings; call it before anything else in the input is read."""
        if isinstance(items, list):
            carriers = [i for i in items if isinstance(i, ToolSearchOutputItem | AdditionalToolsItem)]
            self.tools += [tool for item in carriers for tool in item.tools]

    def add(self, items: str | list[Any] | None, tools: Toolbox) -> None:
        if items is None:
            return
        if isinstance(items, str):
            self.messages.append(Message.user(items))
            return
        for position, item in enumerate(items):
            self._item(item, f"input.{position}", tools)

    def _item(self, item: Any, where: str, tools: Toolbox) -> None:
        if isinstance(item, MessageItem):
            self._message(item)
        elif isinstance(item, ReasoningItem):
            text = text_of(item.content) or decode_reasoning(item.encrypted_content or "") or text_of(item.summary)
            if text:
                self.messages.append(Message.analysis(text))
        elif isinstance(item, FunctionCallItem):
            self.call(self._recipient(item, tools), item.call_id, item.arguments)
        elif isinstance(item, CustomCallItem):
            self.call(self._recipient(item, tools), item.call_id, json.dumps({CUSTOM_FIELD: item.input}))
        elif isinstance(item, ToolSearchCallItem):
            self.call(f"{FUNCTIONS}.tool_search", item.call_id or item.id or "", sse.compact(item.arguments or {}))
        elif isinstance(item, LocalShellCallItem):
            fields = {key: value for key, value in item.action.items() if key != "type" and value}
            self.call(f"{FUNCTIONS}.local_shell", item.call_id or item.id or "", sse.compact(fields))
        elif isinstance(item, ToolSearchOutputItem):
            functions = toolbox((), item.tools)[0].functions
            self._output(item.call_id or item.id, sse.compact({"tools": [f.recipient for f in functions]}), where)
        elif isinstance(item, LocalShellOutputItem):
            self._output(item.call_id or item.id, item.output, where)
        elif isinstance(item, FunctionOutputItem | CustomOutputItem):
            self._output(item.call_id, text_of(item.output), where)
        else:  # tools, which were shown already, and what another service looked up
            assert isinstance(item, AdditionalToolsItem | WebSearchCallItem)

    def _output(self, call_id: str | None, text: str, where: str) -> None:
        recipient = self.calls.get(call_id or "")
        if recipient is None:
            at = f"{where}.call_id"
            raise bad_request(f"'{at}' is {call_id!r}, but no earlier item made that call.", at)
        self.messages.append(Message(Role.TOOL, text, COMMENTARY, recipient=Role.ASSISTANT, name=recipient))

    def _message(self, item: MessageItem) -> None:
        text = text_of(item.content)
        if item.role in ("system", "developer"):
            if self.messages:
                self.messages.append(Message.developer(text))
            else:
                self.opening.append(text)
        elif item.role == "user":
            self.messages.append(Message.user(text))
        else:
            self.messages.append(Message.preamble(text) if item.phase == "commentary" else Message.final(text))

    def _recipient(self, item: FunctionCallItem | CustomCallItem, tools: Toolbox) -> str:
        tool = tools.by_name(item.name, item.namespace)
        return tool.recipient if tool else f"{item.namespace or FUNCTIONS}.{item.name}"

    def call(self, recipient: str, call_id: str, arguments: str) -> None:
        self.calls[call_id] = recipient
        self.messages.append(Message(Role.ASSISTANT, arguments, COMMENTARY, recipient, JSON))
