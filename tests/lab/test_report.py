"""The page: every number with its source, INVALID as such, nothing from elsewhere, and a stranger's text stays text."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from halfbyte.cli.app import app
from halfbyte.errors import UsageError
from halfbyte.lab.receipts import RESULTS
from halfbyte.lab.report import content
from halfbyte.lab.report.page import render
from halfbyte.lab.report.sources import Collected, Published, collect, published
from halfbyte.lab.result import Cell, FigureCeiling, Result, ResultFile, figure

CHROMIUM = shutil.which("chromium")
H200 = "NVIDIA H200"


def samples(level: float, seed: int) -> list[float]:
    return (level * (1 + 0.004 * np.random.default_rng(seed).standard_normal(8))).tolist()


def decode(speed: float, seed: int = 0, engine: str = "", depth: int = 2048, **more: Any) -> Result:
    cell = Cell("decode", "120b", "" if engine else "fast", more.pop("gates", {}), "engine",
                {"tg": 128, "depth": depth, "concurrency": more.pop("concurrency", 1)}, engine)  # fmt: skip
    return Result(cell, (figure("speed", "tok/s", samples(speed, seed), FigureCeiling(1500.0, "H200")),), **more)


def serving(streams: int, speed: float, ttft: float) -> Result:
    shape = {"workload": "chat", "concurrency": streams}
    figures = tuple(figure(n, u, v) for n, u, v in (("speed", "tok/s", speed), ("ttft_p50", "ms", ttft / 2),
                                                    ("ttft_p99", "ms", ttft), ("in_time", "%", 90.0)))  # fmt: skip
    return Result(Cell("serving", "120b", "fast", path="http", shape=shape), figures)


def file(time: str, *results: Result, gpu: str = H200) -> ResultFile:
    environment = {"time": time, "cpu": "Xeon", "commit": "abcdef1", "gpus": [{"name": gpu}]}
    return ResultFile("halfbyte bench", ("--tg", "128"), environment, {}, results)


def collected(tmp_path: Path, *files: ResultFile) -> Collected:
    for i, f in enumerate(files):
        f.write(tmp_path / f"r{i}.json")
    found = collect([tmp_path])
    found.published = []
    return found


class Links(HTMLParser):
    """What a page loads or leads to, and the identifiers it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "action", "data")]
        self.ids += [v or "" for k, v in attrs if k == "id"]


@pytest.mark.slow
def test_the_house_page_is_whole_and_loads_nothing() -> None:
    found = collect([RESULTS])
    text = render(found)
    whole(text)
    assert "llama.cpp" in text
    assert text == render(found)


def whole(text: str) -> None:
    """Every link leads somewhere on the page, and nothing is loaded."""
    page = Links(text)
    assert "script" not in page.tags
    assert all(link.startswith("#") for link in page.found), page.found
    assert {link[1:] for link in page.found} <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org)", text)


def test_a_board_has_peers_ceilings_and_what_is_invalid(tmp_path: Path) -> None:
    bad = decode(900.0, engine="other 1.0").invalidated("the GPU was throttled: heat")
    made = collected(tmp_path, file("2026-01-01", decode(800.0), decode(250.0, engine="vllm 0.26.0"), bad))
    made.published = [Published(H200, "llama.cpp", "120b", "tg128", 210.0, "published", "a table", 2048)]
    (board,) = content.boards(content.measurements(made), made.published)
    assert (board.machine, board.model, board.test) == (H200, "120b", "tg128 @ d2048")
    assert [(p.who, p.state) for p in board.places] == [
        ("halfbyte, fast", "measured"), ("vllm 0.26.0", "measured"), ("llama.cpp", "published"),
        ("other 1.0", "INVALID"),
    ]  # fmt: skip
    assert board.places[0].against == "3.20x"
    assert board.places[0].share == "53% of 1500"
    text = render(made)
    whole(text)
    assert "the GPU was throttled: heat" in text
    assert "it had shown speed 9" in text
    assert re.search(r'<tr class="INVALID.*?<b class="bad">INVALID</b>', text, re.DOTALL)


def test_the_newest_of_a_cell_counts_and_a_regression_is_marked(tmp_path: Path) -> None:
    made = collected(
        tmp_path, file("2026-01-01", decode(800.0, 1)), file("2026-01-02", decode(803.0, 2)),
        file("2026-01-03", decode(720.0, 3)),
    )  # fmt: skip
    found = content.measurements(made)
    (board,) = content.boards(found, [])
    assert board.places[0].value == pytest.approx(720, rel=0.01)
    (history,) = content.histories(found)
    assert history.verdicts == ["", "no difference", "regression"]
    text = render(made)
    assert "regression: -10" in text


def test_curves_over_depth_streams_and_latency(tmp_path: Path) -> None:
    depths = [decode(800.0 - d / 100, depth=d) for d in (0, 2048, 8192)]
    streams = [decode(700.0 * c, depth=128, concurrency=c) for c in (1, 2)]
    made = collected(tmp_path, file("2026-01-01", *depths, *streams, serving(1, 100, 50), serving(8, 500, 400)))
    found = content.measurements(made)
    played, over_streams = content.curves(found, [], "concurrency")
    assert [y for _, y in played.lines[0].points] == [100.0, 500.0]  # a workload's, with the same numbers of streams
    assert [x for x, _ in over_streams.lines[0].points] == [1, 2]
    (depth,) = content.curves(found, [], "depth")
    assert [line.name for line in depth.lines] == ["halfbyte, fast", "ceiling of halfbyte, fast"]
    assert [x for x, _ in depth.lines[0].points] == [0, 128, 2048, 8192]
    (latency,) = content.latencies(found)
    assert latency.lines[0].points == [(100.0, 50.0), (500.0, 400.0)]


def test_the_matrix_shows_what_ran_what_was_refused_and_what_is_invalid(tmp_path: Path) -> None:
    def cell(**gates: str) -> Cell:
        return Cell("matrix", "tiny", gates=gates, path="http")

    results = [
        Result(cell(moe_kernel="triton", kv_dtype="fp8"), (figure("speed", "tok/s", 50.0),)),
        Result(
            cell(moe_kernel="cpu", kv_dtype="fp8"), (figure("prompt", "tok/s", 900.0), figure("decode", "tok/s", 100.0))
        ),
        Result(cell(moe_kernel="gemv", kv_dtype="fp8"), refused="needs a GPU"),
        Result(cell(moe_kernel="cpu", kv_dtype="bf16"), refused="not together"),
        Result(cell(moe_kernel="marlin", kv_dtype="bf16"), (figure("speed", "tok/s", 9.0),)).invalidated("wrong path"),
    ]
    made = collected(tmp_path, file("2026-01-01", *results))
    (heat,) = content.heat_maps(content.measurements(made))
    assert heat.title == f"halfbyte, tiny · {H200}"
    assert heat.counts == {"measured": 2, "refused": 2, "INVALID": 1}
    at = {n: i for i, n in enumerate(heat.names)}

    def shown(a: str, b: str) -> tuple[str, str]:
        return heat.rows[at[a]][at[b]][:2]

    assert shown("kv_dtype fp8", "moe_kernel triton") == ("heat-4", "50")
    assert shown("kv_dtype fp8", "moe_kernel cpu") == ("heat-9", "100")
    assert heat.refused == ["moe_kernel gemv"]
    assert shown("kv_dtype bf16", "moe_kernel cpu") == ("refused", "–")
    assert shown("kv_dtype bf16", "moe_kernel marlin") == ("invalid", "×")
    choices = {c.name: c for c in heat.choices}
    assert (choices["kv_dtype fp8"].run, choices["kv_dtype fp8"].refused) == (2, 1)
    assert (choices["moe_kernel cpu"].speed, choices["moe_kernel cpu"].share) == ("100", 100)
    assert choices["moe_kernel marlin"].invalid == 1
    assert shown("moe_kernel cpu", "moe_kernel triton") == ("none", "")
    assert "wrong path" in render(made)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("moe=q8,qkv=q8,o=q8,lm_head=q8", "layers q8"),
        ("moe=mxfp4,qkv=mxfp4,o=mxfp4,lm_head=mxfp4,qkv.full=q8", "layers mxfp4, qkv.full=q8"),
        ("qkv=q8,o=q8,lm_head=q8", "layers qkv=q8,o=q8,lm_head=q8"),
        ("checkpoint", "layers checkpoint"),
    ],
)
def test_a_format_of_all_layers_is_written_once(value: str, name: str) -> None:
    assert content.choice_name("layers", value) == name


def test_reasons_that_differ_in_numbers_alone_are_one(tmp_path: Path) -> None:
    cells = [Result(Cell("matrix", "tiny", gates={"sinks": v}), refused=f"used {n}%", invalid=True)
             for v, n in (("on", 70), ("off", 81))]  # fmt: skip
    other = Result(Cell("matrix", "tiny", gates={"tile": "64x128"}), refused="no tiles here")
    made = collected(tmp_path, file("2026-01-01", *cells, other))
    busy, refused = content.refusals(content.measurements(made))
    assert (busy.state, len(busy.cells)) == ("INVALID", 2)
    assert (refused.why, len(refused.cells)) == ("no tiles here", 1)


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder, speed in (("a", 800.0), ("b", 801.0)):
        (tmp_path / folder).mkdir()
        file("2026-01-01", decode(speed)).write(tmp_path / folder / "bench.json")
    found = collect([tmp_path / "a" / "bench.json", tmp_path / "b" / "bench.json"])
    assert sorted(e.name for e, _ in found.files) == ["bench", "bench-2"]
    whole(render(found))


def test_a_strangers_text_stays_text(tmp_path: Path) -> None:
    evil = '<script>alert(1)</script>"><img src=x>'
    made = collected(tmp_path, file("2026-01-01", decode(5.0, engine=evil), Result(Cell(evil), refused=evil), gpu=evil))
    text = render(made, title=evil, note=evil)
    assert "<script>" not in text
    assert "<img" not in text


def test_archives_are_read_without_being_unpacked(tmp_path: Path) -> None:
    file("2026-01-01", decode(700.0)).write(tmp_path / "in" / "kit.json")
    (tmp_path / "in" / "broken.json").write_text("{}")
    with tarfile.open(tmp_path / "kit.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "in", arcname="../../outside")
    with zipfile.ZipFile(tmp_path / "kit.zip", "w") as archive:
        archive.write(tmp_path / "in" / "kit.json", "deep/kit.json")
    for name in ("kit.tar.gz", "kit.zip"):
        found = collect([tmp_path / name])
        assert [e.name for e, _ in found.files] == ["kit"]
    assert [name for name, _ in collect([tmp_path / "kit.tar.gz"]).unreadable] == ["broken"]
    assert len(collect([tmp_path / "kit.tar.gz", tmp_path / "kit.zip", tmp_path / "in"]).files) == 1
    (tmp_path / "no.zip").write_text("no")
    for wrong in ("no.zip", "nothing"):
        with pytest.raises(UsageError):
            collect([tmp_path / wrong])


def test_what_others_published_elsewhere_is_left_out_of_a_runs_page(tmp_path: Path) -> None:
    file("2026-01-01", decode(700.0)).write(tmp_path / "a.json")
    here, everywhere = collect([tmp_path], elsewhere=False).published, collect([tmp_path]).published
    assert {p.machine for p in here} == {H200} < {p.machine for p in everywhere}


def test_published_figures_say_whose_they_are() -> None:
    assert len(published()) > 50
    assert all(p.how and p.source and p.value > 0 for p in published())


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    file("2026-01-01", decode(700.0)).write(tmp_path / "in" / "a.json")
    (tmp_path / "in" / "levels.json").write_text("{}")  # as `halfbyte check` leaves it: nothing to complain about
    said = CliRunner().invoke(app, ["report", str(tmp_path / "in"), "-o", str(tmp_path / "out" / "r.html"), "--json"])
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["measured"] == 1
    assert "cannot be read" not in said.output
    assert (tmp_path / "out" / "r.html").read_text().startswith("<!doctype html>")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as p:
        chrome = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chrome
        chrome.close()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_it_light_dark_and_on_paper(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "r.html").write_text(render(collect([RESULTS])), encoding="utf-8")
    colors = set()
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme, viewport={"width": 1180, "height": 900})
        asked, said = [], []
        page.on("request", lambda r, asked=asked: asked.append(r.url))
        page.on("console", lambda m, said=said: said.append(m.text))
        page.goto(f"file://{tmp_path}/r.html")
        assert asked == [f"file://{tmp_path}/r.html"]
        assert not said
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        colors.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        text = page.locator("figure svg text").first
        assert page.evaluate("e => getComputedStyle(e).fill", text.element_handle()) != "rgb(1, 1, 1)"
        assert len(page.pdf()) > 20_000
        page.close()
    assert len(colors) == 2


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [1200, 390])
def test_a_large_matrix_fits_a_screen_and_a_phone(browser: Any, tmp_path: Path, width: int) -> None:
    every = {"layers": "moe=mxfp4,qkv=mxfp4,o=mxfp4,lm_head=mxfp4,qkv.full=q8", "kv_dtype": "fp8", "sinks": "on"}
    many = [{f"moe_kernel{k}": "reference", "activation": f"format{k}", **every} for k in range(12)]
    results = [Result(Cell("matrix", "tiny", gates=g, path="http"), (figure("decode", "tok/s", 9.0),)) for g in many]
    refused = Result(Cell("matrix", "tiny", gates=every), refused="no kernel " + "runs_this_and_" * 40)
    (tmp_path / "r.html").write_text(render(collected(tmp_path, file("2026-01-01", *results, refused))))
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(f"file://{tmp_path}/r.html")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    speeds = page.locator(".choices td.speed").first.bounding_box()
    assert speeds is not None
    columns = page.locator(".choices th").all_text_contents()
    assert columns == ["choice", "run", "refused", "best tokens/s", "of the best of all"]  # nothing is INVALID
    assert speeds["x"] + speeds["width"] <= width  # what a choice is worth is seen without scrolling
    page.close()


def test_a_run_that_failed_is_shown_and_not_ranked(tmp_path: Path) -> None:
    def run(folder: str, verdict: str, speed: float) -> Path:
        result = decode(speed, engine=folder)
        file("2026-11-16T00:00:00", result).write(tmp_path / folder / "results.json")
        levels = [
            {"level": n, "name": "x", "verdict": "PASS", "sentence": "", "results": []} for n in ("1", "1.5", "3")
        ]
        wrong = {"level": "2", "name": "correctness", "verdict": verdict, "sentence": "<worst>", "results": []}
        timed = {"level": "4", "name": "benchmark", "verdict": "PASS", "sentence": "", "results": [asdict(result)]}
        document = {"ok": False, "levels": [*levels, wrong, timed]}
        (tmp_path / folder / "levels.json").write_text(json.dumps(document))
        return tmp_path / folder

    unchecked = file("2026-11-16T00:00:01", decode(1432.0, engine="unchecked"), decode(190.0, engine="honest"))
    unchecked.write(tmp_path / "unchecked.json")
    folders = [run("liar", "FAIL", 1234.0), run("honest", "PASS", 200.0), tmp_path / "unchecked.json"]
    found = collect(folders)
    (board,) = content.boards(content.measurements(found), [], found.verdicts)
    assert [(p.who.split(",")[0], p.state, p.checked) for p in board.places] == [
        ("honest", "measured", True),  # its newer figure, which the protocol did not take, counts as its own
        ("unchecked", "measured", False),
        ("liar", "not ranked", False),
    ]
    page = render(found)
    whole(page)
    assert [e.name for e, _ in found.files] == ["honest", "liar", "unchecked"]  # by their folders
    assert "· not checked" in page
    assert page.index('id="verdicts"') < page.index('id="lead"') < page.index('id="boards"')
    page = render(collect(folders[:2]))
    assert page.index("Verdicts") < page.index("Leaderboard")
    assert "not ranked: level 2 FAIL" in page
    assert "&lt;worst&gt;" in page
    assert not re.search(r'class="n">1\d{3} \(', page)  # the liar's speed
    assert "Latency over throughput" not in page  # an empty section
