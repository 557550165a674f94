"""What one client may ask for beside others, whose request the engine is told it is, and what a client is charged."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from live_server import Live, wait_until
from scripted import Play, ScriptedSource, call, say

from halfbyte.engine import messages
from halfbyte.engine.request import Request
from halfbyte.server.app import create_app
from halfbyte.server.http.admission import Admission
from halfbyte.server.http.errors import ApiError
from halfbyte.server.http.turns import NEWCOMER, Turns
from halfbyte.server.settings import ServerSettings

Serve = Callable[..., Live]
CHAT: dict[str, Any] = {"model": "gpt-oss-test", "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": "gpt-oss-test", "prompt": "Hi", "max_tokens": 4}
QUIET = ServerSettings(min_available_bytes=0)


def always(play: Play | str) -> Callable[[Request, int], Play]:
    return lambda request, index: play if isinstance(play, Play) else Play(play)


def message_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


# ---- bounds ------------------------------------------------------------------------------------------------------


def test_a_request_of_too_many_sequences_names_limit_and_flag(serve: Serve, http: httpx.Client) -> None:
    live = serve(ScriptedSource(always("x")))
    url = f"{live.url}/v1/completions"
    many = http.post(url, json=TEXT | {"prompt": ["Hi"] * 256, "n": 16})
    assert many.status_code == 400
    assert {"4096", "128", "--max-sequences-per-request"} <= set(
        message_of(many).replace("(", " ").replace(")", " ").split()
    )
    assert many.json()["error"]["param"] == "prompt"
    assert not live.source.requests
    assert http.post(url, json=TEXT | {"prompt": ["Hi"] * 8, "n": 16}).status_code == 200
    assert len(live.source.requests) == 8
    small = serve(ScriptedSource(always(say("x"))), replace(QUIET, max_sequences_per_client=3))
    for path, body in (("completions", TEXT | {"prompt": ["Hi"] * 4}), ("chat/completions", CHAT | {"n": 4})):
        refused = http.post(f"{small.url}/v1/{path}", json=body)
        assert refused.status_code == 400
        assert "--max-sequences-per-client" in message_of(refused)


def test_sequences_are_counted_by_key(serve: Serve, http: httpx.Client) -> None:
    slow = Play(say("x " * 60), delay=0.05)
    live = serve(ScriptedSource(always(slow)), replace(QUIET, api_keys=("one", "two"), max_sequences_per_client=4))
    url = f"{live.url}/v1/chat/completions"

    def post(key: str, **more: Any) -> httpx.Response:
        return http.post(url, json=CHAT | more, headers={"authorization": f"Bearer {key}"})

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, "one", n=3)
        wait_until(lambda: live.source.active == 1)
        refused = post("one", n=2)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "--max-sequences-per-client" in message_of(refused)
        assert post("one", max_tokens=1).status_code == 200
        assert post("two", n=4, max_tokens=1).status_code == 200
        assert running.result().status_code == 200
    assert post("one", n=4, max_tokens=1).status_code == 200
    assert not live.service.admission._sequences, "an ended request is still counted"


def test_a_client_that_leaves_while_its_request_is_prepared_keeps_no_place(serve: Serve) -> None:
    """A large request is prepared in a thread, which may count its sequences after the place was given back."""
    admission: Admission = serve(ScriptedSource(always("x"))).service.admission
    slot = admission.take_slot("a")
    slot.hold(5)
    slot.release()
    late = threading.Thread(target=slot.hold, args=(7,))
    late.start()
    late.join()
    assert not admission._sequences
    assert admission.active == 0
    with pytest.raises(ApiError, match="128"):
        admission.take_slot("a").hold(129)


def test_requests_are_read_in_turns_of_their_clients() -> None:
    async def ask() -> list[str]:
        source = ScriptedSource(always(say("x")))
        app = create_app(source, source.tokenizer, replace(QUIET, api_keys=("one", "two", "three")))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            keys = ["one"] * 40 + ["two"] * 3 + ["three"]
            answers = await asyncio.gather(
                *(
                    http.post("/v1/chat/completions", json=CHAT, headers={"authorization": f"Bearer {key}"})
                    for key in keys
                )
            )
        assert {answer.status_code for answer in answers} == {200}
        return [r.client for r in source.requests]

    clients = asyncio.run(ask())
    assert len(clients) == 44
    assert clients.index("key 2") < 8
    assert max(at for at, client in enumerate(clients) if client == "key 1") < 12


def test_one_request_is_read_in_each_pass_of_the_loop() -> None:
    passes = 0
    read_in: list[int] = []

    async def read(turns: Turns, client: str) -> None:
        await turns.take(client)
        read_in.append(passes)

    async def count() -> None:
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    async def main() -> None:
        turns = Turns()
        counter = asyncio.create_task(count())
        readers = [asyncio.create_task(read(turns, "a")) for _ in range(20)]
        await asyncio.sleep(0)
        for reader in readers[3:10]:
            reader.cancel()  # they waste nobody's turn
        await asyncio.gather(*readers, return_exceptions=True)
        await read(turns, "b")
        counter.cancel()

    asyncio.run(main())
    assert len(read_in) == 14
    assert len(set(read_in)) == 14, "two were read in one pass"
    assert read_in[-1] < 20


def test_a_client_that_asks_seldom_has_the_next_turn_and_none_waits_for_ever() -> None:
    order: list[str] = []

    async def read(turns: Turns, client: str) -> None:
        await turns.take(client)
        order.append(client)

    async def main() -> None:
        turns = Turns()
        for _ in range(2):  # connections that ask all the time
            await asyncio.gather(*(read(turns, f"busy {i}") for i in range(100)))
        order.clear()
        busy = [asyncio.create_task(read(turns, f"busy {i}")) for i in range(100)]
        await asyncio.sleep(0)
        await read(turns, "new")
        assert len(order) < 5
        await asyncio.gather(*busy)

        waiting = [asyncio.create_task(read(turns, f"first {i}")) for i in range(50)]
        waiting.append(asyncio.create_task(read(turns, "busy 0")))
        for i in range(2 * NEWCOMER + 200):  # two arrive in each pass, each on a connection of its own
            if "busy 0" in order[-1:]:
                break
            waiting += [asyncio.create_task(read(turns, f"{name} {i}")) for name in ("other", "another")]
            await asyncio.sleep(0)
        assert NEWCOMER // 2 < i < 2 * NEWCOMER + 199, "it was not overtaken, or for ever"
        await asyncio.gather(*waiting)
        assert len(turns._last) <= NEWCOMER
        assert not turns._waiting
        assert not turns._ranks

    asyncio.run(main())


# ---- who a client is ---------------------------------------------------------------------------------------------


def test_the_engine_is_told_whose_request_it_is(serve: Serve, http: httpx.Client) -> None:
    live = serve(ScriptedSource(always(say("x"))), replace(QUIET, api_keys=("one", "two")))
    for key in ("one", "two", "one"):
        headers = {"authorization": f"Bearer {key}"}
        http.post(f"{live.url}/v1/chat/completions", json=CHAT, headers=headers)
    first, second, third = (r.client for r in live.source.requests)
    assert first == third != second
    assert first
    assert "one" not in first


def test_without_keys_a_local_connection_is_a_client_and_a_remote_address_is(serve: Serve) -> None:
    live = serve(ScriptedSource(always(say("x"))))
    url = f"{live.url}/v1/chat/completions"
    addresses = ("203.0.113.5", "203.0.113.5", "2001:db8::1", "2001:db8::2", "203.0.113.6")
    for _ in range(2):
        with httpx.Client() as client:
            for _ in range(2):
                client.post(url, json=CHAT)
    for address in addresses:  # from a proxy on this machine
        httpx.post(url, json=CHAT, headers={"x-forwarded-for": address})
    clients = [r.client for r in live.source.requests]
    assert clients[0] == clients[1] != clients[2] == clients[3]
    assert clients[4] == clients[5]
    assert clients[6] == clients[7], "an IPv6 network of 64 bits is one client"
    assert len(set(clients)) == 5


def test_every_request_of_an_answer_belongs_to_its_client(serve: Serve, http: httpx.Client) -> None:
    def script(request: Request, index: int) -> Play:
        return Play(call("functions.f", "{}"))

    live = serve(ScriptedSource(script))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    http.post(f"{live.url}/v1/chat/completions", json=CHAT | {"tools": tools, "tool_choice": "required", "n": 2})
    http.post(f"{live.url}/v1/completions", json=TEXT | {"prompt": ["a", "b"]})
    clients = {r.client for r in live.source.requests}
    assert len(live.source.requests) > 4
    assert len(clients) == 1
    assert clients != {""}


def test_the_client_travels_to_the_engines_process() -> None:
    (body,) = messages.Frames().feed(messages.frame(messages.Submit(Request([1], client="key 3"))))
    submit = messages.decode_to_engine(body)
    assert isinstance(submit, messages.Submit)
    assert submit.request.client == "key 3"


# ---- usage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_usage_of_an_answer_that_a_stop_string_ends(serve: Serve, http: httpx.Client, path: str, stream: bool) -> None:
    """The same however many tokens a step brings, as under speculation: those up to the end of the match."""
    text = "one two three STOP four five six seven eight nine ten"
    answer = say(text) if path.startswith("chat") else text
    body = (CHAT if path.startswith("chat") else TEXT) | {"stop": "STOP", "max_tokens": 50, "stream": stream}
    usages = []
    for per_step in (1, 2, 3, 5, 100):
        live = serve(ScriptedSource(always(Play(answer, per_step=per_step, cached=3))))
        options = {"stream_options": {"include_usage": True}} if stream else {}
        reply = http.post(f"{live.url}/v1/{path}", json=body | options)
        if stream:
            lines = [line for line in reply.text.splitlines() if line.startswith("data: {")]
            value = httpx.Response(200, text=lines[-1].removeprefix("data: ")).json()["usage"]
        else:
            value = reply.json()["usage"]
        usages.append((value["completion_tokens"], value["prompt_tokens_details"]["cached_tokens"]))
    ids = live.source.tokenizer.encode(answer[: answer.index("STOP") + 4], allow_special=True)
    assert usages == [(len(ids), 3)] * 5


def test_usage_of_the_one_call_that_was_allowed(serve: Serve, http: httpx.Client) -> None:
    answer = call("functions.f", '{"a":1}') + "<|start|>assistant" + call("functions.f", '{"a":2}')
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    counts = set()
    for per_step in (1, 4, 100):
        live = serve(ScriptedSource(always(Play(answer, per_step=per_step, cached=3))))
        body = CHAT | {"tools": tools, "parallel_tool_calls": False}
        usage = http.post(f"{live.url}/v1/chat/completions", json=body).json()["usage"]
        counts.add((usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
    assert len(counts) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_a_key_has_prefixes_of_its_own(serve: Serve, http: httpx.Client, shared: bool) -> None:
    scopes = []
    for keys in (("one", "two"), ("two", "one")):  # after a restart, in another order
        live = serve(ScriptedSource(always(say("x"))), replace(QUIET, api_keys=keys, prefix_shared=shared))
        for key in ("one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            http.post(f"{live.url}/v1/chat/completions", json=CHAT, headers=headers)
            http.post(f"{live.url}/v1/completions", json=TEXT, headers=headers)
        scopes.append([r.scope for r in live.source.requests])
    assert scopes[0] == scopes[1]
    one, _, two, _ = scopes[0]
    assert scopes[0] == [one, one, two, two]
    assert (one == two == "") if shared else one != two
    assert "one" not in one


def test_without_keys_all_clients_share_prefixes(serve: Serve, http: httpx.Client) -> None:
    live = serve(ScriptedSource(always(say("x"))))
    http.post(f"{live.url}/v1/chat/completions", json=CHAT)
    assert live.source.requests[0].scope == ""
