"""The application: every endpoint around one token source.

`create_app` takes what it serves and how; it starts nothing and listens to nothing (run.py does).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from halfbyte import __version__
from halfbyte.engine.request import TokenSource
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.server.answer.service import Service
from halfbyte.server.api import (
    anthropic_messages,
    ollama,
    openai_chat,
    openai_completions,
    openai_responses,
    tokenize,
)
from halfbyte.server.http import errors, info, openapi, page
from halfbyte.server.http.middleware import Bodies, Middleware
from halfbyte.server.settings import ServerSettings


def create_app(source: TokenSource, tokenizer: Tokenizer, settings: ServerSettings | None = None) -> FastAPI:
    """The ASGI application. Its `state.service` is what run.py drains on SIGTERM."""
    settings = settings or ServerSettings()
    service = Service(source, tokenizer, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.admission.watchdog.start()
        try:
            yield
        finally:
            await service.admission.watchdog.stop()
            service.admission.workroom.close()

    app = FastAPI(
        title="halfbyte",
        version=__version__,
        summary="gpt-oss behind OpenAI's, Anthropic's and Ollama's APIs",
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    app.state.endpoints = []  # (path, shape of its errors)
    errors.install(app)
    tokenizer_name = tokenizer.name.rpartition("/")[2]
    apis = (openai_chat, openai_completions, openai_responses, anthropic_messages, ollama)  # they generate answers
    for api in apis:
        service.metrics.expect_api(api.API)
    routers = [
        *(api.router(service) for api in (*apis, tokenize)),
        info.router(source.info, tokenizer_name, service.names, service.admission, service.metrics),
    ]
    for router in routers:
        app.include_router(router)
        for route in router.routes:
            assert isinstance(route, APIRoute)
            for method in route.methods or ():
                service.metrics.expect(method, route.path)
            app.state.endpoints.append((route.path, errors.shape_with(map(str, route.tags))))
    if settings.page:
        app.include_router(page.router())
    app.openapi = openapi.describe(app, settings)  # type: ignore[method-assign]
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    # Added last, so it is the outermost of ours: a preflight is answered by CORS behind it, without a key.
    app.state.bodies = Bodies(settings, service.admission.workroom)
    app.add_middleware(Middleware, settings=settings, metrics=service.metrics, bodies=app.state.bodies)
    return app
