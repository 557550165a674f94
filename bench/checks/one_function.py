"""Does the embedded model call the one function that it is offered? Cases written by hand, as a first trial would be.

    python -m bench run one-function
    python -m bench run one-function --set samples=4 --set temperature=1

What OpenAI's compatibility test for gpt-oss asks of a server and its model, over HTTP with the openai client, on cases
of our own: one function, a question for it; right is a call of it with arguments that its schema allows, reasoning
beside it, and an answer in words once the function has given its result. The cases were written before a model was
asked, none is made by the generator of its training, and none is drawn from OpenAI's cases, which are not here. Needs the packages of halfbyte[test].
"""

# ruff: noqa: E501  (a table of cases reads best with one per line)
from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.measurement import Row, Run, measurement, option
from halfbyte.lab import receipts
from halfbyte.lab.peers.halfbyte import HalfbytePeer
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.peers.process import PeerProcess, TimeLimits
from halfbyte.lab.result import Cell, Result, figure
from halfbyte.model.load import EMBEDDED

if TYPE_CHECKING:  # a package of the tests alone
    import openai

MOST_TOKENS = 600
# Name, what it does, its parameters (a type or what an enumeration offers; optional behind a question mark), a question.
CASES: tuple[tuple[str, str, dict[str, str], str], ...] = (
    ("get_stock_price", "Get the current price of a stock.", {"symbol": "string"}, "How much is a share of NVDA right now?"),
    ("translate_text", "Translate a text into another language.", {"text": "string", "target_language": "string"}, "Translate 'good morning' into Portuguese."),
    ("book_table", "Reserve a table in a restaurant.", {"restaurant": "string", "people": "integer", "time": "string"}, "Book a table for four at Luigi's at 19:30."),
    ("send_email", "Send an email.", {"to": "string", "subject": "string", "body": "string"}, "Send an email to anna@example.com with the subject Lunch saying that I will be late."),
    ("set_alarm", "Set an alarm.", {"time": "string", "label": "string?"}, "Wake me up at 6:45 tomorrow."),
    ("convert_units", "Convert a measurement.", {"value": "number", "from_unit": "string", "to_unit": "string"}, "How many miles are 42 kilometers?"),
    ("search_flights", "Search for flights between two airports.", {"origin": "string", "destination": "string", "date": "string?"}, "Find me a flight from Berlin to Lisbon on May 4."),
    ("play_music", "Play a song or an artist.", {"query": "string"}, "Play something by Miles Davis."),
    ("create_task", "Create a task in the to-do list.", {"title": "string", "priority": "low|medium|high?"}, "Remind me to water the plants, it's important."),
    ("get_definition", "Look up the definition of a word.", {"word": "string"}, "What does ephemeral mean?"),
    ("track_package", "Get the delivery status of a package.", {"tracking_number": "string"}, "Where's my package? The number is 1Z999AA1."),
    ("get_directions", "Get directions between two places.", {"start": "string", "end": "string", "mode": "walking|driving|transit?"}, "How do I get from the station to the museum on foot?"),
    ("calculate_tip", "Calculate the tip for a bill.", {"amount": "number", "percent": "number"}, "What is a 15 percent tip on 80 dollars?"),
    ("find_recipe", "Find recipes that use an ingredient.", {"ingredient": "string", "limit": "integer?"}, "What can I cook with chickpeas?"),
    ("turn_on_light", "Switch on the light in a room.", {"room": "string"}, "Switch on the light in the kitchen please"),
    ("list_files", "List the files in a folder.", {"path": "string"}, "What is in /var/log?"),
    ("run_sql", "Run a SQL query on the database.", {"query": "string"}, "Count the rows of the table orders."),
    ("get_time", "Get the local time in a city.", {"city": "string"}, "What time is it in Nairobi?"),
    ("add_calendar_event", "Add an event to the calendar.", {"title": "string", "date": "string", "time": "string?"}, "Put the dentist in my calendar for Friday at 10."),
    ("get_movie_rating", "Get the rating of a movie.", {"title": "string", "year": "integer?"}, "How good is Blade Runner from 1982?"),
    ("generate_password", "Generate a random password.", {"length": "integer"}, "I need a password with 20 characters."),
    ("check_availability", "Check whether a product is in stock.", {"product_id": "string", "store": "string?"}, "Do you have article B-2045 in the Hamburg store?"),
    ("cancel_order", "Cancel an order.", {"order_id": "string", "reason": "string?"}, "Please cancel order 88213, I ordered it twice."),
    ("get_exchange_rate", "Get the exchange rate of two currencies.", {"base": "string", "quote": "string"}, "What's the rate from EUR to JPY?"),
    ("create_user", "Create a user account.", {"name": "string", "email": "string", "role": "admin|editor|viewer"}, "Add Mia Brandt with mia@corp.org as an editor."),
    ("set_temperature", "Set the temperature of the heating.", {"degrees": "number", "room": "string?"}, "Make it 21 degrees in the living room."),
    ("get_population", "Get the number of inhabitants of a country.", {"country": "string"}, "How many people live in Norway?"),
    ("summarize_url", "Summarize a web page.", {"url": "string"}, "Give me the gist of https://example.com/news"),
    ("roll_dice", "Roll dice.", {"sides": "integer", "count": "integer?"}, "Roll two six-sided dice."),
    ("get_horoscope", "Get today's horoscope for a sign.", {"sign": "string"}, "My sign is Leo, what does today bring?"),
    ("resize_image", "Resize an image.", {"file": "string", "width": "integer", "height": "integer"}, "Make photo.jpg 800 by 600 pixels."),
    ("submit_feedback", "Submit feedback about the app.", {"rating": "integer", "comment": "string?"}, "Five stars from me, great app!"),
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    samples: int = option(1, "answers to each question")
    temperature: float = option(0.0, "of sampling")


def schema_of(parameters: dict[str, str]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, text in parameters.items():
        kind = text.removesuffix("?")
        properties[name] = {"type": "string", "enum": kind.split("|")} if "|" in kind else {"type": kind}
    required = [name for name, text in parameters.items() if not text.endswith("?")]
    return {"type": "object", "properties": properties, "required": required}


def called_rightly(
    client: openai.OpenAI, case: tuple[str, str, dict[str, str], str], options: Options, seed: int
) -> str:
    """What is wrong with the answer; empty if nothing is."""
    import jsonschema

    name, description, parameters, question = case
    schema = schema_of(parameters)
    function = {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
    messages: list[Any] = [{"role": "user", "content": question}]

    def answer() -> Any:
        return client.chat.completions.create(
            model="tiny", messages=messages, tools=[function], temperature=options.temperature, seed=seed,
            max_tokens=MOST_TOKENS,
        ).choices[0]  # type: ignore[call-overload]  # fmt: skip

    first = answer()
    calls = first.message.tool_calls or []
    if [call.function.name for call in calls] != [name]:
        return f"{len(calls)} calls"
    try:
        jsonschema.validate(json.loads(calls[0].function.arguments), schema)
    except (ValueError, jsonschema.ValidationError):
        return f"arguments {calls[0].function.arguments}"
    if not getattr(first.message, "reasoning", None):
        return "no reasoning"
    messages += [first.message, {"role": "tool", "tool_call_id": calls[0].id, "content": json.dumps({"ok": True})}]
    last = answer()
    if last.finish_reason != "stop" or not last.message.content:
        return f"after the result: {last.finish_reason}"
    return ""


@measurement(
    "one-function", seconds=120,
    rows=(Row("embedded model: calls of the one function that is offered, cases written by hand", "calls", "right",
              model="tiny", path="http"),),
)  # fmt: skip
def one_function(run: Run, options: Options) -> None:
    import openai

    wrong: list[str] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        PeerProcess(HalfbytePeer(), Setup(None, device="cpu"), Path(folder), TimeLimits()) as server,
    ):
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        for case in CASES:
            for seed in range(options.samples):
                if reason := called_rightly(client, case, options, seed):
                    wrong.append(f"{case[0]}: {reason}")
    total = len(CASES) * options.samples
    right = 100 * (total - len(wrong)) / total
    shape = {"cases": len(CASES), "samples": options.samples, "temperature": options.temperature}
    run.sources |= receipts.weights(EMBEDDED)
    run.add(
        Result(Cell("calls", "tiny", path="http", shape=shape), (figure("right", "%", right),), detail={"wrong": wrong})
    )
    for text in wrong:
        print(text, flush=True)
