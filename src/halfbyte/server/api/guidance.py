"""The fields by which other servers hold an answer to a form, as the one form an answer may have.

vLLM's (`guided_json` and its kin, `structured_outputs`) and llama.cpp's (`json_schema`, `grammar`) mean what they mean
there. More than one form for one answer is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field

from halfbyte.server.answer.conversation import AnswerFormat, json_answer
from halfbyte.server.api.shared_schema import Items, Strict
from halfbyte.server.http import sse
from halfbyte.server.http.errors import bad_request

Schema = dict[str, Any] | str
Choices = Annotated[Items[str], Field(min_length=1, max_length=1024)]


class StructuredOutputs(Strict):
    harmless: ClassVar[dict[str, str]] = {
        "disable_fallback": "there is one grammar engine",
        "disable_any_whitespace": "what the model writes between values is its own",
    }
    json_: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class GuidanceFields(Strict):
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None


def guided_format(body: GuidanceFields, other: AnswerFormat | None = None) -> AnswerFormat | None:
    """The form that one of these fields asks for; `other` is what the API's own field does."""
    forms = list(_forms(body))
    if other is not None:
        forms.append(other)
    if len(forms) > 1:
        text = f"'{forms[0].field}' and '{forms[1].field}' both give the answer a form; leave one of them out."
        raise bad_request(text, forms[0].field)
    return forms[0] if forms else None


def _forms(body: GuidanceFields) -> Iterator[AnswerFormat]:
    more = body.structured_outputs or StructuredOutputs()
    for field, schema in (
        ("guided_json", body.guided_json),
        ("structured_outputs.json", more.json_),
        ("json_schema", body.json_schema),
    ):
        if schema is not None:
            yield json_answer(_schema(schema, field), field=field)
    if more.json_object:
        yield json_answer(None, field="structured_outputs.json_object")
    for field, expression in (("guided_regex", body.guided_regex), ("structured_outputs.regex", more.regex)):
        if expression is not None:
            yield AnswerFormat("regex", expression, field=field)
    for field, choices in (("guided_choice", body.guided_choice), ("structured_outputs.choice", more.choice)):
        if choices is not None:
            yield AnswerFormat("regex", "|".join(f"({re.escape(text)})" for text in choices), field=field)
    for field, grammar in (
        ("guided_grammar", body.guided_grammar),
        ("structured_outputs.grammar", more.grammar),
        ("grammar", body.grammar),
    ):
        if grammar is not None:
            yield AnswerFormat("ebnf", grammar, field=field)


def _schema(schema: Schema, field: str) -> str:
    if isinstance(schema, dict):
        return sse.compact(schema)
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_request(f"'{field}' is a text that is no JSON object; give a JSON schema.", field)
    return schema
