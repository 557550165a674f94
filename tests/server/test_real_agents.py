"""The programs people use, against our server: Codex, Claude Code, Ollama's clients, @openai/agents, LangChain, LiteLLM
and lm-eval. `make test-agents` installs them into folders of their own; without them these tests are skipped.

With AGENTS_RECORD=1 what they sent is written to tests/server/data/transcripts, from where the quick suite plays it
again (test_transcripts.py).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzed_answers import FuzzedScript
from live_server import Live
from recorder import write_fixture
from scripted import Play, ScriptedSource, call, in_turn, say

from halfbyte.engine.python_api import Engine
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.model.load import EMBEDDED
from halfbyte.server.settings import ServerSettings

pytestmark = pytest.mark.slow
Serve = Callable[..., Live]
HERE = Path(__file__).parent / "agents"
ROOT = Path(__file__).parents[2]
NODE = Path(os.environ.get("AGENTS_NODE", ROOT / ".venv-agents" / "node"))
PYTHON = Path(os.environ.get("AGENTS_PYTHON", ROOT / ".venv-agents" / "bin" / "python"))
RECORD = os.environ.get("AGENTS_RECORD") == "1"
SEEDS = range(int(os.environ.get("AGENTS_SEEDS", "4")))


def needs(path: Path) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not path.exists(), reason=f"{path.name} is not installed (make test-agents)")


def run(*command: str | Path, cwd: Path | None = None, **more: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "NO_PROXY": "127.0.0.1,localhost", "LITELLM_LOCAL_MODEL_COST_MAP": "True", **more},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def version_of(package: str, folder: Path = NODE) -> str:
    found = json.loads((folder / "node_modules" / package / "package.json").read_text(encoding="utf-8"))
    return f"{package} {found['version']} (npm)"


def keep(live: Live, name: str, program: str, answers: list[str]) -> None:
    assert live.recorder.refused == []
    if RECORD:
        write_fixture(name, program, live.recorder.requests, answers)


# ---- Codex ----------------------------------------------------------------------------------------

CODEX = NODE / "node_modules" / ".bin" / "codex"
PATCH = "*** Begin Patch\n*** Add File: a.txt\n+halfbyte-was-here\n*** End Patch\n"
RUN_ECHO = 'const done = await tools.exec_command({cmd: "echo halfbyte-was-here"});\ntext(done);\n'
CODEX_ANSWERS = [
    call("functions.exec_command", '{"cmd":"echo halfbyte-was-here"}', "I should run it.", "Running it now."),
    call("multi_agent_v1.close_agent", '{"target":"nobody"}', "And close the agent."),
    say("It printed `halfbyte-was-here`.", "Both are done."),
]


# A model of Codex's own catalogue for which it writes patches as free text and hides tools until it has searched.
SEARCH_ANSWERS = [
    call("functions.tool_search", '{"query":"close an agent","limit":8}', "I need a tool.", "Looking for one."),
    call("multi_agent_v1.close_agent", '{"target":"nobody"}', "There it is."),
    call("functions.apply_patch", json.dumps({"input": PATCH}), "Now the file."),
    say("The file is there.", "Both are done."),
]
# And one for which all tools come as an item of the input, the program of a code interpreter among them.
ADDITIONAL_ANSWERS = [
    call("functions.exec", json.dumps({"input": RUN_ECHO}), "I should run it."),
    say("It printed `halfbyte-was-here`.", "The command worked."),
]


def codex(live: Live, folder: Path, *words: str) -> list[dict[str, Any]]:
    """The items that Codex says it completed."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    (home / "config.toml").write_text(
        f"""model = "{live.source.info.model}"
model_provider = "halfbyte"
[model_providers.halfbyte]
name = "halfbyte"
base_url = "{live.url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
    )
    flags = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json")
    out = run(CODEX, *flags, *words, cwd=work, CODEX_HOME=str(home))
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return [line["item"] for line in lines if line["type"] == "item.completed"]


def sent_back(live: Live, kind: str) -> list[dict[str, Any]]:
    """Items of a kind in the input of the last request."""
    asked = [r["body"] for r in live.recorder.requests if r["path"] == "/v1/responses"]
    return [item for item in asked[-1]["input"] if item["type"] == kind]


def last_message(items: list[dict[str, Any]]) -> str:
    return [i["text"] for i in items if i["type"] == "agent_message"][-1]


@needs(CODEX)
def test_codex(serve: Serve, tmp_path: Path) -> None:
    """A command, then a tool of a namespace: Codex finds both by what our answers carry."""
    live = serve(ScriptedSource(in_turn(*CODEX_ANSWERS), max_context=131072, model="gpt-oss-120b"))
    items = codex(live, tmp_path, "Run echo")
    ran = [i for i in items if i["type"] == "command_execution"]
    assert [i["aggregated_output"] for i in ran] == ["halfbyte-was-here\n"]
    assert last_message(items) == "It printed `halfbyte-was-here`."
    outputs = sent_back(live, "function_call_output")
    assert len(outputs) == 2
    assert "unsupported call" not in str(outputs[-1]["output"])
    keep(live, "codex_namespace.json", version_of("@openai/codex"), CODEX_ANSWERS)


@needs(CODEX)
def test_codex_searches_for_tools_and_writes_a_patch(serve: Serve, tmp_path: Path) -> None:
    live = serve(ScriptedSource(in_turn(*SEARCH_ANSWERS), max_context=131072, model="gpt-5.5"))
    items = codex(live, tmp_path, "Close the agent and write the file")
    assert (tmp_path / "work" / "a.txt").read_text() == "halfbyte-was-here\n"
    assert last_message(items) == "The file is there."
    (found,) = sent_back(live, "tool_search_output")
    assert "close_agent" in [tool["name"] for space in found["tools"] for tool in space["tools"]]
    assert "unsupported call" not in str(sent_back(live, "function_call_output"))
    assert "Success" in sent_back(live, "custom_tool_call_output")[0]["output"]
    keep(live, "codex_tool_search_and_patch.json", version_of("@openai/codex"), SEARCH_ANSWERS)


@needs(CODEX)
def test_codex_sends_its_tools_as_an_item(serve: Serve, tmp_path: Path) -> None:
    live = serve(ScriptedSource(in_turn(*ADDITIONAL_ANSWERS), max_context=131072, model="gpt-5.6-luna"))
    items = codex(live, tmp_path, "Run echo")
    assert last_message(items) == "It printed `halfbyte-was-here`."
    assert sent_back(live, "additional_tools")
    assert "halfbyte-was-here" in str(sent_back(live, "custom_tool_call_output")[0]["output"])
    keep(live, "codex_additional_tools.json", version_of("@openai/codex"), ADDITIONAL_ANSWERS)


# ---- Claude Code ----------------------------------------------------------------------------------

CLAUDE = NODE / "node_modules" / ".bin" / "claude"
CLAUDE_ANSWERS = [
    call("functions.Bash", '{"command":"echo halfbyte-was-here","description":"Print it"}', "I should run it."),
    say("It printed `halfbyte-was-here`.", "The command worked."),
]


@needs(CLAUDE)
def test_claude_code(serve: Serve, tmp_path: Path) -> None:
    source = ScriptedSource(in_turn(*CLAUDE_ANSWERS), max_context=131072, model="claude-sonnet-4-5")
    live = serve(source)
    work = tmp_path / "work"
    work.mkdir()
    out = run(
        CLAUDE, "-p", "Run echo halfbyte-was-here", "--output-format", "json", "--model", "claude-sonnet-4-5",
        "--allowedTools", "Bash", cwd=work, HOME=str(tmp_path), ANTHROPIC_BASE_URL=live.url, ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", DISABLE_TELEMETRY="1", IS_SANDBOX="1",
    )  # fmt: skip
    told = json.loads(out)
    last = told[-1] if isinstance(told, list) else told
    assert last["result"] == "It printed `halfbyte-was-here`."
    asked = [r["body"] for r in live.recorder.requests if r["path"] == "/v1/messages"]
    results = [b for b in asked[-1]["messages"][-1]["content"] if b["type"] == "tool_result"]
    assert "halfbyte-was-here" in str(results[-1]["content"])
    keep(live, "claude_code.json", version_of("@anthropic-ai/claude-code"), CLAUDE_ANSWERS)


# ---- Ollama's clients -----------------------------------------------------------------------------

OLLAMA_ANSWERS = [call("functions.get_weather", '{"place":"Bern"}', "They want the weather."), say("Sunny in Bern.")]


@needs(NODE / "node_modules" / "ollama")
def test_ollama_in_javascript(serve: Serve) -> None:
    live = serve(ScriptedSource(in_turn(*OLLAMA_ANSWERS)))
    told = json.loads(run("node", HERE / "ollama_client.mjs", NODE, live.url))
    assert told["calls"][0]["function"]["arguments"] == {"place": "Bern"}
    assert told["text"] == "Sunny in Bern."
    assert "tools" in told["capabilities"]
    assert "They want the weather." in live.source.prompts()[1]
    keep(live, "ollama_js.json", version_of("ollama"), OLLAMA_ANSWERS)


# ---- what an SDK got from us it may send back -------------------------------------------------------


def talk(live: Live, *command: str | Path) -> list[str]:
    lines = [json.loads(line) for line in run(*command).splitlines() if line.startswith("{")]
    return [line["answer"] for line in lines]


Command = Callable[[str], tuple[str | Path, ...]]


def fuzz(serve: Serve, seed: int, name: str, program: str, command: Command, ending: str = "final") -> None:
    """Four questions. `ending` is a channel whose text ends the client's turn besides `final`."""
    script = FuzzedScript(seed)
    live = serve(ScriptedSource(script, max_context=131072))
    answers = talk(live, *command(live.url))
    assert len(answers) == 4
    ends = [
        m
        for text in script.said
        for m in re.findall(rf"<\|channel\|>(?:final|{ending})<\|message\|>(.*?)<\|", text, re.S)
    ]
    assert [a for a in answers if a not in ends] == []
    if seed == 0:
        keep(live, name, program, script.said)
    assert live.recorder.refused == []


@needs(NODE / "node_modules" / "@openai" / "agents")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("api", ["chat_completions", "responses"])
@pytest.mark.parametrize("folder", ["", "agents-0.0.15"])
def test_openai_agents(serve: Serve, seed: int, api: str, folder: str) -> None:
    home = NODE / folder
    name = f"openai_agents_{api}{'_0.0.15' if folder else ''}.json"
    # The old version reads content or calls, never both: words in front of a call end its turn.
    ending = "commentary" if folder and api == "chat_completions" else "final"
    fuzz(serve, seed, name, version_of("@openai/agents", home), lambda url: (
        "node", HERE / "openai_agents.mjs", home, url, api, "4"
    ), ending)  # fmt: skip


@needs(PYTHON)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
@pytest.mark.parametrize("library", ["langchain", "litellm"])
def test_python_libraries(serve: Serve, seed: int, api: str, library: str) -> None:
    packages = {"langchain": ("langchain-openai", "langchain-anthropic"), "litellm": ("litellm",)}[library]
    program = run(PYTHON, "-c", f"from importlib.metadata import version as v\nfor p in {packages}: print(p, v(p))")
    fuzz(serve, seed, f"{library}_{api}.json", ", ".join(program.splitlines()) + " (PyPI)", lambda url: (
        PYTHON, HERE / f"{library}_talk.py", url, api, "4"
    ))  # fmt: skip


# ---- conformance ----------------------------------------------------------------------------------


def obliging(request: Request, index: int) -> Play:
    """What a model would say to each of llm-comply's questions: a call where one is asked for, else a few words."""
    if request.constraint is not None:
        return Play('{"location":"San Francisco"}<|call|>')
    if len(request.sampling.stop_token_ids) > 2:  # it reasons before a required call
        return Play("They want the weather.<|end|>")
    return Play(say("Hello there, friend.", "A greeting."))


@needs(PYTHON)
@pytest.mark.parametrize("api", ["openai-chat", "open-responses", "anthropic"])
def test_conformance(serve: Serve, api: str) -> None:
    """Every test of llm-comply but those of pictures, which gpt-oss does not see."""
    live = serve(ScriptedSource(obliging, max_context=131072))
    base = f"{live.url}/v1"
    command = [PYTHON.parent / "llm-comply", "-u", base, "-k", "none", "-m", "gpt-oss-test", "--format", api, "--json"]
    done = subprocess.run([str(w) for w in command], capture_output=True, text=True, timeout=900, check=False)
    told = json.loads(done.stdout)
    results = told["results"] if isinstance(told, dict) else told
    failed = [
        f"{r['id']}: {error}"
        for r in results
        if r["status"] not in ("passed", "skipped") and "image" not in r["id"]
        for error in r["errors"]
        if "response.reasoning_text." not in error  # OpenAI's own events; this list is older
    ]
    assert failed == []
    assert len(results) > 5


# ---- lm-eval --------------------------------------------------------------------------------------


@pytest.fixture
def embedded() -> Iterator[Engine]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with Engine(max_context=2048, max_seqs=8, kv_gib=0.2, reserve_gib=0.0) as engine:
        yield engine
    torch.set_num_threads(threads)


@needs(PYTHON)
def test_lm_eval(embedded: Engine, tmp_path: Path) -> None:
    """A task of log probabilities from a local file, scored by lm-eval and by the engine itself."""
    live = Live(embedded.source, ServerSettings(min_available_bytes=0), embedded.tokenizer)
    data = HERE / "lm_eval" / "colours.jsonl"
    task = (HERE / "lm_eval" / "colours.yaml").read_text(encoding="utf-8").replace("DATA_FILE", str(data))
    (tmp_path / "colours.yaml").write_text(task, encoding="utf-8")
    settings = {
        "base_url": f"{live.url}/v1/completions", "model": embedded.info.model, "tokenizer": str(EMBEDDED),
        "tokenizer_backend": "huggingface", "num_concurrent": "2", "max_retries": "1",
    }  # fmt: skip
    try:
        run(
            PYTHON, "-m", "lm_eval", "--model", "local-completions", "--model_args",
            ",".join(f"{k}={v}" for k, v in settings.items()), "--tasks", "colours", "--include_path", tmp_path,
            "--output_path", tmp_path / "out", "--log_samples", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"),
        )  # fmt: skip
        samples = next((tmp_path / "out").rglob("samples_colours_*.jsonl")).read_text(encoding="utf-8").splitlines()
        for line in map(json.loads, samples):
            for choice, scored in zip(line["doc"]["choices"], line["resps"], strict=True):
                assert float(scored[0][0]) == pytest.approx(
                    score(embedded, line["doc"]["question"], f" {choice}"), abs=1e-3
                )
        assert live.recorder.refused == []
        if RECORD:
            version = run(PYTHON, "-c", "from importlib.metadata import version as v; print(v('lm_eval'))").strip()
            write_fixture("lm_eval.json", f"lm_eval {version} (PyPI)", live.recorder.requests, [])
    finally:
        live.close()


def score(engine: Engine, context: str, rest: str) -> float:
    """What the model gives to `rest`: the sum over its tokens."""
    before, whole = (engine.tokenizer.encode(text) for text in (context, context + rest))
    (out,) = engine.generate(
        [whole],
        SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0, prompt_logprobs_from=len(before)),
    )
    assert out.prompt_logprobs is not None
    return sum(lp.logprob for lp in out.prompt_logprobs)
