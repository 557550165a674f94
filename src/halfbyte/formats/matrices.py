"""The format of every matrix of a model, as a function of its role and its layer.

One record for everything that asks: plans, loaders, sizes, ceilings, self-tests and records. A role whose layers differ
has no single format, so `formats[role]` refuses to name one; a caller that cannot ask layer by layer finds out at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence


class Formats(Mapping[str, str]):
    """Role -> bf16, f16, f32, q8 or mxfp4; `by_layer` adds roles with a format for each layer."""

    def __init__(self, formats: Mapping[str, str], by_layer: Mapping[str, Sequence[str]] | None = None) -> None:
        sequences: dict[str, Sequence[str]] = {}
        if isinstance(formats, Formats):
            sequences |= formats._formats
        else:
            sequences |= {role: (form,) for role, form in formats.items()}
        sequences |= by_layer or {}
        self._formats: dict[str, tuple[str, ...]] = {
            role: tuple(sequence if len(set(sequence)) > 1 else sequence[:1]) for role, sequence in sequences.items()
        }

    @property
    def by_layer(self) -> dict[str, tuple[str, ...]]:
        """Role -> a format for each layer, of the roles whose layers differ."""
        return {role: layers for role, layers in self._formats.items() if len(layers) > 1}

    def __getitem__(self, role: str) -> str:
        form, *others = self._formats[role]
        if others:
            raise AssertionError(f"{role} has no single format: {self.text(role)}")
        return form

    def __iter__(self) -> Iterator[str]:
        return iter(self._formats)

    def __len__(self) -> int:
        return len(self._formats)

    def __contains__(self, role: object) -> bool:
        return role in self._formats

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return self._formats == Formats(other)._formats

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Formats({self.texts()})"

    def of(self, role: str, layer: int | None) -> str:
        """The format of a matrix; the layer is None outside the layers."""
        layers = self._formats[role]
        if len(layers) == 1:
            return layers[0]
        assert layer is not None, f"{role} differs from layer to layer"
        return layers[layer]

    def per_layer(self, role: str) -> tuple[str, ...]:
        """A format for each layer, or the one that all share."""
        return self._formats[role]

    def kinds(self, role: str) -> tuple[str, ...]:
        """The different formats of a role, the most frequent first."""
        layers = self._formats[role]
        return tuple(sorted(dict.fromkeys(layers), key=lambda form: (-layers.count(form), layers.index(form))))

    def coarsest(self) -> dict[str, str]:
        """One format for each role: where layers differ, a quantised one."""
        return {
            role: min(layers, key=lambda form: form in ("bf16", "f16", "f32")) for role, layers in self._formats.items()
        }

    def in_layer(self, layer: int) -> Formats:
        """The formats of one layer, and of what lies outside the layers."""
        return Formats({role: self.of(role, layer) for role in self})

    def only(self, roles: Iterable[str]) -> Formats:
        names = set(roles)
        return Formats({}, {role: layers for role, layers in self._formats.items() if role in names})

    def __or__(self, others: Mapping[str, str]) -> Formats:
        """With other roles, each of which has one format."""
        return Formats(self, {role: (form,) for role, form in others.items()})

    def text(self, role: str) -> str:
        """The format, or all of them with their layers: `mxfp4, and q8 in layers 1, 3`."""
        usual, *others = self.kinds(role)
        clauses = [f"{form} in layers {', '.join(map(str, self._layers(role, form)))}" for form in others]
        return ", and ".join([usual, *clauses])

    def texts(self) -> dict[str, str]:
        return {role: self.text(role) for role in self}

    def _layers(self, role: str, form: str) -> list[int]:
        return [layer for layer, own in enumerate(self._formats[role]) if own == form]


def kinds_in(text: str) -> set[str]:
    """The formats that `Formats.text` names."""
    return {clause.partition(" ")[0] for clause in text.split(", and ")}
