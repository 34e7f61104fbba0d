"""Prefill, decode, a fork that shares its prompt, and drafts that are rejected, with both caches."""

import torch

import splitkv

device = "cuda" if torch.cuda.is_available() else "cpu"
num_q_heads, num_kv_heads, head_dim, prompt, steps = 8, 2, 64, 100, 20


def new_tokens(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(1, n, num_kv_heads, head_dim, device=device) for _ in range(2))


shape = dict(num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=torch.bfloat16, device=device)
paged = splitkv.PagedKVCache(num_pages=32, page_size=16, max_batch=2, max_pages_per_row=16, **shape)
contiguous = splitkv.ContiguousKVCache(batch=2, capacity=prompt + steps, **shape)

# One prompt in row 0; row 1 is a fork, which takes no page until it writes.
row = paged.allocate(prompt + steps)
k, v = new_tokens(prompt)
paged.append(k, v, rows=[row])
contiguous.append(k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1))
free = paged.free_pages
fork = paged.fork(row)
print(f"a fork takes no page: {paged.free_pages == free}")
paged.reserve(fork, prompt + steps)

# Both go on, each with tokens of its own, one at a time.
for _ in range(steps - 4):
    k, v = (torch.cat(parts) for parts in zip(new_tokens(1), new_tokens(1), strict=True))
    for cache in (paged, contiguous):
        cache.append(k, v)

# Two drafts, of which each row accepts one; the next take the place of the other.
for _ in range(3):
    k, v = (torch.cat(parts) for parts in zip(new_tokens(2), new_tokens(2), strict=True))
    for cache in (paged, contiguous):
        kept = cache.seq_lens + 1
        cache.append(k, v)
        cache.truncate(None, kept)

q = torch.randn(2, num_q_heads, head_dim, device=device)
same = torch.equal(
    splitkv.decode_attention(q, **paged.arguments()), splitkv.decode_attention(q, **contiguous.arguments())
)
print(f"paged equals contiguous, byte for byte: {same}")
print(f"nothing was dropped: {not paged.dropped.any() and not contiguous.dropped.any()}")
