"""What every API shares when it answers: the engine, the tokens of harmony, who may come in, what is measured."""

from __future__ import annotations

import logging

from halfbyte.engine.request import TokenSource
from halfbyte.harmony.repairs import REPAIRS
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.server.answer.call_memory import CallMemory
from halfbyte.server.answer.harmony_tokens import HarmonyTokens
from halfbyte.server.answer.pump import Pacer
from halfbyte.server.http.admission import Admission
from halfbyte.server.http.metrics import Metrics
from halfbyte.server.http.model_names import ModelNames
from halfbyte.server.http.printable import printable
from halfbyte.server.settings import ServerSettings

MAX_TEXT = 8 << 20  # bytes that are tokenised for whoever only wants to count
prompt_log = logging.getLogger("halfbyte.prompts")


class Service:
    def __init__(self, source: TokenSource, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.settings = settings
        self.harmony = HarmonyTokens(tokenizer)
        self.metrics = Metrics(source, REPAIRS)
        self.admission = Admission(source, settings, self.metrics)
        self.names = ModelNames(source.info, settings)
        self.pacer = Pacer()
        # No text of a request can be longer: a token stands for so many bytes at the most.
        self.longest_text = max(MAX_TEXT, source.info.max_context * tokenizer.longest_token)
        self.calls = CallMemory(settings.remembered_bytes)
        if settings.log_prompts:
            prompt_log.setLevel(logging.INFO)

    def log_prompt(self, tokens: list[int]) -> None:
        if self.settings.log_prompts:
            prompt_log.info("%s", printable(self.tokenizer.decode(tokens)))
