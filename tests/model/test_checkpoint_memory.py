"""Loading, writing and requantising hold little more than the weights that stay, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte import formats
from halfbyte.model import synthetic
from halfbyte.model.config import ModelConfig
from halfbyte.model.weight_file import CHUNK

# About 270 MB over 5 layers; a shard holds a layer and a bit, as OpenAI's do.
CONFIG = ModelConfig(
    layers=5, hidden=768, intermediate=768, experts=48, top_k=4, heads=12, kv_heads=2, head_dim=64, vocab=8192,
    eos_tokens=(1,), pad_token=2,
)  # fmt: skip
SHARD = 80_000_000

PROBE = """
import json, resource, sys, torch
from pathlib import Path
from halfbyte.model import checkpoint, gguf_io, gguf_writer, synthetic
from halfbyte.model.config import NAMED
act, path, out = sys.argv[1:4]

def run(path, out):
    if act == "load":
        return checkpoint.load(path)
    if act == "load-q8":
        return checkpoint.load(path, layer_formats={"qkv": "q8", "o": "q8", "lm_head": "q8"})
    checkpoint.quantize_checkpoint(path, out, {"moe": "q8", "lm_head": "mxfp4"})

torch.set_num_threads(1)
small = Path(out).with_name("warm")  # everything imported and warm before the mark
synthetic.write_gguf(NAMED["small"].with_(layers=1, layer_kinds=()), 0, small.with_suffix(".gguf"))
synthetic.write_safetensors(NAMED["small"].with_(layers=1, layer_kinds=()), 0, small)
run(small if Path(path).is_dir() else small.with_suffix(".gguf"), small.with_name("warm-out" + Path(out).suffix))
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")  # the peak starts again from here

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(l.split()[1]) * 1024 for l in lines if l.startswith(key))

before = status("VmRSS")
kept = run(path, out)
stays = kept.nbytes if kept else 0
print(json.dumps({"beyond": status("VmHWM") - before - stays, "kept": stays}))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    synthetic.write_safetensors(CONFIG, 3, root / "folder", max_shard_bytes=SHARD)
    synthetic.write_gguf(CONFIG, 3, root / "file.gguf")
    return root


def probe(act: str, model: Path, out: Path) -> dict[str, int]:
    command = [sys.executable, "-c", PROBE, act, str(model), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen: dict[str, int] = json.loads(done.stdout)
    return seen


needs_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak counter")


@needs_linux
@pytest.mark.parametrize(("act", "model"), [("load", "folder"), ("load", "file.gguf"), ("load-q8", "folder")])
def test_loading_holds_little_more_than_what_stays(act: str, model: str, models: Path, tmp_path: Path) -> None:
    sizes = [p.stat().st_size for p in (models / "folder").glob("*.safetensors")]
    assert max(sizes) < sum(sizes) / 3
    seen = probe(act, models / model, tmp_path / "unused")
    print(f"{act} {model}: {seen['beyond'] / max(sizes):.2f}x the largest shard of {max(sizes) / 1e6:.0f} MB")
    assert seen["beyond"] < 1.2 * max(sizes)
    if act == "load":
        assert seen["kept"] == pytest.approx(sum(sizes), rel=0.01)


@needs_linux
@pytest.mark.slow
@pytest.mark.parametrize(("model", "out"), [("folder", "out"), ("file.gguf", "out.gguf")])
def test_quantising_holds_one_tensor_and_what_becomes_of_it(model: str, out: str, models: Path, tmp_path: Path) -> None:
    elements = CONFIG.experts * 2 * CONFIG.intermediate * CONFIG.hidden
    both = formats.bytes_for((elements,), "mxfp4") + formats.bytes_for((elements,), "q8")
    seen = probe("quantize", models / model, tmp_path / out)
    print(
        f"quantize {model}: {seen['beyond'] / 1e6:.0f} MB; the largest tensor before and after is {both / 1e6:.0f} MB"
    )
    assert seen["beyond"] < both + 6 * CHUNK
    assert seen["beyond"] < sum(p.stat().st_size for p in (models / "folder").glob("*.safetensors"))
