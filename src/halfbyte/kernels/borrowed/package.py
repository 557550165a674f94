"""A package that kernels are borrowed from: whether it is installed, and whether its version is tested.

Only the metadata is read, because importing such a package takes seconds. A plan for another machine (`explain --arch`)
cannot know what is installed there, so nothing is checked then.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

import torch

from halfbyte.plan.phase import Arch


@dataclass(frozen=True)
class Package:
    name: str  # as pip knows it
    calls: str  # what it is called in a sentence
    tested: tuple[str, ...]  # versions whose functions we call, by their beginnings

    def version(self) -> str | None:
        """The version of the installed GPU build; None if there is none."""
        try:
            version = metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return None
        return None if "cpu" in version else version

    def refuse(self, arch: Arch) -> str | None:
        if not is_here(arch):
            return None
        version = self.version()
        if version is None:
            return f"needs {self.calls} with its CUDA kernels, which is not installed here (pip install {self.name})"
        if not version.startswith(self.tested):
            return f"supports {self.calls} {' and '.join(v.rstrip('.') for v in self.tested)}, not {version}"
        return None


def is_here(arch: Arch) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == arch.capability


VLLM = Package("vllm", "vLLM", ("0.26.", "0.32."))
FLASHINFER = Package("flashinfer-python", "FlashInfer", ("0.6.14", "0.6.18", "0.7."))  # vLLM 0.26's, and vLLM 0.32's
