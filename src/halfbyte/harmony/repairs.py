"""The names of every repair that the parser counts, for those who publish counts before the first one happens.

docs/harmony.md says what each means.
"""

from __future__ import annotations

REPAIRS = (
    "abandoned_header",
    "bare_channel",
    "bare_recipient",
    "call_without_call",
    "call_without_recipient",
    "cut_header",
    "doubled_channel",
    "doubled_content_type",
    "doubled_end",
    "doubled_header",
    "doubled_message",
    "doubled_recipient",
    "doubled_role",
    "doubled_start",
    "empty_channel",
    "empty_header",
    "foreign_role",
    "glued_channel",
    "glued_role",
    "half_character",
    "late_message",
    "missing_end",
    "missing_message",
    "missing_role",
    "missing_start",
    "spaced_recipient",
    "special_in_text",
    "stray_words",
    "unclean_channel",
    "unknown_channel",
    "unknown_role",
)
