"""The fingerprint of a model: equal for equal content, plan and build, another one otherwise."""

from __future__ import annotations

import shutil
from pathlib import Path

from halfbyte.gates import Gates, parse
from halfbyte.model.fingerprint import fingerprint
from halfbyte.model.load import EMBEDDED, load_model, resolve_model


def test_it_follows_content_and_plan_and_nothing_else(tmp_path: Path) -> None:
    copy = tmp_path / "another-name"
    shutil.copytree(EMBEDDED, copy)

    def of(path: Path, gates: Gates | None = None) -> str:
        model = load_model(resolve_model(str(path)), gates or Gates(), page_size=16)
        return fingerprint(model, path, path.name)

    own = of(EMBEDDED)
    assert own.startswith("fp_")
    assert own == of(copy) == of(EMBEDDED, parse({"threads": "2"}, env={}))
    others = [of(EMBEDDED, parse(env={}, preset="fast")), of(EMBEDDED, parse({"deterministic": "on"}, env={}))]
    shard = copy / "model-00001-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1  # one bit of one weight
    shard.write_bytes(data)
    assert len({own, of(copy), *others}) == 4
