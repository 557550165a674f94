"""Start the server and stop it well.

SIGTERM and SIGINT close the door first (503 with Retry-After, `/health` says so), let running requests end for up to
`drain_seconds`, then cancel what is left and close the engine. A second signal does not wait, more change nothing.
An engine that is gone for good ends the server with EngineDiedError, a machine about to swap with NotEnoughMemoryError,
so that whoever supervises it sees a failure and not an empty shell.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import importlib.util
import logging
import os
import signal
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

import uvicorn

from halfbyte.engine.request import TokenSource
from halfbyte.errors import EngineDiedError, NotEnoughMemoryError, UsageError
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.server.answer.service import Service
from halfbyte.server.app import create_app
from halfbyte.server.http.doorkeeper import Doorkeeper, GuardedProtocol
from halfbyte.server.settings import ServerSettings
from halfbyte.server.watchdog import Watchdog

log = logging.getLogger("halfbyte.server")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SourceFactory = Callable[[], Awaitable[tuple[TokenSource, Tokenizer]]]


class Server(uvicorn.Server):
    """uvicorn with a drain before its shutdown. uvicorn alone would stop accepting connections at once, and a client
    would see a refused connection where it could have had a 503."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining is not None:
            if not self.should_exit:
                log.warning("second signal: stopping now")
            self._stop()
            return
        loop = asyncio.get_running_loop()
        self._draining = loop.create_task(self._drain(), name="drain")

    async def _drain(self) -> None:
        await self.service.admission.drain(self.service.settings.drain_seconds)
        self._stop()

    def _stop(self) -> None:
        """Close what still runs, as if every client had left: uvicorn would cancel it and log a traceback for each."""
        self.should_exit = True
        for connection in list(self.server_state.connections):
            if connection.cycle is not None and not connection.cycle.response_complete:  # type: ignore[union-attr]
                connection.transport.abort()


def bind(settings: ServerSettings) -> socket.socket:
    """The listening socket, taken before a model is loaded: a port in use should not cost a minute."""
    if settings.ssl_certfile is not None:
        _check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    if settings.uds is not None:
        return _bind_path(settings.uds)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((settings.host, settings.port))
    except OSError as e:
        sock.close()
        where = f"{settings.host}:{settings.port}"
        raise UsageError(f"cannot listen on {where} ({e.strerror or e}); choose another --host or --port.") from None
    sock.set_inheritable(True)
    return sock


def _bind_path(path: str) -> socket.socket:
    """A unix socket for its owner and group. What a server that was killed left there is taken away."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o117)
    try:
        if _is_abandoned(path):
            os.unlink(path)
        sock.bind(path)
    except OSError as e:
        sock.close()
        raise UsageError(f"cannot listen on {path} ({e.strerror or e}); choose another --uds.") from None
    finally:
        os.umask(mask)
    sock.set_inheritable(True)
    return sock


def _is_abandoned(path: str) -> bool:
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)
    except FileNotFoundError:
        return False
    except ConnectionRefusedError:
        return True
    return False


def _check_certificate(certificate: str, key: str | None) -> None:
    """Before a model is loaded, and without asking for the password of a locked key."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or getattr(e, "reason", None) or e
        named = f"{certificate}{f' and {key}' if key else ''}"
        raise UsageError(
            f"{named} cannot be used for TLS ({reason}); give a certificate and its key in PEM, without a password."
        ) from None


def _address(settings: ServerSettings, sock: socket.socket) -> str:
    if settings.uds is not None:
        return f"unix:{os.path.abspath(settings.uds)}"
    host, port = sock.getsockname()[:2]
    return f"http{'s' if settings.ssl_certfile else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def _release(settings: ServerSettings, sock: socket.socket) -> None:
    sock.close()
    if settings.uds is not None:
        with contextlib.suppress(OSError):
            os.unlink(settings.uds)


def config_for(app: Any, settings: ServerSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        access_log=False,  # middleware.py writes one, with the request's id and without its query
        log_config=None,
        http=functools.partial(GuardedProtocol, Doorkeeper(settings)),  # type: ignore[arg-type]
        ws="none",
        timeout_keep_alive=settings.idle_seconds,
        timeout_graceful_shutdown=2,  # the drain has already waited
        server_header=False,
        lifespan="on",
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )


async def serve_source(
    settings: ServerSettings,
    source: TokenSource,
    tokenizer: Tokenizer,
    *,
    sock: socket.socket | None = None,
    started: Callable[[str], None] | None = None,
) -> None:
    """Serve until a signal, or until the source is gone, which raises EngineDiedError. `started` is told the address
    once connections are accepted."""
    sock = sock or bind(settings)
    app = create_app(source, tokenizer, settings)
    service: Service = app.state.service
    server = Server(config_for(app, settings), service)
    if not settings.local_only and not settings.api_keys:
        log.warning("listening on %s without an API key: whoever reaches this port can use the model", settings.host)
    url = _address(settings, sock)
    loop = asyncio.get_running_loop()
    for sig in _SIGNALS:
        loop.add_signal_handler(sig, server.handle_exit, sig, None)
    announce = asyncio.create_task(_announce(server, url, started))
    watch = asyncio.create_task(_end_with_source(server, source))
    memory = asyncio.create_task(_end_before_swapping(server, source))
    try:
        await server._serve([sock])
    finally:
        announce.cancel()
        watch.cancel()
        memory.cancel()
        health = source.health()  # a source that was closed is gone, too
        await source.close()
        _release(settings, sock)
    if spent := service.admission.watchdog.spent:
        raise _ended_for_memory(spent)
    if health.gone:
        raise EngineDiedError(f"{health.trouble}.")


async def _end_with_source(server: Server, source: TokenSource) -> None:
    while not source.health().gone:
        await asyncio.sleep(0.2)
    log.error("the server ends: %s", source.health().trouble)
    server.should_exit = True


def _ended_for_memory(spent: str) -> NotEnoughMemoryError:
    return NotEnoughMemoryError(
        f"the server ended so that the machine need not swap: {spent}; see what else uses memory."
    )


async def _end_before_swapping(server: Server, source: TokenSource) -> None:
    """Memory first: the engine gives back what it holds, and with that tells everybody who waits for it."""
    while not (spent := server.service.admission.watchdog.spent):
        await asyncio.sleep(0.2)
    log.error("the server ends: %s", spent)
    server.service.admission.draining = True
    await source.close()
    await asyncio.sleep(0.5)  # for those who are told to hear it
    server._stop()


async def _stop_loading(loading: asyncio.Future[Any], watchdog: Watchdog) -> None:
    """Loading takes most of the memory that a server ever takes, and others may take theirs at the same time."""
    while not watchdog.spent:
        await asyncio.sleep(watchdog.every)
        watchdog.look()
    loading.cancel()


async def _announce(server: Server, url: str, started: Callable[[str], None] | None) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    gc.collect()
    gc.freeze()  # what the start left lives as long as this process: no collection between tokens looks at it again
    gc.set_threshold(
        20_000, 20, 20
    )  # a body of many parts is not garbage: the usual 700 would look at it over and over
    log.info("serving %s at %s", server.service.names.main, url)
    if started is not None:
        started(url)


def serve(
    settings: ServerSettings, source_factory: SourceFactory, *, started: Callable[[str], None] | None = None
) -> None:
    """Take the port, make the engine, serve until a signal. Blocks; raises HalfbyteError for what a person can fix."""
    sock = bind(settings)

    async def main() -> bool:
        """Whether it came to serve; a signal may have come first."""
        loop = asyncio.get_running_loop()
        loading = asyncio.ensure_future(source_factory())
        watchdog = Watchdog(settings.min_available_bytes, settings.last_available_bytes)
        watch = asyncio.create_task(_stop_loading(loading, watchdog))

        def stop() -> None:
            if not loading.cancelling():  # a second signal must not disturb what the first has begun to end
                loading.cancel()

        for sig in _SIGNALS:
            loop.add_signal_handler(sig, stop)
        try:
            source, tokenizer = await loading
        except asyncio.CancelledError:
            _release(settings, sock)
            if watchdog.spent:
                raise _ended_for_memory(watchdog.spent) from None
            return False
        except BaseException:
            _release(settings, sock)
            raise
        finally:
            watch.cancel()
        await serve_source(settings, source, tokenizer, sock=sock, started=started)
        return True

    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        served = runner.run(main())
    if not served:
        raise KeyboardInterrupt


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed: a third less time per chunk."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory
