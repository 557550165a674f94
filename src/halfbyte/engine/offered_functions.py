"""Binds a call of the model to the functions that were offered to it.

The recipient in the header of a message is generated under a grammar of the offered names. The grammar sleeps until a
header is about to name a recipient, so that everything else that the model writes is free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from halfbyte.engine.request import Constraint
from halfbyte.harmony.triggers import recipient_triggers
from halfbyte.harmony.vocabulary import Controls, Vocabulary


def offered_recipient(vocabulary: Vocabulary, recipients: Iterable[str]) -> Constraint:
    """It wakes before the equals sign, which shares a token with what follows in some vocabularies."""
    c = Controls.of(vocabulary)
    names = "|".join(map(re.escape, recipients))
    ends = (c.channel, c.constrain, c.message)
    return Constraint("regex", f"=({names}) ?", triggers=recipient_triggers(vocabulary), end_tokens=ends)
