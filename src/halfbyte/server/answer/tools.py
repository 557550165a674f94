"""The tools of one request: how they are shown to the model, and which one a call of the model means.

Three APIs describe tools in three ways; all become `Function` here. A tool that only a hosted service could run is
refused by the endpoint that reads it, not here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from halfbyte.harmony.messages import FUNCTION_NAME, FUNCTIONS, Tool, ToolNamespace
from halfbyte.server.http.errors import bad_request

Mode = Literal["auto", "none", "required"]
# What a client's tool is called in its API. To the model they are all functions.
Form = Literal["function", "custom", "tool_search", "local_shell"]
# A tool that takes free text ("custom" in OpenAI's terms) is shown to the model as a function of one string.
CUSTOM_FIELD = "input"


@dataclass(frozen=True)
class Function:
    name: str
    namespace: str = FUNCTIONS
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False
    form: Form = "function"

    @property
    def recipient(self) -> str:
        return f"{self.namespace}.{self.name}"

    @property
    def custom(self) -> bool:
        return self.form == "custom"

    @property
    def schema(self) -> dict[str, Any]:
        if self.custom:
            return custom_schema()
        return self.parameters if self.parameters is not None else {"type": "object", "properties": {}}

    @property
    def forced_schema(self) -> dict[str, Any]:
        """The schema of a call that the model may not want to make: it invents no properties beyond those named."""
        return self.schema if self.strict else _closed(self.schema)


_MEMBERS, _LISTS = ("properties", "$defs", "definitions"), ("anyOf", "oneOf", "prefixItems")
# Beside these an object's properties are not all that it may have.
_OPEN = frozenset(
    [
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "propertyNames",
        "minProperties",
        "anyOf",
        "oneOf",
        "not",
        "$ref",
        "$dynamicRef",
    ]
)
_MERGED = frozenset(("allOf", "if", "dependentSchemas", "$recursiveRef"))  # one object has several schemas
_DEEPEST = 64


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false` where an object names its properties and says nothing of others.
    Unchanged where one object has several schemas, or where it is nested too deeply."""
    try:
        closed: dict[str, Any] = _close(schema, 0)
    except _NotClosableError:
        return schema
    return closed


class _NotClosableError(Exception):
    pass


def _close(schema: Any, depth: int) -> Any:
    if not isinstance(schema, dict):
        return schema
    if depth > _DEEPEST or not _MERGED.isdisjoint(schema):
        raise _NotClosableError
    out = dict(schema)
    for key in _MEMBERS:
        if isinstance(members := schema.get(key), dict):
            out[key] = {name: _close(member, depth + 1) for name, member in members.items()}
    for key in _LISTS:
        if isinstance(members := schema.get(key), list):
            out[key] = [_close(member, depth + 1) for member in members]
    if "items" in schema:
        out["items"] = _close(schema["items"], depth + 1)
    properties = schema.get("properties")
    if isinstance(properties, dict) and _OPEN.isdisjoint(schema) and properties.keys() >= _required(schema):
        out["additionalProperties"] = False
    return out


def _required(schema: dict[str, Any]) -> set[str]:
    required = schema.get("required")
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def custom_schema() -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {CUSTOM_FIELD: {"type": "string"}},
        "required": [CUSTOM_FIELD],
        "additionalProperties": False,
    }


@dataclass(frozen=True)
class ToolChoice:
    """`required` with one allowed recipient is what the APIs call a named function."""

    mode: Mode = "auto"
    allowed: tuple[str, ...] | None = None  # recipients; None: every tool


class Toolbox:
    def __init__(self, functions: Iterable[Function] = (), descriptions: dict[str, str] | None = None) -> None:
        self.functions = tuple(functions)
        self.descriptions = descriptions or {}  # of namespaces
        self._by_recipient: dict[str, Function] = {}
        self._by_name: dict[str, Function] = {}
        for f in self.functions:
            if f.recipient in self._by_recipient:
                raise bad_request(f"two tools are called {f.name!r}; names must differ.", "tools")
            self._by_recipient[f.recipient] = f
            self._by_name.setdefault(f.name, f)

    def __bool__(self) -> bool:
        return bool(self.functions)

    @property
    def recipients(self) -> tuple[str, ...]:
        return tuple(f.recipient for f in self.functions)

    @property
    def strict(self) -> bool:
        """Whether the arguments of some tool must follow its schema."""
        return any(f.strict and f.parameters is not None for f in self.functions)

    def limited_to(self, choice: ToolChoice) -> Toolbox:
        """Only what the model may call now, which is all it is shown."""
        if choice.mode == "none":
            return Toolbox()
        if choice.allowed is None:
            return self
        return Toolbox((f for f in self.functions if f.recipient in choice.allowed), self.descriptions)

    def namespaces(self) -> tuple[ToolNamespace, ...]:
        by_namespace: dict[str, list[Function]] = {}
        for f in self.functions:
            by_namespace.setdefault(f.namespace, []).append(f)
        return tuple(
            ToolNamespace(
                name,
                tuple(Tool(f.name, f.description, f.schema if f.custom else f.parameters) for f in members),
                self.descriptions.get(name),
            )
            for name, members in by_namespace.items()
        )

    def offered(self, recipient: str) -> Function | None:
        """The function that the model meant; None if it was not offered."""
        function = self._by_recipient.get(recipient) or self._by_name.get(recipient)
        if function is None:
            # "functions.multi_agent_v1.close_agent", "functions/get_weather": models decorate.
            last = re.split(r"[/:]", recipient.removeprefix(f"{FUNCTIONS}."))[-1]
            function = self._by_recipient.get(last) or self._by_name.get(last)
        return function

    def find(self, recipient: str) -> Function:
        """The function that the model meant. A name that was not offered is passed on as it is."""
        return self.offered(recipient) or Function(recipient.removeprefix(f"{FUNCTIONS}.") or "unknown")

    def by_name(self, name: str, namespace: str | None = None) -> Function | None:
        if namespace is not None:
            return self._by_recipient.get(f"{namespace}.{name}")
        return self._by_recipient.get(f"{FUNCTIONS}.{name}") or self._by_name.get(name)

    def require(self, name: str, param: str, namespace: str | None = None) -> Function:
        """The tool a client named in `param`, or the refusal that says it sent no such tool."""
        function = self.by_name(name, namespace)
        if function is None:
            raise bad_request(f"'tool_choice' names the tool {name!r}, which is not among 'tools'.", param)
        return function


def check_name(name: str, param: str) -> str:
    if not FUNCTION_NAME.fullmatch(name):
        raise bad_request(
            f"the tool name {name!r} may hold only letters, digits, '_', '-' and '.' (at most 128).", param
        )
    return name


def check_choice(choice: ToolChoice, tools: Toolbox, param: str = "tool_choice") -> ToolChoice:
    if choice.mode == "required" and not tools:
        raise bad_request(f"'{param}' asks for a call, but no tools were given.", param)
    return choice


def arguments_object(arguments: str) -> dict[str, Any]:
    """The arguments as an object, where an API wants one; text that is no object is passed on, not lost."""
    try:
        value = json.loads(arguments or "{}", strict=False)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"_unparsed": arguments}


def custom_input(arguments: str) -> str:
    """The free text of a custom tool call; a model that wrote no JSON around it meant all of it."""
    try:
        value = json.loads(arguments, strict=False)
    except ValueError:
        return arguments
    if isinstance(value, dict) and isinstance(value.get(CUSTOM_FIELD), str):
        return str(value[CUSTOM_FIELD])
    return value if isinstance(value, str) else arguments
