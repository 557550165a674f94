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
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    ReasoningItem,
    text_of,
)
from halfbyte.server.http.errors import bad_request


@dataclass
class History:
    """A conversation in the making: opening instructions, messages, and which call each id was."""

    opening: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    calls: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many characters it has, or so."""
        return sum(map(len, self.opening)) + sum(len(m.text) for m in self.messages)

    def copy(self) -> History:
        return History(list(self.opening), list(self.messages), dict(self.calls))

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
        else:
            recipient = self.calls.get(item.call_id)
            if recipient is None:
                raise bad_request(
                    f"'{where}.call_id' is {item.call_id!r}, but no earlier item made that call.", f"{where}.call_id"
                )
            self.messages.append(
                Message(Role.TOOL, text_of(item.output), COMMENTARY, recipient=Role.ASSISTANT, name=recipient)
            )

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
        known = tools.by_name(item.name, item.namespace)
        return known.recipient if known else f"{item.namespace or FUNCTIONS}.{item.name}"

    def call(self, recipient: str, call_id: str, arguments: str) -> None:
        self.calls[call_id] = recipient
        self.messages.append(Message(Role.ASSISTANT, arguments, COMMENTARY, recipient, JSON))
