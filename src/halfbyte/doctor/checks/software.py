"""What is installed: copies that hide each other, variables that nothing reads, kernels for this CPU, compilers that
something still needs at run time.
"""

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
    "install.shadowed", "error", "copies of halfbyte, vLLM and FlashInfer that hide each other (the PYTHONPATH trap)"
)
def shadowed(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    path = machine.variables().get("PYTHONPATH")
    for module, found in (machine.ask("imports") or {}).items():
        hidden = found["shadows"]
        if not hidden:
            continue
        sources = [copy for copy in hidden if not SITE.search(copy)]
        said = f"import {module} takes {found['path']} and hides {', '.join(hidden)}"
        if SITE.search(found["path"]) and sources:
            yield Finding(
                "error",
                f"{said}: what is changed there does not run",
                "remove the installed copy, or put the sources first",
                (f"pip uninstall -y {module}", f"pip install --no-build-isolation -e {sources[0].rsplit('/', 1)[0]}"),
            )
        else:
            because = f" because PYTHONPATH is {path!r}" if path else ""
            yield Finding(
                "warning",
                f"{said}{because}: versions and receipts may be of the other copy",
                "keep one copy: unset PYTHONPATH, or uninstall the other",
                ("unset PYTHONPATH",) if path else (f"pip uninstall -y {module}",),
            )


@check("install.variables", "error", "variables of ours that nothing knows, and retired ones of older MXFP4 stacks")
def variables(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    for name, value in machine.variables().items():
        try:
            check_environment({name: value})
        except GateError as e:
            yield Finding("error", str(e).rstrip("."), "unset it", (f"unset {name}",))


@check("install.python", "error", "the version of Python")
def python(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    told = str((machine.ask("system") or {}).get("python", ""))
    match = re.match(r"3\.(\d+)", told)
    if match and not 11 <= int(match[1]) <= 14:
        severity = "error" if int(match[1]) < 11 else "warning"
        yield Finding(severity, f"Python is {told}; 3.11 to 3.14 are tried", "use one of those")


@check("cpu.kernels", "warning", "a library of the CPU kernels for this CPU, or a compiler to make one")
def cpu_kernels(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    found = machine.ask("cpu_kernels") or {}
    if found and not found.get("library") and not found.get("compiler"):
        yield Finding(
            "warning",
            f"no library of the CPU kernels is here and {found.get('reason', 'nothing can build one')}: on a CPU the "
            "reference runs, far slower",
            "install a wheel, which brings them, or a C++ compiler",
            ("sudo apt install g++",),
        )


@check("cpu.governor", "note", "a CPU governor that saves power")
def governor(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    told = (machine.file("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or "").strip()
    driver = (machine.file("/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver") or "").strip()
    if told == "powersave" and driver not in ("intel_pstate", "amd-pstate-epp"):  # their powersave is fast enough
        yield Finding(
            "note", "the CPU's governor is powersave", "performance answers faster", ("sudo cpupower frequency-set -g "
            "performance",),
        )  # fmt: skip


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
            f"{' and '.join(missing)} is not here: Triton's launcher cannot be built, so only kernels in CUDA run",
            "install what is missing, or keep to CUDA kernels (halfbyte explain says which a plan takes)",
            ("sudo apt install gcc python3-dev",),
        )


@check(
    "vllm.loading", "warning", "how vLLM would read the weights where memory is unified: by mmap they are held twice"
)
def vllm_loading(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    installed = machine.packages()
    if unified(machine) and "vllm" in installed and "fastsafetensors" not in installed:
        yield Finding(
            "warning",
            "vLLM is installed without fastsafetensors: it maps the files, which is slow here and fills the page cache "
            "with a second copy of the weights",
            "install it and load with it",
            (
                "pip install fastsafetensors",
                "halfbyte serve MODEL --engine vllm --vllm '--load-format fastsafetensors'",
            ),
        )


@check(
    "vllm.vocabulary", "warning", "the vocabulary that openai-harmony fetches from the network at vLLM's first request"
)
def vllm_vocabulary(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    named = machine.variables().get("TIKTOKEN_ENCODINGS_BASE")
    if "vllm" not in machine.packages():
        return
    if named is None:
        yield Finding(
            "note",
            "TIKTOKEN_ENCODINGS_BASE is not set: vLLM fetches the vocabulary when it starts (halfbyte's own engine "
            "carries it)",
            "put o200k_base.tiktoken into a folder and name it, for machines without a network",
            ("export TIKTOKEN_ENCODINGS_BASE=~/.cache/tiktoken",),
        )
    elif "o200k_base.tiktoken" not in machine.folder(named):
        yield Finding(
            "warning",
            f"TIKTOKEN_ENCODINGS_BASE is {named}, where there is no o200k_base.tiktoken: vLLM does not start",
            "put it there",
            (
                f"curl -o {named}/o200k_base.tiktoken "
                "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken",
            ),
        )
