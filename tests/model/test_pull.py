"""Pulling from a local server that speaks the hub's protocol, with the faults that real lines have."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from halfbyte.errors import CapacityError, CheckpointError, UsageError
from halfbyte.model.checksums import RECORD, verify
from halfbyte.model.hub import Hub, RemoteFile
from halfbyte.model.pull import Pull, pull

BIG = bytes(range(256)) * 12_000  # 3 MB
FILES = {
    "config.json": b'{"model_type": "gpt_oss"}',
    "model-00001-of-00002.safetensors": BIG,
    "model-00002-of-00002.safetensors": BIG[::-1],
    "model.safetensors.index.json": b"{}",
    "README.md": b"# model",
    ".gitattributes": b"*",
    "original/model.safetensors": b"x" * 1000,
    "metal/model.bin": b"y" * 1000,
}


@dataclass
class FakeHub:
    files: dict[str, bytes] = field(default_factory=lambda: dict(FILES))
    requests: list[tuple[str, str | None, str | None]] = field(default_factory=list)  # path, range, authorization
    drops: int = 0  # downloads to cut after half a megabyte
    damaged: int = 0  # downloads to send with a wrong byte
    ranges: bool = True
    status: int = 200
    claimed_size: int | None = None
    url: str = ""

    def listing(self) -> dict[str, Any]:
        siblings: list[dict[str, Any]] = []
        for name, body in self.files.items():
            size = self.claimed_size or len(body)
            entry: dict[str, Any] = {"rfilename": name, "size": size}
            if len(body) > 500:
                entry["lfs"] = {"sha256": hashlib.sha256(body).hexdigest(), "size": size}
            else:
                entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
            siblings.append(entry)
        return {"sha": "c0ffee", "siblings": siblings}

    def fetched(self) -> list[str]:
        return sorted({path.split("/resolve/c0ffee/")[1] for path, _, _ in self.requests if "/resolve/" in path})


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    state = FakeHub()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            state.requests.append((self.path, self.headers.get("range"), self.headers.get("authorization")))
            if state.status != 200:
                return self.answer(state.status, b"no")
            if self.path.startswith("/api/models/"):
                return self.answer(200, json.dumps(state.listing()).encode())
            if "/resolve/c0ffee/" in self.path:
                name = self.path.split("/resolve/c0ffee/")[1]
                if len(state.files[name]) > 500:  # large files live elsewhere, as on the hub
                    return self.answer(302, b"", {"location": f"/cdn/{name}"})
                return self.answer(200, state.files[name])
            return self.large(state.files[self.path.removeprefix("/cdn/")])

        def large(self, body: bytes) -> None:
            start = 0
            asked = self.headers.get("range")
            if asked and state.ranges:
                start = int(asked.removeprefix("bytes=").rstrip("-"))
            rest = body[start:]
            if state.damaged > 0:
                state.damaged -= 1
                rest = rest[:-1] + b"!"
            self.send_response(206 if start else 200)
            self.send_header("content-length", str(len(rest)))
            self.end_headers()
            if state.drops > 0:
                state.drops -= 1
                self.wfile.write(rest[: 1 << 19])
                self.wfile.flush()
                self.connection.close()
                self.close_connection = True
                return
            self.wfile.write(rest)

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    class Quiet(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: object) -> None:  # a connection that a test dropped
            pass

    server = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


def make(fake: FakeHub, folder: Path, **more: Any) -> Pull:
    return Pull("openai/gpt-oss-20b", folder, Hub(fake.url), sleep=lambda seconds: None, **more)


def test_only_what_is_needed(fake: FakeHub, tmp_path: Path) -> None:
    assert make(fake, tmp_path / "m").run() == tmp_path / "m"
    needed = sorted(n for n in FILES if "/" not in n and n != ".gitattributes")
    assert fake.fetched() == needed
    for name in needed:
        assert (tmp_path / "m" / name).read_bytes() == FILES[name]
    left = sorted(p.name for p in (tmp_path / "m").iterdir())
    assert left == sorted([*needed, RECORD])


def test_a_second_pull_fetches_and_reads_nothing(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(fake, tmp_path).run()
    fake.requests.clear()
    monkeypatch.setattr(RemoteFile, "digest_of", lambda f, path: pytest.fail("read again"))
    make(fake, tmp_path).run()
    assert fake.fetched() == []


def test_a_damaged_file_on_disk_is_fetched_again(fake: FakeHub, tmp_path: Path) -> None:
    make(fake, tmp_path).run()
    victim = tmp_path / "model-00001-of-00002.safetensors"
    victim.write_bytes(BIG[:-1] + b"!")
    fake.requests.clear()
    make(fake, tmp_path).run()
    assert fake.fetched() == [victim.name]
    assert victim.read_bytes() == BIG


def test_dropped_connections_are_resumed(fake: FakeHub, tmp_path: Path) -> None:
    fake.drops = 4
    job = make(fake, tmp_path, workers=1)
    job.run()
    ranges = [r for path, r, _ in fake.requests if path.startswith("/cdn/") and r]
    assert len(ranges) == 4
    assert all(int(r.removeprefix("bytes=").rstrip("-")) > 0 for r in ranges)
    assert (tmp_path / "model-00001-of-00002.safetensors").read_bytes() == BIG
    assert job.download.progress.done == job.download.progress.total


def test_an_interrupted_pull_goes_on_where_it_was(fake: FakeHub, tmp_path: Path) -> None:
    sha256 = hashlib.sha256(BIG).hexdigest()
    f = RemoteFile("model-00001-of-00002.safetensors", len(BIG), sha256, None)
    part = make(fake, tmp_path).download.part(f)
    part.write_bytes(BIG[:1_000_000])
    make(fake, tmp_path).run()
    assert ("/cdn/model-00001-of-00002.safetensors", "bytes=1000000-", None) in fake.requests
    assert (tmp_path / f.path).read_bytes() == BIG
    assert not part.exists()


def test_a_server_without_ranges(fake: FakeHub, tmp_path: Path) -> None:
    fake.ranges = False
    fake.drops = 1
    make(fake, tmp_path, workers=1).run()
    assert (tmp_path / "model-00001-of-00002.safetensors").read_bytes() == BIG


def test_a_wrong_hash_is_tried_once_more_then_refused(fake: FakeHub, tmp_path: Path) -> None:
    fake.damaged = 1
    make(fake, tmp_path / "a", workers=1).run()
    fake.damaged = 100
    with pytest.raises(CheckpointError, match="another hash"):
        make(fake, tmp_path / "b", workers=1).run()
    assert not (tmp_path / "b" / "model-00001-of-00002.safetensors").exists()


def test_disk_space_is_checked_first(fake: FakeHub, tmp_path: Path) -> None:
    fake.claimed_size = 1 << 60
    with pytest.raises(UsageError, match=r"GB are still to be downloaded and .* GB are free"):
        make(fake, tmp_path).run()
    assert fake.fetched() == []


def test_offline(fake: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    offline = Hub.from_environ({"HF_ENDPOINT": fake.url, "HF_HUB_OFFLINE": "1"})
    with pytest.raises(CapacityError, match="HF_HUB_OFFLINE"):
        Pull("openai/gpt-oss-20b", folder, offline).run()
    make(fake, folder).run()
    fake.requests.clear()
    assert Pull("openai/gpt-oss-20b", folder, offline).run() == folder
    assert fake.requests == []
    gone = Hub("http://127.0.0.1:9")
    assert Pull("openai/gpt-oss-20b", folder, gone, sleep=lambda s: None).run() == folder  # complete: no need to ask
    with pytest.raises(CapacityError, match="cannot be reached"):
        Pull("openai/gpt-oss-20b", tmp_path / "empty", gone, sleep=lambda s: None).run()


def test_token_goes_to_the_hub(fake: FakeHub, tmp_path: Path) -> None:
    Pull("openai/gpt-oss-20b", tmp_path, Hub(fake.url, token="hf_x")).run()
    assert all(auth == "Bearer hf_x" for path, _, auth in fake.requests if "/resolve/" in path)


@pytest.mark.parametrize(("status", "text"), [(404, "does not exist"), (401, "HF_TOKEN"), (403, "HF_TOKEN")])
def test_refusals_say_what_to_do(fake: FakeHub, tmp_path: Path, status: int, text: str) -> None:
    fake.status = status
    with pytest.raises(CheckpointError, match=text):
        make(fake, tmp_path).run()


def test_gguf(fake: FakeHub, tmp_path: Path) -> None:
    fake.files = {"a-Q8.gguf": BIG, "README.md": b"x"}
    assert make(fake, tmp_path / "one").run() == tmp_path / "one" / "a-Q8.gguf"
    fake.files["b-F16.gguf"] = BIG
    with pytest.raises(CheckpointError, match="--file"):
        make(fake, tmp_path / "two").run()
    assert make(fake, tmp_path / "two", file="b-F16.gguf").run() == tmp_path / "two" / "b-F16.gguf"
    with pytest.raises(CheckpointError, match="no file 'c'"):
        make(fake, tmp_path / "two", file="c").run()


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/../../b.safetensors"])
def test_a_listing_cannot_write_outside(fake: FakeHub, tmp_path: Path, name: str) -> None:
    fake.files[name] = b"x"
    with pytest.raises(CheckpointError, match="outside"):
        make(fake, tmp_path).run()


@pytest.mark.parametrize("name", ["", "x", "a/b/c", "../x", "a/..", "http://h/x"])
def test_names_that_are_no_model(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a model"):
        pull(name, models=tmp_path)


def test_environment() -> None:
    assert Hub.from_environ({}) == Hub()
    assert Hub.from_environ({"HF_ENDPOINT": "http://m/", "HF_TOKEN": "t"}) == Hub("http://m", "t")
    with pytest.raises(UsageError, match="HF_ENDPOINT"):
        Hub.from_environ({"HF_ENDPOINT": "mirror"})


# ---- serve --verify ------------------------------------------------------------------------------------------------


def test_what_was_pulled_verifies(fake: FakeHub, tmp_path: Path) -> None:
    make(fake, tmp_path / "m").run()
    seen: list[tuple[int, int, str]] = []
    assert verify(tmp_path / "m", lambda *at: seen.append(at)) == 5
    assert seen[-1][0] == seen[-1][1] == sum(len(FILES[n]) for n in FILES if "/" not in n and n != ".gitattributes")


@pytest.mark.parametrize("name", ["config.json", "model-00002-of-00002.safetensors", "README.md"])
def test_a_changed_file_does_not_verify(fake: FakeHub, tmp_path: Path, name: str) -> None:
    make(fake, tmp_path / "m").run()
    path = tmp_path / "m" / name
    stat = path.stat()
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # size and time are as they were
    with pytest.raises(CheckpointError, match=rf"{name} is not the file that was pulled"):
        verify(tmp_path / "m")


def test_what_the_record_does_not_know_does_not_verify(fake: FakeHub, tmp_path: Path) -> None:
    make(fake, tmp_path / "m").run()
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not in the record"):
        verify(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").unlink()
    (tmp_path / "m" / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        verify(tmp_path / "m")
    record = tmp_path / "m" / RECORD
    for text in ("{", "[]", '{"files": 3}', '{"files": {"config.json": {"size": "x"}}}'):
        record.write_text(text)
        with pytest.raises(CheckpointError, match=r"halfbyte-pull\.json cannot be read"):
            verify(tmp_path / "m")
    record.unlink()
    with pytest.raises(CheckpointError, match="no record of checksums"):
        verify(tmp_path / "m")


def test_a_pulled_gguf_verifies(fake: FakeHub, tmp_path: Path) -> None:
    fake.files = {"a.gguf": BIG, "b.gguf": b"GGUF"}
    for name in fake.files:
        make(fake, tmp_path / "m", file=name).run()
    assert verify(tmp_path / "m" / "a.gguf") == 1
    (tmp_path / "m" / "b.gguf").write_bytes(b"GGUG")
    assert verify(tmp_path / "m" / "a.gguf") == 1
    with pytest.raises(CheckpointError, match=r"b\.gguf is not the file"):
        verify(tmp_path / "m" / "b.gguf")
