"""Tool definitions as the TypeScript-like text gpt-oss was trained on.

The layout, odd corners included (which comments go above a property and which behind it, how a default of an enum is
quoted), follows OpenAI's harmony package to the character, because the tokens must be the same. Keywords of JSON
schema that the format has no words for (`anyOf`, `pattern`, `minimum`, ...) are left out, as they are there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from halfbyte.harmony.messages import Tool, ToolNamespace

_PLAIN = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def tools_section(namespaces: Iterable[ToolNamespace]) -> str:
    by_name = {namespace.name: namespace for namespace in namespaces}
    ordered = [by_name[name] for name in sorted(by_name, key=str.encode)]
    return "\n\n".join(["# Tools", *map(_namespace, ordered)])


def _namespace(namespace: ToolNamespace) -> str:
    name = namespace.name
    about = _lines(namespace.description or "")
    if not namespace.tools:
        return "\n".join([f"## {name}\n", *about])
    tools = [line for tool in namespace.tools for line in _tool(tool)]
    return "\n".join([f"## {name}\n", *_comments(about), f"namespace {name} {{\n", *tools, f"}} // namespace {name}"])


def _tool(tool: Tool) -> list[str]:
    argument = "" if tool.parameters is None else f"_: {schema_type(tool.parameters)}"
    return [*_comments(_lines(tool.description)), f"type {tool.name} = ({argument}) => any;\n"]


def schema_type(schema: Any, indent: str = "") -> str:
    """The TypeScript type of a JSON schema; `any` for whatever the format cannot say."""
    if not isinstance(schema, Mapping):
        return "any"
    variants, kind = schema.get("oneOf"), schema.get("type")
    if isinstance(variants, Sequence) and not isinstance(variants, str):
        return "".join(f"\n{indent} | {_union_member(variant, indent)}" for variant in variants)
    if isinstance(kind, Sequence) and not isinstance(kind, str):
        names = ["number" if name == "integer" else name for name in kind if isinstance(name, str)]
        return " | ".join(names) if names else "any"
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        return schema_type(schema["items"], indent) + "[]" if "items" in schema else "Array<any>"
    if kind == "string":
        values = [f'"{value}"' for value in _list(schema.get("enum")) if isinstance(value, str)]
        return " | ".join(values) or "string"
    return _PLAIN.get(kind, "any") if isinstance(kind, str) else "any"


def _object(schema: Mapping[str, Any], indent: str) -> str:
    about = schema.get("description")
    lines = [f"{indent}// {about}\n"] if isinstance(about, str) else []
    lines.append("{\n")
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        required = {name for name in _list(schema.get("required")) if isinstance(name, str)}
        for name, value in properties.items():
            lines.append(_property(name if name in required else f"{name}?", value, indent))
    lines.append(f"{indent}}}")
    return "".join(lines)


def _property(name: str, value: Any, indent: str) -> str:
    """One property with its comments. `name` carries the question mark of an optional one."""
    schema: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    out = []
    if isinstance(title := schema.get("title"), str):
        out.append(f"{indent}// {title}\n{indent}//\n")
    about = schema.get("description") if isinstance(schema.get("description"), str) else None
    if about is not None and "oneOf" not in schema:
        out.append(f"{indent}// {about}\n")
    if examples := _list(schema.get("examples")):
        out.append(f"{indent}// Examples:\n")
        out += [f'{indent}// - "{example}"\n' for example in examples if isinstance(example, str)]
    if isinstance(schema.get("oneOf"), list | tuple):
        return "".join(out) + _union_property(name, schema, about, indent)
    type_ = _nullable(schema, schema_type(value, f"{indent}    "))
    default = f" // {_default(schema)}" if "default" in schema and "oneOf" not in schema else ""
    return "".join(out) + f"{indent}{name}: {type_},{default}\n"


def _union_property(name: str, schema: Mapping[str, Any], about: str | None, indent: str) -> str:
    """A property with `oneOf`: one line per variant. A description that the first variant repeats is omitted."""
    variants = _list(schema["oneOf"])
    first = variants[0].get("description") if variants and isinstance(variants[0], Mapping) else None
    told_above = about is not None and about != first
    out = [f"{indent}// {about}\n"] if told_above else []
    if "default" in schema:
        out.append(f"{indent}// {_default(schema)}\n")
    out.append(f"{indent}{name}:\n")
    for index, value in enumerate(variants):
        variant: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
        comments = []
        described = variant.get("description")
        if isinstance(described, str) and described != about and not (index == 0 and told_above):
            comments.append(described)
        if "default" in variant:
            comments.append(_default(variant))
        type_ = _nullable(variant, schema_type(value, f"{indent}   "))
        out.append(f"{indent} | {type_}{_trailing(comments)}\n")
    out.append(f"{indent},\n")
    return "".join(out)


def _union_member(value: Any, indent: str) -> str:
    """A variant of a `oneOf` that is not a property's own."""
    variant: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    comments = []
    if isinstance(about := variant.get("description"), str):
        comments.append(about)
    if "default" in variant:
        enum_text = isinstance(variant["default"], str) and bool(_list(variant.get("enum")))
        comments.append(f"default: {_json(variant['default'])}" if enum_text else _default(variant))
    return _nullable(variant, schema_type(value, f"{indent}   ")) + _trailing(comments)


def _nullable(schema: Mapping[str, Any], type_: str) -> str:
    return f"{type_} | null" if schema.get("nullable") is True and "null" not in type_ else type_


def _default(schema: Mapping[str, Any]) -> str:
    value = schema["default"]
    if isinstance(value, str):  # an enum's value stands bare, other text in quotes, both unescaped
        return f"default: {value}" if _list(schema.get("enum")) else f'default: "{value}"'
    return f"default: {_json(value)}"


def _trailing(comments: Sequence[str]) -> str:
    return f" // {' '.join(comments)}" if comments else ""


def _comments(lines: Iterable[str]) -> list[str]:
    return [f"// {line}" for line in lines]


def _lines(text: str) -> list[str]:
    """Lines end with LF or CRLF and with nothing else; a last empty one does not count."""
    *ended, last = text.split("\n")
    return [line.removesuffix("\r") for line in ended] + ([last] if last else [])


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _json(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_json(str(key))}:{_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_json, value)) + "]"
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**64:
        value = float(value)  # beyond 64 bits the format keeps a double's worth of digits
    if isinstance(value, float) and value == value and abs(value) != float("inf"):
        return _float(value)
    return json.dumps(value, ensure_ascii=False)


def _float(value: float) -> str:
    """The shortest digits that read back the same; 0.00001 is still written out, and exponents have no padding."""
    digits, _, exponent = repr(value).partition("e")
    if exponent == "-05":
        sign, digits = ("-", digits[1:]) if digits.startswith("-") else ("", digits)
        return f"{sign}0.0000{digits.replace('.', '')}"
    return f"{digits}e{int(exponent)}" if exponent else digits
