"""OpenAI's harmony format: conversations to tokens, and whatever a model emits back to messages.

Knows nothing of models, engines or HTTP; any vocabulary with the control tokens will do (`vocabulary.Vocabulary`).
"""

from halfbyte.harmony.messages import (
    DeveloperContent,
    Message,
    Role,
    SystemContent,
    Tool,
    ToolNamespace,
)
from halfbyte.harmony.render import (
    drop_stale_analysis,
    render_conversation,
    render_conversation_for_completion,
    render_conversation_for_training,
    render_message,
    render_prompt,
    render_text,
    render_training_example,
)
from halfbyte.harmony.vocabulary import Controls, Vocabulary

__all__ = [
    "Controls",
    "DeveloperContent",
    "Message",
    "Role",
    "SystemContent",
    "Tool",
    "ToolNamespace",
    "Vocabulary",
    "drop_stale_analysis",
    "render_conversation",
    "render_conversation_for_completion",
    "render_conversation_for_training",
    "render_message",
    "render_prompt",
    "render_text",
    "render_training_example",
]
