"""Every exception halfbyte raises on purpose.

    HalfbyteError                  one sentence that says what to do; `exit_code` for the terminal, `status` for HTTP
    ├── UsageError                 the caller can fix it (exit 2, HTTP 400)
    │   ├── GateError              an unknown gate, value, preset or environment variable
    │   ├── PlanError              no phase can serve what was asked for; carries every refusal
    │   ├── FormatError            a tensor or number format used where it cannot be
    │   ├── InvalidFigureError     a figure that no hardware of that kind can reach
    │   ├── CheckpointError        a model folder or file that is missing, damaged or of another kind
    │   └── RequestError           a request that can never be served as written
    │       └── ContextError       prompt + max_tokens exceed what the model or the KV cache can ever hold (HTTP 400)
    ├── CapacityError              it could be served, but not now (exit 1, HTTP 503)
    │   ├── QueueFullError         the bounded queue is full (HTTP 429)
    │   └── NotEnoughMemoryError   of the device or of the host; the message has the numbers
    ├── EngineError                our side failed (exit 1, HTTP 500)
    │   ├── StepError              one step failed for one request; the engine goes on
    │   ├── AccountError           a measured time below the least its operations can take: our bookkeeping is wrong
    │   └── EngineDiedError        the engine process is gone (HTTP 503)
    └── PeerError                  another engine could not be built, or did not run (exit 1)
        ├── PeerRefusedError       it cannot run what was asked for; the message has the reasons
        ├── PeerDiedError          it crashed, hung or never became ready; the message names the diagnostics
        └── AskError               it did not answer a request well

Anything else that escapes is a bug.
"""

from __future__ import annotations


class HalfbyteError(Exception):
    exit_code = 1
    status = 500


class UsageError(HalfbyteError):
    exit_code = 2
    status = 400


class GateError(UsageError):
    pass


class PlanError(UsageError):
    pass


class FormatError(UsageError):
    pass


class InvalidFigureError(UsageError):
    pass


class DisturbedError(InvalidFigureError):
    """A figure was taken while the machine did other work."""


class CheckpointError(UsageError):
    pass


class RequestError(UsageError):
    pass


class ContextError(RequestError):
    pass


class CapacityError(HalfbyteError):
    status = 503


class QueueFullError(CapacityError):
    status = 429


class NotEnoughMemoryError(CapacityError):
    pass


class EngineError(HalfbyteError):
    pass


class StepError(EngineError):
    pass


class AccountError(EngineError):
    pass


class EngineDiedError(EngineError):
    status = 503


class PeerError(HalfbyteError):
    pass


class PeerRefusedError(PeerError):
    pass


class PeerDiedError(PeerError):
    pass


class AskError(PeerError):
    pass
