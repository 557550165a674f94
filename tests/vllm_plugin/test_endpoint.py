"""The route that tells which kernels ran, in an app as vLLM's server is one, with a client in the engine's place."""

from __future__ import annotations

import asyncio
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from halfbyte.vllm_plugin import endpoint
from halfbyte.vllm_plugin.endpoint import METHOD, PATH, KernelsEndpoint


class Client:
    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, []  # type: ignore[var-annotated]

    async def collective_rpc(self, method: str) -> Any:
        self.asked.append(method)
        if self.answer is None:
            await asyncio.sleep(60)
        return self.answer


def ask(client: Client | None) -> tuple[int, Any]:
    async def run() -> tuple[int, Any]:
        app, plugin = Starlette(), KernelsEndpoint()
        plugin.attach_router(app)
        await plugin.init_state(client, app.state, None)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://vllm") as http:
            answer = await http.get(PATH)
            return answer.status_code, answer.json()

    return asyncio.run(run())


def test_every_rank_reports() -> None:
    client = Client([{"unit": "layers"}, {"unit": "layers"}])
    assert ask(client) == (200, {"ranks": [{"unit": "layers"}, {"unit": "layers"}]})
    assert client.asked == [METHOD]


def test_what_there_is_to_say_without_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PATIENCE_S", 0.01)
    for client, why in ((None, "not ready"), (Client([None]), "no gpt-oss model"), (Client(None), "did not answer")):
        code, body = ask(client)
        assert code == 503
        assert why in body["error"]


def test_the_entry_points_are_there() -> None:
    declared = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8"))
    points = declared["project"]["entry-points"]
    for group in ("vllm.general_plugins", "vllm.endpoint_plugins"):
        module, _, name = points[group]["halfbyte"].partition(":")
        assert callable(getattr(import_module(module), name))
