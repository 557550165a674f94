"""Imports follow the arrows of the house, and third-party engines stay in their corner."""

from __future__ import annotations

import ast
from pathlib import Path

import halfbyte

ROOT = Path(halfbyte.__file__).parent

# room -> rooms it may import from
MAY: dict[str, set[str]] = {
    "errors": set(),
    "architectures": {"errors"},
    "byte_cache": set(),
    "flags": set(),
    "records": set(),
    "log_lines": {"errors"},
    "gates": {"errors"},
    "cgroups": set(),
    "formats": {"errors"},
    "ops": {"errors", "formats"},
    "plan": {"errors", "architectures", "gates", "formats", "ops"},
    "kernels": {"errors", "architectures", "gates", "cgroups", "formats", "ops", "plan"},
    "model": {"errors", "architectures", "records", "gates", "formats", "ops", "plan"},
    "roofline": {"errors", "architectures", "gates", "formats", "model"},
    "memory": {"errors", "cgroups"},
    "installed": {"gates"},
    "caches": {"errors", "architectures", "gates", "installed", "kernels", "model", "plan"},
    "gpu_sensor": set(),
    "kv": {"errors"},
    "harmony": {"errors"},
    "evals": {"errors", "harmony"},
    "engine": {
        "errors",
        "byte_cache",
        "flags",
        "records",
        "log_lines",
        "gates",
        "formats",
        "ops",
        "plan",
        "model",
        "kv",
        "harmony",
        "roofline",
        "memory",
        "vllm_plugin",
    },
    "server": {
        "errors",
        "byte_cache",
        "flags",
        "log_lines",
        "gpu_sensor",
        "gates",
        "model",
        "engine",
        "harmony",
        "roofline",
        "memory",
    },
    "vllm_plugin": {"errors", "architectures", "gates", "formats", "ops", "plan", "kernels"},
    "lab": {
        "errors",
        "records",
        "flags",
        "installed",
        "gpu_sensor",
        "gates",
        "formats",
        "ops",
        "plan",
        "kernels",
        "model",
        "engine",
        "harmony",
        "roofline",
        "evals",
        "server",
        "memory",
        "vllm_plugin",
    },
    "explanation": {
        "errors",
        "formats",
        "gates",
        "plan",
        "kernels",
        "model",
        "engine",
        "memory",
        "roofline",
        "vllm_plugin",
    },
    "inspection": {"errors", "gates", "formats", "model", "roofline"},
    "doctor": {
        "errors",
        "architectures",
        "gates",
        "caches",
        "harmony",
        "installed",
        "kernels",
        "memory",
        "vllm_plugin",
    },
}
# within server: part -> parts it may import from
SERVER_MAY: dict[str, set[str]] = {
    "settings": set(),
    "watchdog": set(),
    "http": {"settings", "watchdog"},
    "answer": {"settings", "http"},
    "api": {"settings", "http", "answer"},
    "app": {"settings", "http", "answer", "api"},
    "run": {"settings", "http", "answer", "app", "watchdog"},
}
FREE = {"cli", "__init__", "__main__"}
ENGINES = {"vllm", "sglang", "flashinfer", "llama_cpp", "tensorrt_llm"}
ENGINE_ROOMS = (
    "vllm_plugin/compat.py",
    "vllm_plugin/compat_model.py",
    "vllm_plugin/compat_engine.py",
    "kernels/borrowed/",
)
NO_TENSORS = (
    "kv/pages.py",
    "engine/scheduler.py",
    "engine/request.py",
    "gates.py",
    "errors.py",
    "architectures.py",
    "harmony/",
)


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            names.add(node.module or "")
            if node.module in ("halfbyte", "halfbyte.server"):
                names |= {f"{node.module}.{a.name}" for a in node.names}
    return names


def files() -> list[tuple[str, str, set[str]]]:
    out = []
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT).as_posix()
        out.append((relative, relative.split("/")[0].removesuffix(".py"), imports(path)))
    return out


def test_arrows() -> None:
    broken = []
    for relative, room, names in files():
        if room in FREE:
            continue
        assert room in MAY, f"{relative}: a new room; say in this test what it may import"
        for name in names:
            if not name.startswith("halfbyte."):
                continue
            target = name.split(".")[1]
            if target == "__version__":
                continue
            if target != room and target not in MAY[room]:
                broken.append(f"{relative} imports {name}")
    assert not broken, "\n".join(broken)


def test_arrows_within_the_server() -> None:
    """http knows nothing of conversations, answer nothing of any API's bodies."""
    broken = []
    for relative, room, names in files():
        part = relative.removeprefix("server/").split("/")[0].removesuffix(".py")
        if room != "server" or part == "__init__":
            continue
        assert part in SERVER_MAY, f"{relative}: a new part of the server; say in this test what it may import"
        for name in names:
            if name.startswith("halfbyte.server."):
                target = name.split(".")[2]
                if target != part and target not in SERVER_MAY[part]:
                    broken.append(f"{relative} imports {name}")
            elif name.startswith("halfbyte.harmony") and part == "http":
                broken.append(f"{relative} imports {name}")
    assert not broken, "\n".join(broken)


def test_third_party_engines_stay_in_their_corner() -> None:
    for relative, _, names in files():
        used = {n.split(".")[0] for n in names} & ENGINES
        assert not used or relative.startswith(ENGINE_ROOMS), f"{relative} imports {used}"


def test_scheduler_pages_and_parsers_hold_no_tensors() -> None:
    for relative, _, names in files():
        if relative.startswith(NO_TENSORS):
            assert "torch" not in {n.split(".")[0] for n in names}, relative


def test_no_utils() -> None:
    assert not [r for r, _, _ in files() if "util" in r or "helper" in r or "common" in r]


def test_environment_is_read_in_one_place() -> None:
    for relative, _, _ in files():
        text = (ROOT / relative).read_text(encoding="utf-8")
        if relative != "gates.py":
            assert "os.environ" not in text, f"{relative} reads the environment; ask gates.py"
            assert "getenv" not in text, f"{relative} reads the environment; ask gates.py"
