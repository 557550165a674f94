"""The images and compose files: what this project asks of them. Their formats: test_formats.py."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from halfbyte.gates import RETIRED, Gates
from halfbyte.vllm_plugin.compat import version_of
from halfbyte.vllm_plugin.launch import Serving, vllm_command
from halfbyte.vllm_plugin.nodes import Network, node_launches
from tests.deploy.tools import COMPOSE, DEPLOY, DOCKERFILES, ROOT, fails, passes, services, tool

FINAL = ("native", "vllm")
VARIABLES = {
    "MODELS": "/srv/models", "MODEL": "gpt-oss-120b", "FIRST": "10.0.0.1", "SECOND": "10.0.0.2",
}  # fmt: skip


def stages(path: Path = DEPLOY / "Dockerfile") -> dict[str, str]:
    """Name of a stage -> its instructions, continued lines joined, comments left out."""
    text = "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    found: dict[str, str] = {}
    for part in re.split(r"^(?=FROM )", text.replace("\\\n", " "), flags=re.M)[1:]:
        head = re.match(r"FROM \S+(?: AS (\S+))?", part)
        assert head is not None
        found[head.group(1) or ""] = part
    return found


def image(name: str) -> str:
    """All instructions of an image: those of the stages that it begins with, too."""
    parts = stages()
    stage = parts[name]
    before = stage.split()[1]
    return image(before) + stage if before in parts else stage


# ---- by compose itself -----------------------------------------------------------------------------------------------


@functools.cache
def compose() -> tuple[list[str], str]:
    """Its command and version: Debian's program, or docker's plugin."""
    alone = shutil.which("docker-compose")
    command = [alone] if alone else [tool("docker", "Debian's docker-compose"), "compose"]
    asked = subprocess.run([*command, "version", "--short"], capture_output=True, text=True)
    if asked.returncode:
        pytest.skip("docker is here, but not its compose")
    return command, asked.stdout.strip().removeprefix("v")


def readable(path: Path, folder: Path) -> Path:
    """For this compose: its first version (Debian 12's) does not know two words that came later, and takes the rest."""
    if not compose()[1].startswith("1."):
        return path
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    del content["name"]
    for service in content["services"].values():
        service.get("build", {}).pop("platforms", None)
    copy = folder / path.name
    copy.write_text(yaml.safe_dump(content), encoding="utf-8")
    return copy


def config(path: Path, **variables: str) -> tuple[list[str | Path], dict[str, str]]:
    profiles = [word for name in ("first", "second", "serve", "vllm") for word in ("--profile", name)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", **variables}
    return [*compose()[0], "-f", path, *profiles, "config", "--quiet"], environment


@pytest.mark.parametrize("path", COMPOSE, ids=lambda p: p.name)
def test_compose_itself_reads_them(path: Path, tmp_path: Path) -> None:
    command, environment = config(readable(path, tmp_path), **VARIABLES)
    passes(command, env=environment)


@pytest.mark.parametrize("variable", ["MODELS", "MODEL", "FIRST"])
def test_compose_says_which_variable_is_missing(variable: str, tmp_path: Path) -> None:
    path = readable(DEPLOY / "compose.two-sparks.yaml", tmp_path)
    command, environment = config(path, **{k: v for k, v in VARIABLES.items() if k != variable})
    assert variable in fails(command, env=environment)


# ---- what this project asks of the images ----------------------------------------------------------------------------


def test_bases_are_pinned() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    bases = re.findall(r"^ARG \w+_IMAGE=(\S+)", text, re.M)
    assert len(bases) == 2
    for base in bases:
        assert re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", base), base
    assert re.search(r"^ARG NGC_IMAGE=\S+:\d\S+$", (DEPLOY / "Dockerfile.dev").read_text(encoding="utf-8"), re.M)
    named = set(stages()) | {"${PYTHON_IMAGE}", "${CUDA_IMAGE}"}
    assert {part.split()[1] for part in stages().values()} <= named


@pytest.mark.parametrize("name", FINAL)
def test_final_stages_hold_no_compiler_and_run_as_nobody_special(name: str) -> None:
    stage = image(name)
    assert stage.startswith("FROM ${PYTHON_IMAGE} ")
    assert "apt-get" not in stage
    assert not re.search(r"--from=(?:cuda|wheel)\b", stage)
    assert re.findall(r"^USER (.*)$", stage, re.M) == ["10001:10001"]
    assert not re.search(r"^(?:RUN|COPY)", stage[stage.index("USER 10001") :], re.M)
    assert "HEALTHCHECK" in stage
    assert 'ENTRYPOINT ["entrypoint"]' in stage


@pytest.mark.parametrize("name", FINAL)
def test_every_cache_is_on_the_volume(name: str) -> None:
    """The root may be read-only: whatever is written at run time has its place on the one volume, or in /tmp."""
    stage = image(name)
    assert 'VOLUME ["/var/cache/halfbyte"]' in stage
    caches = ["HALFBYTE_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME", "HOME"]
    if name == "vllm":
        caches += ["VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"]
    for variable in caches:
        assert re.search(rf"\b{variable}=/var/cache/halfbyte\b", stage), variable


def test_tritons_module_is_made_under_the_key_that_it_is_looked_for_by() -> None:
    """The folder of the driver is a part of it."""
    places = {name: re.findall(r"TRITON_LIBCUDA_PATH=(\S+)", stage) for name, stage in stages().items()}
    assert {name for name, found in places.items() if found} == {"final", "native-kernels", "vllm-kernels"}
    assert len({place for found in places.values() for place in found}) == 1


def test_what_the_vllm_image_is_made_of() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    version = re.search(r"^ARG VLLM_VERSION=(\S+)$", text, re.M)
    assert version is not None
    version_of(version.group(1))  # refuses one that the plugin does not know
    kernels, final = stages()["vllm-kernels"], stages()["vllm"]
    assert "FLASHINFER_CUDA_ARCH_LIST=12.1a" in kernels  # without the letter there is no hardware FP4
    assert "FLASHINFER_CUDA_ARCH_LIST=12.1a" in final
    assert "FLASHINFER_DISABLE_JIT=1" in final  # there is no nvcc: a kernel that is missing is an error with a name
    assert "TIKTOKEN_ENCODINGS_BASE" in final
    assert "fastsafetensors==" in stages()["vllm-packages"]


def test_the_vocabulary_step_runs(tmp_path: Path) -> None:
    """The command of the image, as it stands there, with other folders."""
    command = re.search(r'python -c "(import importlib.resources.*?)"$', stages()["vllm-packages"], re.M)
    assert command is not None
    code = command.group(1).replace("/opt/halfbyte/share/tiktoken", str(tmp_path / "tiktoken"))
    exec(code, {})
    words = (tmp_path / "tiktoken" / "o200k_base.tiktoken").read_bytes().splitlines()
    assert len(words) == 199998


def test_the_context_of_a_build_has_what_it_copies() -> None:
    """And nothing that was made here, or that is secret."""
    left_out = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {".venv", "build", "dist", "deploy/secrets", "**/*.so"} <= set(left_out)
    for path in DOCKERFILES:
        for stage in stages(path).values():
            for source in re.findall(r"^COPY (?!--from)(?:--\S+ )*(\S+)", stage, re.M):
                assert (ROOT / source).exists(), source
                assert source.split("/")[0] not in left_out, source


# ---- and of the compose files ----------------------------------------------------------------------------------------


def ours() -> list[tuple[str, str, dict[str, Any]]]:
    return [(p.name, n, s) for p in COMPOSE for n, s in services(p).items() if "halfbyte" in s["image"]]


@pytest.mark.parametrize(("file", "name", "service"), ours(), ids=lambda v: v if isinstance(v, str) else "")
def test_every_service_of_ours(file: str, name: str, service: dict[str, Any]) -> None:
    assert service["init"] is True  # compilers leave zombies
    assert service["restart"] == "no" or re.fullmatch(r"on-failure:[1-9]", service["restart"])
    assert service["mem_limit"] == service["memswap_limit"]  # no swap: unified memory would stand still
    assert service["oom_score_adj"] > 0
    assert re.fullmatch(r"[1-4]gb", service["shm_size"])
    devices = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
    mounts = " ".join(service["volumes"])
    if "dev" in file:
        for cache in ("halfbyte", "flashinfer", "triton", "vllm", "torch", "cuda", "huggingface"):
            assert re.search(rf"cache/{cache}\}}?:/root/", mounts), cache
    else:
        assert ":/var/cache/halfbyte" in mounts
        assert ":/models:ro" in mounts
    assert not set(service.get("environment", {})) & set(RETIRED)
    if file in ("compose.production.yaml", "compose.two-sparks.yaml"):
        assert service["read_only"] is True
        assert service["user"] == "10001:10001"
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_nothing_listens_beyond_this_machine_without_a_key() -> None:
    for path in COMPOSE:
        for name, service in services(path).items():
            for port in service.get("ports", []):
                assert port.startswith("127.0.0.1:"), (path.name, name)


def test_the_sources_win_over_installed_wheels_in_development() -> None:
    for service in services(DEPLOY / "compose.dev.yaml").values():
        places = service["environment"]["PYTHONPATH"].split(":")
        assert places == ["/workspace/flashinfer", "/workspace/vllm", "/workspace/halfbyte/src"]
        targets = [mount.rsplit(":", 1)[1] for mount in service["volumes"]]
        assert all(any(place == t or place.startswith(f"{t}/") for t in targets) for place in places)


def test_two_sparks_run_what_dry_run_prints() -> None:
    found = services(DEPLOY / "compose.two-sparks.yaml")
    launch = vllm_command("/models/gpt-oss-120b", Gates(), serving=Serving(tensor_parallel=2), python="python")
    nodes = node_launches(launch, (VARIABLES["FIRST"], VARIABLES["SECOND"]), 2, Network())
    for node, name in zip(nodes, ("first", "second")):
        service = found[name]
        words = [*service["entrypoint"], *(filled(str(word)) for word in service["command"])]
        expected = list(node.launch.command)
        assert words[:5] == expected[:5]
        assert pairs(expected).items() <= pairs(words).items()
        environment = {k: filled(str(v)) for k, v in service["environment"].items()}
        assert dict(node.launch.environment).items() <= environment.items()


def filled(text: str) -> str:
    """With the variables of the shell, or the defaults that stand in the file."""
    return re.sub(r"\$\{(\w+)(?::[-?]([^}]*))?\}", lambda m: VARIABLES.get(m.group(1), m.group(2) or ""), text)


def pairs(words: list[str]) -> dict[str, str]:
    """Flag -> value; JSON as what it says."""
    found: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], "--"]):
        if word.startswith("--"):
            found[word] = "" if after.startswith("--") else after
    return {k: json.dumps(json.loads(v), sort_keys=True) if v.startswith("{") else v for k, v in found.items()}


def test_secrets_are_files_that_git_does_not_keep() -> None:
    production = yaml.safe_load((DEPLOY / "compose.production.yaml").read_text(encoding="utf-8"))
    assert all(s["file"].startswith("./secrets/") for s in production["secrets"].values())
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {"/deploy/secrets/", "/deploy/.cache/"} <= set(ignored)
