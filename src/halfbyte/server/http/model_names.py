"""The names under which clients may ask for the one model that is served."""

from __future__ import annotations

from halfbyte.engine.request import SourceInfo
from halfbyte.server.http.errors import ApiError
from halfbyte.server.settings import ServerSettings


class ModelNames:
    def __init__(self, info: SourceInfo, settings: ServerSettings) -> None:
        self.main = settings.model_name or info.model
        self.all = tuple(dict.fromkeys((self.main, info.model, *settings.aliases)))
        self.any_name = settings.any_model

    def check_tagged(self, name: str) -> str:
        """Like `check`, for clients of Ollama, who write `gpt-oss:20b` and `NAME:latest`."""
        if name.removesuffix(":latest") in self.all or name.replace(":", "-") in self.all:
            return name
        return self.check(name)

    def check(self, name: str) -> str:
        """The name to answer under: the one that was asked for, if it is one of ours."""
        if self.any_name or name in self.all:
            return name
        names = ", ".join(repr(n) for n in self.all)
        raise ApiError(
            404, f"The model {name!r} is not served here; ask for {names}.", param="model", code="model_not_found"
        )
