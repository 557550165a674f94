"""Every knob of the HTTP server, as one frozen record, and where API keys come from.

Reads a key file when asked to; never reads the environment on its own: the caller hands in what it found there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halfbyte.errors import UsageError

Effort = Literal["none", "low", "medium", "high"]

MiB = 1 << 20
GiB = 1 << 30


@dataclass(frozen=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    # The name clients see; None means the engine's own. `aliases` are further names for the same model.
    model_name: str | None = None
    aliases: tuple[str, ...] = ()
    any_model: bool = False  # accept whatever name a client sends (for clients that cannot be configured)
    api_keys: tuple[str, ...] = ()  # empty: no key is asked for
    cors_origins: tuple[str, ...] = ()  # empty: no CORS headers at all
    max_body_bytes: int = 32 * MiB
    max_requests: int = 256  # running and waiting together; one more is answered 429
    request_timeout: float | None = None  # seconds a request may take in the engine
    default_max_tokens: int | None = None  # None: until the context ends
    default_effort: Effort = "medium"
    temperature: float = 1.0  # what a request that names none gets
    top_p: float = 1.0
    max_choices: int = 16  # the largest `n`
    stored_responses: int = 512  # how many responses `previous_response_id` can reach back to
    stored_bytes: int = 64 * MiB
    drain_seconds: float = 30.0  # how long SIGTERM waits for running requests
    keepalive_seconds: float = 10.0  # between SSE comments while a long prompt is read
    headers_after: float = 1.0  # how long a stream waits for its first token before it answers 200
    min_available_bytes: int = 2 * GiB  # below this much MemAvailable new work is refused
    log_prompts: bool = False
    page: bool = True
    knowledge_cutoff: str = "2024-06"
    conversation_date: str | None = None  # None: today

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be at least {least}"
            for name, least in (
                ("max_body_bytes", 1024),
                ("max_requests", 1),
                ("max_choices", 1),
                ("stored_responses", 0),
                ("drain_seconds", 0),
                ("keepalive_seconds", 0.1),
                ("headers_after", 0),
            )
            if getattr(self, name) < least
        ]
        if not 0 <= self.port <= 65535:
            problems.append("port must lie between 0 and 65535")
        if any(not key.strip() for key in self.api_keys):
            problems.append("an API key is empty")
        if problems:
            raise UsageError(f"server settings: {'; '.join(problems)}.")

    @property
    def local_only(self) -> bool:
        return self.host in ("127.0.0.1", "localhost", "::1")


def load_api_keys(file: Path | None = None, given: Sequence[str] = ()) -> tuple[str, ...]:
    """Keys from `given` (already split from an option or a variable) and from a file with one key per line.

    Empty lines and lines that start with # are skipped. A file without any key is an error: it would open the server.
    """
    keys = [key.strip() for key in given if key.strip()]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(
                f"the API key file {file} cannot be read ({e}); check the path and its permissions."
            ) from None
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise UsageError(f"the API key file {file} holds no key; put one key on each line.")
        keys += found
    if any(not key.isascii() or any(c.isspace() for c in key) for key in keys):
        raise UsageError(
            "an API key holds a space or a non-ASCII character, which HTTP headers cannot carry; choose another."
        )
    return tuple(dict.fromkeys(keys))
