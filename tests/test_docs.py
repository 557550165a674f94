"""What the documents name exists: files, commands, flags, modules, tests, make targets. What they claim is not checked.

The log is history and keeps the names of its day; its links are checked, and that `docs/LOG.md` has one short row for
every section in `docs/log/`. The ledger of results is made from files as old as they are.

A flag behind a command is checked against that command. A flag alone is checked against the commands named in the same
paragraph, table row, list item or code block and those that its page is about (PAGE_COMMANDS); where there are none,
against all commands of `halfbyte`.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import typer

import bench.__main__
from bench import catalog
from bench.measurement import MEASUREMENTS
from halfbyte.cli.app import COMMANDS, app
from halfbyte.errors import UsageError

ROOT = Path(__file__).parents[1]
FOLDERS = ("bench", "deploy", "docs", "models", "src", "tests", "training")
LOG = ROOT / "docs" / "LOG.md"
LONG_LOG = sorted((ROOT / "docs" / "log").glob("*.md"), reverse=True)  # a file for each day, newest first
HISTORY = (LOG, *LONG_LOG, ROOT / "docs" / "BENCHMARK_RESULTS.md")  # they keep the names of their day
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "bench" / "README.md",
    ROOT / "deploy" / "README.md",
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path not in HISTORY),
    *sorted((ROOT / "models").glob("*/README.md")),
]

# Pages about certain commands: flags that stand alone on them are flags of these.
PAGE_COMMANDS = {
    "deploy/README.md": ("halfbyte serve", "docker build"),
    "docs/checking.md": ("halfbyte check",),
    "docs/doctor.md": ("halfbyte doctor",),
    "docs/measuring.md": ("halfbyte bench",),
    "docs/moving.md": ("halfbyte serve", "vllm serve"),
    "docs/protocol.md": ("halfbyte check",),
    "docs/server.md": ("halfbyte serve",),
    "docs/vllm.md": ("halfbyte serve", "vllm serve"),
}
WRITTEN = {"test_log.md", "test_log"}  # files that a command writes, and their names without endings

SPAN = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.M | re.S)
BLOCK_END = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.) )|\n(?=\|)")  # of a paragraph, list item or table row
INDENTED = re.compile(r"^ {4}(\S[^\n]*)$", re.M)
URL = re.compile(r"https?://\S+")
# A word with the ending of a source or document, or one that begins with a folder of the tree.
SOURCE = re.compile(r"[\w./-]*\w\.(?:py|cu|cuh|h|sh|md|js|css|html|patch|xz)\b")
IN_FOLDER = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./-]*\w")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
PLACEHOLDER = re.compile(r"[\w./-]*(?:<[^<>\s]*>|[*…])[\w./<>*…-]*")
DEFINITION = re.compile(r"(\S+\.py) ([A-Za-z_][\w.]*)")  # a file and what it defines: engine/loop.py EngineLoop.run


def blocks(text: str) -> Iterator[list[str]]:
    """The code in each code block, paragraph, list item and table row: lines, and spans between backticks."""
    for block in FENCE.findall(text):
        yield [line.split(" #")[0].strip() for line in block.replace("\\\n", " ").splitlines()]
    for block in BLOCK_END.split(FENCE.sub("\n\n", text)):
        yield [*INDENTED.findall(block), *SPAN.findall(block)]


def commands(lines: Iterable[str]) -> Iterator[list[str]]:
    """What a shell would run, as words, assignments in front left out."""
    for line in lines:
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
    return frozenset(o for p in found.params for o in (*p.opts, *p.secondary_opts)) | {"--help", "--help-all"}


@cache
def quoted_flags(path: str) -> frozenset[str]:
    """Flags between quotes in a file or in the Python files of a folder."""
    files = (ROOT / path).glob("*.py") if (ROOT / path).is_dir() else [ROOT / path]
    return frozenset(flag for f in files for flag in re.findall(r"\"(--[a-z][a-z0-9-]*)\"", f.read_text("utf-8")))


@cache
def workshop_options() -> dict[str, frozenset[str]]:
    """Flags of each command of `python -m bench`."""
    actions = bench.__main__.parser()._actions
    subparsers = next(a for a in actions if isinstance(a, argparse._SubParsersAction)).choices
    return {name: frozenset(s for a in p._actions for s in a.option_strings) for name, p in subparsers.items()}


def command_options(words: list[str]) -> frozenset[str] | None:
    """The flags of the command that these words name; None if it is not a command of this project."""
    first, following = words[0].rpartition("/")[2], words[1:2]
    if first == "halfbyte" and following and following[0] in COMMANDS:
        return options(following[0])
    if first in COMMANDS and (not following or following[0].startswith("--")):  # `profile --predict`
        return options(first)
    if words[:2] == ["vllm", "serve"]:
        return quoted_flags("src/halfbyte/vllm_plugin")
    if words[:2] == ["docker", "build"]:
        return frozenset({"--target"})
    if first in ("python", "python3", "PY"):
        if words[1:3] == ["-m", "bench"]:
            return workshop_options().get(words[3]) if len(words) > 3 else None
        script = module_file(words[2]) if words[1:2] == ["-m"] and len(words) > 2 else script_file(*following)
    else:
        script = script_file(words[0]) if following and following[0].startswith("--") else None
    return None if script is None else quoted_flags(script.relative_to(ROOT).as_posix())


def script_file(name: str = "") -> Path | None:
    return next((f for f in (ROOT / name, ROOT / "training" / name) if name.endswith(".py") and f.is_file()), None)


def module_file(name: str) -> Path | None:
    """The file that `python -m` runs for a module of this project."""
    path = (ROOT / "src" if name.startswith("halfbyte") else ROOT).joinpath(*name.split("."))
    return next((f for f in (path.with_suffix(".py"), path / "__main__.py") if f.is_file()), None)


def wrong_flags(block: list[str], page_commands: Sequence[str]) -> Iterator[str]:
    """Flags that are not the command's in front of them or, where they stand alone, of none that they may belong to."""
    candidates = [command_options(command.split()) or frozenset() for command in page_commands]
    for words in commands(block):
        known = command_options(words)
        if known is not None:
            candidates.append(known)
            yield from (f"{' '.join(words)}: {flag}" for flag in FLAG.findall(" ".join(words[1:])) if flag not in known)
    known = frozenset().union(*(candidates or (options(command) for command in COMMANDS)))
    for line in block:
        if line.startswith("--"):
            yield from (flag for flag in FLAG.findall(line) if flag not in known)


def is_module(name: str) -> bool:
    root = name.partition(".")[0]
    if root in ("halfbyte", "bench"):
        return module_file(name) is not None
    return importlib.util.find_spec(root) is not None


def missing(document: Path, page_commands: Sequence[str] = ()) -> Iterator[str]:
    """What a document names and is not there; `page_commands` are those that it is about."""
    text = URL.sub("", document.read_text(encoding="utf-8"))
    yield from (name for name in LINK.findall(text) if not (document.parent / name).exists())
    plain = PLACEHOLDER.sub("", text)
    for name in dict.fromkeys([*SOURCE.findall(plain), *IN_FOLDER.findall(plain)]):
        if name.strip("./") not in paths() | WRITTEN and not (document.parent / name).exists():
            yield name
    tests = test_names() | WRITTEN
    for block in blocks(text):
        for line in block:
            if match := DEFINITION.fullmatch(line):
                yield from undefined(*match.groups())
            yield from (name for name in re.findall(r"\btest_\w+", line) if name not in tests)
        for words in commands(block):
            yield from wrong_words(words)
        yield from wrong_flags(block, page_commands)


def undefined(path: str, name: str) -> Iterator[str]:
    file = next((f for f in (ROOT / "src" / "halfbyte" / path, ROOT / path) if f.is_file()), None)
    text = "" if file is None else file.read_text(encoding="utf-8")
    if not all(re.search(rf"\b(?:class|def) {part}\b", text) for part in name.split(".")):
        yield f"{path} {name}"


def wrong_words(words: list[str]) -> Iterator[str]:
    line = " ".join(words)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        yield from (line for word in words[1:2] if word not in targets)
    elif words[0] == "halfbyte" and len(words) > 1 and words[1] != "--version":
        if words[1].startswith("-"):
            own = {o for p in typer.main.get_command(app).params for o in p.opts} | {"--help", "--help-all"}
            yield from (line for word in words[1:] if word not in own)
        elif words[1] not in COMMANDS:
            yield line
    elif words[0] in ("python", "PY"):
        if words[1:2] == ["-m"] and not words[2].split(".")[-1].isupper() and not is_module(words[2]):
            yield line
        if words[1:4] == ["-m", "bench", "run"]:
            yield from (f"{line}: {reason}" for reason in wrong_measurements(words[4:]))


def wrong_measurements(words: list[str]) -> Iterator[str]:
    """Of `python -m bench run NAME --set OPTION=VALUE`: a name or an option that is not there."""
    catalog.load()
    names = [w for w in itertools.takewhile(lambda w: not w.startswith("--"), words) if not w.isupper()]
    yield from (name for name in names if name not in MEASUREMENTS)
    for flag, setting in itertools.pairwise(words):
        if flag == "--set" and setting != "OPTION=VALUE" and len(names) == 1 and names[0] in MEASUREMENTS:
            try:
                MEASUREMENTS[names[0]].parse([setting.strip("'\"")])
            except UsageError as e:
                yield str(e)


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
    assert not list(missing(document, PAGE_COMMANDS.get(document.relative_to(ROOT).as_posix(), ())))


def test_pages_about_a_command_exist() -> None:
    assert set(PAGE_COMMANDS) <= {document.relative_to(ROOT).as_posix() for document in DOCUMENTS}
    assert None not in [command_options(name.split()) for names in PAGE_COMMANDS.values() for name in names]


@pytest.mark.parametrize(
    ("text", "page_commands", "wrong"),
    [
        ("`halfbyte serve --pp 4`", (), ["halfbyte serve --pp 4: --pp"]),  # a flag of bench
        ("```\nhalfbyte serve M \\\n  --pp 4\n```", (), ["halfbyte serve M --pp 4: --pp"]),
        ("`profile --max-seqs 4`", (), ["profile --max-seqs 4: --max-seqs"]),
        ("`python -m bench table --stale`", (), ["python -m bench table --stale: --stale"]),  # a flag of bench run
        ("`training/evaluate.py --stage draft`", (), ["training/evaluate.py --stage draft: --stage"]),
        ("`halfbyte serve` takes\n`--pp`.", (), ["--pp"]),
        ("| `halfbyte bench` | `--pp` |\n| `halfbyte serve` | `--pp` |", (), ["--pp"]),
        ("- `halfbyte bench`: `--pp`\n- `halfbyte serve`: `--pp`", (), ["--pp"]),
        ("`halfbyte bench` is one thing.\n\n`halfbyte serve` takes `--pp`.", (), ["--pp"]),
        ("`--pp 512` and `--max-seqs 4`", ("halfbyte serve",), ["--pp"]),
        ("`--pp 512` beside `halfbyte bench`", ("halfbyte serve",), []),
        ("`--pp 512` and `--max-seqs 4`", (), []),
        ("`--write` and `--graphs`", (), ["--write", "--graphs"]),  # of a script, and of nothing
        ("`python -m bench run` with `--stale`", (), []),
    ],
)
def test_a_flag_belongs_to_the_command_beside_it(
    tmp_path: Path, text: str, page_commands: Sequence[str], wrong: list[str]
) -> None:
    document = tmp_path / "page.md"
    document.write_text(text)
    assert list(missing(document, page_commands)) == wrong


def test_what_does_not_exist_is_noticed(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "`server/nowhere.py`, bench/gone.json and [a page](gone.md); `test_nothing_like_it`; `--no-such-flag`;\n"
        "`engine/loop.py EngineLoop.leap`, `halfbyte fly`, `halfbyte serve --depth 4`, `make tea`\n\n"
        "```\nX=1 python -m halfbyte.nowhere\npython -m bench run --no-such-option   # comment\n```\n"
    )
    assert set(missing(document)) == {
        "server/nowhere.py", "bench/gone.json", "gone.md", "test_nothing_like_it", "--no-such-flag", "halfbyte fly",
        "engine/loop.py EngineLoop.leap",
        "halfbyte serve --depth 4: --depth", "python -m halfbyte.nowhere", "make tea",
        "python -m bench run --no-such-option: --no-such-option",
    }  # fmt: skip


def test_what_exists_is_not_complained_about(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "`server/http/middleware.py`, `src/halfbyte/memory.py`, `pages.py`, bench/kernels, `bench/*.py`,\n"
        "`cuda/<room>/<kernel>.cu`, https://example.com/some/page.md, `halfbyte serve M --max-context 4096`,\n"
        "`engine/loop.py EngineLoop.run`\n"
        "`python -m bench.kernels.NAME`, `halfbyte bench --served`, `make test`, `--layers qkv=q8`\n"
    )
    assert not list(missing(document))


@pytest.mark.parametrize("page", HISTORY, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_of_history_lead_somewhere(page: Path) -> None:
    assert [name for name in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / name).exists()] == []


def test_the_log_has_a_row_for_every_section() -> None:
    sections = []
    for page in LONG_LOG:
        titles = re.findall(r"^## (2.*)", page.read_text(encoding="utf-8"), re.M)
        assert all(title.startswith(page.stem) for title in titles)
        slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
        sections += [f"log/{page.name}#{slug}" for slug in slugs]
    assert sections
    assert re.findall(r"^\| .* \| \[[^\]]+\]\(([^)]*)\) \|$", LOG.read_text(encoding="utf-8"), re.M) == sections


def test_a_row_of_the_log_is_one_short_line() -> None:
    rows = re.findall(r"^\| (.*) \| (.*) \| \[", LOG.read_text(encoding="utf-8"), re.M)
    assert [row for row in rows if len(" ".join(row)) > 165] == []
