"""Why a kernel stopped itself: whoever runs kernels that can says how to ask, whoever finds the device dead asks.

Knows no driver and no kernel. A kernel that gives up a wait stops the whole context, so nothing on the device can be
read any more; what it has to say lies in the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable

_reports: list[Callable[[], str | None]] = []


def report_stops(report: Callable[[], str | None]) -> None:
    """`report` is asked when a device has failed: what its kernel said, or None."""
    _reports.append(report)


def stop_reason() -> str | None:
    return next((reason for report in _reports if (reason := report())), None)
