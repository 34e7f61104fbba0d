"""Other programs on the same weights, for `splitkv bench e2e --with`: each reads the decoder written as a GGUF file.

One sequence each. What a peer cannot run is listed with its reason, like everything else that was not measured.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cache.gguf_header import read_gguf_header
from ..models.decoder import Decoder
from ..models.gguf_export import write_gguf
from ..models.loop import DecodeLoop
from ..models.state import DecodeState
from . import e2e_llamacpp, e2e_transformers
from .e2e_llamacpp import LlamaCppOptions, Tokens, time_llamacpp
from .e2e_source import Source
from .e2e_transformers import time_transformers
from .failures import short_reason
from .parity import difference_of
from .progress import Progress

PEERS = {
    e2e_llamacpp.NAME: "llama.cpp through llama-cpp-python, on the decoder's weights written as GGUF",
    e2e_transformers.NAME: "transformers' model of the same GGUF file, eager attention, DynamicCache",
}
STEPS = {"cuda": 32, "cpu": 12}
"""Timed at each depth."""
PROMPT, FOLLOW = 48, 4
"""Tokens whose logits are compared: a prompt, and steps after it."""
LOGITS_LIMIT = {torch.float32: 1e-3}
"""Relative difference of llama.cpp's logits from ours that still is rounding; 16-bit models differ by more."""
LOGITS_LIMIT_16_BIT = 0.1
Q8_0_SHARE = 34 / 32
"""Bytes of q8_0, blocks of 32 bytes with a scale, over fp8's."""


def choose_peers(text: str | None) -> tuple[str, ...]:
    """Peers named in "a,b", in PEERS' order; ValueError for an unknown name."""
    names = [word.strip() for word in text.split(",")] if text is not None else []
    if not all(name in PEERS for name in names):
        raise ValueError(f"with: expected some of {', '.join(PEERS)}, joined by commas, got {text!r}")
    return tuple(name for name in PEERS if name in names)


@dataclass(frozen=True)
class PeerRun:
    """What the peers of one geometry run, beside our decoder with the same weights.

    name: of the geometry. prefill: longest prompt that transformers really runs; llama.cpp runs all. bytes_per_s: the
    read bandwidth that floors are made of. deadline: nothing begins when time.monotonic() is past it.
    """

    name: str
    source: Source
    decoder: Decoder
    depths: tuple[int, ...]
    kv_dtypes: tuple[str, ...]
    prefill: int
    bytes_per_s: float
    seed: int = 0
    deadline: float | None = None


def run_peers(
    peers: Sequence[str], run: PeerRun, progress: Progress = lambda done, total, text: None
) -> dict[str, Any]:
    """{"rows", "not_measured", "about"}: rows as e2e.json has them, and by peer its version, method and checks."""
    result: dict[str, Any] = {"rows": [], "not_measured": [], "about": {}}
    with tempfile.TemporaryDirectory(prefix="splitkv-") as folder:
        file, start = Path(folder) / "model.gguf", time.monotonic()
        try:
            _require_room(run.decoder, file)
            progress(0, 1, f"{run.name}: writing GGUF")
            write_gguf(run.decoder, file)
        except (ValueError, OSError) as error:
            for peer in peers:
                result["not_measured"].append({"geometry": run.name, "contender": peer, "reason": short_reason(error)})
            return result
        result["about"]["gguf"] = {"bytes": file.stat().st_size, "write_s": time.monotonic() - start}
        if e2e_llamacpp.NAME in peers:
            _llamacpp(run, file, result, progress)
        if e2e_transformers.NAME in peers:
            progress(0, 1, f"{run.name}: transformers")
            decoder, device = run.decoder, run.decoder.device.type
            found = time_transformers(
                file, decoder.dtype, device, run.depths, STEPS[device], run.prefill, run.seed, run.deadline
            )
            weights = run.source.activations, decoder.bytes_per_step()
            _take(run, e2e_transformers.NAME, found, result, weights)
    return result


def _require_room(decoder: Decoder, file: Path) -> None:
    """OSError where the file does not fit, before 18 GB of it are written."""
    needed = sum(part.dest.numel() * part.dest.element_size() for part in decoder.parts())
    free = shutil.disk_usage(file.parent).free
    if free < needed:
        raise OSError(
            f"the GGUF file takes {needed / 1e9:.1f} GB, and {file.parent} has {free / 1e9:.1f} GB (see TMPDIR)"
        )


def _llamacpp(run: PeerRun, file: Path, result: dict[str, Any], progress: Progress) -> None:
    """Logits first, then times; of a model that came from a GGUF file also the times of that file as it is."""
    peer = e2e_llamacpp.NAME
    layers = -1 if run.decoder.device.type == "cuda" else 0
    kv_dtypes = tuple(dict.fromkeys("q8_0" if kv.startswith("fp8") else kv for kv in run.kv_dtypes))
    options = LlamaCppOptions(
        run.depths, kv_dtypes, STEPS[run.decoder.device.type], gpu_layers=layers, seed=run.seed, deadline=run.deadline
    )
    generator = torch.Generator().manual_seed(run.seed)
    ids = torch.randint(run.decoder.config.vocab_size, (PROMPT + FOLLOW,), generator=generator)
    progress(0, 1, f"{run.name}: {peer}")
    found = time_llamacpp(file, options, progress, Tokens(tuple(ids[:PROMPT].tolist()), tuple(ids[PROMPT:].tolist())))
    check = _compare(run.decoder, ids, found.pop("logits"))
    _take(run, peer, found, result, (run.source.activations, run.decoder.bytes_per_step()), check["passed"])
    result["about"][peer] |= {"logits": check}
    for kv_dtype in sorted(kv for kv in run.kv_dtypes if kv.startswith("fp8")):
        reason = "llama.cpp has no fp8 cache; its q8_0, 8.5 bits, ran instead"
        result["not_measured"].append(
            {"geometry": run.name, "contender": peer, "kv_dtype": kv_dtype, "batch": 1, "reason": reason}
        )
    if run.source.gguf is not None and run.source.header is not None:
        stored = sum(tensor.nbytes for tensor in run.source.header.tensors.values())
        found = time_llamacpp(run.source.gguf, options, progress)
        _take(run, peer, found, result, (_stored_weights(run.source.gguf), stored))


def _compare(decoder: Decoder, ids: Tensor, theirs: Tensor | str) -> dict[str, Any]:
    """llama.cpp's logits against ours, both over f32 keys and values: after a prompt, and after each of some steps."""
    if isinstance(theirs, str):
        return {"passed": False, "reason": theirs}
    state = DecodeState(decoder.config, 1, len(ids), "f32", decoder.dtype, decoder.device)
    rows = [DecodeLoop(decoder, state, graph=False).prefill(ids[:PROMPT].tolist())]
    on_device = ids.to(decoder.device)
    rows += [decoder.decode(on_device[i : i + 1], state)[0] for i in range(PROMPT, len(ids))]
    ours = torch.stack(rows).cpu()
    if theirs.shape != ours.shape:
        return {"passed": False, "reason": f"expected logits {tuple(ours.shape)}, got {tuple(theirs.shape)}"}
    difference = difference_of(theirs, ours)
    limit = LOGITS_LIMIT.get(decoder.dtype, LOGITS_LIMIT_16_BIT)
    same = float((theirs.argmax(-1) == ours.argmax(-1)).float().mean())
    passed = difference["relative"] <= limit
    return {"tokens": len(ids), **difference, "same_token_share": same, "limit": limit, "passed": passed}


def _take(
    run: PeerRun,
    peer: str,
    found: dict[str, Any],
    result: dict[str, Any],
    weights: tuple[str, int],
    passed: bool = True,
) -> None:
    """Put what a peer gave into the result, with the floor of the bytes that it reads. weights: type, and bytes."""
    where = {"geometry": run.name, "batch": 1, "weights": weights[0]}
    geometry = run.source.geometry
    for row in found.pop("rows"):
        kv_dtype = row["kv_dtype"]
        stored, share = ("fp8_e4m3", Q8_0_SHARE) if kv_dtype == "q8_0" else (kv_dtype, 1.0)
        per_token = share * geometry.kv_bytes_per_token(stored)
        bytes_read = weights[1] + per_token * row["depth"] + 2 * geometry.state_bytes
        floor_ms = bytes_read / run.bytes_per_s * 1e3
        speeds = {"tokens_s": 1e3 / row["ms_per_token"], "percent_of_floor": 100 * floor_ms / row["ms_per_token"]}
        result["rows"].append({**where, **row, "floor_ms": floor_ms, **speeds, "passed": passed, "flips": []})
    for entry in found.pop("not_measured"):
        result["not_measured"].append({**where, **entry})
    result["about"].setdefault(peer, {}).update(found)


def _stored_weights(file: Path) -> str:
    """The GGML type of most of a file's bytes, as in "q4_1"."""
    import gguf

    sizes: dict[int, int] = {}
    for tensor in read_gguf_header(file).tensors.values():
        sizes[tensor.type_id] = sizes.get(tensor.type_id, 0) + tensor.nbytes
    return gguf.GGMLQuantizationType(max(sizes, key=lambda kind: sizes[kind])).name.lower()
