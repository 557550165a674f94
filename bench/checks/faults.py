"""Does the protocol find faults? Each is planted into a real `halfbyte serve`, and its level must not pass it.

    python -m bench run faults --set names=window

Faults of code are patched into the server's processes (`planted/sitecustomize.py`), those of numbers are another
`config.json` beside the same weights. Where only some requests have a fault there are two servers behind one address
(`planted/two_models.py`), one of them with three experts instead of four. The engine without a fault is the control,
which must pass.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.checks.planted import sitecustomize, two_models
from bench.measurement import Run, child_command, measurement, option
from halfbyte.errors import UsageError
from halfbyte.gates import parse
from halfbyte.lab import receipts
from halfbyte.lab.levels.protocol import FAIL, INVALID, PASS, Outcome, run_levels
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.options import CheckOptions, Works
from halfbyte.lab.peers.halfbyte import HalfbytePeer
from halfbyte.lab.peers.launch import Launch, Setup
from halfbyte.lab.result import Cell, Check, Result, figure
from halfbyte.model import load

CONTROL = "none"
NUMBERS: Mapping[str, Mapping[str, Any]] = {
    "the window is off by one": {"sliding_window": 129},
    "the rope base is off by 1 %": {"rope_theta": 151500.0},
    "the rope base is off by 10 %": {"rope_theta": 165000.0},
    "three experts instead of four": {"num_experts_per_tok": 3, "experts_per_token": 3},
    "the limit of SwiGLU is 2": {"swiglu_limit": 2.0},
    "the epsilon of the norms is 0.01": {"rms_norm_eps": 0.01},
    "the window is one page larger": {"sliding_window": 192},
    "the factor of YaRN is 15": {"rope_scaling": {"factor": 15.0}},
    "full layers come first": {"layer_types": ["full_attention", "sliding_attention"] * 4},
}
# Faults of a gate: only level 1.5 can see that it was ignored.
GATES: Mapping[str, Mapping[str, str]] = {
    "--kv-dtype is ignored": {"kv_dtype": "fp8"},
    "--speculate is ignored": {"speculate": "ngram"},
}
# Faults that only a timed answer shows, and those that only many requests do.
TIMED = (
    "streamed tokens are made up",
    "streams are held back",
    "streamed prompts are cut",
    "the first token is made up",
)
LOADED = (
    "one request in forty is taken for another",
    "requests of clients that leave go on",
    "one stream in ten loses its end",
)
WORKS = Works((256,), (128,), repeats=2)
FAULTS = (CONTROL, *NUMBERS, *sitecustomize.PATCHES, *two_models.FAULTS)
CHEAPER = "three experts instead of four"  # of NUMBERS: the second of two models
# Words of the checks that must find a fault; one of several is enough.
REASONS: Mapping[str, tuple[str, ...]] = {
    "streams have three experts": ("streams that may end scored again",),
    "answers have three experts, scores four": ("scored again",),
    "requests that may end have three experts": ("log probabilities of", "answers that may end scored again"),
    "requests without log probabilities have three experts": ("scored again", "without log probabilities"),
    "four requests at once have three experts": ("at once", "scored again"),
    "long prompts have three experts": ("log probabilities of long prompts",),
    "the window is off by one": ("log probabilities of long prompts",),
    "the rope base is off by 1 %": ("log probabilities of long prompts",),
    "the rope base is off by 10 %": ("log probabilities of long prompts",),
    "three experts instead of four": ("log probabilities of long prompts",),
    "the limit of SwiGLU is 2": ("log probabilities of long prompts",),
    "the epsilon of the norms is 0.01": ("log probabilities of long prompts",),
    "the window is one page larger": ("log probabilities of long prompts",),
    "a page is given back early": ("log probabilities", "scored again"),
    "prefix hashes are not chained": ("scored again as prompts",),
    "positions of the second chunk are off by one": ("log probabilities of long prompts",),
    "tokens are swapped among more than 8 streams": ("at once without log probabilities answer as alone",),
    "top_p is ignored": ("sampling by its distribution: top_p",),
    "top_k is ignored": ("sampling by its distribution: top_k",),
    "min_p is ignored": ("sampling by its distribution: min_p",),
    "the seed is ignored": ("the same seed gives the same tokens",),
    "the temperature is ignored": ("other seeds give others",),
    "log probabilities are multiplied by 1.5": ("log probabilities", "sampling"),
    "texts lose letters": ("texts are their tokens", "greedy", "sampling"),
    "--kv-dtype is ignored": ("kv_dtype fp8 ran",),
    "--speculate is ignored": ("speculate ngram ran",),
    "sinks are left out": ("log probabilities of long prompts",),
    "the temperature of YaRN is left out": ("log probabilities of long prompts",),
    "a figure is misspelt": ("texts are their tokens",),
    "scores belong to the token before": ("greedy takes the best", "log probabilities of long prompts"),
    "grammars are ignored": ("an answer fits its schema", "a required tool is called"),
    "preempted requests change a token": ("64 at once with preemptions",),
    "penalties are ignored": ("greedy with penalties",),
    "bias is ignored": ("logit_bias",),
    "stop strings are ignored": ("a stop string ends the answer",),
    "n is ignored": ("n of 3 gives as many answers",),
    "the frequency penalty is ignored": ("greedy with frequency_penalty",),
    "every temperature is 1": ("sampling by its distribution: temperature 0.5",),
    "prompts are cut to 1024 tokens": ("answers to long prompts scored again",),
    "answers are kept by the beginning of a prompt": ("answers to similar prompts scored again",),
    "prompts count twice": ("prompts have as many tokens as were sent",),
    "every answer ends with stop": ("an answer that is cut off says so",),
    "streams lose a piece": ("streams are their answers",),
    "streamed tokens are made up": ("the timed answer is not the engine's own", "timed answers are not greedy"),
    "streams are held back": ("held back and sent in a burst",),
    "the factor of YaRN is 15": ("log probabilities of long prompts",),
    "full layers come first": ("log probabilities of long prompts",),
    "earlier turns are dropped": ("earlier turns are read",),
    "instructions are dropped": ("instructions are read",),
    "results of tools are dropped": ("a tool's result is read",),
    "streamed calls lose a piece": ("a streamed call is its call",),
    "streams lose reasoning": ("a stream is its answer",),
    "calls end with stop": ("a required tool is called",),
    "conversations that are cut off end with stop": ("an answer that is cut off says so",),
    "seeds depend on neighbours": ("a seed gives the same tokens among others",),
    "one request in forty is taken for another": ("a stream began",),
    "requests of clients that leave go on": ("requests of clients that leave end",),
    "streamed prompts are cut": ("the timed answer is not the engine's own", "timed answers are not greedy"),
    "the first token is made up": ("the timed answer is not the engine's own", "timed answers are not greedy"),
    "only the first token is drawn": ("sampled answers are drawn by their probabilities",),
    "answers are kept by the letters of a prompt": ("similar prompts have answers of their own",),
    "conversations are kept by their letters": ("chat completions: similar questions have answers of their own",),
    "answers are kept by both ends of a prompt": ("similar prompts have answers of their own",),
    "prompts that come as text are changed": ("a prompt as text is its tokens",),
    "streams are greedy": ("a seed gives the same tokens in a stream",),
    "streams ignore stop strings": ("a stop string ends the answer",),
    "finished answers say that they were cut off": ("an answer that ends by itself says so",),
    "scores of streams are made up": ("streams are their answers",),
    "scores are sorted": ("log probabilities of long prompts",),
    "answers repeat themselves after 256 tokens": ("sampled answers scored again",),
    "two tokens more are counted than were sent": ("as many tokens as asked for",),
    "one stream in ten loses its end": ("requests",),
    "Responses count three tokens for two": ("Responses: tokens are counted",),
    "finished conversations say that they were cut off": ("chat completions: an answer that ends by itself says so",),
    "conversations ignore the temperature": ("chat completions: a temperature is read",),
    "conversations ignore the seed": ("chat completions: a seed gives the same answer",),
    "conversations ignore stop strings": ("chat completions: a stop string ends the answer",),
}


@dataclass(frozen=True)
class FaultyPeer:
    """`halfbyte serve` with a fault; for the lab it is halfbyte with the embedded model."""

    fault: str
    folder: Path  # of another config.json, where the fault is one of numbers
    name: str = "halfbyte"

    def prepare(self, setup: Setup, progress: Any) -> Setup:
        return setup

    def launch(self, setup: Setup) -> Launch:
        launch = HalfbytePeer().launch(setup)
        if self.fault in two_models.FAULTS:
            return self._two_models(setup, launch)
        if self.fault in NUMBERS:
            at = launch.command.index("serve") + 1
            return Launch((*launch.command[:at], str(self.folder), *launch.command[at:]), record=launch.record)
        path = os.pathsep.join([str(Path(sitecustomize.__file__).parent), os.environ.get("PYTHONPATH", "")])
        return Launch(launch.command, {"PLANTED_FAULT": self.fault, "PYTHONPATH": path}, record=launch.record)

    def _two_models(self, setup: Setup, launch: Launch) -> Launch:
        """The engine and a cheaper one behind one address."""
        full = ["PORT" if word == str(setup.port) else word for word in launch.command]
        at = full.index("serve") + 1
        cheaper = [*full[:at], str(self.folder), "--name", load.EMBEDDED.name, *full[at:]]
        at = cheaper.index("--record")
        del cheaper[at : at + 2]
        command = child_command(two_models.serve, setup.port, self.fault, full, cheaper)
        return Launch(tuple(command), record=launch.record)


@contextmanager
def faulty_subject(fault: str) -> Iterator[Subject]:
    with tempfile.TemporaryDirectory(prefix="halfbyte-fault-") as scratch:
        model = Path(scratch) / "model"
        numbers = NUMBERS.get(CHEAPER if fault in two_models.FAULTS else fault)
        if numbers is not None:
            model.mkdir()
            for file in load.EMBEDDED.iterdir():
                (model / file.name).symlink_to(file)
            config = json.loads((model / "config.json").read_text(encoding="utf-8"))
            (model / "config.json").unlink()
            changes = {
                key: {**config[key], **value} if isinstance(value, dict) else value
                for key, value in numbers.items()
                if key in config
            }
            assert changes, f"{fault}: config.json has none of {', '.join(numbers)}"
            (model / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
        gates = parse(GATES.get(fault, {}), env={})
        yield Subject(FaultyPeer(fault, model), Setup(None, gates), Path(scratch) / "run")


def levels_of(fault: str) -> list[str]:
    """The level that must see a fault; every one of these levels must pass the control."""
    if fault == CONTROL:
        return ["1.5", "2", "3", "4"]
    return ["1.5" if fault in GATES else "3" if fault in LOADED else "4" if fault in TIMED else "2"]


def outcomes_of(fault: str) -> list[Outcome]:
    with faulty_subject(fault) as subject:
        return run_levels(subject, levels_of(fault), CheckOptions(works=WORKS)).outcomes


def expected_verdict(fault: str) -> str:
    return PASS if fault == CONTROL else INVALID if fault in GATES or fault in TIMED else FAIL


def has_reason(fault: str, outcome: Outcome) -> bool:
    """Whether a level found the fault by the check that is meant to find it."""
    failed = [c.what for r in outcome.results for c in r.checks if not c.ok] + outcome.reasons
    return any(reason in sentence for reason in REASONS[fault] for sentence in failed)


def measure(cell: Cell, fault: str) -> Result:
    outcomes, verdict = outcomes_of(fault), expected_verdict(fault)
    checks = [
        Check(f"level {o.level} says {verdict}", o.verdict == verdict, note=f"{o.verdict}: {o.sentence}"[:400])
        for o in outcomes
    ]
    if fault != CONTROL:
        checks += [
            Check(f"level {o.level} says why", has_reason(fault, o), note="; ".join(o.reasons)) for o in outcomes
        ]
    figures = (figure("faults", "faults", int(fault != CONTROL)),) if all(c.ok for c in checks) else ()
    return Result(cell, figures, tuple(checks), detail={"seconds": sum(o.seconds for o in outcomes)})


@dataclass(frozen=True)
class Options:
    names: tuple[str, ...] = option((), "words of the names of faults; by default all of them and the control")


@measurement("faults", seconds=1800)
def faults(run: Run, options: Options) -> None:
    run.sources |= receipts.hashes(receipts.sources_of([receipts.PACKAGE / "engine" / "build.py"], ("engine",)))
    chosen = [fault for fault in FAULTS if not options.names or any(word in fault for word in options.names)]
    if not chosen:
        raise UsageError(f"no fault has {' or '.join(map(repr, options.names))} in its name.")
    for fault in chosen:
        cell = Cell("fault", "tiny", path="http", shape={"case": fault})
        run.measure(cell, partial(measure, cell, fault))
