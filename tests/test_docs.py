"""What the documents name exists: files, commands, flags, modules, tests, make targets. What they claim is not checked.

`docs/LOG.md` is history and keeps the names of its day; only its index is held to its sections. So is the ledger of
results, which is made from files as old as they are.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer

from halfbyte.cli.app import COMMANDS, app

ROOT = Path(__file__).parents[1]
FOLDERS = ("bench", "deploy", "docs", "models", "src", "tests", "training")
LOG = ROOT / "docs" / "LOG.md"
HISTORY = (LOG, ROOT / "docs" / "BENCHMARK_RESULTS.md")  # they keep the names of their day
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "deploy" / "README.md",
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path not in HISTORY),
    *sorted((ROOT / "models").glob("*/README.md")),
]

SPAN = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.M | re.S)
INDENTED = re.compile(r"^ {4}(\S[^\n]*)$", re.M)
URL = re.compile(r"https?://\S+")
# A word with the ending of a source or document, or one that begins with a folder of the tree.
SOURCE = re.compile(r"[\w./-]*\w\.(?:py|cu|cuh|h|sh|md|js|css|html|patch|xz)\b")
IN_FOLDER = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./-]*\w")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
PLACEHOLDER = re.compile(r"[\w./-]*(?:<[^<>\s]*>|[*…])[\w./<>*…-]*")
DEFINITION = re.compile(r"(\S+\.py) ([A-Za-z_][\w.]*)")  # a file and what it defines: engine/loop.py EngineLoop.run


def code(text: str) -> Iterator[str]:
    """Spans between backticks and the lines of code blocks."""
    for block in FENCE.findall(text):
        yield from (line.split(" #")[0].strip() for line in block.splitlines())
    text = FENCE.sub("", text)
    yield from INDENTED.findall(text)
    yield from SPAN.findall(text)


def commands(text: str) -> Iterator[list[str]]:
    """What a shell would run, as words, assignments in front left out."""
    for line in code(text):
        for command in re.split(r"&&|;|\|", line):
            words = command.split()
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words.pop(0)
            if words:
                yield words


@cache
def paths() -> frozenset[str]:
    """Every file and folder of the tree, from its root, and every end of such a path."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        found += [p for p in (ROOT / folder).rglob("*") if "__pycache__" not in p.parts]
    ends = set(FOLDERS)
    for path in found:
        parts = path.relative_to(ROOT).parts
        ends |= {"/".join(parts[i:]) for i in range(len(parts))}
    return frozenset(ends)


@cache
def options(command: str) -> frozenset[str]:
    group = typer.main.get_command(app)
    found = group.get_command(None, command)  # type: ignore[attr-defined]
    return frozenset(o for p in found.params for o in (*p.opts, *p.secondary_opts)) | {"--help"}


@cache
def script_options() -> frozenset[str]:
    """Of everything that is run with python, wherever its parser is made."""
    found: set[str] = set()
    for folder in ("src", "bench", "training"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r"\"(--[a-z][a-z0-9-]*)\"", path.read_text(encoding="utf-8")))
    return frozenset(found).union(*(options(command) for command in COMMANDS))


def is_module(name: str) -> bool:
    root = name.partition(".")[0]
    if root in ("halfbyte", "bench"):
        path = (ROOT / "src" if root == "halfbyte" else ROOT).joinpath(*name.split("."))
        return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
    return importlib.util.find_spec(root) is not None


def missing(document: Path) -> Iterator[str]:
    text = URL.sub("", document.read_text(encoding="utf-8"))
    yield from (name for name in LINK.findall(text) if not (document.parent / name).exists())
    plain = PLACEHOLDER.sub("", text)
    for name in dict.fromkeys([*SOURCE.findall(plain), *IN_FOLDER.findall(plain)]):
        if name.strip("./") not in paths() and not (document.parent / name).exists():
            yield name
    tests = test_names()
    for line in code(text):
        if match := DEFINITION.fullmatch(line):
            yield from undefined(*match.groups())
        yield from (name for name in re.findall(r"\btest_\w+", line) if name not in tests)
        if line.startswith("--"):
            yield from (flag for flag in FLAG.findall(line) if flag not in script_options())
    for words in commands(text):
        yield from wrong_words(words)


def undefined(path: str, name: str) -> Iterator[str]:
    file = next((f for f in (ROOT / "src" / "halfbyte" / path, ROOT / path) if f.is_file()), None)
    text = "" if file is None else file.read_text(encoding="utf-8")
    if not all(re.search(rf"\b(?:class|def) {part}\b", text) for part in name.split(".")):
        yield f"{path} {name}"


def wrong_words(words: list[str]) -> Iterator[str]:
    line, flags = " ".join(words), FLAG.findall(" ".join(words[1:]))
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        yield from (line for word in words[1:2] if word not in targets)
    elif words[0] == "halfbyte" and len(words) > 1 and words[1] != "--version":
        if words[1].startswith("-"):
            own = {o for p in typer.main.get_command(app).params for o in p.opts} | {"--help"}
            yield from (line for word in words[1:] if word not in own)
        elif words[1] not in COMMANDS:
            yield line
        elif words[1] in COMMANDS:
            yield from (f"{line}: {flag}" for flag in flags if flag not in options(words[1]))
    elif words[0] in ("python", "PY"):
        if words[1:2] == ["-m"] and not words[2].split(".")[-1].isupper() and not is_module(words[2]):
            yield line
        if "pytest" not in words:
            yield from (f"{line}: {flag}" for flag in flags if flag not in script_options())


@cache
def test_names() -> frozenset[str]:
    """Functions and files of tests, the files without their endings."""
    names: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        names |= {path.stem, *re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))}
    return frozenset(names)


test_names.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_is_named_exists(document: Path) -> None:
    assert not list(missing(document))


def test_what_does_not_exist_is_noticed(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "`server/nowhere.py`, bench/gone.json and [a page](gone.md); `test_nothing_like_it`; `--no-such-flag`;\n"
        "`engine/loop.py EngineLoop.leap`, `halfbyte fly`, `halfbyte serve --depth 4`, `make tea`\n\n"
        "```\nX=1 python -m halfbyte.nowhere\npython -m halfbyte.lab.bench --no-such-option   # comment\n```\n"
    )
    assert set(missing(document)) == {
        "server/nowhere.py", "bench/gone.json", "gone.md", "test_nothing_like_it", "--no-such-flag", "halfbyte fly",
        "engine/loop.py EngineLoop.leap",
        "halfbyte serve --depth 4: --depth", "python -m halfbyte.nowhere", "make tea",
        "python -m halfbyte.lab.bench --no-such-option: --no-such-option",
    }  # fmt: skip


def test_what_exists_is_not_complained_about(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "`server/http/middleware.py`, `src/halfbyte/memory.py`, `pages.py`, bench/kernels, `bench/*.py`,\n"
        "`cuda/<room>/<kernel>.cu`, https://example.com/some/page.md, `halfbyte serve M --max-context 4096`,\n"
        "`engine/loop.py EngineLoop.run`\n"
        "`python -m bench.kernels.NAME`, `python -m halfbyte.lab.bench --served`, `make test`, `--layers qkv=q8`\n"
    )
    assert not list(missing(document))


def test_the_index_of_the_log_has_a_row_for_every_section() -> None:
    text = LOG.read_text(encoding="utf-8")
    index, _, _ = text.partition("\n## 2026")
    sections = [
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^## (2.*)", text, re.M)
    ]
    assert re.findall(r"^\| .* \| \[[^\]]+\]\(#(.*)\) \|$", index, re.M) == sections
