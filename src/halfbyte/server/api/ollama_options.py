"""Ollama's `options`: how tokens are chosen, under its names, as the fields every endpoint here shares.

What describes Ollama's own machine is taken without effect; a sampler that this engine has not is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field

from halfbyte.server.api.shared_schema import RepetitionPenalty, SamplerFields, SamplingFields

B = TypeVar("B", bound=SamplingFields)

_MACHINE = "how the model is loaded was decided when this server started"
OPTIONS_HARMLESS = {
    "num_ctx": "the context is as long as this server was started with",
    "num_keep": "no prompt is cut here",
    "penalize_newline": "a newline is a token like others",
    **dict.fromkeys(
        ("num_gpu", "main_gpu", "num_thread", "num_batch", "numa", "low_vram", "f16_kv", "vocab_only"), _MACHINE
    ),
    **dict.fromkeys(("use_mmap", "use_mlock", "draft_num_predict"), _MACHINE),
}
_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}


class OllamaOptions(SamplerFields):
    harmless: ClassVar[dict[str, str]] = OPTIONS_HARMLESS
    num_predict: Annotated[int, Field(ge=-2, le=2**31)] | None = None  # -1 and -2: as many as fit
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: Literal[-1] | None = None  # penalties look at everything so far
    typical_p: Literal[1] | None = None
    tfs_z: Literal[1] | None = None
    mirostat: Literal[0] | None = None
    mirostat_tau: float | None = None  # without effect while it is off
    mirostat_eta: float | None = None

    def as_defaults(self, body: B) -> B:
        """The body, with what these options say of fields it leaves open."""
        values: dict[str, Any] = {}
        for option in (*SamplerFields.model_fields, *_NAMES):
            field = _NAMES.get(option, option)
            value = getattr(self, option)
            if value is not None and getattr(body, field) is None:
                values[field] = max(value, -1) if option == "num_predict" else value
        return body.model_copy(update=values) if values else body
