"""Whether the rows of a batch are in memory, and asking the disk for those that are not.

Asking for pages costs several times the update itself when they are resident already,
and saves most of the time when they are not. So the optimizer asks only while pages are
missing: it starts when a step met major faults, and stops when a sample of the rows of
a few steps in a row was resident.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from lowmem.dsa.store import RowStore

Prefetch = Literal["auto", "always", "never"]

_MISSING_SHARE = 0.01  # of a step's rows; below it, asking costs more than it saves
_SAMPLES = 64
_HUGE_PAGE = 2 << 20
_CALM_STEPS = 3


class Residency:
    """Watches one store's faults and asks for missing pages."""

    def __init__(self, store: RowStore, prefetch: Prefetch) -> None:
        from lowmem.kernels import pages

        self._store = store
        self._prefetch = prefetch if pages.AVAILABLE else "never"
        self._calm = 0
        self._first_faults = 2 * store.file_bytes // _HUGE_PAGE  # not all of them are whole
        # A store from an earlier run is most likely on the disk; a new one holds nothing yet.
        resumed = self._prefetch == "auto" and store.header.step > 0
        self.asking = self._prefetch == "always" or resumed

    def ask(self, rows: np.ndarray) -> None:
        """Ask for the pages of the sorted ``rows``, unless a sample of them is in memory."""
        if rows.size and (self._prefetch == "always" or self._some_missing(rows)):
            self._store.will_need(rows)

    def after_step(self, rows: int, faults: int) -> None:
        """Notice the ``faults`` that waited for the disk in a step of ``rows`` rows."""
        if not faults or self._prefetch != "auto" or self.asking:
            return
        if self._store.roomy:
            # Each huge page comes once, and that is no reason to ask.
            self._first_faults -= faults
            if self._first_faults >= 0:
                return
            # They went again: memory is tighter than it looked. No more huge reads.
            self._store.advise_random()
        elif faults <= max(2, _MISSING_SHARE * rows):
            return
        self.asking = True
        self._calm = 0

    def _some_missing(self, rows: np.ndarray) -> bool:
        """Whether a sample of the rows is not all in memory; stops asking after calm steps."""
        from lowmem.kernels import pages

        missing = pages.count_missing(
            rows,
            min(_SAMPLES, rows.size),
            self._store.address,
            self._store.layout.row_bytes,
            pages.PAGE,
        )
        self._calm = 0 if missing else self._calm + 1
        self.asking = self._calm < _CALM_STEPS
        return missing > 0
