"""Installed software: packages that shadow each other, unknown variables, CPU kernels, compilers needed at run time."""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfbyte.doctor.finding import Finding, Purpose, check
from halfbyte.doctor.machine import Machine
from halfbyte.doctor.reading import gpus, unified
from halfbyte.errors import GateError
from halfbyte.gates import check_environment

SITE = re.compile(r"(site|dist)-packages/")


@check(
    "install.shadowed", "error", "copies of halfbyte, vLLM and FlashInfer that shadow each other (the PYTHONPATH trap)"
)
def shadowed(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    path = machine.variables().get("PYTHONPATH")
    for module, package in (machine.ask("imports") or {}).items():
        hidden = package["shadows"]
        if not hidden:
            continue
        sources = [copy for copy in hidden if not SITE.search(copy)]
        evidence = f"import {module} loads {package['path']} and shadows {', '.join(hidden)}"
        if SITE.search(package["path"]) and sources:
            yield Finding(
                "error",
                f"{evidence}: changes made there have no effect",
                "remove the installed copy, or put the sources first",
                (f"pip uninstall -y {module}", f"pip install --no-build-isolation -e {sources[0].rsplit('/', 1)[0]}"),
            )
        else:
            because = f" because PYTHONPATH is {path!r}" if path else ""
            yield Finding(
                "warning",
                f"{evidence}{because}: versions and receipts may describe the other copy",
                "keep one copy: unset PYTHONPATH, or uninstall the other",
                ("unset PYTHONPATH",) if path else (f"pip uninstall -y {module}",),
            )


@check("install.variables", "error", "unknown halfbyte variables, and retired ones of older MXFP4 stacks")
def variables(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    for name, value in machine.variables().items():
        try:
            check_environment({name: value})
        except GateError as e:
            yield Finding("error", str(e).rstrip("."), "unset it", (f"unset {name}",))


@check("install.python", "error", "the version of Python")
def python(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    version = str((machine.ask("system") or {}).get("python", ""))
    match = re.match(r"3\.(\d+)", version)
    if match and not 11 <= int(match[1]) <= 14:
        severity = "error" if int(match[1]) < 11 else "warning"
        yield Finding(severity, f"Python is {version}; 3.11 to 3.14 are supported", "use one of those")


@check("cpu.kernels", "warning", "a library of the CPU kernels for this CPU, or a compiler to build one")
def cpu_kernels(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    kernels = machine.ask("cpu_kernels") or {}
    if kernels and not kernels.get("library") and not kernels.get("compiler"):
        yield Finding(
            "warning",
            f"there is no library of the CPU kernels and {kernels.get('reason', 'nothing can build one')}: the "
            "CPU runs the reference, which is far slower",
            "install a wheel, which contains the library, or a C++ compiler",
            ("sudo apt install g++",),
        )


@check("cpu.governor", "note", "a CPU governor that saves power")
def governor(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    policy = (machine.file("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or "").strip()
    driver = (machine.file("/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver") or "").strip()
    if policy == "powersave" and driver not in ("intel_pstate", "amd-pstate-epp"):  # their powersave is fast enough
        yield Finding(
            "note",
            "the CPU's governor is powersave",
            "performance answers faster",
            ("sudo cpupower frequency-set -g performance",),
        )


@check("triton.compiler", "warning", "Triton's launcher in its cache, or a C compiler and Python's headers to build it")
def triton_compiler(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    if not gpus(machine) or "triton" not in machine.packages():
        return
    missing = []
    if not any(machine.program(name) for name in ("cc", "gcc", "clang")) and not machine.variables().get("CC"):
        missing.append("a C compiler")
    if machine.ask("python_headers") is False:
        missing.append("Python.h")
    if missing and not machine.ask("triton_module"):
        yield Finding(
            "warning",
            f"{' and '.join(missing)} is missing: Triton's launcher cannot be built, so only CUDA C++ kernels run",
            "install it, or use CUDA C++ kernels only (halfbyte explain shows which kernels a plan uses)",
            ("sudo apt install gcc python3-dev",),
        )


@check("vllm.loading", "warning", "how vLLM reads the weights on unified memory: with mmap it holds them twice")
def vllm_loading(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    installed = machine.packages()
    if unified(machine) and "vllm" in installed and "fastsafetensors" not in installed:
        yield Finding(
            "warning",
            "vLLM is installed without fastsafetensors: it maps the files, which is slow on unified memory and fills "
            "the page cache with a second copy of the weights",
            "install fastsafetensors and load with it",
            (
                "pip install fastsafetensors",
                "halfbyte serve MODEL --engine vllm --vllm '--load-format fastsafetensors'",
            ),
        )


@check("vllm.vocabulary", "warning", "the vocabulary that openai-harmony downloads when vLLM starts")
def vllm_vocabulary(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    folder = machine.variables().get("TIKTOKEN_ENCODINGS_BASE")
    if "vllm" not in machine.packages():
        return
    if folder is None:
        yield Finding(
            "note",
            "TIKTOKEN_ENCODINGS_BASE is not set: vLLM downloads the vocabulary when it starts (halfbyte's own engine "
            "contains it)",
            "on a machine without a network, put o200k_base.tiktoken into a folder and set the variable to it",
            ("export TIKTOKEN_ENCODINGS_BASE=~/.cache/tiktoken",),
        )
    elif "o200k_base.tiktoken" not in machine.folder(folder):
        yield Finding(
            "warning",
            f"TIKTOKEN_ENCODINGS_BASE is {folder}, which has no o200k_base.tiktoken: vLLM does not start",
            "download the file into that folder",
            (
                f"curl -o {folder}/o200k_base.tiktoken "
                "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken",
            ),
        )
