"""Decode attention over two rows of different lengths, on a GPU if there is one, else on the CPU."""

import torch

import splitkv

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16
batch, capacity, num_q_heads, num_kv_heads, head_dim = 2, 4096, 16, 4, 128

q = torch.randn(batch, num_q_heads, head_dim, device=device, dtype=dtype)
k_cache = torch.randn(batch, capacity, num_kv_heads, head_dim, device=device, dtype=dtype)
v_cache = torch.randn(batch, capacity, num_kv_heads, head_dim, device=device, dtype=dtype)
seq_lens = torch.tensor([4096, 100], device=device, dtype=torch.int32)

out, lse = splitkv.decode_attention(q, k_cache, v_cache, seq_lens, return_lse=True)
reference = splitkv.reference_attention(q, k_cache, v_cache, seq_lens)
print(f"out {tuple(out.shape)} {out.dtype}, lse {tuple(lse.shape)}")
print(f"largest difference from float64: {(out.double().cpu() - reference).abs().max():.1e}")

alone = splitkv.decode_attention(q[1:], k_cache[1:], v_cache[1:], seq_lens[1:])
print(f"row 1 alone gives the same bytes: {torch.equal(alone[0], out[1])}")
