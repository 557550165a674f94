"""From the name of a method (`--speculate`) to a proposer for a model, and the search for heads and draft models."""

from __future__ import annotations

from pathlib import Path

from halfbyte.engine.speculative.controller import Controller, TimeLedger
from halfbyte.engine.speculative.draft import DraftModelProposer
from halfbyte.engine.speculative.eagle3 import Eagle3Head, Eagle3Proposer
from halfbyte.engine.speculative.ngram import NgramProposer
from halfbyte.engine.speculative.proposer import Proposer
from halfbyte.engine.speculative.suffix import SuffixProposer
from halfbyte.errors import UsageError
from halfbyte.gates import Gates, setting
from halfbyte.kv.pages import PagePool
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.load import EMBEDDED, load_model, resolve_model
from halfbyte.roofline import decode_traffic

# Heads by use: their published names, best first. {base} is gpt-oss-120b or gpt-oss-20b.
HEADS = {
    "eagle3": (
        "nvidia/{base}-Eagle3-v3", "RedHatAI/{base}-speculator.eagle3", "nvidia/{base}-Eagle3-v2",
        "nvidia/{base}-Eagle3",
    ),
    "eagle3-short": ("nvidia/{base}-Eagle3-short-context",),
    "eagle3-long": ("nvidia/{base}-Eagle3-long-context",),
    "eagle3-throughput": ("nvidia/{base}-Eagle3-throughput",),
}  # fmt: skip
_BASES = {36: "gpt-oss-120b", 24: "gpt-oss-20b"}


class BytesRead:
    """Cost of a step: the bytes it reads by the roofline's count, for this model in its formats."""

    def __init__(self, model: GptOss) -> None:
        self._config, self._formats, self._kv = model.config, model.spec.formats, model.spec.kv_dtype
        self._by_rows: dict[int, float] = {}
        window = self._config.window
        far = decode_traffic(self._config, self._formats, window + 1, 1, self._kv).kv
        near = decode_traffic(self._config, self._formats, window, 1, self._kv).kv
        self._token = far - near  # one more cached token past the window is read by full layers only

    def __call__(self, rows: int, context: int) -> float:
        weights = self._by_rows.get(rows)
        if weights is None:
            weights = self._by_rows[rows] = decode_traffic(self._config, self._formats, 0, rows, self._kv).total
        return weights + context * self._token


def find_head(method: str, layers: int, draft: str | None, models: Path | None = None) -> Path:
    """The folder of a head: `draft`, or the first of its names among the pulled models."""
    if draft is not None:
        path = Path(draft).expanduser()
        if not path.is_dir():
            raise UsageError(f"--draft {draft} is not a folder; give the folder of an EAGLE-3 head.")
        return path
    if layers not in _BASES:
        own = EMBEDDED.parent / f"{EMBEDDED.name}-eagle3"
        if method == "eagle3" and own.is_dir():
            return own
        raise UsageError(
            f"--speculate {method} asks for a head that is published for {' and '.join(_BASES.values())} only; use "
            f"--speculate eagle3, or name the folder of a head for this model with --draft."
            if method != "eagle3"
            else "--speculate eagle3 needs a head for this model; name its folder with --draft."
        )
    root = models or Path(setting("HALFBYTE_MODELS_DIR") or "~/.cache/halfbyte/models").expanduser()
    names = [name.format(base=_BASES[layers]) for name in HEADS[method]]
    for name in names:
        owner, _, short = name.partition("/")
        for folder in (root / short, root / name, root / f"{owner}--{short}"):
            if (folder / "config.json").is_file():
                return folder
    raise UsageError(
        f"--speculate {method} needs one of {', '.join(names)} in {root}; fetch it with "
        f"`halfbyte pull {names[0]}`, or name a folder with --draft."
    )


def make_proposer(
    method: str, model: GptOss, draft: str | None, longest: int, max_seqs: int, context: int
) -> Proposer | None:
    """Make a proposer. For EAGLE-3, call `allocate` once the number of pages is known."""
    if method == "off":
        return None
    cost = BytesRead(model)
    if method == "ngram":
        return NgramProposer(Controller(cost, longest=longest, ledger=TimeLedger()))
    if method == "suffix":
        return SuffixProposer(Controller(cost, longest=longest, ledger=TimeLedger()))
    if method in HEADS:
        head = Eagle3Head(find_head(method, model.config.layers, draft), model)
        share = head.nbytes / cost(1, 0)
        ledger = TimeLedger(follows=True)
        return Eagle3Proposer(head, model, Controller(cost, longest=longest, draft_cost=share, ledger=ledger), share)
    if method == "draft":
        name = resolve_model(draft or _own_draft())
        small = load_model(name, Gates(), device=model.device, page_size=model.spec.page_size)
        if small.config.vocab != model.config.vocab:
            raise UsageError(
                f"--draft {draft} has a vocabulary of {small.config.vocab}, the model one of {model.config.vocab}; "
                f"a draft model must share it."
            )
        per_context = PagePool(2, small.spec.page_size, small.config.window).peak_pages(context, 512)
        pages = 1 + per_context * max(1, min(max_seqs, 4))
        small.allocate_kv(pages)
        small_cost = BytesRead(small)
        share = small_cost(1, 0) / cost(1, 0)
        controller = Controller(cost, longest=longest, draft_cost=share, ledger=TimeLedger())
        return DraftModelProposer(small, controller, pages, cost=small_cost, target_cost=cost)
    raise UsageError(f"--speculate {method} is not known; use off, ngram, suffix, draft, {', '.join(HEADS)}.")


def _own_draft() -> str:
    own = EMBEDDED.parent / f"{EMBEDDED.name}-draft"
    if not own.is_dir():
        raise UsageError("--speculate draft needs a small model of the same vocabulary; name it with --draft.")
    return str(own)
