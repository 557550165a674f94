"""Whatever fits (or nearly fits) the published schema is answered, never with a 5xx: schemathesis against the app."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from scripted import Play, ScriptedSource, say

from halfbyte.server.app import create_app
from halfbyte.server.settings import ServerSettings

schemathesis = pytest.importorskip("schemathesis")
pytestmark = pytest.mark.slow


def _play(request: Any, index: int) -> Play:
    return Play("{}<|return|>" if request.constraint else say("ok", "hm"))


_source = ScriptedSource(_play, max_context=100_000)
_app = create_app(_source, _source.tokenizer, ServerSettings(min_available_bytes=0))
_schema = schemathesis.openapi.from_asgi("/openapi.json", _app)


@_schema.parametrize()
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_server_errors(case: Any) -> None:
    response = case.call()
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert response.json()["error"]["message"]
