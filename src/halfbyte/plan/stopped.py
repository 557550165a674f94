"""Why a kernel stopped itself and, with it, the device.

A kernel that gives up a wait stops the whole context, so nothing on the device can be read any more; its report lies in
the host's memory. Kernels that can stop register a function that reads it. No driver and no kernel is known here.
"""

from __future__ import annotations

from collections.abc import Callable

_reports: list[Callable[[], str | None]] = []


def report_stops(report: Callable[[], str | None]) -> None:
    """Register a function that returns why a kernel stopped the device, or None."""
    _reports.append(report)


def stop_reason() -> str | None:
    """The first report of a kernel that stopped the device, once the device has failed."""
    return next((reason for report in _reports if (reason := report())), None)
