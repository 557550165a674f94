"""What a machine's memory and arithmetic allow at most for some work, in any engine.

An engine in this process says which experts its steps touched. An engine behind HTTP does not say: random weights
spread their routing evenly, so that the expected number counts; of all others no fewer are read than one token chooses.
A closed loop may overlap one stream's prompt with another's answer, but not with its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from halfbyte import roofline
from halfbyte.errors import InvalidFigureError, UsageError
from halfbyte.gates import Gates
from halfbyte.lab import environment
from halfbyte.lab.result import FigureCeiling, Result
from halfbyte.model import load
from halfbyte.model.config import ModelConfig
from halfbyte.model.gpt_oss import GptOss, formats_after
from halfbyte.plan.phase import ARCHES
from halfbyte.roofline import Gpu, decode_traffic, prefill_ceiling

KV = {"auto": "bf16"}  # on a GPU


@dataclass(frozen=True)
class Ceilings:
    gpu: Gpu
    config: ModelConfig
    formats: Mapping[str, str]
    kv_dtype: str = "bf16"
    even: bool = True  # every expert is chosen as often as any other

    def step_seconds(self, context: int, streams: int, experts: float | None = None) -> float:
        """Ceiling of a token for every stream, each with so many tokens behind it."""
        touched = self._experts() if experts is None else experts
        traffic = decode_traffic(self.config, self.formats, context, streams, self.kv_dtype, touched)
        return traffic.total / self.gpu.read

    def prompt_seconds(self, prompt: int, depth: int = 0, count: int = 1) -> float:
        """Every operation at the matrix rate, or every weight that so many rows need read once."""
        flops = prefill_ceiling(self.gpu, self.config, self.formats, prompt, depth).flops * prompt * count
        traffic = decode_traffic(self.config, self.formats, 0, prompt * count, experts_touched=self._experts())
        weights = traffic.experts + traffic.attention + traffic.lm_head
        return max(flops / self.gpu.bf16, weights / self.gpu.read)

    def _experts(self) -> float | None:
        return None if self.even else float(self.config.top_k)

    # ---- of what is measured, in tokens per second of all requests together ----

    def decode(self, tokens: int, depth: int, streams: int, experts: float | None = None) -> FigureCeiling:
        return self._named(streams / self.step_seconds(depth + tokens // 2, streams, experts))

    def prompts(self, prompt: int, depth: int, count: int) -> FigureCeiling:
        return self._named(count * prompt / self.prompt_seconds(prompt, depth, count))

    def first_token(self, prompt: int, depth: int) -> FigureCeiling:
        """In milliseconds, the least."""
        return self._named(1e3 * self.prompt_seconds(prompt, depth))

    def closed_loop(self, prompt: int, tokens: int, streams: int) -> FigureCeiling:
        """Streams that ask again as soon as they are answered: a round of it takes no less than all prompts, than all
        decode steps with every stream in them, and than one stream's own prompt and answer with no other stream."""
        context, steps = prompt + tokens // 2, tokens - 1
        alone = self.prompt_seconds(prompt) + steps * self.step_seconds(context, 1)
        together = steps * self.step_seconds(context, streams)
        return self._named(streams * tokens / max(alone, together, streams * self.prompt_seconds(prompt)))

    def _named(self, value: float) -> FigureCeiling:
        return FigureCeiling(value, f"{self.gpu.name}: {self.gpu.note}")


def ceilings_of(model: GptOss, gpu: Gpu) -> Ceilings:
    return Ceilings(gpu, model.config, model.spec.formats, model.spec.kv_dtype)


def ceilings_for(model: load.ModelName, gates: Gates, gpu_name: str) -> Ceilings | None:
    """Ceilings on a GPU of that name; None where its rates are unknown, and for steps that verify drafts, which
    read less per token. A CPU's rates are measured, by the process that computes."""
    if gates.speculate != "off":
        return None
    with contextlib.suppress(UsageError):
        facts = load.read_facts(model)
        gpu = roofline.gpu_named(gpu_name)
        formats = formats_after(facts.config, gates, facts.formats, ARCHES[gpu.arch])
        kv_dtype = KV.get(gates.kv_dtype, gates.kv_dtype)
        return Ceilings(
            gpu, facts.config, formats, kv_dtype, even=model.random is not None and not model.character.skew
        )
    return None


def ceilings_here(model: load.ModelName, gates: Gates, device: str | None) -> Ceilings | None:
    """Ceilings of an engine on this machine's GPU; None on a CPU."""
    gpus = [] if device == "cpu" else environment.gpus()
    return ceilings_for(model, gates, str(gpus[0]["name"])) if gpus else None


def under(result: Result, ceilings: Mapping[str, FigureCeiling | None]) -> Result:
    """With a ceiling for each figure that has one here; INVALID if a figure passes it, and what it showed is kept."""
    try:
        figures = tuple(replace(f, ceiling=ceilings.get(f.name, f.ceiling)) for f in result.figures)
    except InvalidFigureError as e:
        return result.invalidated(str(e))
    return replace(result, figures=figures)


def beside(result: Result, ceilings: Ceilings) -> Result:
    """The result under the ceilings that its cell has."""
    return under(result, _of_cell(result, ceilings))


def _of_cell(result: Result, ceilings: Ceilings) -> dict[str, FigureCeiling]:
    """Ceilings by the figure's name, of work with one length for all prompts and one for all answers."""
    shape, kind = result.cell.shape, result.cell.kind
    prompt, tokens, depth = (int(shape.get(n, 0)) for n in ("pp", "tg", "depth"))
    streams = int(shape.get("concurrency", 1))
    if kind == "prompt" and prompt:
        return {"speed": ceilings.prompts(prompt, depth, streams), "ttft": ceilings.first_token(prompt, depth)}
    if kind == "decode" and tokens:
        return {"speed": ceilings.decode(tokens, depth, streams)}
    if kind == "serving" and shape.get("workload") == "synthetic" and "rate" not in shape and prompt and tokens:
        return {"speed": ceilings.closed_loop(prompt, tokens, streams)}
    return {}
