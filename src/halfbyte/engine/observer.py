"""StepObserver: follows the steps of a core, for measurements and tests. `EngineCore.observer` is None by default.

Called in the core's thread, so the time an observer takes is added to the step. It must not change what it sees.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from halfbyte.engine.batch import Batch
from halfbyte.engine.scheduled_step import ScheduledStep

# `wait` is for the result of the step that is committed, which may have been launched by an earlier call of `step()`.
Stage = Literal["schedule", "build", "launch", "wait"]


class StepObserver:
    """Observes nothing; a subclass overrides what it needs."""

    def stage(self, name: Stage) -> AbstractContextManager[None]:
        """Entered before a stage and left after it, also if the stage raises."""
        return nullcontext()

    def launched(self, step: ScheduledStep, batch: Batch) -> None:
        """A step was launched with this batch. A batch built in place is overwritten by the next one."""
