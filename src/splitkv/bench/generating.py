"""`splitkv generate`: a model from files, the capacity check, a prompt in, text out, and how fast that was.

Text goes to standard output as it is made; progress and figures go to standard error.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from ..problem import MAX_CONTEXT, dtype_name
from .commands import Json, app, fail, usage
from .record import command_line, provenance, to_json

SCHEMA = "splitkv.generate.v1"
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and the signal's number, as shells have it."""
_ENDS = {"end": "the model's end token", "length": "--max-new-tokens", "interrupt": "Ctrl-C"}
_FLOOR_SWEEP_BYTES = 256 << 20
_DTYPES = ("f32", "f16", "bf16")


@dataclass
class Outcome:
    """What came of one run. Times in seconds; ended: "end" (the model's end token), "length" or "interrupt"."""

    prompt_tokens: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    ended: str = "interrupt"
    prefill_s: float = 0.0
    prefilled: int = 0
    decode_s: float = 0.0
    steps: int = 0
    bytes_per_token: int = 0
    read_bytes_s: float | None = None

    def figures(self) -> dict[str, Any]:
        """Rates; null where nothing was timed. The floor is the bytes of a step over the read bandwidth of this run."""
        step_s = self.decode_s / self.steps if self.steps else None
        floor_s = self.bytes_per_token / self.read_bytes_s if self.read_bytes_s and self.steps else None
        return {
            "prefill_tokens_s": self.prefilled / self.prefill_s if self.prefill_s else None,
            "decode_tokens_s": 1 / step_s if step_s else None,
            "ms_per_token": step_s * 1e3 if step_s else None,
            "floor_ms": floor_s * 1e3 if floor_s else None,
            "percent_of_floor": 100 * floor_s / step_s if floor_s and step_s else None,
        }


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The one of the two that is given; ValueError otherwise."""
    if (prompt is None) == (prompt_file is None):
        raise ValueError("prompt: expected one of --prompt and --prompt-file")
    if prompt_file is None:
        return prompt or ""
    try:
        return prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt_file: expected a text file in UTF-8: {error}") from None


def pick_device(device: str | None) -> str:
    """cuda where there is one, unless a device is named; ValueError where it is not there."""
    import torch

    has_gpu = torch.cuda.is_available()
    name = device or ("cuda" if has_gpu else "cpu")
    if name not in ("cuda", "cpu") or (name == "cuda" and not has_gpu):
        raise ValueError(
            f"device: expected cpu{', cuda' if has_gpu else ' (there is no CUDA GPU here)'}, got {device!r}"
        )
    return name


@app.command(epilog='Example: splitkv generate --model Qwen3.5-9B --prompt "Why is the sky blue?"')
def generate(
    model: Annotated[Path, typer.Option(help="Folder with config.json and safetensors, or a GGUF file.")],
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file with the prompt.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens to make room for, new ones included. Default: as many as are needed.")
    ] = None,
    kv_dtype: Annotated[
        str,
        typer.Option(help="auto, f32, f16, bf16 or fp8. auto: that of the activations; where f32 does not fit, f16."),
    ] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, max=MAX_CONTEXT, help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this probability together.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**30, help="Seed of the draws.")] = 0,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda where there is one.")] = None,
    dtype: Annotated[
        str, typer.Option(help="Weights and activations: auto (f32 on a CPU, else bf16), f32, f16, bf16.")
    ] = "auto",
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Put the prompt into the model's chat template, if it has one.")
    ] = True,
    json: Json = False,
) -> None:
    """Generate text from a model's files.

    Whether weights, cache and workspace fit is decided before any weight is loaded; a refusal is exit code 1.
    The prompt is prefilled in chunks, then a step per token, on a GPU a captured graph. Ctrl-C ends with what
    there is, exit code 130.
    """
    with usage():
        from ..models.loading import open_model
        from ..models.sampling import Sampler
        from ..models.state import torch_dtype

        text = read_prompt(prompt, prompt_file)
        place = pick_device(device)
        activations = "f32" if place == "cpu" else "bf16"
        activations = activations if dtype == "auto" else dtype_name(dtype, "dtype")
        if activations not in _DTYPES:
            raise ValueError(f"dtype: expected auto, {', '.join(_DTYPES)}, got {dtype!r}")
        kv_dtypes = {"f32": ("f32", "f16")}.get(activations, (activations,))
        if kv_dtype != "auto":
            kv_dtypes = (dtype_name(kv_dtype, "kv_dtype"),)
        sampler = Sampler(temperature, top_p, seed, place)
        files = open_model(model)
        ids = files.tokenizer.prompt_ids(text, chat)
        room = context_of(len(ids), max_new_tokens, context)
        if max(ids) >= files.config.vocab_size:
            raise ValueError(f"{files.tokenizer.source}: expected ids below {files.config.vocab_size}, got {max(ids)}")

        plan = check_memory(files, place, torch_dtype(activations), room - max_new_tokens, max_new_tokens, kv_dtypes)
    if not plan.fits:
        raise fail(plan.arithmetic)
    outcome = Outcome(len(ids))
    try:
        with usage():
            run(
                files, outcome, ids, max_new_tokens, room, plan.kv_dtype, torch_dtype(activations), sampler, place, json
            )
    except KeyboardInterrupt:
        outcome.ended = "interrupt"
    except RuntimeError as error:  # torch's own, such as out of memory
        raise fail(str(error)) from error
    options: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "prompt_file": prompt_file,
        "context": context,
        "kv_dtype": kv_dtype,
    }
    options |= {"max_new_tokens": max_new_tokens}
    options |= {"temperature": temperature, "top_p": top_p, "seed": seed}
    options |= {"device": place, "dtype": activations, "no_chat": not chat, "json": json}
    report(outcome, plan.kv_dtype, plan.as_dict(), options, json)
    if outcome.ended == "interrupt":
        raise typer.Exit(INTERRUPTED)


def context_of(prompt: int, generated: int, context: int | None) -> int:
    """Tokens that the cache must hold; ValueError where --context or the longest context is too small."""
    if prompt < 1:
        raise ValueError("prompt: expected at least one token, got none")
    needed = prompt + generated
    if context is not None and not needed <= context <= MAX_CONTEXT:
        raise ValueError(
            f"context: expected {needed} (prompt {prompt}, new {generated}) to {MAX_CONTEXT}, got {context}"
        )
    return needed if context is None else context


def check_memory(files: Any, device: str, dtype: Any, prompt: int, generated: int, kv_dtypes: tuple[str, ...]) -> Any:
    """The plan for this model on this device, with what is free there now."""
    from . import machine
    from .fitting import Memory, attention_workspace, find_memory

    memory = find_memory(None, None, False) if device == "cuda" else Memory(*machine.host_memory_bytes(), False, "")
    return files.plan(
        dtype, prompt, generated, kv_dtypes, attention_workspace(files.geometry, 1),
        memory.free_bytes, memory.total_bytes, memory.unified,
    )  # fmt: skip


def run(
    files: Any, outcome: Outcome, ids: list[int], most: int, room: int, kv_dtype: str, dtype: Any, sampler: Any,
    device: str, quiet: bool,
) -> None:  # fmt: skip
    """Load, prefill and generate, and note in `outcome` what has been done so far."""
    from ..models.loop import DecodeLoop
    from ..models.state import DecodeState
    from .render import progress_bar
    from .roofline import read_bandwidth

    with progress_bar("weights") as progress:
        decoder = files.load(dtype, device, progress)
    state = DecodeState(files.config, 1, room, kv_dtype, dtype, device)
    loop = DecodeLoop(decoder, state, sampler)

    def count(done: int, total: int, label: str) -> None:
        outcome.prefilled, outcome.prefill_s = done, time.perf_counter() - start
        progress(done, total, label)

    start = time.perf_counter()
    with progress_bar("prompt") as progress:
        loop.prefill(ids, progress=count)

    stream = files.tokenizer.stream()
    start = time.perf_counter()
    try:
        for (token,) in loop.generate(most):
            outcome.decode_s = time.perf_counter() - start
            outcome.tokens.append(token)
            outcome.steps = len(outcome.tokens) - 1  # prefill made the first
            if token in files.tokenizer.end_ids:
                outcome.ended = "end"
                break
            show(stream.put(token), quiet)
        else:
            outcome.ended = "length"
    finally:
        show(stream.finish(), quiet)
        outcome.text = stream.text
        if not quiet and not outcome.text.endswith("\n"):
            show("\n", quiet)
    middle = len(ids) + (len(outcome.tokens) + 1) // 2
    outcome.bytes_per_token = decoder.bytes_per_step() + state.bytes_per_step(middle)
    outcome.read_bytes_s = read_bandwidth(device, _FLOOR_SWEEP_BYTES).bytes_per_s


def show(text: str, quiet: bool) -> None:
    """Text to standard output at once."""
    if text and not quiet:
        sys.stdout.write(text)
        sys.stdout.flush()


def report(outcome: Outcome, kv_dtype: str, plan: dict[str, Any], options: dict[str, Any], json: bool) -> None:
    """Figures to standard error, or all of it as JSON to standard output."""
    figures = outcome.figures()
    if json:
        record = {"schema": SCHEMA, **provenance(), "command": command_line("generate", options)}
        record |= {"device": options["device"], "dtype": options["dtype"], "kv_dtype": kv_dtype}
        sys.stdout.write(to_json({**record, **asdict(outcome), **figures, "plan": plan}))
        return
    lines = []
    if outcome.prefill_s:
        rate = figures["prefill_tokens_s"]
        lines.append(f"prompt: {outcome.prefilled} tokens in {outcome.prefill_s:.2f} s, {rate:.1f} tokens/s")
    if outcome.steps:
        rate, each = figures["decode_tokens_s"], figures["ms_per_token"]
        line = f"decode: {outcome.steps} steps in {outcome.decode_s:.2f} s, {rate:.1f} tokens/s, {each:.2f} ms each"
        if outcome.read_bytes_s is not None:
            share, speed = figures["percent_of_floor"], outcome.read_bytes_s / 1e9
            line += f"; {outcome.bytes_per_token / 1e6:,.1f} MB a token, {share:.0f}% of the floor at {speed:,.1f} GB/s"
        lines.append(line)
    lines.append(f"{kv_dtype} KV; ended by {_ENDS[outcome.ended]}")
    for line in lines:
        typer.echo(line, err=True)
