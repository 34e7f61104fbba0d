"""One long row whose keys lie on two ranks: prefill, then decode steps, beside one process that holds them all.

Here the ranks are processes on this machine's CPU, joined by gloo. On two GPUs torchrun would start them, NCCL would
join them, and device="cuda" would stand where this says "cpu".
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing

import splitkv
from splitkv.ranks import RankAttention, part_of

ranks, prompt, steps = 2, 5000, 4
num_q_heads, num_kv_heads, head_dim, window = 8, 2, 64, 4000


def decode(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    tokens = torch.Generator().manual_seed(0)  # every rank draws the same; a model's ranks would compute the same
    keys, values = torch.randn(2, 1, prompt, num_kv_heads, head_dim, generator=tokens)

    # Each rank caches its part of the prompt; the last has room for what is generated.
    part, last = part_of(prompt, rank, ranks), rank == ranks - 1
    capacity = len(part) + (steps if last else 0)
    cache = splitkv.ContiguousKVCache(1, capacity, num_kv_heads, head_dim, dtype=torch.float32, device="cpu")
    cache.append(keys[:, part.start : part.stop], values[:, part.start : part.stop])
    problem = splitkv.DecodeProblem(
        1, num_q_heads, num_kv_heads, head_dim, capacity=capacity, q_dtype="f32", kv_dtype="f32"
    )
    attention = RankAttention(problem, device="cpu")
    later_keys = torch.tensor([prompt - part.stop], dtype=torch.int32)  # on the device: a graph would read it there

    error = 0.0
    for _ in range(steps):
        q = torch.randn(1, num_q_heads, head_dim, generator=tokens)
        k, v = torch.randn(2, 1, 1, num_kv_heads, head_dim, generator=tokens)
        keys, values = torch.cat((keys, k), 1), torch.cat((values, v), 1)
        if last:
            cache.append(k, v)
        else:
            later_keys += 1
        out = attention.run(q, **cache.arguments(), window=window, later_keys=later_keys)
        alone = splitkv.decode_attention(q, keys, values, keys.shape[1], window=window)
        error = max(error, (out - alone).abs().max().item())
    print(f"rank {rank}: {steps} steps over {prompt} keys differ from one process's by {error:.1e}: {error < 1e-5}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(decode, (folder,), nprocs=ranks)
