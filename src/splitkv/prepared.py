"""Calls seen before. The first call of a kind is checked, planned and prepared in full; its outcome is kept under all
that those steps read, so that a repeated call only has to look itself up and launch with new addresses.

A kind is: the tensors' shapes, strides, dtypes, devices and alignments, every option with its type, and the environment
variables. Lengths, addresses and contents are not in it. Bad input is never kept, so it meets the full check each time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .backends import TENSORS, PreparedLaunch, launcher, preparer
from .backends.launching import addresses_of
from .checks import DecodeInputs
from .device_checks import CHECK_VARIABLE, check_values, checks_asked, checks_wanted
from .plan import DecodePlan
from .policy import BACKEND_VARIABLE, PACK_VARIABLE, POLICY_VARIABLE
from .scratch import Scratch

INTERPRET_VARIABLE = "TRITON_INTERPRET"
VARIABLES = (POLICY_VARIABLE, PACK_VARIABLE, BACKEND_VARIABLE, CHECK_VARIABLE, INTERPRET_VARIABLE)
CALLS = 1024
"""Kinds of call that one memo keeps: some kilobytes each, and no tensor."""
LONGEST = 2**31 - 1
"""A uniform length above this is another type to a kernel, so it is not served from the memo."""
ALIGNMENT = 16
"""Bytes. Kernels are compiled, and some inputs refused, by whether an address is a multiple of this."""

NO_MEMORY, NO_OPTIONS = (0,) * 4, (0,) * 5
"""Addresses where none is given: of block_table, out, lse, workspace, and of starts, mask, sinks, k_scale, v_scale."""
OUT, LSE, WORKSPACE = map(TENSORS.index, ("out", "lse", "workspace"))

NOTHING_SET = (None,) * len(VARIABLES)
_ENCODED = tuple(getattr(os.environ, "encodekey", str)(name) for name in VARIABLES)
_SCRATCH = Scratch()


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """What a kind of call needs besides its tensors. out_like_q: whether out has q's shape and layout. lse_shape: None
    where no lse is wanted. workspace_bytes: of its plan. device: index of the tensors' GPU. longest: the greatest
    uniform length it may have."""

    launch: PreparedLaunch
    out_shape: tuple[int, ...]
    out_like_q: bool
    lse_shape: tuple[int, ...] | None
    workspace_bytes: int
    device: int | None
    longest: int

    def run(
        self, q: Tensor, addresses: list[int], uniform_len: int, out: Tensor | None, workspace: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Launch for tensors at these addresses (`call_key`); what is None is allocated."""
        if out is None:
            out = torch.empty_like(q) if self.out_like_q else q.new_empty(self.out_shape)  # the former in half the time
            addresses[OUT] = out.data_ptr()
        lse = None
        if self.lse_shape is not None:
            lse = q.new_empty(self.lse_shape, dtype=torch.float32)
            addresses[LSE] = lse.data_ptr()
        waiting = None
        if self.workspace_bytes:
            if workspace is None:
                workspace, waiting = _SCRATCH.take(q, self.device, self.workspace_bytes)
            addresses[WORKSPACE] = workspace.data_ptr()
        self.launch(addresses, uniform_len)
        if waiting is not None and workspace is not None:
            waiting.append(workspace)
        return out if lse is None else (out, lse)


class FirstCall:
    """A checked call that is run in full, and what may be kept of it. `variant` names the code that it runs."""

    def __init__(
        self,
        backend: str,
        inputs: DecodeInputs,
        plan: DecodePlan,
        q: Tensor,
        out: Tensor | None,
        return_lse: bool,
        workspace: Tensor | None,
    ) -> None:
        if checks_wanted(q.device):
            check_values(inputs)
        if out is None:
            out = q.new_empty((*q.shape[:-1], plan.problem.v_head_dim))
        self._like_q = q.is_contiguous() and q.shape == out.shape
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32) if return_lse else None
        if workspace is None and plan.splits:
            workspace = q.new_empty(plan.workspace_bytes, dtype=torch.uint8)
        self._backend, self._out, self._lse = backend, out, lse
        self._arguments = inputs.launch_arguments() | dict(
            out=out if out.ndim == 4 else out.unsqueeze(1),
            lse=lse if lse is None or lse.ndim == 3 else lse.unsqueeze(1),
            workspace=workspace,
            plan=plan,
        )
        self._uniform_len = 0 if isinstance(inputs.seq_lens, Tensor) else inputs.seq_lens
        self._launch = preparer(backend)(**self._arguments) if self._uniform_len <= LONGEST else None
        self.variant: Hashable = (backend, None if self._launch is None else self._launch.variant)

    def run(self) -> Tensor | tuple[Tensor, Tensor]:
        if self._launch is None:
            launcher(self._backend)(**self._arguments)
        else:
            self._launch(addresses_of(self._arguments), self._uniform_len)
        return self._out if self._lse is None else (self._out, self._lse)

    def kept(self) -> PreparedCall | None:
        """What a repeated call needs, or None where it must be checked in full: values to read on the device, a backend
        that prepares nothing, and factors of zero, whose sign the look-up would not see."""
        factors = (self._arguments[name] for name in ("softmax_scale", "k_scale", "v_scale"))
        zero = any(not isinstance(factor, Tensor) and factor == 0 for factor in factors)
        if self._launch is None or zero or checks_asked():
            return None
        plan: DecodePlan = self._arguments["plan"]
        return PreparedCall(
            launch=self._launch,
            out_shape=tuple(self._out.shape),
            out_like_q=self._like_q,
            lse_shape=None if self._lse is None else tuple(self._lse.shape),
            workspace_bytes=plan.workspace_bytes,
            device=self._out.device.index,
            longest=min(plan.problem.capacity, LONGEST),
        )


class CallMemo:
    """A bounded memo of prepared calls, safe to share between threads. When full, the older half goes."""

    def __init__(self, size: int = CALLS) -> None:
        self._size = size
        self._calls: dict[Hashable, PreparedCall] = {}
        self._lock = threading.Lock()

    def find(self, key: Hashable, uniform_len: int) -> PreparedCall | None:
        """The call kept under a key, if it may run with this uniform length."""
        call = self._calls.get(key)
        return call if call is not None and 0 <= uniform_len <= call.longest else None

    def keep(self, key: Hashable | None, call: PreparedCall | None) -> None:
        """Keep a call, unless one of the two is None."""
        if key is None or call is None:
            return
        with self._lock:
            if len(self._calls) >= self._size:
                self._calls = dict(list(self._calls.items())[self._size // 2 :])
            self._calls[key] = call

    def clear(self) -> None:
        with self._lock:
            self._calls = {}

    def __len__(self) -> int:
        return len(self._calls)


def call_key(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor | int,
    out: Tensor | None,
    workspace: Tensor | None,
    settings: tuple[Any, ...],
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    starts: Tensor | None = None,
    mask: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
) -> tuple[tuple[Any, ...], list[int], int]:
    """(the kind of this call, addresses in the order of backends.TENSORS, the uniform length or 0).

    Types stand beside numbers, as True == 1 == 1.0. Arguments that are no tensors where tensors belong give a kind
    of their own, or an exception: AttributeError, TypeError or RuntimeError. Written out where every call passes: half
    the time of a loop.
    """
    key: tuple[Any, ...] = (
        settings, environment(),
        q.shape, q.stride(), q.dtype, q.device,
        k_cache.shape, k_cache.stride(), k_cache.dtype, k_cache.device,
        v_cache.shape, v_cache.stride(), v_cache.dtype, v_cache.device,
    )  # fmt: skip
    addresses = [q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()]
    bits = addresses[0] | addresses[1] | addresses[2]
    uniform_len = 0
    if type(seq_lens) is int:
        uniform_len = seq_lens
        key += (None,)
        addresses.append(0)
    else:
        lens: Any = seq_lens
        key += (lens.shape, lens.stride(), lens.dtype, lens.device)
        addresses.append(address := lens.data_ptr())
        bits |= address
    if block_table is out is workspace is None:
        addresses += NO_MEMORY
    else:
        for tensor in (block_table, out, None, workspace):
            if tensor is None:
                key += (None,)
                addresses.append(0)
            else:
                key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
                addresses.append(address := tensor.data_ptr())
                bits |= address
    if starts is mask is sinks is k_scale is v_scale is None and softmax_scale is window is softcap is None:
        addresses += NO_OPTIONS
    else:
        key += (type(softmax_scale), softmax_scale, type(window), window, type(softcap), softcap)
        for argument in (starts, mask, sinks, k_scale, v_scale):
            if isinstance(argument, Tensor):
                key += (argument.shape, argument.stride(), argument.dtype, argument.device)
                addresses.append(argument.data_ptr())
            else:
                key += (type(argument), argument)
                addresses.append(0)
            bits |= addresses[-1]
    if bits % ALIGNMENT:
        key += (tuple([address % ALIGNMENT == 0 for address in addresses]),)
    return key, addresses, uniform_len


NO_KEY = (AttributeError, TypeError, RuntimeError)
"""What `call_key` and a look-up raise for arguments that only the full check can name."""


def environment() -> tuple[Any, ...]:
    """The raw values of the variables that a call reads; mostly none is set. From the dictionary beneath os.environ
    where it has one: 0.1 us, and 2.5 us by os.environ.get."""
    data: Any = getattr(os.environ, "_data", None)
    if data is None:
        return tuple(map(os.environ.get, VARIABLES))
    return NOTHING_SET if data.keys().isdisjoint(_ENCODED) else tuple(map(data.get, _ENCODED))
