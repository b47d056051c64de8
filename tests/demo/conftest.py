"""Hypothesis without a stopwatch: a first call of torch takes seconds on a busy machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("demo", deadline=None)
settings.load_profile("demo")
