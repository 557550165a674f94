"""Every knob of the HTTP server, as one frozen record, and where API keys come from.

Reads a key file when asked to; never reads the environment on its own: the caller hands in what stood there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from halfbyte.errors import UsageError
from halfbyte.flags import flag
from halfbyte.log_lines import parse_format

Effort = Literal["none", "low", "medium", "high"]

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30


def parse_effort(text: str) -> Effort:
    if text.lower() not in get_args(Effort):
        raise UsageError(f"there is no effort {text!r}; use {', '.join(get_args(Effort))}.")
    return cast(Effort, text.lower())


@dataclass(frozen=True)
class ServerSettings:
    """A field with a `flag` is also an option of `halfbyte serve`."""

    host: str = flag("127.0.0.1", "--host", "Address to listen on; this machine only by default.")
    port: int = flag(8000, "--port", "Port to listen on; 0 takes a free one.", minimum=0, maximum=65535)
    uds: str | None = flag(None, "--uds", "Listen on this unix socket instead of an address and a port.")
    ssl_certfile: str | None = flag(None, "--ssl-certfile", "Serve HTTPS with this certificate (PEM).")
    ssl_keyfile: str | None = flag(None, "--ssl-keyfile", "The certificate's key, unless it is in the same file.")
    model_name: str | None = flag(  # None: the engine's own
        None, "--name", "The name that clients see.", spellings=("--served-model-name",)
    )
    aliases: tuple[str, ...] = flag((), "--alias", "A further name for the same model; repeat it for more.")
    # For clients that cannot be configured.
    any_model: bool = flag(False, "--any-model", "Answer whichever model name a client asks for.")
    api_keys: tuple[str, ...] = ()  # empty: no key is asked for
    cors_origins: tuple[str, ...] = flag(
        (), "--cors", "An origin whose pages may call from a browser."
    )  # empty: no CORS headers
    allow_hosts: tuple[str, ...] = flag(
        (), "--allow-host", "A further host name by which clients may reach this server; * allows any."
    )
    max_body_bytes: int = flag(32 * MiB, "--max-body", "Largest request body, in MiB.", minimum=0.001, unit=MiB)
    max_bodies_bytes: int = 256 * MiB  # of all requests that have not ended
    max_requests: int = flag(
        256, "--max-requests", "Most requests running and waiting together; further ones get a 429.", minimum=1
    )
    # A request's prompts times its choices. One client must not fill `max_requests`.
    max_sequences_per_request: int = flag(
        128, "--max-sequences-per-request", "Most sequences (prompts times n) of one request.", minimum=1
    )
    max_sequences_per_client: int = flag(
        192, "--max-sequences-per-client", "Most sequences of one key or address, running and waiting.", minimum=1
    )
    max_connections: int = flag(
        1024, "--max-connections", "Most connections; a few more are kept for health checks.", minimum=1
    )
    # One client may well hold 64 streams; this machine's own clients are not counted.
    max_connections_per_address: int = flag(
        256, "--max-connections-per-address", "Most connections from one remote address.", minimum=1
    )
    max_head_bytes: int = 64 * KiB  # of a request before its body
    max_headers: int = 100
    head_seconds: float = 15.0  # to send a request's head
    body_seconds: float = 300.0  # to send its body, and the longest pause within it
    body_idle: float = 30.0
    idle_seconds: int = 75  # between two requests of one connection
    write_seconds: float = 60.0  # a client that has read nothing for so long is dropped
    request_timeout: float | None = flag(None, "--timeout", "Most seconds that a request may take.")  # in the engine
    silence_seconds: float = flag(
        600.0, "--token-timeout", "End a request after so many seconds without a token; 0: never.", minimum=0.0
    )
    most_unread_tokens: int = 64 * KiB  # tokens kept for a client that does not read its stream
    default_max_tokens: int | None = None  # None: until the context ends
    default_effort: Effort = flag(
        "medium",
        "--effort",
        "Reasoning effort of requests that name none: none, low, medium, high.",
        parse=parse_effort,
    )
    max_reasoning_tokens: int | None = flag(
        None,
        "--max-reasoning-tokens",
        "End the reasoning after so many tokens and go on to the answer, where a request sets no limit of its own.",
        spellings=("--reasoning-budget",),
        minimum=0,
    )
    temperature: float = 1.0  # what a request that names none gets
    top_p: float = 1.0
    bind_tools: bool = flag(
        True, "--bind-tools/--no-bind-tools", "Let the model call only the functions that a request offers."
    )
    max_choices: int = 16  # the largest `n`
    stored_responses: int = 512  # how many responses `previous_response_id` can reach back to
    stored_bytes: int = 64 * MiB
    remembered_bytes: int = 16 * MiB  # of reasoning before calls, for clients that do not send it back
    drain_seconds: float = flag(
        30.0, "--drain", "On SIGTERM, wait so many seconds for requests that are being answered.", minimum=0.0
    )
    # Not while it loads, compiles or, on a CPU, computes: then ten minutes.
    hang_seconds: float = flag(
        30.0, "--hang", "Restart the engine after so many seconds without a step while requests wait.", minimum=1.0
    )
    keepalive_seconds: float = 10.0  # between SSE comments while a long prompt is read
    headers_after: float = 1.0  # how long a stream waits for its first token before it answers 200
    min_available_bytes: int = 2 * GiB  # below this much MemAvailable new work is refused
    last_available_bytes: int = 0  # below this much the server ends, before the machine swaps; 0: never
    log_prompts: bool = flag(False, "--log-prompts", "Write prompts and answers to the log.")
    log_format: str = flag(
        "text", "--log-format", "text, or json: one object a line, one line a request, with its id.", parse=parse_format
    )
    prefix_shared: bool = flag(
        False, "--prefix-shared",
        "Let all API keys use each other's cached prefixes; the time to a first token then tells one key what another "
        "has sent.",
    )  # fmt: skip
    page: bool = flag(True, "--page/--no-page", "Serve the chat page at /.")
    knowledge_cutoff: str = "2024-06"
    conversation_date: str | None = None  # None: today

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be at least {least}"
            for name, least in (
                ("max_body_bytes", 1024),
                ("max_requests", 1),
                ("max_choices", 1),
                ("max_sequences_per_request", 1),
                ("max_sequences_per_client", 1),
                ("stored_responses", 0),
                ("remembered_bytes", 0),
                ("drain_seconds", 0),
                ("hang_seconds", 1),
                ("keepalive_seconds", 0.1),
                ("headers_after", 0),
                ("max_connections", 1),
                ("max_connections_per_address", 1),
                ("max_head_bytes", 1024),
                ("max_headers", 16),
                ("head_seconds", 0.1),
                ("body_seconds", 0.1),
                ("body_idle", 0.1),
                ("idle_seconds", 1),
                ("write_seconds", 0.1),
                ("silence_seconds", 0),
                ("most_unread_tokens", 1),
            )
            if not getattr(self, name) >= least  # `nan` is not
        ]
        if not 0 <= self.port <= 65535:
            problems.append("port must lie between 0 and 65535")
        if self.ssl_keyfile and not self.ssl_certfile:
            problems.append("--ssl-keyfile needs --ssl-certfile beside it")
        if any(not key.strip() for key in self.api_keys):
            problems.append("an API key is empty")
        if problems:
            raise UsageError(f"server settings: {'; '.join(problems)}.")

    def prefix_scope(self, client: str) -> str:
        """Whose cached prefixes a client's requests may find: its key's, or everybody's without keys. Depends on the
        key alone, so that it is the same after a restart and tells nothing of the key."""
        number = client.removeprefix("key ")
        if self.prefix_shared or not self.api_keys or not number.isdecimal():
            return ""
        return hashlib.sha256(b"halfbyte prefix scope\0" + self.api_keys[int(number)].encode()).hexdigest()

    @property
    def local_only(self) -> bool:
        return self.uds is not None or self.host in ("127.0.0.1", "localhost", "::1")


def load_api_keys(file: Path | None = None, keys: Sequence[str] = ()) -> tuple[str, ...]:
    """Keys from `keys` (already split from an option or a variable) and from a file with one key per line.

    Empty lines and lines that start with # are skipped. A file without any key is an error: it would open the server.
    """
    all_keys = [key.strip() for key in keys if key.strip()]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(
                f"the API key file {file} cannot be read ({e}); check the path and its permissions."
            ) from None
        file_keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not file_keys:
            raise UsageError(f"the API key file {file} holds no key; put one key on each line.")
        all_keys += file_keys
    if any(not key.isascii() or any(c.isspace() for c in key) for key in all_keys):
        raise UsageError(
            "an API key holds a space or a non-ASCII character, which HTTP headers cannot carry; choose another."
        )
    return tuple(dict.fromkeys(all_keys))
