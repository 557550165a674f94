"""`halfbyte serve --engine vllm` and real clients in front of it: `make test-vllm-slow`.

Whatever a client does, the answer is whole or a sentence, and the server goes on; the kernels that answered are ours.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

START_S = 900.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Server:
    def __init__(self, folder: Path, *words: str) -> None:
        self.port, self.log = free_port(), folder / "server.log"
        self.record = folder / "ran.json"
        arguments = ["--port", str(self.port), "--max-context", "2048", "--activation", "f32", *words]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).with_name("halfbyte")), "serve", "--engine", "vllm", *arguments,
                 "--record", str(self.record), "--vllm", "--dtype float32 --enforce-eager --tool-call-parser openai"],
                stdout=log, stderr=log, env=os.environ | ENVIRONMENT,
            )  # fmt: skip

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            assert self.process.poll() is None, self.said()[-3000:]
            try:
                if httpx.get(f"{self.address}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise AssertionError(self.said()[-3000:])

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("served"), "--mxfp4-layers", "all")
    try:
        found.wait()
        yield found
    finally:
        found.close()


@pytest.fixture
def client(server: Server) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


@pytest.fixture
def model(client: Any) -> str:
    name: str = client.models.list().data[0].id
    return name


def test_chat_and_streaming_say_the_same(client: Any, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    assert "42" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    parts = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    for part in parts:
        text += (part.choices[0].delta.content or "") if part.choices else ""
        usage = part.usage or usage
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_tools(client: Any, model: str) -> None:
    """Offered, a call is the model's to make; required, it is held to the tool's schema."""
    offered = client.chat.completions.create(model=model, messages=QUESTION, tools=[TOOL], max_tokens=300)
    assert offered.choices[0].finish_reason in ("stop", "tool_calls", "length")
    forced = client.chat.completions.create(
        model=model, messages=QUESTION, tools=[TOOL], tool_choice="required", max_tokens=300, temperature=0
    )
    call = forced.choices[0].message.tool_calls[0]
    assert call.function.name == "lookup"
    assert isinstance(json.loads(call.function.arguments)["word"], str)


def test_structured_output(client: Any, model: str) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}
    found = client.chat.completions.create(
        model=model, messages=QUESTION, response_format=format, n=2, temperature=1.0, seed=3, max_tokens=400
    )
    for choice in found.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(json.loads(choice.message.content)["sum"], int)
    import openai

    with pytest.raises(openai.BadRequestError, match="cannot be"):
        client.completions.create(model=model, prompt="x", extra_body={"guided_regex": "("})


def test_a_client_that_goes_away_leaves_nothing_behind(client: Any, model: str, server: Server) -> None:
    stream = client.completions.create(
        model=model, prompt="1 2 3", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = re.search(
            r"^halfbyte_requests_running(?:\{.*\})? (\S+)$", httpx.get(f"{server.address}/metrics").text, re.M
        )
        if found and float(found[1]) == 0:
            return
        time.sleep(0.2)
    raise AssertionError("the request runs on")


def test_responses_and_messages(client: Any, model: str, server: Server) -> None:
    answer = client.responses.create(model=model, input="What is 17 + 25?", temperature=0)
    assert "42" in answer.output_text
    events = [e.type for e in client.responses.create(model=model, input="What is 17 + 25?", stream=True)]
    assert events[-1] == "response.completed"
    import anthropic

    messages = anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0).messages
    said = messages.create(model=model, max_tokens=300, messages=QUESTION)  # type: ignore[arg-type]
    assert "42" in "".join(block.text for block in said.content if block.type == "text")


def test_odd_output_is_an_answer(client: Any, model: str) -> None:
    """Cut inside a header, pushed into tokens that no message has, ended by a word: never an error."""
    for odd in (
        {"max_tokens": 1},
        {"max_tokens": 3},
        {"temperature": 2.0, "max_tokens": 200, "seed": 1},
        {"stop": ["a", "e"], "max_tokens": 200},
        {"logit_bias": {"5": 100}, "max_tokens": 20},
        {"logprobs": True, "top_logprobs": 2, "max_tokens": 20},
    ):
        found = client.chat.completions.create(model=model, messages=QUESTION, **odd)
        assert found.choices[0].finish_reason in ("stop", "length"), odd


def test_refusals_are_sentences(client: Any, model: str) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="more tokens than the 2048"):
        client.completions.create(model=model, prompt="word " * 4000, max_tokens=10)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=QUESTION)


def test_the_kernels_were_ours(client: Any, model: str, server: Server) -> None:
    client.completions.create(model=model, prompt="1 2 3", max_tokens=2)
    end = time.monotonic() + 60
    while not server.record.exists() and time.monotonic() < end:
        time.sleep(0.5)
    record = json.loads(server.record.read_text(encoding="utf-8"))
    assert record["differences"] == []
    assert {"cpu.moe", "cpu.qkv", "cpu.o", "cpu.lm_head"} <= set(record["plan"]["decode"])
    assert "tool-call-parser is ignored" in " ".join(server.said().split())


def test_vllms_own_server_says_which_kernels_ran(tmp_path: Path) -> None:
    """The command of --dry-run as it stands, and the route that the plugin adds where vLLM has such."""
    import vllm

    if vllm.__version__.startswith("0.26."):
        pytest.skip("vLLM 0.26 has no endpoint plugins")
    port, log = free_port(), tmp_path / "vllm.log"
    words = ["serve", "--engine", "vllm", "--dry-run", "--mxfp4-layers", "all", "--activation", "f32"]
    more = f"--dtype float32 --enforce-eager --max-model-len 2048 --port {port}"
    shown = subprocess.run(
        [str(Path(sys.executable).with_name("halfbyte")), *words, "--vllm", more],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    with log.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {shown.stdout.strip()}"], stdout=file, stderr=file, env=os.environ | ENVIRONMENT
        )
    try:
        end = time.monotonic() + START_S
        address = f"http://127.0.0.1:{port}"
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end
            try:
                if httpx.get(f"{address}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        model = httpx.get(f"{address}/v1/models").json()["data"][0]["id"]
        asked = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4}
        httpx.post(f"{address}/v1/completions", json=asked, timeout=120).raise_for_status()
        (report,) = httpx.get(f"{address}/halfbyte/kernels", timeout=60).json()["ranks"]
        assert report["differences"] == []
        assert {"cpu.moe", "cpu.qkv", "cpu.o", "cpu.lm_head"} <= set(report["plan"]["decode"])
    finally:
        process.terminate()
        process.wait(60)


def child(server: Server, word: str) -> int:
    """The child of the server whose command has this word."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    for each in map(int, children):
        words = Path(f"/proc/{each}/cmdline").read_bytes().decode().split("\0")
        if any(word in w for w in words):
            return each
    raise AssertionError(children)


def test_an_engine_that_is_killed(tmp_path: Path) -> None:
    """Whoever waits for it gets a sentence, and the next one an answer: vLLM is started again."""
    import openai

    server = Server(tmp_path)
    try:
        server.wait()
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=START_S)
        model = client.models.list().data[0].id
        stream = client.completions.create(
            model=model, prompt="1 2 3", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        rest = iter(stream)
        next(rest)
        os.kill(child(server, "halfbyte.engine.worker"), signal.SIGKILL)
        with pytest.raises(openai.APIError) as ended:
            list(rest)
        assert "engine" in str(ended.value)
        end = time.monotonic() + START_S
        while True:
            try:
                found = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
                break
            except openai.APIStatusError as e:
                assert e.status_code == 503, e
                assert e.message.rstrip().endswith("."), e.message
                assert time.monotonic() < end
                time.sleep(1)
        assert "42" in found.choices[0].message.content
        assert server.process.poll() is None
    finally:
        server.close()


def test_two_nodes(server: Server, client: Any, model: str, tmp_path: Path) -> None:
    """vLLM's own launch over two machines, which are both this one: the tokens of one process, and the end of one is
    the end of both, with a sentence."""
    import openai

    pair = Server(tmp_path, "--mxfp4-layers", "all", "--nodes", "localhost,localhost", "--tp", "2")
    try:
        pair.wait()
        both = openai.OpenAI(base_url=f"{pair.address}/v1", api_key="none", max_retries=0, timeout=START_S)
        for prompt in ("1 2 3", "What is 17 + 25?", "The word list is"):
            asked: Any = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0}
            asked["extra_body"] = {"ignore_eos": True}
            one, two = (c.completions.create(**asked).choices[0].text for c in (client, both))
            assert one == two
        started = psutil.Process(pair.process.pid).children(recursive=True)
        assert len(started) > 2
        os.kill(child(pair, "--headless"), signal.SIGKILL)
        pair.process.wait(120)
        assert pair.process.returncode != 0
        _, left = psutil.wait_procs(started, 60)  # the worker of the node that was killed, above all
        assert not left
        assert "vLLM on localhost (node 1) ended with signal 9; the others end, too." in " ".join(pair.said().split())
    finally:
        pair.close()
