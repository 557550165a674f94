"""An answer as the items of the Responses API and the events that announce them.

One writer serves both forms: a stream sends what it writes, a plain request keeps only the items.
"""

from __future__ import annotations

from typing import Any

from halfbyte.harmony.messages import FUNCTIONS
from halfbyte.server.answer.answer import AnswerItem, AnswerPiece, Call, ChoiceAnswer, TokenLogprob
from halfbyte.server.answer.tools import arguments_object, custom_input
from halfbyte.server.api.carried_reasoning import encode_reasoning
from halfbyte.server.api.openai_chunks import finite
from halfbyte.server.http import sse


class ItemWriter:
    """Feed it pieces in order; `output` grows, and each call returns the events as bytes."""

    def __init__(self, answer: ChoiceAnswer, *, carry_reasoning: bool, logprobs: bool) -> None:
        self.answer = answer
        self.carry_reasoning = carry_reasoning
        self.logprobs = logprobs
        self.output: list[dict[str, Any]] = []
        self.sequence = 0
        self._current = -1  # the answer's item that is open
        self._prefix = b""

    # ---- events -------------------------------------------------------------------------------

    def event(self, type: str, **fields: Any) -> bytes:
        payload = {"type": type, "sequence_number": self.sequence, **fields}
        self.sequence += 1
        return sse.event(type, payload)

    def _delta(self, type: bytes, text: str, more: bytes = b"") -> bytes:
        """The one event that there are many of, without building a dictionary for it."""
        self.sequence += 1
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b,"delta":%b%b}\n\n' % (
            type,
            type,
            self.sequence - 1,
            self._prefix,
            sse.quote(text),
            more,
        )

    # ---- pieces -------------------------------------------------------------------------------

    def add(self, piece: AnswerPiece) -> bytes:
        out = b""
        if piece.item != self._current:
            out += self.close() + self._open(piece)
        if not piece.text:
            return out
        if piece.kind == "reasoning":
            return out + self._delta(b"response.reasoning_text.delta", piece.text)
        if piece.kind == "content":
            entries = [_entry(lp) for lp in piece.logprobs or ()] if self.logprobs else []
            return out + self._delta(b"response.output_text.delta", piece.text, b',"logprobs":' + sse.dumps(entries))
        assert piece.call is not None
        if piece.call.function.form != "function":
            return out  # what the client wants is inside JSON; it is sent whole when it is complete
        return out + self._delta(b"response.function_call_arguments.delta", piece.text)

    def _open(self, piece: AnswerPiece) -> bytes:
        self._current = piece.item
        item = self.answer.items[piece.item]
        index = len(self.output)
        body = self._body(item, "in_progress", empty=True)
        self.output.append(body)
        self._prefix = b'"item_id":%b,"output_index":%d' % (sse.dumps(body["id"]), index)
        out = self.event("response.output_item.added", output_index=index, item=body)
        if item.kind != "call":
            self._prefix += b',"content_index":0'
            out += self.event(
                "response.content_part.added",
                item_id=body["id"],
                output_index=index,
                content_index=0,
                part=self._part(item, empty=True),
            )
        return out

    def close(self, *, failed: bool = False) -> bytes:
        """End the open item, if there is one."""
        if self._current < 0:
            return b""
        item = self.answer.items[self._current]
        self._current = -1
        index = len(self.output) - 1
        id = self.output[index]["id"]
        body = self._body(item, "completed" if item.complete and not failed else "incomplete", id=id)
        self.output[index] = body
        at: dict[str, Any] = {"item_id": id, "output_index": index}
        if item.kind == "call":
            assert item.call is not None
            form, out = item.call.function.form, b""
            if form == "custom":
                text = custom_input(item.call.arguments)
                out = self.event("response.custom_tool_call_input.delta", **at, delta=text)
                out += self.event("response.custom_tool_call_input.done", **at, input=text)
            elif form == "function":
                name, arguments = item.call.function.name, item.call.arguments
                out = self.event("response.function_call_arguments.done", **at, name=name, arguments=arguments)
        else:
            at["content_index"] = 0
            if item.kind == "reasoning":
                out = self.event("response.reasoning_text.done", **at, text=item.text)
            else:
                entries = [_entry(lp) for lp in item.logprobs] if self.logprobs else []
                out = self.event("response.output_text.done", **at, text=item.text, logprobs=entries)
            out += self.event("response.content_part.done", **at, part=self._part(item))
        return out + self.event("response.output_item.done", output_index=index, item=body)

    # ---- bodies -------------------------------------------------------------------------------

    def _part(self, item: AnswerItem, *, empty: bool = False) -> dict[str, Any]:
        text = "" if empty else item.text
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        entries = [_entry(lp) for lp in item.logprobs] if self.logprobs and not empty else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}

    def _body(self, item: AnswerItem, status: str, *, id: str | None = None, empty: bool = False) -> dict[str, Any]:
        parts = [] if empty else [self._part(item)]
        if item.kind == "reasoning":
            body: dict[str, Any] = {"type": "reasoning", "id": id or sse.new_id("rs_"), "summary": []}
            body |= {"content": parts, "status": status}
            if self.carry_reasoning:
                body["encrypted_content"] = None if empty else encode_reasoning(item.text)
            return body
        if item.kind == "content":
            return {
                "type": "message",
                "id": id or sse.new_id("msg_"),
                "status": status,
                "role": "assistant",
                "content": parts,
                "phase": "commentary" if item.preamble else "final_answer",
            }
        assert item.call is not None
        return _call_body(item.call, status, id, empty)


def _call_body(call: Call, status: str, id: str | None, empty: bool) -> dict[str, Any]:
    function = call.function
    arguments = "" if empty else call.arguments
    body: dict[str, Any] = {"call_id": call.id, "status": status}
    if function.form == "tool_search":
        fields = {"execution": "client", "arguments": arguments_object(arguments)}
        return body | {"type": "tool_search_call", "id": id or sse.new_id("tsc_"), **fields}
    if function.form == "local_shell":
        return body | {"type": "local_shell_call", "id": id or sse.new_id("lsh_"), "action": _shell_action(arguments)}
    body["name"] = function.name
    if function.custom:
        body |= {"type": "custom_tool_call", "id": id or sse.new_id("ctc_"), "input": custom_input(arguments)}
    else:
        body |= {"type": "function_call", "id": id or sse.new_id("fc_"), "arguments": arguments}
    if function.namespace != FUNCTIONS:
        body["namespace"] = function.namespace
    return body


def _shell_action(arguments: str) -> dict[str, Any]:
    """What to run. Arguments that are no list of words are the one line of a shell."""
    values = arguments_object(arguments)
    command = values.get("command", [])
    if isinstance(command, str):
        command = ["bash", "-lc", command]
    parts = [str(word) for word in command] if isinstance(command, list) else [arguments]
    where, limit = values.get("working_directory"), values.get("timeout_ms")
    return {
        "type": "exec",
        "command": parts,
        "env": {},
        "working_directory": where if isinstance(where, str) else None,
        "timeout_ms": int(limit) if isinstance(limit, int | float) else None,
    }


def _entry(lp: TokenLogprob) -> dict[str, Any]:
    def token(data: bytes, value: float) -> dict[str, Any]:
        return {"token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": finite(value)}

    return {**token(lp.data, lp.logprob), "top_logprobs": [token(data, value) for data, value in lp.top]}
