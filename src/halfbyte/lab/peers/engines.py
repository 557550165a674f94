"""Engines by name: what `--engine` takes."""

from __future__ import annotations

from collections.abc import Callable

from halfbyte.errors import UsageError
from halfbyte.lab.peers.halfbyte import HalfbytePeer
from halfbyte.lab.peers.launch import Peer
from halfbyte.lab.peers.llamacpp_server import LlamaCppPeer
from halfbyte.lab.peers.sglang import SglangPeer
from halfbyte.lab.peers.url import UrlPeer
from halfbyte.lab.peers.vllm import VllmPeer

ENGINES: dict[str, Callable[[], Peer]] = {
    "halfbyte": HalfbytePeer,
    "vllm": lambda: VllmPeer(plugin=False),
    "vllm+halfbyte": lambda: VllmPeer(plugin=True),
    "sglang": SglangPeer,
    "llama.cpp": LlamaCppPeer,
}
SPELLINGS = {"llamacpp": "llama.cpp", "llama-cpp": "llama.cpp", "llama-server": "llama.cpp"}


def engine_named(text: str) -> Peer:
    """An engine by its name, or one that runs already by its address."""
    if ":" in text:
        return UrlPeer(text)
    name = SPELLINGS.get(text.lower(), text.lower())
    if name not in ENGINES:
        names = ", ".join(ENGINES)
        raise UsageError(f"there is no engine {text!r}; use {names}, or an address such as http://host:8000.")
    return ENGINES[name]()
