"""Files that are cut short, lie, or are of another kind: exit code 2, file and field, no traceback, no code run."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make, save
from transcripts import run

from splitkv.models.loading import open_model

pytest.importorskip("transformers")
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model() -> Any:
    return make("llama", num_hidden_layers=2, rope_parameters=None)


@pytest.fixture(scope="module")
def originals(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "single": save(model, root / "single"),
        "sharded": save(model, root / "sharded", max_shard_size="100KB"),
        "gguf": write_gguf(model, root / "m.gguf"),
    }


def edit(file: Path, change: Callable[[Any], None]) -> None:
    """Change the object in a JSON file."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", lambda content: content.update(changes))


def index(change: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    return lambda folder: edit(folder / INDEX, lambda content: change(content["weight_map"]))


def cut(folder: Path, share: float = 0.6) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])


def rewritten(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """Change the tensors of the one safetensors file."""

    def spoil(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return spoil


def header_size(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 50) + file.read_bytes()[8:])


def offsets(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1))


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.safetensors.bin"):
        (folder / name).write_bytes(pickle.dumps(Trap(folder / "ran")))


Q = "layers.0.self_attn.q_proj.weight"
# name: (which model, how it is spoiled, what is said)
SPOILED: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "cut short": ("single", cut, "model.safetensors: expected a complete safetensors file"),
    "header cut": ("single", lambda f: cut(f, 0.001), "model.safetensors: expected a complete safetensors file"),
    "empty": ("single", lambda f: cut(f, 0), "model.safetensors: expected a complete safetensors file"),
    "header size": ("single", header_size, "model.safetensors: expected a complete safetensors file"),
    "offsets": ("single", offsets, "model.safetensors: expected a complete safetensors file"),
    "no weights": ("single", lambda f: (f / "model.safetensors").unlink(), f"expected model.safetensors or {INDEX}"),
    "only a pickle": ("single", only_pickle, f"expected model.safetensors or {INDEX}, and neither is there"),
    "missing shard": (
        "sharded",
        lambda f: next(f.glob("model-00002*")).unlink(),
        ".safetensors: expected this safetensors file, and it is not there",
    ),
    "index says another shard": (
        "sharded",
        index(lambda names: names.update({"model.norm.weight": names["model.embed_tokens.weight"]})),
        f"model.norm.weight: expected this tensor, as {INDEX} says, and it is missing",
    ),
    "index leaves the folder": (
        "sharded",
        index(lambda names: names.update({"model.norm.weight": "../single/model.safetensors"})),
        f"{INDEX}: weight_map.model.norm.weight: expected a .safetensors file in the same folder, got '../",
    ),
    "index without a map": (
        "sharded",
        lambda f: (f / INDEX).write_text("{}"),
        f"{INDEX}: weight_map: expected an object of tensor names and files",
    ),
    "index not JSON": ("sharded", lambda f: (f / INDEX).write_text("{"), f"{INDEX}: expected JSON"),
    "tensor missing": (
        "single",
        rewritten(lambda t: t.pop(f"model.{Q}") is None),  # type: ignore[arg-type, return-value]
        f"{Q}: expected this tensor, and it is missing (1 are)",
    ),
    "tensor too many": (
        "single",
        rewritten(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})),
        "layers.0.self_attn.q_proj.bias: expected no such tensor in this architecture (1 such)",
    ),
    "tensor of another shape": (
        "single",
        rewritten(lambda t: t.update({f"model.{Q}": torch.zeros(64, 63)})),
        f"model.safetensors: model.{Q}: expected shape (64, 64), got (64, 63)",
    ),
    "tensor of another dtype": (
        "single",
        rewritten(lambda t: t.update({f"model.{Q}": torch.zeros(64, 64, dtype=torch.int8)})),
        f"model.safetensors: model.{Q}: expected dtype F32, F16, BF16, got I8",
    ),
    "more layers than tensors": ("single", config(num_hidden_layers=900), "expected tensors of 900 layers, got 20"),
    "one layer more": ("single", config(num_hidden_layers=3), "layers.2.input_layernorm.weight: expected this tensor"),
    "architecture": ("single", config(model_type="rwkv7"), "config.json: model_type: expected one of"),
    "remote code": (
        "single",
        config(model_type="mine", auto_map={"AutoModelForCausalLM": "evil.Evil"}),
        "config.json: model_type: expected one of",
    ),
    "activation": ("single", config(hidden_act="gelu"), "config.json: hidden_act: expected 'silu', got 'gelu'"),
    "quantised": ("single", config(quantization_config={"quant_method": "fp8"}), "config.json: quantization_config"),
    "positions": (
        "single",
        config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        "rope_parameters.rope_type: expected one of default, linear, llama3, yarn, got 'longrope'",
    ),
    "heads": ("single", config(num_key_value_heads=3), "config.json: num_key_value_heads: expected a divisor of 4"),
    "norm": ("single", config(rms_norm_eps=0), "config.json: rms_norm_eps: expected a number above 0, got 0"),
    "config not JSON": ("single", lambda f: (f / "config.json").write_text("{"), "config.json: expected JSON"),
    "no config": ("single", lambda f: (f / "config.json").unlink(), "config.json is not there"),
    "no tokenizer": ("single", lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: expected the model's"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_folder(name: str, originals: dict[str, Path], tmp_path: Path) -> None:
    kind, spoil, message = SPOILED[name]
    folder = tmp_path / "m"
    shutil.copytree(originals[kind], folder)
    spoil(folder)
    code, out, err = run("generate", "--model", str(folder), "--device", "cpu", "--prompt", "abc")
    unwrapped = "".join(err.split())  # the error's frame breaks long paths
    assert (code, out) == (2, "") and "".join(message.split()) in unwrapped and str(folder) in unwrapped, err
    assert not (folder / "ran").exists()


def test_unspoiled_they_work(originals: dict[str, Path]) -> None:
    words = ("--device", "cpu", "--prompt", "abc", "--max-new-tokens", "5", "--no-chat")
    texts = {run("generate", "--model", str(path), *words)[:2] for path in originals.values()}
    assert len(texts) == 1 and next(iter(texts))[0] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_length": 48}, "token_embd.weight: expected shape (300, 48), got (300, 64)"),
        ({"block_count": 3}, "layers.2.input_layernorm.weight: expected this tensor, and it is missing"),
        ({"block_count": 10_001}, "num_hidden_layers: expected at most 10000"),
        ({"feed_forward_length": 1 << 31}, "layers.0.mlp.gate_proj.weight: expected shape"),
        ({"attention.head_count_kv": 3}, "num_key_value_heads: expected a divisor of 4"),
        ({"rope.scaling.type": "magic", "rope.scaling.factor": 2.0}, "rope_parameters.rope_type: expected one of"),
        ({"rope.dimension_count": 32}, "rope_parameters.partial_rotary_factor: expected a share of the 16 columns"),
    ],
)
def test_a_gguf_file_whose_metadata_lies(changes: dict[str, Any], message: str, model: Any, tmp_path: Path) -> None:
    file = write_gguf(model, tmp_path / "m.gguf", **changes)
    with pytest.raises(ValueError) as caught:
        open_model(file).load(torch.float32, "cpu")
    text = str(caught.value).replace("blk.0.ffn_gate.weight", "layers.0.mlp.gate_proj.weight")
    assert text.startswith(str(file)) and message in text, text


def test_what_is_not_a_model_at_all(tmp_path: Path) -> None:
    other = tmp_path / "model.pt"
    other.write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    for path, message in ((other, "magic: expected a GGUF file"), (tmp_path / "x", f"{tmp_path}/x is not there")):
        code, _, err = run("generate", "--model", str(path), "--device", "cpu", "--prompt", "abc")
        assert code == 2 and message in err
    assert not (tmp_path / "ran").exists()


@settings(max_examples=120)
@given(share=st.floats(0, 1), value=st.integers(0, 255))
def test_any_byte_of_a_gguf_header_may_be_wrong(
    share: float, value: int, originals: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It loads (a byte of a name or a weight), or a ValueError names the file: never anything else."""
    whole = originals["gguf"].read_bytes()
    header = min(tensor.start for tensor in open_model(originals["gguf"]).header.tensors.values())  # type: ignore[union-attr]
    file = tmp_path_factory.getbasetemp() / "any.gguf"
    at = int(share * (header - 1))
    file.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
    try:
        files = open_model(file)
        plan = files.plan(torch.float32, 3, 5, ("f32",), 0, 1 << 30, 1 << 30, False)
        if plan.fits:
            files.load(torch.float32, "cpu")
    except ValueError as error:
        assert str(file) in str(error) or "tokenizer" in str(error)


WRONG = (None, "x", -1, 0, [], {}, 1e300, float("nan"), True, 3, [1], [None], {"a": 1})


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_any_value_may_be_wrong(name: str, family: str, tmp_path: Path) -> None:
    """Each key in turn, and those inside rope_parameters: what does not matter works, the rest names the file."""
    file = save(make(family), tmp_path) / name
    good = json.loads(file.read_text())
    further = ("quantization_config", "rope_scaling", "text_config", "layer_types", "chat_template", "eos_token_id")
    spoiled = [{**good, key: value} for key in {*good, *further} for value in WRONG]
    rope = good.get("rope_parameters", {})
    spoiled += [{**good, "rope_parameters": {**rope, key: value}} for key in rope for value in WRONG]
    refused = 0
    for content in spoiled:
        file.write_text(json.dumps(content))
        try:
            files = open_model(tmp_path)
            files.tokenizer.prompt_ids("hi")
            if files.plan(torch.float32, 3, 5, ("f32",), 0, 1 << 30, 1 << 30, False).fits:
                files.load(torch.float32, "cpu")
        except ValueError as error:
            assert str(tmp_path) in str(error)
            refused += 1
    assert name != "config.json" or refused > 100
