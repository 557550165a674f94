"""A conversation of several turns through LangChain: python langchain_talk.py URL chat|responses|anthropic TURNS

Runs in the environment of `make test-agents`; each answer goes back through LangChain's own converters.
"""

from __future__ import annotations

import json
import sys

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

url, api, turns = sys.argv[1], sys.argv[2], int(sys.argv[3])


@tool
def get_weather(place: str) -> str:
    """The weather at a place."""
    return f"sun over {place}"


@tool
def search_notes(place: str) -> str:
    """Looks a place up in the notes."""
    return f"no note about {place}"


TOOLS = {"get_weather": get_weather, "search_notes": search_notes}
if api == "anthropic":
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(
        model="gpt-oss-test", base_url=url, api_key="none", max_retries=0, max_tokens=4000,
        thinking={"type": "enabled", "budget_tokens": 2000},
    )  # fmt: skip
else:
    from langchain_openai import ChatOpenAI

    more = {"use_responses_api": True, "output_version": "responses/v1"} if api == "responses" else {}
    model = ChatOpenAI(model="gpt-oss-test", base_url=f"{url}/v1", api_key="none", max_retries=0, **more)
model = model.bind_tools(list(TOOLS.values()))
talk = [SystemMessage("Be brief.")]
for turn in range(turns):
    talk.append(HumanMessage(f"question {turn}"))
    while True:
        if turn % 2:
            answer = None
            for chunk in model.stream(talk):
                answer = chunk if answer is None else answer + chunk
        else:
            answer = model.invoke(talk)
        talk.append(answer)
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            result = TOOLS[call["name"]].invoke(call["args"]) if "place" in call["args"] else "no place"
            talk.append(ToolMessage(result, tool_call_id=call["id"]))
    print(json.dumps({"turn": turn, "answer": answer.text if isinstance(answer.text, str) else answer.text()}))
