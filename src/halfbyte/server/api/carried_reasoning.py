"""Reasoning in the fields that clients carry back untouched (`encrypted_content`, `signature`).

Not a secret: the text is in the answer as well. What another service wrote there nobody but it can read, and it is
ignored.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "halfbyte.1."


def encode_reasoning(reasoning: str) -> str:
    return _MARK + base64.b64encode(reasoning.encode()).decode()


def decode_reasoning(field: str) -> str:
    """The reasoning; empty if it is not ours or is damaged."""
    if not field.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(field.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""
