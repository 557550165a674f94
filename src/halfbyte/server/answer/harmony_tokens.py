"""The words of harmony as token ids of one vocabulary, looked up once."""

from __future__ import annotations

from halfbyte.harmony.messages import ANALYSIS, COMMENTARY, FINAL
from halfbyte.harmony.triggers import final_triggers
from halfbyte.harmony.vocabulary import Controls
from halfbyte.model.tokenizer import Tokenizer


class HarmonyTokens:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        c = self.controls = Controls.of(tokenizer)
        encode = tokenizer.encode
        # A message has ended, or something began that a plain text cannot hold.
        self.structural = frozenset(
            (c.start, c.channel, c.message, c.constrain, c.end, c.return_, c.call, *tokenizer.eos_tokens)
        )
        self.analysis_header = [c.channel, *encode(ANALYSIS), c.message]
        self.final_header = [c.channel, *encode(FINAL), c.message]
        self.final_headers = final_triggers(tokenizer)
        self.json_format = [*encode(" "), c.constrain, *encode("json"), c.message]
        self.json_header = [c.channel, *encode(FINAL), *self.json_format]
        assert tuple(self.json_header) in self.final_headers
        self.new_message = [c.end, c.start, *encode("assistant")]
        self.empty_reasoning = [*self.analysis_header, *self.new_message]
        self.call_format = [c.channel, *encode(COMMENTARY), *self.json_format]

    def call_header(self, recipient: str) -> list[int]:
        """The rest of the header of a call, from `<|start|>assistant` on."""
        return [*self.tokenizer.encode(f" to={recipient}"), *self.call_format]
