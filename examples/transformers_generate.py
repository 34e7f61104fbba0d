"""Greedy text of a small random Qwen3 through transformers: eager, splitkv, and splitkv over a paged cache.

With a real model only the first lines differ: AutoModelForCausalLM.from_pretrained(folder, dtype="auto").
"""

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from splitkv.integrations.transformers import SplitKVCache, register

register()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, head_dim=32, initializer_range=0.2, pad_token_id=0, eos_token_id=None,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device).eval()
prompt = torch.randint(1, 512, (2, 200), device=device)
options = dict(max_new_tokens=40, do_sample=False)

model.set_attn_implementation("eager")
eager = model.generate(prompt, **options)

model.set_attn_implementation("splitkv")
print("splitkv gives eager's tokens:", torch.equal(model.generate(prompt, **options), eager))

paged = SplitKVCache(config, max_length=240, page_size=16)
print("and over pages:", torch.equal(model.generate(prompt, past_key_values=paged, **options), eager))

half = SplitKVCache(config, max_length=240, dtype=torch.float16)
model.generate(prompt, past_key_values=half, **options)
print(f"float32 pages take {paged.bytes:,} bytes, float16 rows {half.bytes:,}")
