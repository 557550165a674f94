"""halfbyte: gpt-oss from MXFP4 weights at the speed of the memory it lives in.

from halfbyte import Engine

with Engine() as engine:                              # no argument: the embedded model
    print(engine.chat("What is 17 + 25?").text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "Completion",
    "Constraint",
    "Delta",
    "Engine",
    "Gates",
    "HalfbyteError",
    "Piece",
    "SamplingParams",
    "ToolCall",
    "__version__",
]

if TYPE_CHECKING:
    from halfbyte.engine.answers import Answer, Piece, ToolCall
    from halfbyte.engine.python_api import Completion, Engine
    from halfbyte.engine.request import Constraint, Delta, SamplingParams
    from halfbyte.errors import HalfbyteError
    from halfbyte.gates import Gates

_HOMES = {
    "Answer": "halfbyte.engine.answers",
    "Piece": "halfbyte.engine.answers",
    "ToolCall": "halfbyte.engine.answers",
    "Completion": "halfbyte.engine.python_api",
    "Engine": "halfbyte.engine.python_api",
    "Constraint": "halfbyte.engine.request",
    "Delta": "halfbyte.engine.request",
    "SamplingParams": "halfbyte.engine.request",
    "HalfbyteError": "halfbyte.errors",
    "Gates": "halfbyte.gates",
}


def __getattr__(name: str) -> Any:
    """Exports are imported when asked for: `import halfbyte` alone does not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'halfbyte' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """What programs use: the modules behind it are not part of the interface."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
