"""The two tools gpt-oss was trained with: a browser and a Python notebook.

The wording is part of the model's training data, so it is kept to the letter as OpenAI's harmony package
(Apache-2.0) publishes it; other words would describe a tool the model does not know. Running the tools is not
halfbyte's business.
"""

from __future__ import annotations

from halfbyte.harmony.messages import Tool, ToolNamespace

_NUMBER_MINUS_ONE = {"type": "number", "default": -1}

BROWSER = ToolNamespace(
    name="browser",
    description=(
        "Tool for browsing.\n"
        "The `cursor` appears in brackets before each browsing display: `[{cursor}]`.\n"
        "Cite information from the tool using the following format:\n"
        "`【{cursor}†L{line_start}(-L{line_end})?】`, for example: `【6†L9-L11】` or `【8†L3】`.\n"
        "Do not quote more than 10 words directly from the tool output.\n"
        "sources=web (default: web)"
    ),
    tools=(
        Tool(
            "search",
            "Searches for information related to `query` and displays `topn` results.",
            {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "topn": {"type": "number", "default": 10},
                    "source": {"type": "string"},
                },
                "required": ["query"],
            },
        ),
        Tool(
            "open",
            "Opens the link `id` from the page indicated by `cursor` starting at line number `loc`, showing "
            "`num_lines` lines.\n"
            "Valid link ids are displayed with the formatting: `【{id}†.*】`.\n"
            "If `cursor` is not provided, the most recent page is implied.\n"
            "If `id` is a string, it is treated as a fully qualified URL associated with `source`.\n"
            "If `loc` is not provided, the viewport will be positioned at the beginning of the document or centered on "
            "the most relevant passage, if available.\n"
            "Use this function without `id` to scroll to a new location of an opened page.",
            {
                "type": "object",
                "properties": {
                    "id": {"type": ["number", "string"], "default": -1},
                    "cursor": _NUMBER_MINUS_ONE,
                    "loc": _NUMBER_MINUS_ONE,
                    "num_lines": _NUMBER_MINUS_ONE,
                    "view_source": {"type": "boolean", "default": False},
                    "source": {"type": "string"},
                },
            },
        ),
        Tool(
            "find",
            "Finds exact matches of `pattern` in the current page, or the page given by `cursor`.",
            {
                "type": "object",
                "properties": {"pattern": {"type": "string"}, "cursor": _NUMBER_MINUS_ONE},
                "required": ["pattern"],
            },
        ),
    ),
)

PYTHON = ToolNamespace(
    name="python",
    description=(
        "Use this tool to execute Python code in your chain of thought. The code will not be shown to the user. This "
        "tool should be used for internal reasoning, but not for code that is intended to be visible to the user (e.g. "
        "when creating plots, tables, or files).\n\n"
        "When you send a message containing Python code to python, it will be executed in a stateful Jupyter notebook "
        "environment. python will respond with the output of the execution or time out after 120.0 seconds. The drive "
        "at '/mnt/data' can be used to save and persist user files. Internet access for this session is UNKNOWN. "
        "Depends on the cluster."
    ),
)
