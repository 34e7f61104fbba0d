"""What a run does with an exception in one of its rows: name it in one line, and stop if the GPU went with it."""

from __future__ import annotations

import torch

REASON_LENGTH = 300


class DeviceBroken(RuntimeError):
    """The CUDA context reports an error that every later call would report too."""


def short_reason(failure: Exception) -> str:
    """One line of what was raised."""
    text = " ".join(f"{type(failure).__name__}: {failure}".split())
    return text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 3] + "..."


def require_working_device(failure: Exception, device: str) -> None:
    """Raises DeviceBroken if the failure left the GPU unusable: nothing measured after it would be worth anything."""
    if device == "cuda":
        try:
            torch.cuda.synchronize()
            torch.zeros(1, device=device).item()
        except RuntimeError as error:
            raise DeviceBroken(f"the GPU stopped working after: {short_reason(failure)}") from error
