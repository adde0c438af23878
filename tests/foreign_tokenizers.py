"""Tokenizers of the kinds that published models have, trained by `tokenizers` on a few lines."""

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

# Llama 3's and GPT-4o's words; the latter's punctuation takes line ends and slashes with it.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CORPUS = [
    "def f(x):\n    return x + 1;\n// a comment\n",
    "the cat sat on the mat.\n\nIt is a cat, and the dog is no cat!\n",
    "one\ntwo\nthree\n  indented\n\n\n====\n----\nGrüße aus Köln\n",
] * 9

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>", "<end_of_turn>"]
KINDS = (
    "gpt2", "llama3", "gpt4o", "llama2", "metaspace", "metaspace_split", "gemma", "unigram", "bert",
    "across_lines",
)  # fmt: skip


def trained(kind: str, vocab_size: int = 400, corpus=CORPUS) -> tokenizers.Tokenizer:
    """A tokenizer of a kind of `KINDS`, with the tokens of `SPECIAL`."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet, trainer = (
        sorted({*"".join(corpus), *map(chr, range(33, 127)), "▁"}),
        trainers.BpeTrainer,
    )
    normalizer, words = None, None  # those of use, where others are trained with
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    if kind == "gpt2":
        made.pre_tokenizer, made.decoder = byte_level, decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    elif kind in ("llama3", "gpt4o"):
        pattern = Regex({"llama3": LLAMA_3, "gpt4o": GPT_4O}[kind])
        split = pre_tokenizers.Split(pattern, behavior="isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
        made.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
    elif kind == "llama2":
        spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        normalizer = normalizers.Sequence(spaces)
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])
    elif kind in ("metaspace", "metaspace_split"):
        words = pre_tokenizers.Metaspace(split=kind == "metaspace_split")
        made.decoder = decoders.Metaspace()
    elif kind == "gemma":
        normalizer = normalizers.Replace(" ", "▁")
        words = pre_tokenizers.Split(" ", "merged_with_previous")
        made.decoder = decoders.Replace("▁", " ")
    elif kind == "unigram":
        made = tokenizers.Tokenizer(models.Unigram())
        made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(False, True)])
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder, trainer = decoders.Metaspace(), trainers.UnigramTrainer
    elif kind == "across_lines":
        made.normalizer = normalizers.Replace(" ", "▁")
    else:
        assert kind == "bert", kind
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder, trainer = decoders.WordPiece(), trainers.WordPieceTrainer
    if normalizer is not None or words is not None:  # SentencePiece trains words of one line
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        corpus = [line for text in corpus for line in text.splitlines()]
    more = {"unk_token": "<unk>"} if kind == "unigram" else {}
    made.train_from_iterator(
        corpus,
        trainer(
            vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet,
            show_progress=False, **more,
        ),
    )  # fmt: skip
    if normalizer is not None or words is not None:
        made.normalizer = normalizer or normalizers.Sequence([])
        made.pre_tokenizer = words or pre_tokenizers.Sequence([])
    return made


def template(single: str) -> processors.TemplateProcessing:
    """A post-processor that writes a text as `single` says, such as "<s> $A"."""
    return processors.TemplateProcessing(
        single=single,
        pair=f"{single} $B:1",
        special_tokens=[(name, SPECIAL.index(name)) for name in SPECIAL if name in single],
    )
