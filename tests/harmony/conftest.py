"""The reference: OpenAI's harmony package, made to work offline from the vocabulary we ship."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.model.tokenizer import Tokenizer, o200k_file


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import openai_harmony

    folder = tmp_path_factory.mktemp("vocabulary")
    (folder / "o200k_base.tiktoken").write_bytes(o200k_file())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        return openai_harmony.load_harmony_encoding("HarmonyGptOss")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.gpt_oss()
