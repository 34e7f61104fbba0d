"""splitkv: decode attention for long contexts, with one answer whatever the schedule."""

from . import ops as _ops  # registers torch.ops.splitkv
from .attention import decode_attention, merge_states
from .cache.contiguous import ContiguousKVCache
from .cache.memory import MemoryPlan, plan_memory
from .cache.paged import PagedKVCache
from .checks import UnsupportedError
from .decode_loop import DecodeAttention
from .plan import DecodePlan, plan_decode, workspace_bytes
from .policy import SplitPolicy
from .problem import DecodeProblem, DeviceSpec
from .reference import reference_attention

__version__ = "0.1.0"
__all__ = [
    "ContiguousKVCache",
    "DecodeAttention",
    "DecodePlan",
    "DecodeProblem",
    "DeviceSpec",
    "MemoryPlan",
    "PagedKVCache",
    "SplitPolicy",
    "UnsupportedError",
    "decode_attention",
    "merge_states",
    "plan_decode",
    "plan_memory",
    "reference_attention",
    "workspace_bytes",
]
