"""The same keys in shuffled pages give the same bytes as in a contiguous cache."""

import torch

import splitkv

device = "cuda" if torch.cuda.is_available() else "cpu"
num_q_heads, num_kv_heads, head_dim, length, page_size = 8, 2, 64, 1000, 16
pages = -(-length // page_size)

q = torch.randn(1, num_q_heads, head_dim, device=device)
k_pages = torch.randn(pages, page_size, num_kv_heads, head_dim, device=device)
v_pages = torch.randn(pages, page_size, num_kv_heads, head_dim, device=device)
block_table = torch.randperm(pages, device=device, dtype=torch.int32).unsqueeze(0)

paged = splitkv.decode_attention(q, k_pages, v_pages, length, block_table=block_table)

order = block_table[0].long()
contiguous = splitkv.decode_attention(
    q, k_pages[order].flatten(0, 1).unsqueeze(0), v_pages[order].flatten(0, 1).unsqueeze(0), length
)
print(f"paged equals contiguous, byte for byte: {torch.equal(paged, contiguous)}")
