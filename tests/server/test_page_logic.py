"""The chat page without a browser: its files, its headers, and the parts that node can run (tree, markdown)."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from scripted import ScriptedSource, always

from halfbyte.server.app import create_app

STATIC = Path(__file__).parents[2] / "src" / "halfbyte" / "server" / "static"
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_conversations_and_markdown(tmp_path: Path) -> None:
    folder = tmp_path / "static"
    shutil.copytree(STATIC, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    script = Path(__file__).with_name("page_checks.mjs")
    done = subprocess.run([str(NODE), str(script), str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_every_file_the_page_names_is_served_and_nothing_else_is_allowed() -> None:
    app = create_app(source := ScriptedSource(always("x")), source.tokenizer)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        page = await client.get("/")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        named = set(re.findall(r"/static/[\w./-]+", page.text))
        for script in STATIC.glob("*.js"):
            text = script.read_text(encoding="utf-8")
            named |= set(re.findall(r"/static/[\w./-]+", text))
            named |= {f"/static/{name}" for name in re.findall(r'(?:from|import) "\./([\w./-]+)"', text)}
        style = STATIC / "vendor" / "katex" / "katex.min.css"
        fonts = set(re.findall(r"url\((fonts/[\w-]+\.woff2)\)", style.read_text(encoding="utf-8")))
        named |= {f"/static/vendor/katex/{font}" for font in fonts}
        assert len(named) > 30
        for name in sorted(named):
            answer = await client.get(name)
            assert answer.status_code == 200, name
            again = await client.get(name, headers={"if-none-match": answer.headers["etag"]})
            assert again.status_code == 304
        for name in (
            "/static/../settings.py",
            "/static/vendor/katex/LICENSE",
            "/static/%2e%2e/page.py",
            "/static/none.js",
        ):
            assert (await client.get(name)).status_code == 404, name


def test_what_is_vendored_is_whole_and_unchanged_and_has_its_licence() -> None:
    vendor = STATIC / "vendor"
    sources = json.loads((vendor / "SOURCES.json").read_text(encoding="utf-8"))
    assert {p.name for p in vendor.iterdir() if p.is_dir()} == set(sources)
    for name, about in sources.items():
        assert about["license"] == "MIT"
        assert about["version"] in about["source"]
        files = {p.relative_to(vendor / name).as_posix(): p for p in (vendor / name).rglob("*") if p.is_file()}
        assert "LICENSE" in files
        assert {n: hashlib.sha256(p.read_bytes()).hexdigest() for n, p in files.items()} == about["files"]
