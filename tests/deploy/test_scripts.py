"""The scripts, run here, outside a container."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.gates import AXES
from tests.deploy.tools import DEPLOY, fails, passes

ENTRYPOINT = DEPLOY / "entrypoint.sh"


# ---- the entrypoint --------------------------------------------------------------------------------------------------


class Container:
    """The entrypoint with a `halfbyte` that writes down how it was called, and fails where it is told to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        (folder / "bin").mkdir()
        halfbyte = folder / "bin" / "halfbyte"
        halfbyte.write_text(
            '#!/bin/sh\nfor word in "$@"; do printf "%s|" "$word"; done >> "$CALLS"; echo >> "$CALLS"\n'
            'test "$1" != "${FAILING:-}"\n'
        )
        halfbyte.chmod(0o755)

    def run(self, *words: str, **variables: str) -> tuple[int, list[list[str]], str]:
        path = f"{self.folder / 'bin'}{os.pathsep}{os.defpath}"
        environment = {
            "PATH": path,
            "CALLS": str(self.calls),
            "CONTAINER_CACHE": str(self.folder / "cache"),
            **variables,
        }
        self.calls.unlink(missing_ok=True)
        done = subprocess.run(["sh", str(ENTRYPOINT), *words], env=environment, capture_output=True, text=True)
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return done.returncode, [line.split("|")[:-1] for line in lines], done.stderr


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


def test_doctor_then_selection_then_server(container: Container) -> None:
    words = [
        "/models/a b",
        "--port",
        "80",
        "--moe-kernel",
        "cuda",
        "--layers=qkv=q8",
        "--name",
        "a b",
        "--enforce-eager",
    ]
    code, calls, _ = container.run("serve", *words)
    assert code == 0
    assert calls == [
        ["doctor", "/models/a b", "--port", "80"],
        ["explain", "/models/a b", "--moe-kernel", "cuda", "--layers=qkv=q8", "--enforce-eager"],
        ["serve", *words],
    ]


def test_without_a_word_the_embedded_model_is_served(container: Container) -> None:
    assert container.run()[:2] == (0, [["doctor"], ["explain"], ["serve"]])
    assert container.run("serve", "--host", "0.0.0.0")[1][-1] == ["serve", "--host", "0.0.0.0"]
    assert container.run("serve", "--port=81")[1][0] == ["doctor", "--port", "81"]


def test_vllm_is_explained_as_such(container: Container) -> None:
    _, calls, _ = container.run("serve", "/m", "--engine", "vllm", "--vllm", "--max-model-len 10")
    assert calls[1] == ["explain", "/m", "--engine", "vllm"]
    assert calls[2] == ["serve", "/m", "--engine", "vllm", "--vllm", "--max-model-len 10"]


def test_an_error_of_the_doctors_ends_it(container: Container) -> None:
    code, calls, said = container.run("serve", "/m", FAILING="doctor")
    assert (code, calls) == (1, [["doctor", "/m"]])
    assert "nothing is served" in said
    code, calls, said = container.run("serve", "/m", FAILING="doctor", CONTAINER_DOCTOR="warn")
    assert (code, calls[-1]) == (0, ["serve", "/m"])
    assert "found an error" in said
    assert container.run("serve", FAILING="doctor", CONTAINER_DOCTOR="off")[1] == [["explain"], ["serve"]]
    assert container.run("serve", CONTAINER_DOCTOR="maybe")[0] == 2


def test_a_refused_selection_ends_it(container: Container) -> None:
    code, calls, _ = container.run("serve", "/m", "--moe-kernel", "marlin", FAILING="explain")
    assert code != 0
    assert calls[-1][0] == "explain"


def test_other_commands_run_as_they_are(container: Container) -> None:
    assert container.run("bench", "--pp", "512")[1] == [["bench", "--pp", "512"]]
    assert container.run("doctor", FAILING="doctor")[0] == 1


def test_caches_are_seeded_once(container: Container, tmp_path: Path) -> None:
    seed = tmp_path / "seed" / "triton" / "abc"
    seed.mkdir(parents=True)
    (seed / "a b.so").write_text("from the image")
    known = tmp_path / "cache" / "triton" / "abc" / "own.so"
    known.parent.mkdir(parents=True)
    known.write_text("own")
    (seed / "own.so").write_text("from the image")
    assert container.run("serve", CONTAINER_SEED=str(tmp_path / "seed"))[0] == 0
    assert (tmp_path / "cache" / "triton" / "abc" / "a b.so").read_text() == "from the image"
    assert known.read_text() == "own"


def test_the_entrypoint_knows_every_gate() -> None:
    text = ENTRYPOINT.read_text()
    both = {axis.flag for axis in AXES if not axis.switch} | {"--preset", "--mxfp4-layers", "--engine"}
    with_value = next(line for line in text.splitlines() if line.strip().startswith("--moe-kernel |"))
    assert set(re.findall(r"--[a-z0-9-]+", with_value)) == both
    joined = next(line for line in text.splitlines() if line.strip().startswith("--moe-kernel=*"))
    assert set(re.findall(r"--[a-z0-9-]+", joined)) == both | {axis.flag for axis in AXES if axis.switch}


# ---- the others ------------------------------------------------------------------------------------------------------


def test_the_health_check(tmp_path: Path) -> None:
    check = [sys.executable, DEPLOY / "healthcheck.py"]
    assert fails([*check, "1"])
    assert fails([*check, "no port"])


def test_mounted_sources_are_installed_where_something_else_would_be_imported(tmp_path: Path) -> None:
    """The development container with three sources: one in its place, one hidden by a wheel, one not checked out."""
    work, bin = tmp_path / "workspace", tmp_path / "bin"
    for name in ("halfbyte", "vllm"):
        (work / name).mkdir(parents=True)
        (work / name / "pyproject.toml").touch()
    script = tmp_path / "dev-entrypoint.sh"
    script.write_text((DEPLOY / "dev-entrypoint.sh").read_text().replace("/workspace", str(work)))
    bin.mkdir()
    calls = tmp_path / "calls"
    written = f'echo "$(basename "$0") $*" >> {calls}\n'
    found = f"""case "$*" in *find_spec*halfbyte*) echo {work}/halfbyte/src/halfbyte/__init__.py ;;
    *find_spec*) echo /usr/lib/python3/dist-packages/vllm/__init__.py ;; *) {written} ;; esac"""
    for name, body in (("python3", found), ("uv", written), ("halfbyte", f"{written}exit 1\n")):
        (bin / name).write_text(f"#!/bin/sh\n{body}")
        (bin / name).chmod(0o755)
    said = passes(["sh", script, "echo", "at the keyboard"], env={"PATH": f"{bin}{os.pathsep}{os.defpath}"})
    assert calls.read_text().splitlines() == [
        "python3 use_existing_torch.py",
        "uv pip install --system -r requirements/build.txt",
        f"uv pip install --system --no-build-isolation --no-deps --editable {work}/vllm",
        "halfbyte doctor",
    ]
    assert "halfbyte runs from" in said
    assert "vllm would be imported from /usr/lib/python3/dist-packages" in said
    assert said.splitlines()[-1] == "at the keyboard"


def test_the_development_images_vocabulary(tmp_path: Path) -> None:
    """The command of the image, as it stands there, with other folders."""
    text = (DEPLOY / "Dockerfile.dev").read_text().replace("\\\n", " ")
    command = next(line.removeprefix("RUN ") for line in text.splitlines() if "tiktoken && " in line)
    source = re.search(r"^COPY (\S+\.xz) /tmp/$", text, re.M)
    assert source is not None
    (tmp_path / "tmp").mkdir()
    packed = tmp_path / "tmp" / Path(source.group(1)).name
    packed.write_bytes((DEPLOY.parent / source.group(1)).read_bytes())
    passes(["sh", "-c", command.replace("/tmp/", f"{tmp_path}/tmp/").replace("/opt/tiktoken", f"{tmp_path}/tiktoken")])
    assert len((tmp_path / "tiktoken" / "o200k_base.tiktoken").read_bytes().splitlines()) == 199998
    assert not packed.exists()


def test_bases_are_pinned_by_asking_the_registry(tmp_path: Path) -> None:
    """With a docker that knows one digest for everything."""
    for name in ("Dockerfile", "Dockerfile.dev", "compose.production.yaml", "pin-bases.sh"):
        (tmp_path / name).write_text((DEPLOY / name).read_text())
    digest = f"sha256:{'5' * 64}"
    (tmp_path / "bin").mkdir()
    docker = tmp_path / "bin" / "docker"
    docker.write_text(f'#!/bin/sh\ntest "$1 $2 $3" = "buildx imagetools inspect" && echo {digest}\n')
    docker.chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.defpath}"}
    said = passes(["sh", tmp_path / "pin-bases.sh"], env=environment)
    assert len(said.splitlines()) == 5  # Python, CUDA, NGC, Prometheus, Grafana
    text = "".join(
        (tmp_path / name).read_text() for name in ("Dockerfile", "Dockerfile.dev", "compose.production.yaml")
    )
    assert text.count(f"@{digest}") == 5
    assert not set(re.findall(r"@sha256:[0-9a-f]{64}", text)) - {f"@{digest}"}
    assert passes(["sh", tmp_path / "pin-bases.sh"], env=environment) == ""
