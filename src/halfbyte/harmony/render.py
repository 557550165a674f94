"""A conversation as the tokens the model was trained on, equal to OpenAI's harmony package token for token.

Control tokens come from the structure of the messages alone: text, names and recipients are always encoded as plain
text, so nothing a caller writes can open or close a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfbyte.errors import RequestError
from halfbyte.harmony import vocabulary as names
from halfbyte.harmony.messages import (
    ANALYSIS,
    FINAL,
    FUNCTIONS,
    Content,
    DeveloperContent,
    Message,
    Role,
    SystemContent,
)
from halfbyte.harmony.typescript import tools_section
from halfbyte.harmony.vocabulary import Controls, Vocabulary


@dataclass(frozen=True, slots=True)
class Control:
    """A control token on its way to becoming an id; anything else in a rendering is a plain string."""

    name: str


Piece = Control | str
_START, _CHANNEL, _CONSTRAIN = Control(names.START), Control(names.CHANNEL), Control(names.CONSTRAIN)
_MESSAGE, _END, _CALL, _RETURN = (Control(n) for n in (names.MESSAGE, names.END, names.CALL, names.RETURN))


def render_prompt(vocabulary: Vocabulary, messages: Sequence[Message]) -> list[int]:
    """The prompt for a model: without the reasoning of finished turns, with `<|start|>assistant` at the end."""
    return render_conversation_for_completion(vocabulary, drop_stale_analysis(messages), drop_analysis=False)


def render_conversation_for_completion(
    vocabulary: Vocabulary,
    messages: Sequence[Message],
    next_role: Role = Role.ASSISTANT,
    *,
    drop_analysis: bool = True,
) -> list[int]:
    """The conversation, then the beginning of the next message. `drop_analysis` is the package's own rule."""
    return _ids(vocabulary, [*_conversation(messages, drop_analysis), _START, next_role.value])


def render_conversation(
    vocabulary: Vocabulary, messages: Sequence[Message], *, drop_analysis: bool = True
) -> list[int]:
    return _ids(vocabulary, _conversation(messages, drop_analysis))


def render_conversation_for_training(
    vocabulary: Vocabulary, messages: Sequence[Message], *, drop_analysis: bool = True
) -> list[int]:
    """Like `render_conversation`, but a final answer that ends the conversation ends with `<|return|>`."""
    return _ids(vocabulary, _ending_with_return(messages, list(_conversation(messages, drop_analysis))))


def render_message(vocabulary: Vocabulary, message: Message, *, has_functions: bool = False) -> list[int]:
    return _ids(vocabulary, _message(message, has_functions))


def render_text(messages: Sequence[Message], *, drop_analysis: bool = True) -> str:
    """The rendering for a person to read. Not for a model: text spelled like a control token looks like one here."""
    pieces = _conversation(messages, drop_analysis)
    return "".join(piece.name if isinstance(piece, Control) else piece for piece in pieces)


def render_training_example(vocabulary: Vocabulary, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Ids, and for each whether the model has to produce it itself.

    It produces what the assistant says and how each message ends, and the `<|start|>assistant` between two of its own
    messages; the first `<|start|>assistant` after anyone else's message is part of the prompt.
    """
    messages = drop_stale_analysis(messages)
    has_functions = _has_functions(messages)
    ids: list[int] = []
    mask: list[bool] = []
    previous: Role | None = None
    for index, message in enumerate(messages):
        pieces = list(_message(message, has_functions))
        if index == len(messages) - 1:
            pieces = _ending_with_return(messages, pieces)
        prompt_pieces = 0 if previous is Role.ASSISTANT else 2  # <|start|> and the role
        for position, piece in enumerate(pieces):
            encoded = _ids(vocabulary, [piece])
            ids += encoded
            mask += [message.role is Role.ASSISTANT and position >= prompt_pieces] * len(encoded)
        previous = message.role
    return ids, mask


def drop_stale_analysis(messages: Sequence[Message]) -> list[Message]:
    """Without the reasoning of turns that ended in a final answer before the last user message.

    Reasoning since then stays: in a chain of tool calls the model has to see what it was thinking. (The package's
    own rule looks only at the first final answer of a conversation, so it keeps reasoning that the format's
    description says to drop; on what this function returns the two agree.)
    """
    last_user = max((i for i, m in enumerate(messages) if m.role is Role.USER), default=0)
    answered = max((i for i, m in enumerate(messages[:last_user]) if _is_final(m)), default=-1)
    return [m for i, m in enumerate(messages) if i > answered or m.channel != ANALYSIS]


# ---- pieces -------------------------------------------------------------------------------------


def _ids(vocabulary: Vocabulary, pieces: Iterator[Piece] | Sequence[Piece]) -> list[int]:
    special, encode = vocabulary.special, vocabulary.encode
    out: list[int] = []
    for piece in pieces:
        if isinstance(piece, Control):
            if piece.name not in special:
                Controls.of(vocabulary)  # says which are missing
            out.append(special[piece.name])
        else:
            out += encode(piece)
    return out


def _conversation(messages: Sequence[Message], drop_analysis: bool) -> Iterator[Piece]:
    has_functions = _has_functions(messages)
    spoken = [m for m in messages if m.role is Role.ASSISTANT]
    drop = drop_analysis and bool(spoken) and spoken[-1].channel == FINAL
    first_final = next((i for i, m in enumerate(messages) if m.channel == FINAL), 0)
    for index, message in enumerate(messages):
        if not (drop and index < first_final and message.channel == ANALYSIS):
            yield from _message(message, has_functions)


def _message(message: Message, has_functions: bool) -> Iterator[Piece]:
    yield _START
    if message.role is Role.TOOL:
        if not message.name:
            raise RequestError("a tool's result needs the name of the tool that produced it.")
        yield message.name
    else:
        yield message.role.value
        if message.name is not None:
            yield f":{message.name}"
    if message.recipient is not None and message.recipient != "all":
        yield f" to={message.recipient}"
    if message.channel is not None:
        yield _CHANNEL
        yield message.channel
    if message.content_type is not None:
        yield from _content_type(message.content_type)
    yield _MESSAGE
    for part in message.parts:
        yield _content(part, message.role, has_functions)
    yield _CALL if message.role is Role.ASSISTANT and message.recipient is not None else _END


def _content_type(content_type: str) -> Iterator[Piece]:
    format = content_type.removeprefix(names.CONSTRAIN)
    if format == content_type:
        yield f" {content_type}"
    else:
        yield " "
        yield _CONSTRAIN
        yield format


def _content(content: Content, role: Role, has_functions: bool) -> str:
    if isinstance(content, str):
        return content
    home = Role.SYSTEM if isinstance(content, SystemContent) else Role.DEVELOPER
    if role is not home:
        raise RequestError(f"{home.value} content cannot stand in a {role.value} message.")
    if isinstance(content, SystemContent):
        return _system(content, has_functions)
    return _developer(content)


def _system(content: SystemContent, has_functions: bool) -> str:
    about = []
    if content.model_identity is not None:
        about.append(content.model_identity)
    if content.knowledge_cutoff is not None:
        about.append(f"Knowledge cutoff: {content.knowledge_cutoff}")
    if content.conversation_start_date is not None:
        about.append(f"Current date: {content.conversation_start_date}")
    sections = ["\n".join(about)] if about else []
    if content.reasoning_effort is not None:
        sections.append(f"Reasoning: {content.reasoning_effort}")
    if content.tools:
        sections.append(tools_section(content.tools))
    if content.channels:
        line = f"# Valid channels: {', '.join(content.channels)}."
        if content.channel_required:
            line += " Channel must be included for every message."
        if has_functions:
            line += f"\nCalls to these tools must go to the commentary channel: '{FUNCTIONS}'."
        sections.append(line)
    return "\n\n".join(sections)


def _developer(content: DeveloperContent) -> str:
    sections = [] if content.instructions is None else ["# Instructions", content.instructions]
    if content.tools:
        sections.append(tools_section(content.tools))
    return "\n\n".join(sections)


def _has_functions(messages: Sequence[Message]) -> bool:
    return any(
        namespace.name == FUNCTIONS and namespace.tools
        for message in messages
        for part in message.parts
        if isinstance(part, DeveloperContent)
        for namespace in part.tools
    )


def _is_final(message: Message) -> bool:
    return message.role is Role.ASSISTANT and message.channel == FINAL


def _ending_with_return(messages: Sequence[Message], pieces: list[Piece]) -> list[Piece]:
    return [*pieces[:-1], _RETURN] if messages and _is_final(messages[-1]) else pieces
