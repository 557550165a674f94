"""The plugin's entry point, which vLLM calls in each of its processes, sometimes repeatedly. Errors here stop vLLM."""

from __future__ import annotations


def register() -> None:
    from halfbyte.vllm_plugin import compat, orphans

    orphans.end_with_parent()
    compat.register()
