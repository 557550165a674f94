"""The options of `bench`, `check` and `matrix`: frozen records from which the command line is made (`flags.py`).

A record is the whole input of a measurement or of a run of the protocol: a program that makes one needs no command
line. This module does not import torch, so that the help answers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.errors import UsageError
from halfbyte.flags import flag
from halfbyte.gates import PRESETS, Gates, as_stored, parse, preset_name
from halfbyte.lab.peers.launch import Setup, variables
from halfbyte.memory import parse_size

if TYPE_CHECKING:
    from halfbyte.lab.measure.engine_timing import TimedWork

ENGINE = "Engine"
LOAD = "A server under load"
OTHER = "Other measurements"
STRESS = "Stress"
SEED = "The seed of everything that is drawn at random, to repeat a run; by default a new one each time."
BENCHMARK = "Benchmark"
QUALITY = "Quality"


def numbers(name: str, least: int) -> Callable[[str], tuple[int, ...]]:
    """Reads `512,2048`, typed for the option `name`."""

    def parse(text: str) -> tuple[int, ...]:
        try:
            values = tuple(int(part) for part in text.split(",") if part.strip())
        except ValueError:
            raise UsageError(f"{name} takes numbers with commas between, not {text!r}.") from None
        if any(v < least for v in values):
            raise UsageError(f"{name} takes numbers of at least {least}, not {text!r}.")
        return values

    return parse


def rates(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        values = (float("nan"),)
    if any(not 0 < v < float("inf") for v in values):
        raise UsageError(f"--rate takes numbers above 0 with commas between, not {text!r}.")
    return values


def split_words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def preset_of(gates: Gates, *, gpu: bool, stored: Mapping[str, str] | None = None) -> str:
    """The preset that these gates are on a device, or else the one that has them, activations apart; empty if none."""
    return preset_name(gates, gpu=gpu, stored=stored) or next(
        (name for name, p in PRESETS.items() if replace(p.gates, activation=gates.activation) == gates), ""
    )


def preset_served(gates: Gates, engine: str, setup: Setup) -> str:
    """The preset of a server: of halfbyte on its device; another engine holds dense layers as the file has them."""
    if engine != "halfbyte":
        return preset_of(as_stored(gates), gpu=True)
    from halfbyte.model import load

    facts = load.read_facts(load.resolve_model(setup.model))
    return preset_of(gates, gpu=load.resolve_device(setup.device).type != "cpu", stored=facts.formats.coarsest())


def run_log(log: Path | None, resume: bool, name: str) -> Path | None:
    """The file of runs that an interrupted measurement continues from; without --resume it starts empty."""
    if log is None:
        if resume:
            raise UsageError(f"--resume continues what --out {name} began; name it with --out.")
        return None
    if not resume:
        log.unlink(missing_ok=True)
    return log


@dataclass(frozen=True)
class EngineStart:
    """How an engine is started that is not measured in this process."""

    flags: tuple[str, ...] = flag(
        (), "--engine-flag", "A flag to pass on to the engine; repeat it for more.", panel=ENGINE
    )
    environment: tuple[str, ...] = flag(
        (), "--engine-env", "A variable for the engine's environment; repeat it for more.", panel=ENGINE,
        metavar="NAME=VALUE",
    )  # fmt: skip
    python: str | None = flag(None, "--engine-python", "The Python that vLLM or SGLang is installed in.", panel=ENGINE)

    def setup(self, model: str | None, gates: Gates, device: str | None) -> Setup:
        return Setup(
            model, gates, device, flags=self.flags, python=self.python, environment=variables(self.environment)
        )


# ---- bench -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkloadOptions:
    """Workloads and when their sessions begin. Without a rate they are a closed loop of `concurrency` streams."""

    workload: str = flag("", "--workload", "What users do: synthetic, chat, replay, or replay:FILE.", panel=LOAD)
    rates: tuple[float, ...] = flag(
        (), "--rate", "Sessions that begin each second, at random times (open loop, Poisson).", panel=LOAD, parse=rates
    )
    sessions: int = flag(0, "--sessions", "Sessions of each figure; 0: automatic.", panel=LOAD, minimum=0)
    turns: int | None = flag(
        None, "--turns", "How many turns a chat has, or how many of a recording to play.", panel=LOAD, minimum=1
    )
    limits: str = flag(
        "", "--limits", "What counts as in time, in milliseconds: ttft=1000,tpot=50,e2e=20000.", panel=LOAD
    )
    pace: float = flag(
        1.0, "--pace", "Play a recording this many times as fast: its pauses are divided by it.", panel=LOAD
    )
    seed: int | None = flag(None, "--seed", SEED, panel=LOAD, minimum=0)


@dataclass(frozen=True)
class BenchOptions:
    model: str | None = None
    gates: Gates = field(default_factory=Gates)
    device: str | None = None
    load: WorkloadOptions = WorkloadOptions()
    start: EngineStart = EngineStart()
    prompts: tuple[int, ...] = flag(
        (512,), "--pp", "Prompt lengths in tokens, for example 512,2048.", parse=numbers("--pp", 1)
    )
    tokens: tuple[int, ...] = flag((32,), "--tg", "How many tokens to generate.", parse=numbers("--tg", 2))
    depths: tuple[int, ...] = flag(
        (0,), "--depth", "How many tokens the cache holds already.", parse=numbers("--depth", 0)
    )
    concurrency: tuple[int, ...] = flag(
        (1,), "--concurrency", "How many requests at once; speeds are their total.", parse=numbers("--concurrency", 1)
    )
    repeats: int = flag(3, "--repeats", "Timed runs of each figure, after a warm-up.", spellings=("--runs",), minimum=1)
    out: Path | None = flag(None, "--out", "Also write a receipt to this file.")
    served: bool = flag(False, "--served", "Then do the same over HTTP through `halfbyte serve`, and print the ratio.")
    url: str | None = flag(None, "--url", "Measure the server at this address.")
    engine: str = flag("", "--engine", "Measure this engine over HTTP: halfbyte, vllm, llama.cpp … or an address.")
    resume: bool = flag(False, "--resume", "Continue what --out FILE began.")
    store: Path | None = flag(None, "--store", "Also keep the result in this folder.")
    eager: bool = flag(False, "--eager", "Time a single sequence, without engine or graphs.", panel=OTHER)
    graph: bool = flag(False, "--graph", "Time graph replays alone, without engine or sampler.", panel=OTHER)
    phases: tuple[int, ...] = flag(
        (), "--phases", "Time every phase alone, over this many rows.", panel=OTHER, parse=numbers("--phases", 1)
    )
    sustain: float = flag(0.0, "--sustain", "Decode for this many seconds, and show watts and MHz.", panel=OTHER)
    check: bool = flag(True, "--check/--no-check", "On a GPU, first compare the kernels with the reference.")
    gpu_memory: int | None = flag(
        None, "--gpu-memory", "Most memory to use on the GPU, for example 24GiB; experts that do not fit stay in host "
        "memory.", parse=parse_size, minimum=1, metavar="SIZE",
    )  # fmt: skip
    require_native: bool = flag(False, "--require-native", "Fail unless our own kernels run everywhere.")
    self_test: str = flag(
        "auto", "--self-test", "Test the GPU's kernels before the model is loaded: auto, always or off."
    )

    @property
    def peer(self) -> str:
        """The engine or the address that is measured over HTTP; empty: the engine in this process."""
        return self.url or self.engine or ("halfbyte" if self.load.workload else "")

    @property
    def setup(self) -> Setup:
        setup = self.start.setup(self.model, self.gates, self.device)
        if self.gpu_memory is None or self.engine not in ("", "halfbyte"):
            return setup
        return replace(setup, flags=(*setup.flags, "--gpu-memory", f"{self.gpu_memory}B"))

    @property
    def works(self) -> list[TimedWork]:
        from halfbyte.lab.measure.engine_timing import all_work

        return all_work(self.prompts, self.tokens, self.depths, self.concurrency)

    def check_consistency(self) -> None:
        if bool(self.url) + bool(self.engine) + self.served > 1:
            raise UsageError("--url, --engine and --served name different servers; use one of them.")
        if self.served and (self.eager or self.graph or self.phases or self.sustain):
            raise UsageError("--served compares the engine with a server; leave --eager, --graph and the like out.")


# ---- check and matrix ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Works:
    """What level 4 measures; the defaults are the protocol's. Level 5 compares other lengths that are named, too."""

    prompts: tuple[int, ...] = flag(
        (2048,), "--pp", "Prompt lengths in tokens.", panel=BENCHMARK, parse=numbers("--pp", 1)
    )
    tokens: tuple[int, ...] = flag(
        (32, 128), "--tg", "How many tokens to generate.", panel=BENCHMARK, parse=numbers("--tg", 2)
    )
    depths: tuple[int, ...] = flag(
        (0,), "--depth", "How many tokens the cache holds already.", panel=BENCHMARK, parse=numbers("--depth", 0)
    )
    concurrency: tuple[int, ...] = flag(
        (1,), "--concurrency", "Requests at once.", panel=BENCHMARK, parse=numbers("--concurrency", 1)
    )
    repeats: int = flag(8, "--repeats", "Timed runs of each; 6 are the least that level 5 can compare.",
                        panel=BENCHMARK, minimum=1)  # fmt: skip
    seed: int | None = flag(None, "--seed", SEED, panel=BENCHMARK, minimum=0)

    @property
    def all(self) -> list[TimedWork]:
        from halfbyte.lab.measure.engine_timing import all_work

        return all_work(self.prompts, self.tokens, self.depths, self.concurrency)


@dataclass(frozen=True)
class StressCounts:
    """How much level 3 does; the defaults are the protocol's."""

    sequential: int = flag(100, "--sequential", "Requests one by one.", panel=STRESS, minimum=1)
    prefill: int = flag(4096, "--prefill", "Tokens of a long prompt.", panel=STRESS, minimum=1)
    generation: int = flag(1024, "--generation", "Tokens of a long answer.", panel=STRESS, minimum=1)
    load: int = flag(200, "--load", "Requests under load.", panel=STRESS, minimum=1)
    at_once: int = flag(8, "--at-once", "How many of these at once.", panel=STRESS, minimum=1)
    together: tuple[int, ...] = (4, 10)
    tokens: int = 16  # of an ordinary answer
    settle_s: float = 1.0  # before memory is looked at

    def __post_init__(self) -> None:
        counts = (self.sequential, *self.together, self.prefill, self.generation, self.load, self.at_once, self.tokens)
        if min(counts) < 1:
            raise UsageError("every count of the stress is at least 1.")


@dataclass(frozen=True)
class QualityOptions:
    """What `check quality` compares with `exact`, and on which texts."""

    presets: tuple[str, ...] = flag(
        (), "--presets", "The presets to compare with exact; by default every one that changes number formats.",
        panel=QUALITY, parse=split_words,
    )  # fmt: skip
    texts: tuple[str, ...] = flag(
        (), "--text", "A text file of your own to compare on, too; repeat it for more. None of it leaves this machine.",
        panel=QUALITY, metavar="FILE",
    )  # fmt: skip
    lengths: tuple[int, ...] = flag(
        (2048, 32768), "--lengths", "Tokens of the texts, where the model's context holds them.", panel=QUALITY,
        parse=numbers("--lengths", 256),
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name in self.presets:
            if name not in PRESETS:
                raise UsageError(f"there is no preset {name!r}; use {', '.join(PRESETS)}.")


@dataclass(frozen=True)
class CheckOptions:
    model: str | None = None
    gates: Gates = field(default_factory=Gates)
    device: str | None = None
    start: EngineStart = EngineStart()
    counts: StressCounts = StressCounts()
    works: Works = Works()
    quality: QualityOptions = QualityOptions()
    engine: str = flag(
        "halfbyte", "--engine",
        "halfbyte, vllm, vllm+halfbyte, sglang, llama.cpp, or the address of a running one.", panel=ENGINE,
    )  # fmt: skip
    engine_log: Path | None = flag(None, "--engine-log", "The log of an engine that is already running.", panel=ENGINE)
    trace: Path | None = flag(
        None, "--trace", "A profiler's trace of the engine: torch's JSON or an nsys .sqlite export.", panel=ENGINE
    )
    baseline: str = flag(
        "exact", "--baseline", "What to compare the gates with: a preset, or gates such as 'kv_dtype=fp8; sinks=on'."
    )
    reference: Path | None = flag(None, "--reference", "The answers to compare with, from --write-reference.")
    write_reference: Path | None = flag(
        None, "--write-reference", "Write this engine's answers as a reference, and exit."
    )
    suite: str | None = flag(None, "--suite", "The problems of level 2: quick or tiny; by default the reference's.")
    targets: Path | None = flag(
        None, "--targets", "A file of figures to reach; by default this GPU's.", panel=BENCHMARK
    )
    prior: tuple[str, ...] = flag(
        (), "--prior", "Presets on top of which level 5 also measures the gates.", parse=split_words
    )
    against: Path | None = flag(None, "--against", "The results.json of an earlier run, for level 5.")
    full: tuple[str, ...] = flag(
        (), "--full",
        "Gates to combine in full in the matrix, for example moe_kernel,activation; by default in pairs.",
        parse=split_words,
    )  # fmt: skip
    kit: Path | None = flag(
        None, "--kit", "Run levels 1 to 4, self-test and profile, and put it all into one archive to send to us.",
        metavar="FILE.zip",
    )  # fmt: skip
    minutes: float = flag(20.0, "--minutes", "The most minutes that --kit may take.")
    start_s: float = flag(300.0, "--start-limit", "The most seconds to a first token after the start.")
    request_s: float = flag(120.0, "--request-limit", "The most seconds to an answer.")
    debug: bool = flag(False, "--debug", "Start the engine with blocking launches, C++ stacks and API logs: slow.")
    resume: bool = flag(False, "--resume", "Continue the matrix that --out FOLDER began; other levels run again.")
    out: Path | None = flag(None, "--out", "The folder for results, log and diagnostics.")

    @property
    def baseline_gates(self) -> Gates:
        if self.baseline in PRESETS:
            return PRESETS[self.baseline].gates
        parts = [part.partition("=") for part in self.baseline.split(";") if part.strip()]
        if not all(sign for _, sign, _ in parts):
            raise UsageError(f"there is no preset {self.baseline!r}; use {', '.join(PRESETS)}, or GATE=VALUE; ….")
        return parse({name.strip().replace("-", "_"): value.strip() for name, _, value in parts}, env={})

    def __post_init__(self) -> None:
        assert self.baseline_gates is not None  # it raises for a baseline that cannot be read
        if self.kit is not None and self.kit.suffix != ".zip":
            raise UsageError(f"--kit writes a .zip archive, not {self.kit.name!r}.")
