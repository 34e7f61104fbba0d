"""Tokenizers from folders and GGUF files, chat templates in their sandbox, and text that arrives in pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import save_tokenizer

from splitkv.cache.gguf_header import GgufHeader
from splitkv.models.tokenizer import TextTokenizer

pytest.importorskip("tokenizers")
FILE = Path("m.gguf")
BYTES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
SPM = [*BYTES, "▁", "h", "e", "l", "o", "lo", "he", "ll", "hell", "hello", "▁hello"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 4]}')
    return tmp_path


def spm(**changes: Any) -> GgufHeader:
    """A GGUF vocabulary of SentencePiece's kind; later pieces have better scores."""
    types = [2, 3, 3, *[6] * 256, *[1] * (len(SPM) - 259)]
    values = {
        "model": "llama", "tokens": SPM, "scores": [float(i) for i in range(len(SPM))], "token_type": types,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    return GgufHeader({f"tokenizer.ggml.{name}": value for name, value in (values | changes).items()}, {})


def test_a_folder(folder: Path) -> None:
    tokenizer = TextTokenizer.from_folder(folder)
    assert tokenizer.end_ids == {0, 4, 5} and tokenizer.specials == {"eos_token": "<end>", "bos_token": "<begin>"}
    assert tokenizer.decode(tokenizer.encode("naïve 🎉<end>")) == "naïve 🎉"
    chat = tokenizer.prompt_ids("hi")
    assert chat[0] == 2 and chat[-1] == 3 and tokenizer.decode(chat) == "hi"
    assert tokenizer.prompt_ids("hi", chat=False) == chat[1:-1]


def test_a_template_in_its_own_file_or_among_several(folder: Path) -> None:
    config = {"chat_template": [{"name": "tools", "template": "no"}, {"name": "default", "template": "A"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert TextTokenizer.from_folder(folder).template == "A"
    (folder / "chat_template.jinja").write_text("B{{ messages[0].content }}")
    assert TextTokenizer.from_folder(folder).render([{"content": "c"}]) == "Bc"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert TextTokenizer.from_folder(folder).template is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('only assistants') }}",
        "{% for x in messages %}",
        "{{ 1 / 0 }}",
        "{{ nothing.there }}",
        "{{ range(10 ** 9) | list }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_that_reaches_out_or_fails_is_refused(template: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=f"{folder}/tokenizer.json: chat_template: expected one that renders"):
        TextTokenizer.from_folder(folder).prompt_ids("hi")


def test_a_character_of_several_tokens_waits_for_its_last(folder: Path) -> None:
    tokenizer = TextTokenizer.from_folder(folder)
    stream = tokenizer.stream()
    pieces = [stream.put(i) for i in tokenizer.encode("a🎉b")]
    assert pieces == ["a", "", "", "", "🎉", "b"] and stream.finish() == "" and stream.text == "a🎉b"
    stream = tokenizer.stream()
    for i in tokenizer.encode("a🎉")[:-1]:
        stream.put(i)
    assert stream.finish() == "�" and stream.text == "a�"


def test_sentence_pieces_merge_by_score() -> None:
    tokenizer = TextTokenizer.from_gguf(spm(), FILE)
    assert [SPM[i] for i in tokenizer.encode("hello")] == ["<s>", "▁hello"]
    assert [SPM[i] for i in tokenizer.encode("hellx", special=False)] == ["▁", "hell", "<0x78>"]
    assert tokenizer.decode(tokenizer.encode("hello hellé")) == "hello hellé" and tokenizer.end_ids == {2}
    bare = TextTokenizer.from_gguf(spm(add_bos_token=False, add_space_prefix=False), FILE)
    assert [SPM[i] for i in bare.encode("hello")] == ["hello"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"tokenizer.ggml.model: expected gpt2 or llama, got 'bert'"),
        ({"tokens": None}, "tokenizer.ggml.tokens: expected a list of texts"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens: expected a list of texts"),
        ({"scores": [1.0]}, f"tokenizer.ggml.scores: expected {len(SPM)} numbers"),
        ({"token_type": [1]}, f"tokenizer.ggml.token_type: expected {len(SPM)} numbers"),
        ({"eos_token_id": 9999}, f"tokenizer.ggml.eos_token_id: expected one of the {len(SPM)} tokens, got 9999"),
        ({"unknown_token_id": 9999}, "tokenizer.ggml.unknown_token_id: expected one of"),
        ({"model": "gpt2"}, "tokenizer.ggml.merges: expected a list of texts"),
        ({"model": "gpt2", "merges": ["h x"]}, "tokenizer.ggml.merges: expected pairs of tokens"),
        ({"model": "gpt2", "merges": ["hx"]}, "tokenizer.ggml.merges: expected pairs of tokens"),
        ({"model": "gpt2", "pre": "klingon", "merges": ["h e"]}, "tokenizer.ggml.pre: expected one of default"),
    ],
)
def test_a_bad_vocabulary_is_told_by_its_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"m.gguf: {message}"):
        TextTokenizer.from_gguf(spm(**changes), FILE)


@pytest.mark.parametrize(
    ("pre", "text", "cuts"),
    [
        ("gpt-2", "it's 123\n\n x", ["it", "'s", "Ġ123", "ĊĊ", "Ġx"]),
        ("smollm", "a 123", ["a", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "IT'S 12345", ["IT", "'S", "Ġ", "123", "45"]),
        ("qwen2", "a 123!?\n", ["a", "Ġ", "1", "2", "3", "!?Ċ"]),
        ("qwen35", "कि 1", ["à¤ķà¤¿", "Ġ", "1"]),  # a letter and its vowel sign stay together
        ("qwen2", "कि", ["à¤ķ", "à¤¿"]),
        ("deepseek-llm", "it's 12!\nÉ  ", ["it", "'", "s", "Ġ", "1", "2", "!", "Ċ", "Ãī", "ĠĠ"]),
        ("deepseek-llm", "xა 中", ["x", "áĥĲ", "Ġ", "ä¸Ń"]),  # letters without case are left whole
    ],
)
def test_text_is_cut_as_the_vocabularys_rule_says(pre: str, text: str, cuts: list[str]) -> None:
    from tokenizers import pre_tokenizers

    words = ["<|end|>", *pre_tokenizers.ByteLevel.alphabet(), "he"]
    types = [3] + [1] * (len(words) - 1)
    header = spm(model="gpt2", tokens=words, pre=pre, merges=["h e"], token_type=types, eos_token_id=0, bos_token_id=0)
    tokenizer = TextTokenizer.from_gguf(header, FILE)
    made = tokenizer.tokenizer
    assert [word for word, _ in made.pre_tokenizer.pre_tokenize_str(text)] == cuts
    assert made.decode(made.encode(f"the {text}<|end|>").ids) == f"the {text}"


@pytest.mark.parametrize(("pre", "words"), [("llama-bpe", ["then"]), ("qwen2", ["the", "n"])])
def test_llama_takes_a_whole_token_as_it_is(pre: str, words: list[str]) -> None:
    """Its vocabulary has tokens that no order of merges makes."""
    tokens = ["<|end|>", "t", "h", "e", "n", "he", "the", "en", "then"]
    merges = ["h e", "t he", "e n"]
    header = spm(model="gpt2", tokens=tokens, pre=pre, merges=merges, token_type=[3] + [1] * 8, eos_token_id=0,
                 bos_token_id=0)  # fmt: skip
    assert TextTokenizer.from_gguf(header, FILE).tokenizer.encode("then").tokens == words


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json: expected the model's tokenizer, and it is not there"),
        ("tokenizer.json", "{}", "tokenizer.json: expected a tokenizer that the tokenizers package reads"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: expected JSON"),
        ("generation_config.json", "[1]", "generation_config.json: expected a JSON object, got list"),
    ],
)
def test_bad_files(name: str, content: str | None, message: str, folder: Path) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ValueError, match=f"{folder}/{message}"):
        TextTokenizer.from_folder(folder)
