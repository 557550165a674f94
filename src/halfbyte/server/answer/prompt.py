"""A conversation as the tokens of a prompt, within the context, and where a JSON answer begins."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, replace

from halfbyte.engine.request import Constraint, ReasoningLimit, SamplingParams, SourceInfo
from halfbyte.harmony.messages import DeveloperContent, Message, ReasoningEffort, SystemContent
from halfbyte.harmony.render import render_prompt
from halfbyte.harmony.triggers import reasoning_closings
from halfbyte.server.answer.conversation import Conversation
from halfbyte.server.answer.harmony_tokens import HarmonyTokens
from halfbyte.server.answer.service import Service
from halfbyte.server.answer.token_budget import TokenBudget
from halfbyte.server.answer.tools import Toolbox
from halfbyte.server.http.errors import ApiError, bad_request
from halfbyte.server.settings import ServerSettings


@dataclass(frozen=True)
class Prompt:
    conversation: Conversation
    context: list[int]  # the conversation so far, up to `<|start|>assistant`
    prefill: list[int]  # what the answer begins with, chosen for the model; the parser sees it too
    tools: Toolbox  # those the model was shown
    sampling: SamplingParams  # max_tokens within the context, no stop strings
    constraint: Constraint | None
    reasoning: ReasoningLimit | None = None

    @property
    def tokens(self) -> list[int]:
        return self.context + self.prefill

    @property
    def length(self) -> int:
        return len(self.context) + len(self.prefill)


def make_prompt(service: Service, conversation: Conversation) -> Prompt:
    """Render it and check that it fits; what does not is refused with the numbers."""
    harmony = service.harmony
    budget = TokenBudget(service.tokenizer, service.source.info.max_context, conversation.input_field)
    tools = conversation.tools.limited_to(conversation.tool_choice)
    try:
        context = render_prompt(budget, _all_messages(conversation, tools, service.settings))
    except RecursionError:
        raise bad_request(
            "a JSON schema in the request is nested too deeply to be shown to the model.", "tools"
        ) from None
    prefill = _prefill(conversation, tools, harmony, budget)
    constraint = None
    if conversation.format is not None:
        constraint = Constraint(
            conversation.format.kind,
            conversation.format.source,
            triggers=harmony.final_headers,
            end_tokens=(harmony.controls.return_,),
        )
    length = len(context) + len(prefill)
    sampling = within_context(conversation.sampling, length, service.source.info, conversation.input_field)
    reasoning = None
    if (limit := conversation.reasoning_limit) is not None:
        is_json = conversation.format is not None and conversation.format.is_json
        reasoning = ReasoningLimit(limit, reasoning_closings(service.tokenizer, tools=bool(tools), json=is_json))
    return Prompt(conversation, context, prefill, tools, replace(sampling, stop=()), constraint, reasoning)


def _all_messages(conversation: Conversation, tools: Toolbox, settings: ServerSettings) -> list[Message]:
    """The messages with harmony's system and developer messages before them."""
    effort: ReasoningEffort = "low" if conversation.effort == "none" else conversation.effort
    system = SystemContent(
        model_identity=conversation.identity or SystemContent.model_identity,
        reasoning_effort=effort,
        knowledge_cutoff=settings.knowledge_cutoff,
        conversation_start_date=settings.conversation_date or dt.datetime.now(dt.UTC).date().isoformat(),
    )
    out = [Message.system(system)]
    instructions = conversation.instructions or None
    if (format := conversation.format) is not None and format.is_json:
        about = f"// {format.description}\n" if format.description else ""
        section = f"# Response Formats\n\n## {format.name}\n\n{about}{format.source}"
        instructions = f"{instructions}\n\n{section}" if instructions else section
    if instructions or tools:
        out.append(Message.developer(DeveloperContent(instructions, tools.namespaces())))
    return out + conversation.messages


def _prefill(conversation: Conversation, tools: Toolbox, harmony: HarmonyTokens, budget: TokenBudget) -> list[int]:
    call_required = conversation.tool_choice.mode == "required"
    if conversation.opening is not None:
        if call_required:
            text = "an answer that must begin with given text cannot be a required tool call."
            raise bad_request(text, conversation.input_field)
        header = harmony.analysis_header if conversation.opens_with_reasoning else harmony.final_header
        return [*header, *budget.encode(conversation.opening)]
    if conversation.reasoning_limit == 0 and not call_required:
        # Without tools the answer begins at once. With them the model must still choose, so it is shown that it
        # has already thought, about nothing.
        if tools:
            return harmony.empty_reasoning
        return harmony.json_header if conversation.format and conversation.format.is_json else harmony.final_header
    return []


def within_context(sampling: SamplingParams, prompt: int, info: SourceInfo, param: str) -> SamplingParams:
    """Limits that fit behind a prompt of so many tokens. An answer that they cut ends with the reason "length"."""
    limit, left = sampling.max_tokens, info.max_context - prompt
    if left < (1 if limit is None else min(limit, 1)):
        raise ApiError(
            400,
            f"The prompt has {prompt} tokens and this model holds {info.max_context} in all; shorten the conversation.",
            param=param,
            code="context_length_exceeded",
        )
    return replace(
        sampling,
        max_tokens=left if limit is None else min(limit, left),
        min_tokens=min(sampling.min_tokens, left),
    )
