"""Settings of hypothesis: no limit of time per example, which a busy machine exceeds, and the same examples always."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")
