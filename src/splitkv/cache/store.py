"""The write of `append`: the device's function, and the same as an operator for torch.compile.

The operator says which tensors it changes, so a compiled step that attends after it reads what it wrote.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def store(*, k: Tensor, k_scale: Tensor | float, v_scale: Tensor | float, **tensors: Tensor | None) -> None:
    """Arguments as of backends.triton_append.append."""
    if torch.compiler.is_compiling():
        given = {"k_scale": k_scale, "v_scale": v_scale}
        numbers: dict[str, Any] = {
            f"{name}_value": 1.0 if isinstance(scale, Tensor) else scale for name, scale in given.items()
        }
        scales = {name: scale if isinstance(scale, Tensor) else None for name, scale in given.items()}
        torch.ops.splitkv.append(k=k, **tensors, **scales, **numbers)
        return
    if k.device.type == "cuda":
        from ..backends.triton_append import append
    else:
        from ..backends.cpu_append import append
    with torch.no_grad():
        append(k=k, k_scale=k_scale, v_scale=v_scale, **tensors)  # type: ignore[arg-type]


@torch.library.custom_op("splitkv::append", mutates_args=("k_cache", "v_cache", "seq_lens", "dropped"))
def _append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    dropped: Tensor,
    rows: Tensor | None,
    lens: Tensor | None,
    block_table: Tensor | None,
    bounds: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_scale_value: float,
    v_scale_value: float,
) -> None:
    store(
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        seq_lens=seq_lens,
        dropped=dropped,
        rows=rows,
        lens=lens,
        block_table=block_table,
        bounds=bounds,
        k_scale=k_scale_value if k_scale is None else k_scale,
        v_scale=v_scale_value if v_scale is None else v_scale,
    )


@_append.register_fake
def _(*_: object) -> None:
    return None
