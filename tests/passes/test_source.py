"""Opening models: what is found by path, what ends a text, which tokenizer files are written, what is refused."""

import json

import pytest
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from enginewright.passes.source import open_source
from enginewright.recipes.errors import InputError
from enginewright.runtime.text import Tokenizer
from tests.passes.test_gguf import write as write_gguf

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 300,
    "eos_token_id": [7, 9],
}


def folder(path, config=CONFIG, generation=None, tokenizer=True):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer:
        byte_level(path)
    return path


def byte_level(path, adds_bos=True):
    """A byte-level tokenizer with <s> (256), </s> (257) and <|end|> (258, its end token), which adds <s>."""
    alphabet = {
        letter: index for index, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    }
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|end|>"])
    if adds_bos:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 256)]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|end|>")
    fast.chat_template = "{{ messages[0].content }}"
    fast.save_pretrained(path)


def test_a_folder(tmp_path):
    source = open_source(folder(tmp_path / "tiny", generation={"eos_token_id": [9, 257]}))
    assert source.name == "tiny"
    assert source.eos_token_ids == [7, 9, 257, 258]
    assert source.config.eos_token_id == source.eos_token_ids
    assert source.generation_config == {"eos_token_id": [9, 257]}


def test_the_tokenizer_files_are_enough(tmp_path):
    source = open_source(folder(tmp_path / "tiny"))
    out = tmp_path / "engine"
    out.mkdir()
    assert source.write_tokenizer(out) == ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    assert sorted(file.name for file in out.iterdir()) == sorted(
        ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    )
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config["eos_token_ids"] == [7, 9, 258] and config["bos_token"] == "<s>"
    # transformers 4 knows this class, and assumes token_type_ids beside these where nothing is said.
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["model_input_names"] == ["input_ids", "attention_mask"]
    again = AutoTokenizer.from_pretrained(out)
    assert again("a b").keys() == source.tokenizer("a b").keys()
    assert str(tmp_path) not in (out / "tokenizer_config.json").read_text()
    text = "Two  spaces, ñ and 日本語\n"
    alone = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    assert alone.encode(text).ids == AutoTokenizer.from_pretrained(tmp_path / "tiny")(text)["input_ids"]
    assert alone.encode(text).ids[0] == 256


def test_named_chat_templates_come_along(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder(tmp_path / "tiny"))
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "tools: {{ tools }}"}
    tokenizer.save_pretrained(tmp_path / "tiny")
    out = tmp_path / "engine"
    out.mkdir()
    names = open_source(tmp_path / "tiny").write_tokenizer(out)
    assert "additional_chat_templates/tool_use.jinja" in names
    conversation = [{"role": "user", "content": "hello"}]
    rendered = Tokenizer(out).render_chat(conversation, template="tool_use", tools=[])
    assert rendered == tokenizer.apply_chat_template(
        conversation, chat_template="tool_use", tools=[], tokenize=False
    )


def test_the_same_model_elsewhere_gives_the_same_bytes(tmp_path):
    sources = [open_source(folder(tmp_path / name)) for name in ("one", "two")]
    for source in sources:
        (tmp_path / f"{source.name}-out").mkdir()
        source.write_tokenizer(tmp_path / f"{source.name}-out")
    for file in (tmp_path / "one-out").iterdir():
        assert file.read_bytes() == (tmp_path / "two-out" / file.name).read_bytes()
    assert sources[0].fingerprint == sources[1].fingerprint
    other = open_source(folder(tmp_path / "three", {**CONFIG, "hidden_size": 32}))
    assert other.fingerprint != sources[0].fingerprint


def test_a_model_without_a_tokenizer(tmp_path):
    source = open_source(folder(tmp_path / "bare", tokenizer=False))
    assert source.tokenizer is None and source.write_tokenizer(tmp_path) == []
    assert source.eos_token_ids == [7, 9]


def test_end_ids_outside_the_vocabulary_are_dropped(tmp_path):
    source = open_source(folder(tmp_path / "odd", {**CONFIG, "eos_token_id": [7, -1, 300]}, tokenizer=False))
    assert source.eos_token_ids == [7]


def gguf_tokenizer(adds_bos):
    """Metadata of a byte-level tokenizer as llama.cpp writes it."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[:36]
    tokens = ["<s>", "</s>", *letters, "<pad>", "!!"]
    return [
        ("add_tokenizer_model", "gpt2"),
        ("add_tokenizer_pre", "smollm"),
        ("add_token_list", tokens),
        ("add_token_types", [3, 3] + [1] * 36 + [3, 1]),
        ("add_token_merges", ["! !"]),
        ("add_bos_token_id", 0),
        ("add_eos_token_id", 1),
        ("add_add_bos_token", adds_bos),
    ]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_gguf_file_says_whether_texts_begin_with_a_token(tmp_path, adds_bos):
    write_gguf(tmp_path / "tiny-q4.gguf", fields=gguf_tokenizer(adds_bos))
    source = open_source(tmp_path / "tiny-q4.gguf")
    assert source.name == "tiny-q4" and source.eos_token_ids == [1]
    out = tmp_path / "engine"
    out.mkdir()
    assert "tokenizer.json" in source.write_tokenizer(out)
    ids = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json")).encode("%&").ids
    assert (ids[0] == 0) == adds_bos and len(ids) == 2 + adds_bos


def test_a_folder_with_one_gguf_file(tmp_path):
    write_gguf(tmp_path / "a.gguf", fields=gguf_tokenizer(False))
    assert open_source(tmp_path).name == "a"
    write_gguf(tmp_path / "b.gguf", fields=gguf_tokenizer(False))
    with pytest.raises(InputError, match=r"(?s)several GGUF files.*a\.gguf, b\.gguf"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "name, said",
    [
        (
            "someone/model",
            r"(?s)no such folder or file: someone/model.*needs a network \(HF_HUB_OFFLINE is set\)",
        ),
        ("gpt2", "(?s)no such folder or file: gpt2.*needs a network"),
        ("./nowhere", "no such folder or file: ./nowhere"),
        ("nowhere/file.gguf", "no such folder or file: nowhere/file.gguf"),
    ],
)
def test_names_that_are_no_path(name, said, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=said):
        open_source(name)


def test_things_that_are_no_model(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="not a Hugging Face model folder"):
        open_source(tmp_path / "empty")
    (tmp_path / "model.safetensors").write_bytes(b"00000000")
    with pytest.raises(InputError, match=f"(?s)is not a model.*give the folder: {tmp_path}"):
        open_source(tmp_path / "model.safetensors")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(InputError, match=r"(?s)is an adapter.*org/base.*--adapter"):
        open_source(adapter)
    (adapter / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(InputError, match="is an adapter"):
        open_source(adapter)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
        {**CONFIG, "architectures": ["LlamaForSequenceClassification"]},
        {"model_type": "t5", "architectures": ["T5EncoderModel"]},
    ],
)
def test_other_kinds_of_models(tmp_path, config):
    with pytest.raises(InputError, match=f"(?s)not a causal language model.*{config['architectures'][0]}"):
        open_source(folder(tmp_path / "other", config, tokenizer=False))
