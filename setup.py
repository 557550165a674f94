"""What pyproject.toml cannot say: a wheel carries the CPU kernels, one library per instruction set of its machine.

An editable install carries none; they are compiled at first use (`halfbyte.kernels.cpu.build`). Where there is no C++
compiler the wheel has none either, is good for any machine, and `halfbyte explain` says why the reference runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent / "src"))

from halfbyte.kernels.cpu import build as kernels  # needs the path above, and nothing that is not here


def can_build() -> bool:
    try:
        kernels.compiler_version(kernels.compiler())
    except kernels.Unavailable:
        return False
    return True


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        try:
            kernels.build_into(Path(self.build_lib, "halfbyte", "kernels", "cpu"))
        except kernels.Unavailable as e:
            self.warn(f"this wheel has no CPU kernels: {e}")


class BdistWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])  # no extension module: any Python will do


class HalfbyteDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        """What setuptools asks to know whether a wheel is for one kind of machine."""
        return can_build()


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel}, distclass=HalfbyteDistribution)
