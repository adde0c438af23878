"""Special tokens around a text and at its end: as transformers has them of the same folder."""

import dataclasses
import inspect
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from foreign_tokenizers import CORPUS, SPECIAL, template, trained
from tokenizers import models, pre_tokenizers, processors, trainers

from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.data.pairs.classed import LabelledText, TaggedText
from jaxtrain.data.pairs.source import PairData
from jaxtrain.data.source import STORE_FILE
from jaxtrain.data.text.chat.chat import ChatData
from jaxtrain.data.text.fill_in_middle import FilledRows
from jaxtrain.data.text.source import TextData
from jaxtrain.data.text.stores.prepare import prepare
from jaxtrain.data.tokenization.file_tokenizer import FileTokenizer
from jaxtrain.data.tokenization.tokenizer_folder import AS_IN_FILE, SETTINGS_KEYS, TOKENIZER_KEYS
from jaxtrain.run.generation.answer import encode_prompt

transformers = pytest.importorskip("transformers")

TEXTS = ["the cat sat\non the mat.\n", "Grüße aus Köln", "<s>twice</s>", "x = 1;\n\n\n  # two\n"]
# The families' own: a template in front of the words of each.
FAMILIES = {
    "llama2": ("llama2", template("<s> $A"), "LlamaTokenizer", "llama"),
    "llama3": ("llama3", processors.Sequence([processors.ByteLevel(trim_offsets=False),
                                              template("<s> $A")]), None, "llama"),
    "mistral": ("metaspace", template("<s> $A"), "LlamaTokenizerFast", "mistral"),
    "gemma": ("gemma", template("<s> $A"), None, "llama"),
    "encloses": ("bert", template("<s> $A </s>"), None, "llama"),
    "t5": ("unigram", template("$A </s>"), None, "llama"),
    "none": ("gpt2", processors.ByteLevel(trim_offsets=False), None, "llama"),
}  # fmt: skip


def folder_of(path: Path, kind: str, post=None, *, model_type: str = "llama", **settings) -> Path:
    """A published tokenizer's folder; the tokenizer.json in it."""
    path.mkdir(exist_ok=True)
    made = trained(kind)
    if post is not None:
        made.post_processor = post
    made.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    if settings:
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path / "tokenizer.json"


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """The file of a family's tokenizer, and transformers' of the folder."""
    kind, post, class_, model_type = FAMILIES[request.param]
    named = {} if class_ is None else {"tokenizer_class": class_}
    file = folder_of(
        tmp_path_factory.mktemp(request.param), kind, post, model_type=model_type,
        bos_token="<s>", eos_token="</s>", unk_token="<unk>", **named,
    )  # fmt: skip
    return file, transformers.AutoTokenizer.from_pretrained(file.parent)


def corpus_of(folder: Path) -> str:
    (folder / "corpus").mkdir()
    for number, text in enumerate([*TEXTS, *CORPUS]):
        (folder / "corpus" / f"{number:02}.txt").write_text(text)
    return str(folder / "corpus")


def documents_of(dataset) -> list[list[int]]:
    return [
        np.asarray(split.tokens[begin:end]).tolist()
        for split in (dataset.train, dataset.heldout)
        for begin, end in zip(split.offsets, split.offsets[1:], strict=False)
    ]


def test_prompts_have_the_tokens_of_the_models_own_tokenizer(family):
    file, theirs = family
    tokenizer = FileTokenizer(file)
    for text in TEXTS:
        assert encode_prompt(tokenizer, text) == theirs(text).input_ids
        bare = theirs(text, add_special_tokens=False).input_ids
        assert encode_prompt(tokenizer, text, special_tokens=False) == bare
        assert tokenizer.encode_whole(text, 100) == (theirs(text).input_ids, False)
    without = FileTokenizer(file, add_special_tokens=False)
    assert encode_prompt(without, TEXTS[0]) == theirs(TEXTS[0], add_special_tokens=False).input_ids


@pytest.mark.parametrize("asked", [None, False])
def test_documents_of_rows_and_stores_are_surrounded_and_end(family, tmp_path, asked):
    file, theirs = family
    data = TextData(
        source=corpus_of(tmp_path), sequence_length=16, heldout_fraction=0.2, tokenizer=str(file),
        add_special_tokens=asked,
    )  # fmt: skip
    read = data.open(seed=0)
    documents = [theirs(text, add_special_tokens=asked is None).input_ids
                 for text in [*TEXTS, *CORPUS]]  # fmt: skip
    ends = asked is None and theirs("a").input_ids[-1] == theirs.eos_token_id
    expected = [ids if ends else [*ids, theirs.eos_token_id] for ids in documents]
    assert sorted(documents_of(read)) == sorted(expected)
    prepare(data, tmp_path / "store", workers=1, progress=lambda characters, tokens: None)
    stored = dataclasses.replace(
        data, source=str(tmp_path / "store"), tokenizer=str(tmp_path / "store" / "tokenizer.json")
    ).open(seed=0)
    assert stored.digest == read.digest
    rows = np.arange(len(read.train))
    jax.tree.map(
        np.testing.assert_array_equal, stored.train.examples(rows), read.train.examples(rows)
    )


def test_stores_of_earlier_versions_stay_readable(tmp_path):
    """They had no special tokens around documents, and other ends."""
    file = folder_of(
        tmp_path / "llama", "llama2", template("<s> $A"), bos_token="<s>", eos_token="<|im_end|>"
    )
    made = TextData(
        source=corpus_of(tmp_path), sequence_length=16, tokenizer=str(file),
        heldout_fraction=0.2, end_of_text="</s>", add_special_tokens=False,
    )  # fmt: skip
    prepare(made, tmp_path / "store", workers=1, progress=lambda characters, tokens: None)
    said = json.loads((tmp_path / "store" / STORE_FILE).read_text())
    del said["before"], said["after"]
    (tmp_path / "store" / STORE_FILE).write_text(json.dumps(said))
    store = TextData(
        source=str(tmp_path / "store"), sequence_length=16, tokenizer=str(file),
        heldout_fraction=0.2,
    )  # fmt: skip
    assert store.open(seed=0).digest == made.open(seed=0).digest
    assert all(one[-1] == SPECIAL.index("</s>") for one in documents_of(store.open(seed=0)))
    with pytest.raises(UserError, match=r"puts the tokens \[1\] before .* have \[\] and \[\]"):
        dataclasses.replace(store, add_special_tokens=True).open(seed=0)
    with pytest.raises(UserError, match="end_of_text is the token 3, but .* end with 2"):
        dataclasses.replace(store, end_of_text="<|im_end|>").open(seed=0)


def test_special_tokens_can_be_asked_for_where_the_tokenizer_puts_none(tmp_path):
    file = folder_of(tmp_path / "a", "gpt2", bos_token="<s>", eos_token="</s>")
    assert FileTokenizer(file).before == ()
    assert FileTokenizer(file, add_special_tokens=True).before == (1,)
    other = folder_of(tmp_path / "b", "gpt2", eos_token="</s>")
    with pytest.raises(UserError, match=r"TextData.add_special_tokens = True: .* names a bos_tok"):
        TextData(tokenizer=str(other), add_special_tokens=True).open_tokenizer()
    with pytest.raises(UserError, match="the byte tokenizer has none"):
        TextData(add_special_tokens=True).open_tokenizer()


def test_a_chat_template_that_writes_the_first_token_has_it_once(tmp_path):
    chat = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}"
        "{% endfor %}"
    )
    file = folder_of(
        tmp_path / "llama", "llama2", template("<s> $A"), bos_token="<s>", eos_token="</s>",
        chat_template=chat,
    )  # fmt: skip
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent)
    record = {"messages": [{"role": "user", "content": "the cat"},
                           {"role": "assistant", "content": "the mat"}]}  # fmt: skip
    plain = {"prompt": "the cat", "completion": " sat"}
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, [record, plain] * 4)) + "\n")
    data = ChatData(
        source=str(tmp_path / "chat.jsonl"), tokenizer=str(file), sequence_length=64,
        heldout_fraction=0.25,
    )  # fmt: skip
    rows = data.open(seed=0).train.rows
    found = {
        tuple(np.asarray(rows.tokens)[begin:end].tolist())
        for begin, end in zip(rows.offsets, rows.offsets[1:], strict=False)
    }
    whole = theirs.apply_chat_template(record["messages"], tokenize=True, return_dict=False)
    assert whole.count(theirs.bos_token_id) == 1
    assert found == {
        tuple(whole), tuple([*theirs("the cat sat").input_ids, theirs.eos_token_id])
    }  # fmt: skip


def test_sources_of_pairs_are_surrounded(tmp_path):
    file = folder_of(tmp_path / "t5", "unigram", template("$A </s>"), eos_token="</s>")
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent)
    (tmp_path / "pairs.jsonl").write_text(
        "\n".join(json.dumps({"source": text, "target": "the mat"}) for text in CORPUS)
    )
    data = PairData(
        source=str(tmp_path / "pairs.jsonl"), tokenizer=str(file), source_length=99,
        target_length=99,
    )  # fmt: skip
    train = data.open(seed=0).train
    found = {tuple(train.sources[number].tolist()) for number in range(len(train))}
    assert found == {tuple(theirs(text).input_ids) for text in CORPUS}
    assert train.targets[0][0].tolist() == theirs(text_target="the mat").input_ids


# -- the end of a text -----------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize("kind", ["llama2", "metaspace", "gpt2"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"legacy": False}, {"legacy": True}, {"legacy": None}, {"add_prefix_space": True},
     {"add_prefix_space": False}],
)  # fmt: skip
def test_spaces_behind_special_tokens_are_those_of_transformers(
    tmp_path, kind, model_type, settings
):
    file = folder_of(
        tmp_path / "folder", kind, template("<s> $A"), model_type=model_type, bos_token="<s>",
        eos_token="</s>", tokenizer_class="LlamaTokenizerFast",
        **(settings if kind != "gpt2" else {}),
    )  # fmt: skip
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent)
    for text in ("<s>the cat</s>the mat", "the cat<|im_end|> on", "</s>\n", " the  cat"):
        assert encode_prompt(FileTokenizer(file), text) == theirs(text).input_ids


def test_models_whose_file_is_taken_as_it_is_are_those_of_transformers():
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    ours = ("llama", "mistral", "mixtral", "phi3", "deepseek_v2", "deepseek_v3", "gpt_oss")
    backends = ("TokenizersBackend", "MistralCommonBackend")
    theirs = [one for one in ours if TOKENIZER_MAPPING_NAMES.get(one) in backends]
    assert tuple(theirs) == AS_IN_FILE


@pytest.mark.parametrize(
    ("settings", "special_map", "generation", "config"),
    [
        ({"eos_token": "<|im_end|>"}, None, {"eos_token_id": [2, 4]}, {"eos_token_id": 2}),
        ({"eos_token": {"__type": "AddedToken", "content": "<end_of_turn>"}}, None, None, None),
        ({}, {"eos_token": "<|im_end|>"}, None, None),
        ({"eos_token": "</s>"}, {"eos_token": "<|im_end|>"}, None, None),
        (
            {"eos_token": "</s>", "added_tokens_decoder": {}},
            {"eos_token": "<|im_end|>"},
            None,
            None,
        ),
        ({"eos_token": "<|new|>"}, None, None, None),  # the tokenizer.json lacks it
    ],
)
def test_documents_end_with_the_tokenizers_own_token(
    tmp_path, settings, special_map, generation, config
):
    file = folder_of(tmp_path / "folder", "llama2", **{"bos_token": "<s>", **settings})
    for name, said in (("special_tokens_map", special_map), ("generation_config", generation),
                       ("config", {"model_type": "llama", **(config or {})})):  # fmt: skip
        if said is not None:
            (file.parent / f"{name}.json").write_text(json.dumps(said))
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent)
    ours = FileTokenizer(file)
    assert ours.end_of_text == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)
    assert ours.encode(f"a{theirs.eos_token}") == theirs(f"a{theirs.eos_token}").input_ids


def test_the_models_own_ends_are_taken_where_no_tokenizer_config_names_one(tmp_path):
    file = folder_of(tmp_path / "folder", "llama2")
    assert FileTokenizer(file).end_of_text == SPECIAL.index("</s>")  # a usual name
    (file.parent / "config.json").write_text('{"eos_token_id": [9, 4]}')
    assert FileTokenizer(file).end_of_text == 4  # 9 is no special token
    (file.parent / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert FileTokenizer(file).end_of_text == 3
    assert FileTokenizer(file, end_of_text="</s>").end_of_text == 2


# -- tables of keys --------------------------------------------------------------------------------


def known_settings() -> set[str]:
    """The keys that transformers reads of a tokenizer_config.json: of its base classes, and of the
    classes of the families that are read here."""
    from transformers.models.auto import tokenization_auto as auto
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    base = transformers.PreTrainedTokenizerBase
    sources = [base.__init__, base._from_pretrained, TokenizersBackend.__init__,
               TokenizersBackend.convert_to_native_format]  # fmt: skip
    read = re.compile(r'kwargs\.(?:pop|get|setdefault)\(\s*"(\w+)"')
    found = {key for source in sources for key in read.findall(inspect.getsource(source))}
    for name in ("gpt2", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3",
                 "phi3", "mamba", "bert", "roberta", "t5"):  # fmt: skip
        class_ = auto.tokenizer_class_from_name(auto.TOKENIZER_MAPPING_NAMES[name])
        found |= inspect.signature(class_.__init__).parameters.keys()
    found |= inspect.signature(transformers.LlamaTokenizer.__init__).parameters.keys()
    return found - {"self", "args", "kwargs"}


def test_every_key_that_transformers_knows_is_in_the_table():
    found = {key for key in known_settings() if not key.endswith("_token")}
    assert len(found) > 40
    assert found <= SETTINGS_KEYS.keys()


@pytest.mark.parametrize("kind", ["llama2", "unigram", "bert", "gpt2"])
def test_every_key_of_a_tokenizer_json_is_in_the_table(kind):
    made = trained(kind)
    made.enable_padding()
    content = json.loads(made.to_str())
    assert content.keys() <= TOKENIZER_KEYS.keys()
    assert content["model"].keys() <= TOKENIZER_KEYS["model"].table.keys()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"do_lowercase": True}, "do_lowercase = True is an unknown key"),
        ({"do_lower_case": False}, "do_lower_case = False, but its normalizer has lowercase = Tru"),
    ],
)
def test_a_key_that_is_not_known_and_a_contradiction_are_rejected(tmp_path, settings, said):
    file = folder_of(tmp_path / "folder", "bert", **settings)
    with pytest.raises(UserError, match=said):
        FileTokenizer(file)


def test_a_tokenizer_that_draws_tokens_is_rejected(tmp_path):
    file = folder_of(tmp_path / "folder", "gpt2")
    content = json.loads(file.read_text())
    content["model"]["dropout"] = 0.1
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="model.dropout = 0.1; it must be None or 0.0 .it samples"):
        FileTokenizer(file)


def test_the_text_of_a_special_token_is_text_where_the_folder_says_so(tmp_path):
    file = folder_of(tmp_path / "folder", "llama2", eos_token="</s>", split_special_tokens=True)
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent)
    expected = theirs("the cat</s>").input_ids
    assert theirs.eos_token_id not in expected
    assert FileTokenizer(file).encode("the cat</s>") == expected


def test_a_tokenizer_without_a_known_end_is_reported_where_the_data_are_described(tmp_path, capsys):
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False, special_tokens=["<end>"],
                                    initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )  # fmt: skip
    made.save(str(tmp_path / "tokenizer.json"))
    words = ["-b", f"TextData.tokenizer='{tmp_path / 'tokenizer.json'}'", "-b",
             f"TextData.source='{corpus_of(tmp_path)}'", "-b", "TextData.sequence_length=8",
             "-b", "GPT.vocab_size=320"]  # fmt: skip
    assert main(["data", "gpt_quickstart", *words]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "No token is known to end a text" in told
    assert "name one in TextData.end_of_text" in told
    assert main(["data", "gpt_quickstart", *words, "-b", "TextData.end_of_text='<end>'"]) == 0
    assert "No token is known" not in capsys.readouterr().out


def test_texts_and_words_with_classes_are_surrounded(tmp_path):
    file = folder_of(tmp_path / "bert", "bert", template("<s> $A </s>"), eos_token="</s>")
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent)
    texts = [text.replace("\n", " ") for text in CORPUS[:6]]
    (tmp_path / "texts.jsonl").write_text(
        "\n".join(json.dumps({"text": text, "label": str(n % 2)}) for n, text in enumerate(texts))
    )
    data = LabelledText(
        source=str(tmp_path / "texts.jsonl"), tokenizer=str(file), num_classes=2,
        sequence_length=12, heldout_fraction=0.4,
    )  # fmt: skip
    opened = data.open(seed=0)
    found = set()
    for split in (opened.train, opened.heldout):
        for row in (split.example(number, None) for number in range(len(split))):
            found.add(tuple(row.inputs[: int((row.segment_ids > 0).sum())].tolist()))
    cut = [theirs(text, truncation=True, max_length=12).input_ids for text in texts]
    assert any(len(ids) == 12 for ids in cut)
    assert found == set(map(tuple, cut))
    words, tags = texts[1].split(), ["a", "b"] * 40
    (tmp_path / "words.jsonl").write_text(
        "\n".join([json.dumps({"tokens": words, "tags": tags[: len(words)]})] * 6)
    )
    data = TaggedText(
        source=str(tmp_path / "words.jsonl"), tokenizer=str(file), num_classes=2,
        sequence_length=99, heldout_fraction=0.4,
    )  # fmt: skip
    row = data.open(seed=0).train.example(0, None)
    ids = theirs(words, is_split_into_words=True)
    assert row.inputs[: len(ids.input_ids)].tolist() == ids.input_ids
    # By hand: a word's class is told at its first token.
    first = [n for n, (before, word) in enumerate(zip([None, *ids.word_ids()], ids.word_ids(),
             strict=False)) if word is not None and word != before]  # fmt: skip
    assert np.flatnonzero(row.loss_mask).tolist() == first


@pytest.mark.parametrize("kind", ["llama2", "metaspace", "gpt2", "gemma"])
def test_a_moved_middle_has_no_space_that_the_text_lacks(tmp_path, kind):
    """The special tokens around a document stay around it, and its characters stay the same."""
    file = folder_of(tmp_path / "folder", kind, template("<s> $A"), eos_token="</s>")
    tokenizer, theirs = FileTokenizer(file), tokenizers.Tokenizer.from_file(str(file))
    sentinels = tuple(SPECIAL.index(name) for name in ("<unk>", "<|im_end|>", "<end_of_turn>"))
    rows = FilledRows(None, 1.0, 0.0, tokenizer, sentinels)
    text = "the cat sat on the mat. It is a cat"
    document = np.array([*theirs.encode(text).ids, 2])
    rng = np.random.default_rng(0)
    for _ in range(30):
        moved = rows._move(document, rng).tolist()
        assert (moved[0], moved[1], moved[-1]) == (1, sentinels[0], 2)
        suffix, middle = (moved.index(one) for one in sentinels[1:])
        parts = moved[2:suffix], moved[middle + 1 : -1], moved[suffix + 1 : middle]
        tokens = [theirs.id_to_token(one) for part in parts for one in part]
        assert "".join(tokens).replace("▁", " ").replace("Ġ", " ").removeprefix(" ") == text
