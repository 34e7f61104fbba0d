"""Text to token ids and back, from a folder's tokenizer.json or a GGUF file's vocabulary, by the tokenizers package.

Chat templates are rendered in Jinja's sandbox: they cannot reach Python's objects or the system.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ..cache.gguf_header import GgufHeader
from ..cache.models import Fields

HINT = "generating text needs the tokenizers and jinja2 packages: pip install 'splitkv[generate]'"
_MOST_JSON_BYTES = 256 << 20
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
"""GGUF's token types that matter here."""

_SPECIAL_IDS = ("bos_token", "eos_token", "eot_token", "eom_token")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _split_rule(letters: str, digits: str) -> str:
    """The regular expression that Llama 3 and Qwen cut text with before merging; they differ in two classes."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}"
        rf"| ?[^\s{letters.strip('[]')}\p{{N}}]+[\r\n]*|{_TAIL}"
    )


# DeepSeek's letters: those of two cases, but for the alphabets that its list leaves out.
_CASED = r"[[\p{Ll}\p{Lu}\p{Lt}]&&[^ՠ-ֈჇ-ჿᲀ-ᲈⴀ-ⴭꞐ-ꟿꬰ-ꭨ𐕰-𐖼𖹀-𖹿𝐀-𝟋𝼀-𝼪]]"

# tokenizer.ggml.pre -> how text is cut: None for GPT-2's own rule, "digits" for that after single digits, else rules
# that each cut what those before them left.
_CUTS: dict[str, str | tuple[str, ...] | None] = {
    "default": None, "gpt-2": None, "smollm": "digits",
    "llama-bpe": (_split_rule(r"\p{L}", r"\p{N}{1,3}"),), "qwen2": (_split_rule(r"\p{L}", r"\p{N}"),),
    "qwen35": (_split_rule(r"[\p{L}\p{M}]", r"\p{N}"),),
    "deepseek-llm": (
        r"[\r\n]", rf"\s?{_CASED}+", r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+", r"\s+$", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}",
    ),
}  # fmt: skip


class TextTokenizer:
    """A tokenizer with what generation needs beside it.

    source: the file, for errors. template: the chat template, or None. specials: names such as bos_token and the
    texts they stand for. end_ids: tokens that end a text.
    """

    def __init__(
        self, source: str, tokenizer: Any, template: str | None, specials: dict[str, str], end_ids: set[int]
    ) -> None:
        self.source, self.tokenizer, self.template = source, tokenizer, template
        self.specials, self.end_ids = specials, end_ids

    @staticmethod
    def from_folder(folder: Path) -> TextTokenizer:
        """From tokenizer.json, with tokenizer_config.json, chat_template.jinja and generation_config.json if there."""
        tokenizers = _tokenizers(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{file}: expected the model's tokenizer, and it is not there")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"{file}: expected a tokenizer that the tokenizers package reads: {error}") from None
        config = _json(folder / "tokenizer_config.json")
        specials = {name: text for name in ("bos_token", "eos_token") if (text := _token_text(config.get(name)))}
        template = config.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = {str(t.get("name")): t.get("template") for t in template if isinstance(t, Mapping)}
            template = named.get("default")
        if (separate := folder / "chat_template.jinja").is_file():
            template = _text(separate)
        ends: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            ids = _json(folder / name).get("eos_token_id")
            ends |= {i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)}
        if (end := tokenizer.token_to_id(specials.get("eos_token", ""))) is not None:
            ends.add(end)
        return TextTokenizer(str(file), tokenizer, template if isinstance(template, str) else None, specials, ends)

    @staticmethod
    def from_gguf(header: GgufHeader, file: Path) -> TextTokenizer:
        """From the vocabulary in a GGUF file: byte-level BPE, or SentencePiece's BPE (tokenizer.ggml.model llama)."""
        _tokenizers(file)
        own = {k.removeprefix("tokenizer."): v for k, v in header.metadata.items() if k.startswith("tokenizer.")}
        fields = Fields(own, str(file), "tokenizer.")
        tokens = _texts(fields, "ggml.tokens")
        kinds = {"gpt2": _byte_level, "llama": _sentence_pieces}
        build = kinds.get(fields.text("ggml.model"))
        if build is None:
            raise fields.error("ggml.model", " or ".join(kinds))
        tokenizer = build(fields, tokens)
        _add_specials(tokenizer, fields, tokens)
        named = [name for name in _SPECIAL_IDS if fields.get(f"ggml.{name}_id") is not None]
        ids = {name: fields.integer(f"ggml.{name}_id", least=0) for name in named}
        for name, number in ids.items():
            if number >= len(tokens):
                raise fields.error(f"ggml.{name}_id", f"one of the {len(tokens)} tokens")
        bos = ids.pop("bos_token", None)
        specials = {"eos_token": tokens[ids["eos_token"]]} if "eos_token" in ids else {}
        if bos is not None:
            specials["bos_token"] = tokens[bos]
            if fields.get("ggml.add_bos_token", fields.text("ggml.model") == "llama"):
                _put_first(tokenizer, tokens[bos], bos)
        template = fields.get("chat_template")
        return TextTokenizer(
            str(file), tokenizer, template if isinstance(template, str) else None, specials, set(ids.values())
        )

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids; with `special`, those that the tokenizer puts around every text."""
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def prompt_ids(self, prompt: str, chat: bool = True) -> list[int]:
        """Ids of a prompt, as a user's message where there is a chat template and `chat` is on."""
        if not chat or self.template is None:
            return self.encode(prompt)
        return self.encode(self.render([{"role": "user", "content": prompt}]), special=False)

    def render(self, messages: list[dict[str, str]]) -> str:
        """The chat template's text for these messages, ready for an answer. ValueError if it cannot be rendered."""
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        sandbox.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
        sandbox.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            template = sandbox.from_string(self.template or "")
            return template.render(messages=messages, add_generation_prompt=True, **self.specials)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise ValueError(
                f"{self.source}: chat_template: expected one that renders a user's message: {error}"
            ) from None

    def stream(self) -> TextStream:
        """An empty TextStream of this tokenizer."""
        return TextStream(self)


class TextStream:
    """Ids in, text out as soon as it is whole: a character of several tokens waits for its last."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        from tokenizers.decoders import DecodeStream

        self.ids: list[int] = []
        self.text = ""
        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=True)

    def put(self, token: int) -> str:
        """The text that this token completes, often its own."""
        self.ids.append(token)
        text = self._stream.step(self._tokenizer.tokenizer, token) or ""
        self.text += text
        return text

    def finish(self) -> str:
        """What is left: text that waited for a token that never came."""
        whole = self._tokenizer.decode(self.ids)
        rest = whole[len(self.text) :] if whole.startswith(self.text) else ""
        self.text += rest
        return rest


def _tokenizers(path: Path) -> Any:
    try:
        import jinja2  # noqa: F401
        import tokenizers
    except ModuleNotFoundError:
        raise ValueError(f"{path}: {HINT}") from None
    return tokenizers


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > _MOST_JSON_BYTES:
            raise ValueError(f"{file}: expected at most {_MOST_JSON_BYTES} bytes, got {file.stat().st_size}")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: expected UTF-8 text: {error}") from None


def _json(file: Path) -> Mapping[str, Any]:
    """The object in a JSON file, or nothing where there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(_text(file))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: expected JSON: {error}") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def _token_text(value: Any) -> str | None:
    """A token in tokenizer_config.json: its text, or an object that holds it."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


# ---- GGUF vocabularies -------------------------------------------------------------------------------------


def _texts(fields: Fields, name: str) -> list[str]:
    value = fields.get(name)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ValueError(
            f"{fields.source}: {fields.prefix}{name}: expected a list of texts, got {type(value).__name__}"
        )
    return value


def _numbers(fields: Fields, name: str, length: int, default: float) -> list[float]:
    value = fields.get(name, [default] * length)
    if not isinstance(value, list) or len(value) != length or isinstance(value[0], str):
        raise ValueError(f"{fields.source}: {fields.prefix}{name}: expected {length} numbers")
    return value


def _byte_level(fields: Fields, tokens: list[str]) -> Any:
    """GPT-2's kind: text cut by a rule that `pre` names, then bytes merged in the listed order."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = fields.get("ggml.pre", "default")
    if pre not in _CUTS:
        raise fields.error("ggml.pre", f"one of {', '.join(_CUTS)}")
    merges = [pair.partition(" ")[::2] for pair in _texts(fields, "ggml.merges")]
    ids = {token: i for i, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{fields.source}: tokenizer.ggml.merges: expected pairs of tokens: {error}") from None
    rule = _CUTS[pre]
    if rule is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif rule == "digits":
        cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    else:
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in rule]
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_only])
        if pre.startswith("qwen"):
            tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(fields: Fields, tokens: list[str]) -> Any:
    """SentencePiece's kind: no merges are listed, so every pair that makes a token is one, best score first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _numbers(fields, "ggml.scores", len(tokens), 0.0)
    ids = {token: i for i, token in enumerate(tokens)}
    pairs = sorted(_pairs(tokens, ids, scores))
    unknown = fields.integer("ggml.unknown_token_id", 0, least=0)
    if unknown >= len(tokens):
        raise fields.error("ggml.unknown_token_id", f"one of the {len(tokens)} tokens")
    tokenizer = Tokenizer(
        models.BPE(ids, [pair for _, pair in pairs], unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    space = [normalizers.Prepend("▁")] if fields.get("ggml.add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*space, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _pairs(
    tokens: list[str], ids: Mapping[str, int], scores: list[float]
) -> Iterator[tuple[tuple[float, int, int], tuple[str, str]]]:
    for i, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                yield (-scores[i], ids[left], ids[right]), (left, right)


def _add_specials(tokenizer: Any, fields: Fields, tokens: list[str]) -> None:
    """Tokens that text is cut around before anything else; control tokens are left out of decoded text."""
    from tokenizers import AddedToken

    types = _numbers(fields, "ggml.token_type", len(tokens), 1)
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        special = kind == _CONTROL
        add([AddedToken(t, normalized=False, special=special) for t, k in zip(tokens, types, strict=True) if k == kind])


def _put_first(tokenizer: Any, token: str, number: int) -> None:
    """Every text begins with this token."""
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, number)])
