"""What all request bodies share: nothing unknown gets in, and what is taken without effect is listed here, once.

`Strict` bodies refuse any field they do not name. The fields in the tables below are the only ones accepted although
they change nothing, each with the reason why that is honest.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

# Accounting, routing and retention at a hosted service: with one local model there is nothing for them to change.
HOSTED: dict[str, str] = {
    "user": "identifies the end user to a hosted service",
    "safety_identifier": "identifies the end user to a hosted service",
    "metadata": "labels for a hosted service's dashboard",
    "service_tier": "there is one tier",
    "prompt_cache_key": "the prefix cache finds prompts by their tokens",
    "prompt_cache_retention": "the prefix cache keeps what fits",
    "prompt_cache_options": "the prefix cache keeps what fits",
}
CHAT_HARMLESS = {
    **HOSTED,
    "store": "chat completions are not stored here",
    "prediction": "a guess at the answer, which speeds it up elsewhere and never changes it",
    "keep_alive": "the model stays loaded",
    "guided_decoding_backend": "there is one grammar engine",
    "guided_whitespace_pattern": "what the model writes between values is its own",
}
RESPONSES_HARMLESS = {
    **{k: v for k, v in HOSTED.items() if k != "metadata"},
    "client_metadata": "what an agent tells a hosted service about itself",
    "stream_options": "the only option, obfuscation, pads events for a public network",
}
MESSAGES_HARMLESS = {
    "metadata": "identifies the end user to a hosted service",
    "service_tier": "there is one tier",
    "cache_control": "the prefix cache needs no marks",
    "inference_geo": "it runs here",
    "user_profile_id": "identifies the end user to a hosted service",
    "workspace_id": "identifies the customer to a hosted service",
    "context_management": "the client's own bookkeeping; nothing is cleared here",
}


Verbosity = Literal["low", "medium", "high"]  # gpt-oss knows no such switch; the answer says that it was left out


def left_out_header(fields: list[str]) -> dict[str, str] | None:
    """What a request asked for and did not get, although it was served."""
    return {"x-halfbyte-left-out": ",".join(fields)} if fields else None


T = TypeVar("T")
# A list of many wrong items is refused for the first of them: noting each would take longer than serving it.
Items = Annotated[list[T], Field(fail_fast=True)]
_MOST_MESSAGES = 1 << 15  # each is four tokens at the least, and no context has more than 131,072


def _few_enough(value: Any) -> Any:
    if isinstance(value, list) and len(value) > _MOST_MESSAGES:
        raise ValueError(f"it has more than {_MOST_MESSAGES} items, and no context holds so many")
    return value


Messages = Annotated[Items[T], BeforeValidator(_few_enough)]


def _not_many(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > 1024:
        raise ValueError("it has more than 1024 entries")
    return value


Table = Annotated[dict[str, T], BeforeValidator(_not_many)]
_MOST_FIELDS = 200  # several times those of the largest body


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    harmless: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_harmless(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MOST_FIELDS:
            raise ValueError("it has far more fields than this server knows")
        if cls.harmless and isinstance(value, dict) and not cls.harmless.keys().isdisjoint(value):
            return {k: v for k, v in value.items() if k not in cls.harmless}
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> Any:
        schema = handler(core_schema)
        if cls.harmless:
            target = handler.resolve_ref_schema(schema)
            target.setdefault("properties", {}).update(
                {k: {"description": f"Accepted without effect: {why}."} for k, why in cls.harmless.items()}
            )
        return schema


class TextPart(Strict):
    harmless: ClassVar[dict[str, str]] = {"cache_control": "the prefix cache needs no marks"}
    type: Literal["text"]
    text: str


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: str


def text_of(content: str | list[Any] | None) -> str:
    """Text of a content field; several parts are one text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.refusal if part.type == "refusal" else part.text for part in content)


Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("0 asks for nothing; give at least 1, or -1 for as many as fit")
    return value


Limit = Annotated[int, Field(ge=-1, le=2**31)]  # of tokens; -1: as many as fit, as other servers read it
SomeTokens = Annotated[Limit, AfterValidator(_not_zero)]


class StreamOptions(Strict):
    harmless: ClassVar[dict[str, str]] = {"include_obfuscation": "padding for a public network"}
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # extension: usage in every chunk


class SamplerFields(Strict):
    """How tokens are chosen, as OpenAI's APIs, Ollama's options and other servers' extensions spell it alike.

    The ranges are those of the APIs, at most as wide as the engine's (`ops/sampling_settings.py`)."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: str | Items[str] | None = None
    # extensions, under the names other servers use
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None  # -1: no limit
    min_p: Share | None = None
    top_n_sigma: Annotated[float, Field(ge=-1, le=100, allow_inf_nan=False)] | None = None  # 0 and less: no limit


class OpenAISamplerFields(SamplerFields):
    """`SamplerFields` of OpenAI's APIs."""

    logit_bias: Table[Bias] | None = None
    repetition_penalty: RepetitionPenalty | None = None  # an extension


class SamplingFields(OpenAISamplerFields):
    """The knobs of /v1/chat/completions and /v1/completions, extensions last."""

    max_tokens: SomeTokens | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[Items[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    return_token_ids: bool | None = None
    cache_prompt: bool | None = None  # false cannot be honoured for one request; the answer says so in a header

    @property
    def left_out(self) -> list[str]:
        return ["cache_prompt"] if self.cache_prompt is False else []
