"""How a long measurement tells where it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""(parts done, parts in all, what is being done now)."""
