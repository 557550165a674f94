"""What tests of the lab share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halfbyte.lab import machine


@pytest.fixture
def fast_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A roof that nothing reaches: how busy the machine is while its own is measured must decide no test."""
    monkeypatch.setattr(machine, "measure_read", lambda device, size=0: 1e13)
    monkeypatch.setattr(machine, "_measure_matmul", lambda device: 1e16)
    monkeypatch.setattr(machine, "_measure_int8", lambda device: 1e17)
    machine.forget_roofs()
    yield
    machine.forget_roofs()
