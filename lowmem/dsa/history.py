"""Which training the rows of a store come from: equal step counts do not mean equal rows.

A store can be trained on twice from one step: after a roll back, in a copy of its folder, from
a backup, or with moments that were loaded from elsewhere. Its identity and its step are the
same then, its rows are not, and a checkpoint of the one must not be taken for the other's. So
each stretch of training, from opening or rolling back to closing, draws a name of its own.
"""

from __future__ import annotations

import uuid


class History:
    """The name of a store's rows at each step that it stands at.

    Args:
        found: the name that the rows came with.
        step: the step that they stood at then; whatever else they stand at later is new.
    """

    def __init__(self, found: str = "", step: int = -1) -> None:
        self._found, self._step = found, step
        self._own = uuid.uuid4().hex[:16]

    def at(self, step: int) -> str:
        """The name of the rows at ``step``, where they stand now."""
        return self._found if step == self._step else self._own
