"""A published model's own ends and defaults of generation, against transformers' generate()."""

import argparse
import json
from pathlib import Path

import pytest
from foreign_tokenizers import SPECIAL, template, trained

from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.run.commands import generate
from jaxtrain.run.generation.beams import BeamSearch
from jaxtrain.run.generation.decoding import Sampling
from jaxtrain.run.generation.published_defaults import (
    GENERATION_KEYS,
    TOP_K,
    Defaults,
    published_defaults,
)
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.settings import load_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

EXACT = ["Mesh.fsdp=8", "Precision.compute='float32'"]
GREEDY = Sampling(temperature=0.0)
PROMPTS = ["the cat sat", "one\ntwo", "It is a dog."]
NEW = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Llama's folder with a tokenizer that puts `<s>` before a text, and random weights."""
    path = tmp_path_factory.mktemp("published")
    tokenizer = trained("llama2")
    tokenizer.post_processor = template("<s> $A")
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    size = -(-tokenizer.get_vocab_size() // 8) * 8
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
        )
    )  # fmt: skip
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(3.0)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def trainer(folder) -> Trainer:
    """A run that starts from the folder."""
    bindings = ["TextData.source='synthetic'", "TextData.synthetic_vocab_size=64"]
    return Trainer(load_config(f"hf:{folder}", [*EXACT, *bindings]))


@pytest.fixture
def trainer_of_text(folder) -> Trainer:
    """The same, with text."""
    readme = Path(__file__).parent.parent / "README.md"
    bindings = [f"TextData.source='{readme}'", "TextData.sequence_length=16"]
    return Trainer(load_config(f"hf:{folder}", [*EXACT, *bindings]))


def say(folder: Path, *, config: object, generation: object) -> None:
    """Give the folder these ends."""
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "eos_token_id": config}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))


def theirs(folder: Path) -> list[list[int]]:
    """What transformers writes after each prompt, up to what ends it and without that."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt in PROMPTS:
        given = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**given, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        new = ids[0, given.input_ids.shape[1] :].tolist()
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        found.append(new[:-1] if new[-1] in ends else new)
    return found


def test_answers_end_where_those_of_transformers_end(folder, trainer_of_text):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    say(folder, config=[], generation={"eos_token_id": []})
    never = theirs(folder)
    assert [len(one) for one in never] == [NEW] * 3
    first, second, third = never[0][9], never[1][4], never[2][14]
    cases = [
        ([first, second], None),
        (first, {"eos_token_id": [second, third]}),
        ([first, second], {"eos_token_id": third, "do_sample": True, "temperature": 0.6}),
        ([third, SPECIAL.index("<end_of_turn>"), SPECIAL.index("<|im_end|>")], None),
    ]
    for config, generation in cases:
        say(folder, config=config, generation=generation)
        vars(trainer_of_text).pop("writer", None)  # it reads the folder once
        expected = theirs(folder)
        assert expected != never
        found = trainer_of_text.answers(PROMPTS, max_new_tokens=NEW, sampling=GREEDY)
        assert [answer.tokens for answer in found] == expected
        assert {answer.ended for answer in found} <= {"end", "length"}
        found = trainer_of_text.answers(prompts, max_new_tokens=NEW, sampling=GREEDY)
        assert [answer.tokens for answer in found] == expected


def test_a_set_end_of_text_ends_answers_too(folder, trainer_of_text):
    say(folder, config=[], generation=None)
    never = theirs(folder)
    end = trainer_of_text.config.train.data.open_tokenizer().decode([never[0][9]])
    data = trainer_of_text.config.train.data
    assert data.end_of_text is None
    bindings = [
        *EXACT, f"TextData.source='{data.source}'", "TextData.sequence_length=16",
        f"TextData.end_of_text={end!r}",
    ]  # fmt: skip
    set_ = Trainer(load_config(f"hf:{folder}", bindings))
    (answer,) = set_.answers(PROMPTS[:1], max_new_tokens=NEW, sampling=GREEDY)
    assert answer.tokens == never[0][: never[0].index(never[0][9])]


def test_token_ids_of_an_imported_t5_without_a_tokenizer_are_answered(tmp_path):
    torch.manual_seed(1)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
            decoder_start_token_id=0, tie_word_embeddings=True,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(4.0)
    sources = [[5, 9, 33, 1], [60, 2, 7, 8, 9, 1]]

    def written(source: list[int]) -> list[int]:
        given = torch.tensor([source])
        ids = model.generate(given, max_new_tokens=NEW, do_sample=False)[0, 1:].tolist()
        return ids[:-1] if ids[-1] in model.generation_config.eos_token_id else ids

    model.generation_config.eos_token_id = [63]
    end = written(sources[0])[3]
    model.generation_config.eos_token_id = [1, end]
    model.save_pretrained(tmp_path)
    run = Trainer(load_config(f"hf:{tmp_path}", EXACT))
    found = run.answers(sources, max_new_tokens=NEW, sampling=GREEDY)
    assert [answer.tokens for answer in found] == [written(source) for source in sources]
    assert run.generate(sources[1], max_new_tokens=NEW, temperature=0) == written(sources[1])
    with pytest.raises(UserError, match="PairData.source = 'synthetic' are random tokens"):
        run.answers(["text"])


# -- defaults --------------------------------------------------------------------------------------


def asked(**options: object) -> argparse.Namespace:
    names = (
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "beams", "length_penalty",
        "early_stopping", "draft",
    )  # fmt: skip
    return argparse.Namespace(**{**dict.fromkeys(names), "chat": False, "stop": [], **options})


@pytest.mark.parametrize(
    ("said", "options", "expected"),
    [
        ({}, {}, Sampling(temperature=0.8)),
        ({"do_sample": False}, {}, Sampling(temperature=0.0)),
        ({"do_sample": True}, {}, Sampling(temperature=1.0, top_k=50)),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0}, {},
         Sampling(temperature=0.6, top_p=0.9)),
        ({"do_sample": True, "temperature": 0.6, "min_p": 0.1, "repetition_penalty": 1.1},
         {"top_k": 7}, Sampling(temperature=0.6, top_k=7, min_p=0.1, repetition_penalty=1.1)),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.0},
         Sampling(temperature=0.0, top_k=50)),
        ({"temperature": 0.6, "top_p": 0.9}, {}, Sampling(temperature=0.8)),
        ({"num_beams": 4, "length_penalty": 2.0}, {}, BeamSearch(beams=4, length_penalty=2.0)),
        ({"num_beams": 4, "early_stopping": True}, {}, BeamSearch(beams=4, early_stopping=True)),
        ({"num_beams": 4}, {"temperature": 0.5}, Sampling(temperature=0.5)),
        ({"do_sample": True, "top_p": 0.9}, {"beams": 2}, BeamSearch(beams=2)),
    ],
)  # fmt: skip
def test_options_that_are_not_given_are_the_models_own(folder, trainer, said, options, expected):
    say(folder, config=2, generation={"eos_token_id": 2, **said})
    defaults = published_defaults(trainer.config, None)
    assert generate._sampling(asked(**options), defaults) == expected


def test_the_top_k_of_transformers():
    assert transformers.GenerationConfig()._get_default_generation_params()["top_k"] == TOP_K


def test_a_run_of_its_own_has_no_such_defaults(tiny_config):
    assert published_defaults(load_config(tiny_config, []), None) == Defaults()


def test_every_key_of_transformers_is_in_the_table():
    config = transformers.GenerationConfig()
    known = vars(config).keys() | config.to_dict().keys()
    known |= config._get_default_generation_params().keys()
    assert len(known) > 70
    assert known <= GENERATION_KEYS.keys()


def test_what_transformers_writes_by_default_is_no_error(folder, trainer):
    config = transformers.GenerationConfig()
    defaults = config._get_default_generation_params()
    say(folder, config=2, generation={**config.to_dict(), **defaults})
    assert published_defaults(trainer.config, None) == Defaults({"temperature": 0.0})


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size = 3; it must be 0"),
        ({"suppress_tokens": [1]}, r"suppress_tokens = \[1\]; it must be None"),
        ({"temprature": 0.5}, "temprature = 0.5 is an unknown key .* 'temperature'"),
        ({"temperature": "hot"}, "temperature = 'hot' is not a number"),
        ({"num_beams": 2, "do_sample": True}, "num_beams = 2 with do_sample = True"),
    ],
)
def test_what_is_not_done_here_is_named(folder, trainer, said, expected):
    say(folder, config=2, generation=said)
    with pytest.raises(UserError, match=expected):
        published_defaults(trainer.config, None)


# The ends of answers are compared above without a run.
@pytest.mark.slow
def test_the_command_takes_the_files_of_an_import(folder, tmp_path, capsys):
    """Of the folder that the import has kept: the published one may be gone."""
    say(folder, config=[], generation={"eos_token_id": []})
    never = theirs(folder)[0]
    say(folder, config=2, generation={"eos_token_id": [never[5], 2], "do_sample": False})
    expected = theirs(folder)[0]
    run, words = tmp_path / "run", [word for one in EXACT for word in ("-b", one)]
    assert main(["import-hf", str(folder), "--workdir", str(run), *words]) == 0
    say(folder, config=[], generation=None)
    capsys.readouterr()
    words = ["generate", "--workdir", str(run), "--prompt", PROMPTS[0], "--log-probabilities"]
    assert main([*words, "--max-new-tokens", str(NEW)]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == expected
    own = run / "huggingface" / "generation_config.json"
    own.write_text(json.dumps({"no_repeat_ngram_size": 2}))
    assert main(words) == 2
    assert f"{own} has what is not supported here" in capsys.readouterr().err
