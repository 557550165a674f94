"""A conversation of several turns through LiteLLM: python litellm_talk.py URL chat|responses|anthropic TURNS

Runs in the environment of `make test-agents`; each answer goes back through LiteLLM's own converters.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

url, api, turns = sys.argv[1], sys.argv[2], int(sys.argv[3])
litellm.telemetry = False
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
NAMES = ("get_weather", "search_notes")


def run(name: str, arguments: str) -> str:
    return f"{name} of {json.loads(arguments).get('place')}"


def chat(model: str, base: str) -> None:
    tools = [{"type": "function", "function": {"name": n, "description": "x", "parameters": PARAMETERS}} for n in NAMES]
    talk: list[Any] = [{"role": "system", "content": "Be brief."}]
    for turn in range(turns):
        talk.append({"role": "user", "content": f"question {turn}"})
        while True:
            out = litellm.completion(
                model=model, api_base=base, api_key="none", messages=talk, tools=tools, num_retries=0,
                max_tokens=4000, stream=bool(turn % 2),
            )  # fmt: skip
            if turn % 2:
                out = litellm.stream_chunk_builder(list(out), messages=talk)
            message = out.choices[0].message
            talk.append(message.model_dump() if turn % 3 else message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = run(call.function.name, call.function.arguments)
                talk.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": result})
        print(json.dumps({"turn": turn, "answer": message.content}))


def responses() -> None:
    tools = [
        {"type": "function", "name": n, "description": "x", "parameters": PARAMETERS, "strict": False} for n in NAMES
    ]
    talk: list[Any] = []
    for turn in range(turns):
        talk.append({"role": "user", "content": f"question {turn}"})
        while True:
            out = litellm.responses(
                model="openai/gpt-oss-test", api_base=f"{url}/v1", api_key="none", input=talk, tools=tools, store=False
            )
            items = [item if isinstance(item, dict) else item.model_dump() for item in out.output]
            talk += items
            calls = [item for item in items if item["type"] == "function_call"]
            if not calls:
                break
            for call in calls:
                result = run(call["name"], call["arguments"])
                talk.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})
        text = "".join(p["text"] for i in items if i["type"] == "message" for p in i["content"])
        print(json.dumps({"turn": turn, "answer": text}))


if api == "responses":
    responses()
elif api == "anthropic":
    chat("anthropic/gpt-oss-test", url)
else:
    chat("openai/gpt-oss-test", f"{url}/v1")
