"""vLLM's entry point: called in every process of vLLM's, sometimes more than once. What cannot be, stops vLLM here."""

from __future__ import annotations


def register() -> None:
    from halfbyte.vllm_plugin import compat, orphans

    orphans.end_with_parent()
    compat.register()
