"""Exports of runs: AutoTokenizer reads a text, and generate() writes, as the run does."""

import json

import pytest
from foreign_tokenizers import template, trained

from jaxtrain.run.generation.decoding import Sampling
from jaxtrain.run.huggingface.exporting import byte_tokenizer
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.settings import load_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

GREEDY = Sampling(temperature=0.0)
TEXTS = ["the cat sat", "Grüße\n 你好", "def f(x):\n    return x\n"]
SIZES = ["Llama.num_layers=1", "Llama.embed_dim=32", "Llama.num_heads=4", "Llama.num_kv_heads=4",
         "Llama.mlp_dim=32", "Llama.context_length=64"]  # fmt: skip


def exported(tmp_path, *bindings: str):
    """A run without a step, and what transformers makes of its export."""
    readme = tmp_path / "text.txt"
    readme.write_text("the cat sat on the mat\n" * 99)
    config = load_config("gpt_quickstart", [
        "Train.model=@Llama()", "Llama.vocab_size=256", *SIZES, "Mesh.tensor=1", "Mesh.fsdp=8",
        f"TextData.source='{readme}'",
        "TextData.sequence_length=16", "Precision.compute='float32'", *bindings,
    ])  # fmt: skip
    run, out = Trainer(config), tmp_path / "exported"
    assert run.export_huggingface(str(out)).passed
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    return run, out, model, transformers.AutoTokenizer.from_pretrained(out)


def assert_writes_alike(run, out, model, tokenizer) -> None:
    """Greedily, and up to the same ends: each a token that the run writes without one."""
    never = run.answers([tokenizer(TEXTS[0]).input_ids], max_new_tokens=24, sampling=GREEDY)
    assert len(never[0].tokens) == 24
    given = tokenizer(TEXTS[0], return_tensors="pt")
    count = given.input_ids.shape[1]
    ids = model.generate(**given, max_new_tokens=24, do_sample=False)[0, count:].tolist()
    end = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    assert end == tokenizer.eos_token_id
    expected = ids[:-1] if ids[-1] == end else ids
    (answer,) = run.answers(TEXTS[:1], max_new_tokens=24, sampling=GREEDY)
    assert answer.tokens == expected


# A run; other exports are in the fast part.
@pytest.mark.slow
def test_a_run_of_bytes(tmp_path):
    run, out, model, tokenizer = exported(tmp_path)
    for text in TEXTS:
        assert tokenizer(text).input_ids == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.eos_token_id == 0
    assert tokenizer.decode([97, 0, 98], skip_special_tokens=True) == "ab"
    assert_writes_alike(run, out, model, tokenizer)


def test_every_byte_has_its_own_id():
    vocab = json.loads(byte_tokenizer())["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(256))
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert all(vocab[name] == byte for byte, name in bytes_to_unicode().items() if byte)


@pytest.mark.slow_cases("None-True-settings2", "<s> $A-False-None", "None-None-settings3")
@pytest.mark.parametrize(
    ("post", "special_tokens", "settings"),
    [
        ("<s> $A", None, None),
        ("<s> $A", False, None),
        (None, True, {"bos_token": "<s>", "eos_token": "<|im_end|>"}),
        (None, None, {"bos_token": "<s>", "eos_token": "<end_of_turn>"}),
    ],
)
def test_a_run_with_a_tokenizer(tmp_path, post, special_tokens, settings):
    own = trained("gpt2")
    if post is not None:
        own.post_processor = template(post)
    own.save(str(tmp_path / "tokenizer.json"))
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    run, out, model, tokenizer = exported(
        tmp_path, f"TextData.tokenizer='{tmp_path / 'tokenizer.json'}'", "Llama.vocab_size=344",
        f"TextData.add_special_tokens={special_tokens}",
    )  # fmt: skip
    begins = special_tokens or (special_tokens is None and post is not None)
    for text in TEXTS:
        bare = own.encode(text, add_special_tokens=False).ids
        assert tokenizer(text).input_ids == ([1, *bare] if begins else bare)
    assert tokenizer.eos_token == (settings or {}).get("eos_token", "</s>")
    assert_writes_alike(run, out, model, tokenizer)
