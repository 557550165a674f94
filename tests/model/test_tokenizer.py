"""The tokenizer against tiktoken's own definition and OpenAI's package; streaming against whole decoding."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import CheckpointError
from halfbyte.harmony import Message, Role, render_conversation
from halfbyte.harmony.parse import Parser
from halfbyte.model import tokenizer as module
from halfbyte.model.tokenizer import O200K_PATTERN, Detokenizer, Tokenizer, o200k_file
from halfbyte.model.tokenizer_json import read_tokenizer_json

CONTROL = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
TEXTS = (
    "",
    " ",
    "Hello, world!",
    "naïve café 漢字 👩\u200d👩\u200d👧",
    "x = {'a': 1}\n\n\tdef f():\r\n",
    "I'LL don't 12345 ٣٤",
    "\x00\x7f\ud800",
)


@pytest.fixture(scope="module")
def gpt_oss() -> Tokenizer:
    return Tokenizer.gpt_oss()


@pytest.fixture(scope="module")
def small_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level vocabulary of another size, as a model of one's own would have."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    small = tokenizers.Tokenizer(models.BPE())
    small.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(O200K_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    small.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    small.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    small.add_special_tokens(["<|endoftext|>", *CONTROL])
    path = tmp_path_factory.mktemp("small") / "tokenizer.json"
    small.save(str(path))
    return path


@pytest.fixture(scope="module")
def small(small_json: Path) -> Tokenizer:
    return Tokenizer.from_file(small_json)


# ---- gpt-oss's vocabulary -----------------------------------------------------------------------


def test_the_shipped_file_is_the_published_one() -> None:
    expected = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
    assert hashlib.sha256(o200k_file()).hexdigest() == expected


def test_special_tokens_and_pattern_are_tiktokens(gpt_oss: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken_ext.openai_public as public

    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *a, **k: module._o200k_ranks())
    theirs = public.o200k_harmony()
    assert gpt_oss.special == theirs["special_tokens"]
    assert theirs["pat_str"] == O200K_PATTERN
    assert gpt_oss.vocab_size == 201088
    assert gpt_oss.eos_tokens == (200002, 200012, 199999)
    assert gpt_oss.special_name(200006) == "<|start|>"
    assert gpt_oss.special_name(100) is None


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(gpt_oss: Tokenizer, small: Tokenizer, text: str) -> None:
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    for tokenizer in (gpt_oss, small):
        assert tokenizer.decode(tokenizer.encode(text)) == whole
        assert tokenizer.decode(tokenizer.encode(text, allow_special=True)) == whole


def test_text_is_never_special_unless_asked(gpt_oss: Tokenizer, small: Tokenizer) -> None:
    for tokenizer in (gpt_oss, small):
        special = set(tokenizer.special.values())
        for name, id in tokenizer.special.items():
            for text in (name, f"a{name}b", name * 2):
                assert not special & set(tokenizer.encode(text)), text
                assert tokenizer.decode(tokenizer.encode(text)) == text
            assert tokenizer.encode(name, allow_special=True) == [id]


def test_every_token_is_its_bytes(gpt_oss: Tokenizer) -> None:
    r = random.Random(0)
    for id in r.sample(range(199998), 2000):
        assert module._o200k_ranks()[gpt_oss.token_bytes(id)] == id
    assert all(gpt_oss.token_bytes(id) for id in range(gpt_oss.vocab_size))


def test_ids_outside_the_vocabulary_are_visible(gpt_oss: Tokenizer) -> None:
    assert gpt_oss.decode([-1, 201088, 10**9]) == "\ufffd" * 3


def test_a_million_blanks_do_not_end_the_process(gpt_oss: Tokenizer) -> None:
    for text in (" " * 1_200_000 + "x", "a" + "\u3000" * 1_100_000 + "\n"):
        assert gpt_oss.decode(gpt_oss.encode(text)) == text
        assert gpt_oss.decode(gpt_oss.encode(text, allow_special=True)) == text


@pytest.mark.parametrize("text", ["7" * 300, "ab" + "12345678" * 40, "٣٤" * 150, "x" * 21 + "9" * 211, "Ⅷ9" * 99])
@pytest.mark.parametrize("part", [20, 21, 22])
def test_digits_without_end_keep_their_groups_of_three(
    gpt_oss: Tokenizer, monkeypatch: pytest.MonkeyPatch, text: str, part: int
) -> None:
    whole = gpt_oss.encode(text)
    monkeypatch.setattr(module, "PART", part)
    assert len(list(gpt_oss.encode_parts(text))) > 1
    assert gpt_oss.encode(text) == whole


def test_a_long_text_is_cut_where_the_pattern_cuts(
    gpt_oss: Tokenizer, small: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", 20)
    draw = random.Random(1)
    pieces = [
        "a",
        "Bc",
        "é",
        "漢",
        "中、",
        "。",
        "，",
        "（",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "1",
        "22",
        "4444",
        "_",
        "'s",
        "'",
        "/",
    ]
    pieces += ["-", "!", "\u00a0", "\u2028", "٣", "Ⅷ", "々", "〇", "े", "<|start|>", "x y", "1 a", "b2"]
    whole = 0
    for _ in range(200):
        text = "".join(draw.choice(pieces) for _ in range(60))
        for tokenizer in (gpt_oss, small):
            for special, encode in ((False, tokenizer._plain), (True, tokenizer._with_special)):
                parts = list(tokenizer.encode_parts(text, allow_special=special))
                assert [id for part in parts for id in part] == tokenizer.encode(text, allow_special=special)
                if tokenizer.decode(id for part in parts for id in part) == text and all(
                    len(tokenizer.decode(part)) < 2 * module.PART for part in parts
                ):
                    assert [id for part in parts for id in part] == encode(text)
                    whole += len(parts) > 2
    assert whole > 100


# ---- other vocabularies -------------------------------------------------------------------------


def test_from_file(small: Tokenizer, small_json: Path) -> None:
    raw = json.loads(small_json.read_text())
    assert small.vocab_size == len(raw["model"]["vocab"]) + 8
    assert set(small.special) == {"<|endoftext|>", *CONTROL}
    assert small.eos_tokens == tuple(small.special[n] for n in ("<|return|>", "<|call|>", "<|endoftext|>"))


def test_control_tokens_marked_plain_are_still_special(small_json: Path, tmp_path: Path) -> None:
    raw = json.loads(small_json.read_text())
    for token in raw["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert set(tokenizer.special) == {"<|endoftext|>", *CONTROL}
    assert not set(tokenizer.special.values()) & set(tokenizer.encode("".join(CONTROL)))


def test_harmony_works_with_any_vocabulary(small: Tokenizer) -> None:
    messages = [Message.user("naïve <|end|> 漢"), Message.analysis("hm"), Message.call("f", '{"a":1}')]
    parser = Parser(small, role=None)
    parser.feed(render_conversation(small, messages))
    assert parser.messages == messages
    assert [m.role for m in parser.messages] == [Role.USER, Role.ASSISTANT, Role.ASSISTANT]


def test_for_model_picks_by_vocabulary(small: Tokenizer, small_json: Path, tmp_path: Path, gpt_oss: Tokenizer) -> None:
    own = Tokenizer.for_model(small_json.parent)
    assert (own.vocab_size, own.encode("Hello")) == (small.vocab_size, small.encode("Hello"))

    # A folder without tokenizer.json, and one whose tokenizer.json is gpt-oss's.
    (tmp_path / "config.json").write_text('{"vocab_size": 201088}')
    assert Tokenizer.for_model(tmp_path) is gpt_oss
    vocab = {module._spell(gpt_oss.token_bytes(id)): id for id in range(199998)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocab, "merges": []}}))
    assert Tokenizer.for_model(tmp_path) is gpt_oss


def test_for_model_refuses(tmp_path: Path, small_json: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a model folder"):
        Tokenizer.for_model(tmp_path / "missing")
    (tmp_path / "config.json").write_text('{"vocab_size": 50000}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json beside"):
        Tokenizer.for_model(tmp_path)
    for broken in ("{", "[]", "{}", '{"model": {"type": "BPE", "vocab": {"漢": 0}}}'):
        (tmp_path / "tokenizer.json").write_text(broken)
        with pytest.raises(CheckpointError):
            Tokenizer.for_model(tmp_path)
    for broken in (b"", b"GGUF", b"GGML" + b"\0" * 40, b"GGUF\3\0\0\0" + b"\1" * 200, b"GGUF\3\0\0\0" + b"\0" * 16):
        (tmp_path / "m.gguf").write_bytes(broken)
        with pytest.raises(CheckpointError):
            Tokenizer.for_model(tmp_path / "m.gguf")


def write_gguf(path: Path, tokens: list[str], types: list[int], merges: list[str], pre: str = "gpt-4o") -> None:
    import gguf

    writer: Any = gguf.GGUFWriter(str(path), "gpt-oss")
    writer.add_uint32("gpt-oss.block_count", 2)  # other metadata lies before and after
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_array("general.tags", ["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_from_gguf(small: Tokenizer, small_json: Path, tmp_path: Path, gpt_oss: Tokenizer) -> None:
    raw = json.loads(small_json.read_text())
    tokens = read_tokenizer_json(small_json).tokens()
    types = [3 if id in set(small.special.values()) else 1 for id in range(len(tokens))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in raw["model"]["merges"]]
    write_gguf(tmp_path / "small.gguf", tokens, types, merges)
    same = Tokenizer.for_model(tmp_path / "small.gguf")
    assert same.special == small.special
    for text in (*TEXTS, "".join(CONTROL)):
        for allow in (False, True):
            assert same.encode(text, allow_special=allow) == small.encode(text, allow_special=allow)
    write_gguf(tmp_path / "odd.gguf", tokens, types, merges, pre="llama-bpe")
    with pytest.raises(CheckpointError, match="llama-bpe"):
        Tokenizer.for_model(tmp_path / "odd.gguf")

    whole = [module._spell(gpt_oss.token_bytes(id)) for id in range(199998)]
    whole += [gpt_oss.token_bytes(id).decode() for id in range(199998, gpt_oss.vocab_size)]
    write_gguf(tmp_path / "whole.gguf", whole, [1] * len(whole), [])
    assert Tokenizer.for_model(tmp_path / "whole.gguf") is gpt_oss


def test_added_tokens_of_a_fine_tune_are_the_file_s(gpt_oss: Tokenizer, tmp_path: Path) -> None:
    """`<think>` as plain text becomes its token, as in transformers; a control token only where it is allowed."""
    from transformers import PreTrainedTokenizerFast

    vocab = {module._spell(gpt_oss.token_bytes(id)): id for id in range(199998)}
    names = {id: gpt_oss.token_bytes(id).decode() for id in range(199998, 200018)} | {200018: "<|endofprompt|>"}
    cut = {"type": "Split", "pattern": {"Regex": O200K_PATTERN}, "behavior": "Isolated", "invert": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    raw: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [{"id": id, "content": name, "special": True} | flags for id, name in names.items()],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, module._byte_level(use_regex=False)]},
        "decoder": module._byte_level(use_regex=True),
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "ignore_merges": True},
    }
    (tmp_path / "config.json").write_text('{"vocab_size": 201088}')
    own = tmp_path / "tokenizer.json"
    own.write_text(json.dumps(raw))
    assert Tokenizer.for_model(tmp_path) is gpt_oss  # harmony's names alone
    raw["added_tokens"] += [
        {"id": 200019, "content": "<think>", "special": False} | flags,
        {"id": 200020, "content": "<|tool|>", "special": True} | flags,
    ]
    own.write_text(json.dumps(raw))
    ours, theirs = Tokenizer.for_model(tmp_path), PreTrainedTokenizerFast(tokenizer_file=str(own))
    text = "Hello <think>world<|end|><|tool|>"
    assert ours.encode(text, allow_special=True) == theirs.encode(text, add_special_tokens=False)
    assert 200019 in ours.encode(text)
    assert not {200007, 200020} & set(ours.encode(text))
    assert (
        ours.decode([200019, 200020, 200006]) == theirs.decode([200019, 200020, 200006]) == "<think><|tool|><|start|>"
    )
    assert ours.eos_tokens == gpt_oss.eos_tokens

    tokens = [*read_tokenizer_json(own).tokens(), *(f"[PAD{id}]" for id in range(200021, 201088))]
    types = [1] * 199998 + [3] * 21 + [4, 3] + [5] * 1067
    write_gguf(tmp_path / "added.gguf", tokens, types, [])
    from_gguf = Tokenizer.for_model(tmp_path / "added.gguf")
    assert from_gguf.decode([200019, 200020]) == "<think><|tool|>"
    types[200019:200021] = [5, 5]
    tokens[200019:200021] = ["[PAD200019]", "[PAD200020]"]  # as llama.cpp's converter fills the vocabulary up
    write_gguf(tmp_path / "padded.gguf", tokens, types, [])
    assert Tokenizer.for_model(tmp_path / "padded.gguf") is gpt_oss


# ---- streaming ----------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 255), st.integers(0, 201087)), max_size=60), st.randoms(use_true_random=False))
def test_detokenizer_says_what_decode_says(ids: list[int], r: random.Random) -> None:
    tokenizer = Tokenizer.gpt_oss()
    stream = Detokenizer(tokenizer)
    at, shown = 0, ""
    while at < len(ids):
        size = r.randint(1, 5)
        shown += stream.add(ids[at : at + size])
        at += size
        # Nothing shown is ever taken back, and at most one character is held.
        assert len(stream.pending) <= 3
        seen = tokenizer.decode_bytes(ids[:at])
        assert shown == seen[: len(seen) - len(stream.pending)].decode("utf-8", "replace")
    assert shown + stream.flush() == tokenizer.decode(ids)
    assert stream.flush() == ""


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_whole_characters_only(text: str) -> None:
    tokenizer = Tokenizer.gpt_oss()
    stream = Detokenizer(tokenizer)
    shown = "".join(stream.add([id]) for id in tokenizer.encode(text))
    assert shown == text
    assert stream.flush() == ""


def test_detokenizer_can_hide_special_tokens(gpt_oss: Tokenizer) -> None:
    ids = gpt_oss.encode("a<|end|>b", allow_special=True)
    assert Detokenizer(gpt_oss).add(ids) == "a<|end|>b"
    assert Detokenizer(gpt_oss, skip_special=True).add(ids) == "ab"
