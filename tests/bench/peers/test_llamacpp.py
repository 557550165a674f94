"""The comparison with llama.cpp: what is asked of it, what is read from it, and what a ratio is held against.

llama.cpp itself is not built here; a script that speaks llama-bench's JSON stands in for it.
"""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from bench.peers import llamacpp as compare
from bench.peers.llamacpp import PEER, Key, TurnOptions, TurnSamples
from halfbyte.errors import PeerError, UsageError
from halfbyte.lab import receipts
from halfbyte.lab.measure.engine_timing import TimedWork, all_work
from halfbyte.lab.peers import llamacpp, shared_weights
from halfbyte.lab.result import Cell, Result, ResultFile, figure

PP, TG = TimedWork(prompt=256), TimedWork(tokens=16)


def bench_json(rows: list[tuple[int, int, int, list[float]]]) -> str:
    return json.dumps([{"n_prompt": p, "n_gen": n, "n_depth": d, "samples_ts": s} for p, n, d, s in rows])


def test_llama_bench_is_asked_once_a_depth(tmp_path: Path) -> None:
    works = all_work([64, 256], [16], [0, 2048], [1])
    commands = llamacpp.bench_command(tmp_path, tmp_path / "m.gguf", works, threads=2, repeats=3)
    said = [" ".join(c[1:]) for c in commands]
    assert said == [f"-m {tmp_path / 'm.gguf'} -t 2 -r 3 -d {depth} -p 64,256 -n 16 -o json" for depth in (0, 2048)]
    (alone,) = llamacpp.bench_command(tmp_path, tmp_path / "m.gguf", [TG], threads=1, repeats=1)
    assert alone[alone.index("-p") + 1] == "0"  # llama-bench runs pp512 unless told not to


def test_what_llama_bench_says() -> None:
    read = llamacpp.read_bench(bench_json([(256, 0, 0, [10.0, 11.0]), (0, 16, 2048, [4.0])]))
    assert read == {PP: [10.0, 11.0], TimedWork(tokens=16, depth=2048): [4.0]}
    with pytest.raises(PeerError, match="something else than its JSON"):
        llamacpp.read_bench("error: failed to load model")


def test_a_peer_that_fails_leaves_its_last_words(tmp_path: Path) -> None:
    program = tmp_path / "llama-bench"
    program.write_text("#!/bin/sh\necho no such file >&2\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(PeerError, match="ended with 3: no such file"):
        llamacpp.measure(tmp_path, tmp_path / "m.gguf", [TG], 1, 1)


def test_the_build_belongs_to_one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    here = llamacpp.built()
    assert llamacpp.VERSION in here.name
    monkeypatch.setattr(llamacpp.environment, "cpu_name", lambda: "another processor")
    assert llamacpp.built() != here


def samples_of(speeds: dict[Key, list[float]]) -> TurnSamples:
    return TurnSamples(speeds, reads=[20e9, 24e9, 22e9])


def test_ratios_and_their_targets() -> None:
    comparison = TurnOptions(("20b-q8", "20b-mxfp4"), (PP, TG), (1, 2), ("plan",))
    speeds = {
        Key("20b-q8", PEER, 2, PP): [10.0, 12.0, 11.0],
        Key("20b-q8", "plan", 2, PP): [30.0, 30.0, 30.0],
        Key("20b-q8", PEER, 2, TG): [4.0, 5.0, 4.5],
        Key("20b-q8", "plan", 2, TG): [6.0, 7.0, 6.5],
        Key("20b-q8", PEER, 1, TG): [3.0],
        Key("20b-q8", "plan", 1, TG): [3.0],
        Key("20b-mxfp4", PEER, 2, TG): [5.0],
        Key("20b-mxfp4", "plan", 2, TG): [7.5],
    }
    bandwidth, *results = compare.results_of(comparison, samples_of(speeds))
    assert bandwidth.figure("read").value == 22.0
    found = {(r.cell.model, r.cell.shape["threads"], r.cell.kind): r for r in results}
    prompt = found["20b-q8", 2, "prompt"]
    assert prompt.figure("ratio").value == pytest.approx(30 / 11)
    assert prompt.figure("ratio").low == pytest.approx(2.5)
    assert [(t.ok, t.bound) for t in prompt.targets] == [(False, 3.0)]
    assert [t.ok for t in found["20b-q8", 2, "decode"].targets] == [True]
    assert not found["20b-q8", 1, "decode"].targets  # targets are for all threads
    assert found["20b-q8", 1, "prompt"].refused == "one of the two was not measured"
    mxfp4 = found["20b-mxfp4", 2, "decode"]  # its target is against llama.cpp on the file its users have
    assert mxfp4.figure("ratio").value == pytest.approx(1.5)
    assert mxfp4.figure("ratio_to_20b-q8").value == pytest.approx(7.5 / 4.5)
    assert [(t.ok, t.bound) for t in mxfp4.targets] == [(False, 1.75)]


def test_our_own_receipt_is_read() -> None:
    results = [
        Result(Cell("decode", "m", path="eager", shape=TG.shape), (figure("speed", "tok/s", [5.0, 6.0, 7.0]),)),
        Result(Cell("prompt", "m", path="eager", shape=PP.shape), refused="too slow to mention"),
        Result(Cell("decode", "m", path="engine", shape=TG.shape), (figure("speed", "tok/s", 1.0),)),
    ]
    file = receipts.result_file("halfbyte bench", results, {}, [])
    samples = TurnSamples()
    compare.read_ours(samples, "tiny", 2, "plan", file)
    assert samples.speeds == {Key("tiny", "plan", 2, TG): [6.0]}
    assert samples.refused == {Key("tiny", "plan", 2, PP): "too slow to mention"}


def test_engines_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    def peer(*_: object) -> dict[TimedWork, list[float]]:
        turns.append(PEER)
        return {TG: [10.0]}

    def ours(words: list[str]) -> ResultFile:
        turns.append("plan" if "--eager" in words else "engine")
        path = "eager" if "--eager" in words else "engine"
        result = Result(Cell("decode", "m", path=path, shape=TG.shape), (figure("speed", "tok/s", 20.0),))
        return receipts.result_file("halfbyte bench", [result], {}, [])

    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(compare.llamacpp, "build", lambda progress: tmp_path)
    monkeypatch.setattr(compare.llamacpp, "measure", peer)
    monkeypatch.setattr(compare, "bench_results", ours)
    monkeypatch.setattr(compare.shared_weights, "write", lambda model, progress: file)
    monkeypatch.setattr(compare, "measure_read", lambda device: 1e9)
    comparison = TurnOptions(("tiny",), (TG,), (2,), rounds=2)
    samples = compare.play(comparison)
    assert turns == [PEER, "plan", "engine", "engine", "plan", PEER]
    assert [len(s) for s in samples.speeds.values()] == [2, 2, 2]


def test_what_cannot_be_compared_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no model '7b'"):
        TurnOptions(("7b",), (TG,), (1,))
    with pytest.raises(UsageError, match="gpu"):
        TurnOptions(("tiny",), (TG,), (1,), ("gpu",))
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", str(tmp_path))
    small = psutil.virtual_memory()._replace(total=8 << 30)
    monkeypatch.setattr(shared_weights.psutil, "virtual_memory", lambda: small)
    with pytest.raises(UsageError, match="too large for this machine"):
        shared_weights.write(shared_weights.model_named("20b-q8"))


def test_the_embedded_model_is_written_for_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", str(tmp_path))
    own = shared_weights.write(shared_weights.model_named("tiny"))
    q8 = shared_weights.write(shared_weights.model_named("tiny-q8"))
    assert own.parent == tmp_path / "peers"
    assert q8.stat().st_size < own.stat().st_size
    shared_weights.warm(own)
