"""Whatever fits (or nearly fits) the published schema is answered, never with a 5xx: schemathesis against the app."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from scripted import Play, ScriptedSource, say

from halfbyte.server.app import create_app
from halfbyte.server.settings import ServerSettings

schemathesis = pytest.importorskip("schemathesis")
pytestmark = pytest.mark.slow


def _play(request: Any, index: int) -> Play:
    return Play("{}<|return|>" if request.constraint else say("ok", "hm"))


def test_no_server_errors() -> None:
    source = ScriptedSource(_play, max_context=100_000)
    app = create_app(source, source.tokenizer, ServerSettings(min_available_bytes=0))
    operations = [found.ok() for found in schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations()]
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages"} <= {o.path for o in operations}
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    for operation, mode in itertools.product(operations, modes):
        if mode is schemathesis.GenerationMode.NEGATIVE and operation.method.upper() != "POST":
            continue  # only a body has a schema that can be broken

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        def answers(case: Any) -> None:
            response = case.call()
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert response.json()["error"]["message"]

        answers()
