"""A route of vLLM's own server that reports which of our kernels ran: GET /halfbyte/kernels, one report per rank.

vLLM loads it if VLLM_PLUGINS lists halfbyte (entry point `vllm.endpoint_plugins`); our own server has `/metrics` and
the record instead. The route calls the method that `compat.register` added to the workers, through vLLM's engine
client, and opens no other access to them. This module does not import vLLM.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

PATH = "/halfbyte/kernels"
METHOD = "halfbyte_report"  # of every worker
PATIENCE_S = 30.0


class KernelsEndpoint:
    name = "halfbyte"
    required_tasks: tuple[str, ...] | None = ("generate",)  # there must be an engine to ask

    def __init__(self) -> None:
        self.client: Any = None

    def attach_router(self, app: Any) -> None:
        app.router.routes.append(Route(PATH, self.kernels, methods=["GET"], include_in_schema=False))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        self.client = engine_client

    async def kernels(self, request: Request) -> JSONResponse:
        if self.client is None:
            return JSONResponse({"error": "the engine is not ready yet; retry later."}, 503)
        try:
            ranks = await asyncio.wait_for(self.client.collective_rpc(METHOD), PATIENCE_S)
        except TimeoutError:
            return JSONResponse({"error": f"the workers did not answer within {PATIENCE_S:.0f} s."}, 503)
        if any(rank is None for rank in ranks):
            return JSONResponse({"error": "the plugin is loaded, but no gpt-oss model was built with it."}, 503)
        return JSONResponse({"ranks": list(ranks)})
