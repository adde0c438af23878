"""Tokenizers, chat templates and published models, small and valid, and how each is read."""

import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import jaxtrain.training.settings  # noqa: F401 - names the packages of data
from jaxtrain.config.registry import CONFIGURABLES
from jaxtrain.training.finetune.tuning import Tuning

TEXT = "".join(f"line {n} of many, which say little\n" for n in range(40))


def data_class(name: str) -> Any:
    return CONFIGURABLES[name]


def open_data(name: str, file: str, folder: Path, **settings: Any) -> None:
    """Opens a dataset and reads every row of it once, as a run would."""
    dataset = data_class(name)(source=str(folder / file), **settings).open(seed=0)
    for rows in (dataset.train, dataset.heldout):
        for index in range(min(len(rows), 8)):
            rows.example(index, None)


def lines(records: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def files(contents: dict[str, bytes], folder: Path) -> None:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def of(contents: dict[str, bytes]) -> Any:
    return functools.partial(files, contents)


# -- tokenizers and templates ----------------------------------------------------------------------


def _tokenizer(kind: str) -> bytes:
    """A small tokenizer.json of each model that the library has."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    special = ["<unk>", "<s>", "</s>", "<|endoftext|>"]
    model, trainer = {
        "bpe": (models.BPE(), trainers.BpeTrainer),
        "wordpiece": (models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer),
        "unigram": (models.Unigram(), trainers.UnigramTrainer),
        "wordlevel": (models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer),
    }[kind]
    found = tokenizers.Tokenizer(model)
    more = {"unk_token": "<unk>"} if kind == "unigram" else {}
    if kind == "bpe":
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        found.decoder = decoders.ByteLevel()
        more = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    elif kind == "unigram":
        found.pre_tokenizer = pre_tokenizers.Metaspace()
        found.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    else:
        found.normalizer = normalizers.BertNormalizer()
        found.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(r"\d", "isolated"), pre_tokenizers.BertPreTokenizer()]
        )
    made = trainer(vocab_size=330, special_tokens=special, show_progress=False, **more)
    found.train_from_iterator(TEXT.splitlines(), made)
    found.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return found.to_str().encode()


def make_tokenizer(kind: str, folder: Path) -> None:
    files({"tokenizer.json": _tokenizer(kind), "text.txt": TEXT.encode()}, folder)


def read_tokenizer(folder: Path) -> None:
    from jaxtrain.data.tokenization.file_tokenizer import FileTokenizer

    tokenizer = FileTokenizer(folder / "tokenizer.json")
    ids = tokenizer.encode("Hello line 7, \U0001f600")
    tokenizer.encode_with_offsets("line of many")
    tokenizer.encode_whole("line of many", 3)
    tokenizer.decode([*ids, 0, tokenizer.vocab_size - 1])
    open_data("TextData", "text.txt", folder, tokenizer=str(folder / "tokenizer.json"),
          sequence_length=8)  # fmt: skip


CHAT = {
    "tokenizer_config.json": json.dumps(
        {
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "lstrip": False},
            "chat_template": "{% for m in messages %}"
            "{{ m['role'] + ': ' + m['content'] + eos_token }}"
            "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
        }
    ).encode(),
    "special_tokens_map.json": json.dumps({"pad_token": "<pad>", "unk_token": "<unk>"}).encode(),
}
JINJA = (
    b"{% for m in messages %}{% if m.role == 'user' %}{{ m.content | trim }}{% else %}"
    b"{% generation %}{{ m['content'] ~ '</s>' }}{% endgeneration %}{% endif %}{% endfor %}"
)
JINJA_WORDS = (
    b"{{", b"}}", b"{%", b"%}", b"{% for a in range(10**9) %}", b"{{ 'x' * 10**10 }}",
    b"{{ range(10**10) | list }}", b"{% for a in messages recursive %}{{ loop(messages) }}",
    b"{{ 10 ** 10 ** 10 }}", b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", b"{% endfor %}",
    b"{{ messages.__class__ }}", b"{{ ''.join(['x'] * 10**9) }}", b"{{ '%99999999999d' % 1 }}",
    b"{{ raise_exception('no') }}", b"{{ cycler }}", b"{{ lipsum(n=10**6) }}", b"{% set a = b %}",
    b"{{ messages | tojson(indent=10**9) }}", b"{{ undefined.x.y }}", b"{% generation %}",
    b"{{ 'x' | center(10**10) }}", b"{{ '{:>99999999999}'.format(1) }}",
    b"{{ 'x'.replace('', 'y' * 10**5) }}", b"{{ namespace(a=1) }}", b"(" * 200, b"[" * 200,
)  # fmt: skip


def read_template(folder: Path) -> None:
    import datetime

    from jaxtrain.config.errors import UserError
    from jaxtrain.data.text.chat.chat_template import TemplateError, template_next_to

    template = template_next_to(folder / "tokenizer.json", datetime.date(2026, 7, 26))
    if template is None:
        return
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    try:
        template.render_with_spans(messages)
        template.text(messages[:1], reply=True)
    except TemplateError as error:
        raise UserError(str(error)) from error
    _ = template.end_of_turn, template.marks


# -- published models ------------------------------------------------------------------------------

_SIZES: dict[str, Any] = {
    "vocab_size": 13, "num_layers": 2, "embed_dim": 12, "num_heads": 6, "context_length": 10
}  # fmt: skip
FAMILIES = ("llama", "gpt2", "bert", "bert of embeddings", "vit", "resnet", "t5", "mamba2",
            "mixtral", "deepseek_v3", "gemma3_text", "qwen2_moe")  # fmt: skip


def _model(kind: str) -> Any:
    from test_weight_maps import MODELS

    channels = {"channels": 3} if kind in ("vit", "resnet") else {}
    return dataclasses.replace(MODELS[kind], **channels)


def make_model(kind: str, folder: Path) -> None:
    from jaxtrain.models.weights.family import family_for, their_shapes
    from jaxtrain.models.weights.formats import safetensors
    from jaxtrain.models.weights.sentences import write_sentence_files

    model = _model(kind)
    family, said = family_for(model, kind.split()[0])
    content = {**said, "architectures": [family.architecture], "model_type": family.model_type,
               "eos_token_id": 2, "torch_dtype": "float32"}  # fmt: skip
    beside = {"config.json": json.dumps(content).encode()}
    if kind == "vit":
        processor = {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
                     "size": {"height": 12, "width": 12}, "do_rescale": True,
                     "rescale_factor": 1 / 255, "resample": 2, "do_resize": True}  # fmt: skip
        beside["preprocessor_config.json"] = json.dumps(processor).encode()
    if kind == "llama":
        beside["tokenizer.json"] = _tokenizer("wordlevel")
        beside["generation_config.json"] = b'{"eos_token_id": [2, 3], "bos_token_id": 1}'
    if kind == "bert of embeddings":
        beside |= write_sentence_files(model)
        beside["sentence_bert_config.json"] = b'{"max_seq_length": 8, "do_lower_case": false}'
    files(beside, folder)
    from test_weight_maps import shapes_of

    shapes = their_shapes(family.names(model), shapes_of(model))
    if kind != "llama":
        safetensors.write(folder / "model.safetensors", shapes, "F32",
                          (np.zeros(shape, np.float32) for shape in shapes.values()))  # fmt: skip
        return
    names = list(shapes)
    parts = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for file, part in parts.items():
        safetensors.write(folder / file, {name: shapes[name] for name in part}, "F32",
                          (np.zeros(shapes[name], np.float32) for name in part))  # fmt: skip
    table = {name: file for file, part in parts.items() for name in part}
    index = {"metadata": {"total_size": 1}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_model(source: Path) -> None:
    """As `import-hf`, up to the parameters on the devices."""
    import jax

    from jaxtrain.models.weights.folder import open_published
    from jaxtrain.run.huggingface.parameters import read_parameters
    from jaxtrain.training import layouts
    from jaxtrain.training.compose import compose
    from jaxtrain.training.preflight import preflight
    from jaxtrain.training.settings import load_config

    config = load_config(f"hf:{source}", ["Train.global_batch_size = 8"])
    config.to_gin()
    folder = open_published(str(source), named="SRC_DIR")
    folder.extra_files()
    preflight.check(config, device_count=jax.device_count(), platform="cpu", kind="cpu",
                    reads_data=False)  # fmt: skip
    program = compose(config, layouts.layout(config)).setup.replace(tuning=Tuning())
    read_parameters(folder, program, config.train.model)


def model_files(kind: str) -> tuple[str, ...]:
    more = {
        "llama": ("model.safetensors.index.json", "model-1.safetensors", "generation_config.json"),
        "vit": ("preprocessor_config.json", "model.safetensors"),
        "bert of embeddings": ("modules.json", "1_Pooling/config.json",
                               "sentence_bert_config.json"),
    }  # fmt: skip
    return ("config.json", *more.get(kind, ()))


def make_gguf(folder: Path) -> None:
    from test_gguf import F32, Q8_0, gguf

    names = ["<unk>", "</s>", *map(chr, range(97, 107)), "ab"]
    said = {
        "general.architecture": "llama", "llama.vocab_size": 13, "llama.block_count": 1,
        "llama.embedding_length": 32, "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2, "llama.rope.dimension_count": 8,
        "llama.feed_forward_length": 32, "llama.context_length": 48, "llama.rope.freq_base": 1e5,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [3, 3] + [1] * 11, "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip
    shapes = {
        "token_embd": (13, 32), "output_norm": (32,), "output": (13, 32),
        "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,), "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (32, 32), "blk.0.ffn_up": (32, 32), "blk.0.ffn_down": (32, 32),
    }  # fmt: skip
    tensors = {
        f"{name}.weight": (
            (shape, Q8_0, bytes(34 * shape[0])) if name.startswith("blk") and len(shape) == 2
            else (shape, F32, bytes(4 * int(np.prod(shape))))
        )
        for name, shape in shapes.items()
    }  # fmt: skip
    tensors["blk.0.ffn_down.weight"] = ((32, 32), 20, bytes(18 * 32))  # IQ4_NL, of the package gguf
    (folder / "model.gguf").write_bytes(gguf(said, tensors))


def make_adapter(folder: Path) -> None:
    from jaxtrain.models.weights.formats import safetensors

    shapes = {}
    for layer in range(2):
        for name in ("q_proj", "v_proj"):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes[f"{stem}.lora_A.weight"] = (2, 16)
            shapes[f"{stem}.lora_B.weight"] = (16, 2)
    safetensors.write(folder / "adapter_model.safetensors", shapes, "F32",
                      (np.zeros(shape, np.float32) for shape in shapes.values()))  # fmt: skip
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"],
            "lora_dropout": 0.0, "bias": "none", "use_rslora": False, "use_dora": False,
            "task_type": "CAUSAL_LM", "init_lora_weights": True}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(said))


@functools.cache
def _lora_program() -> tuple[Any, Any]:
    from jaxtrain.training import layouts
    from jaxtrain.training.compose import compose
    from jaxtrain.training.settings import load_config

    sizes = {"vocab_size": 256, "num_layers": 2, "embed_dim": 16, "num_heads": 4,
             "num_kv_heads": 4, "mlp_dim": 8, "context_length": 16}  # fmt: skip
    config = load_config("gpt_quickstart", [
        "Train.model = @Llama()", *(f"Llama.{name} = {value}" for name, value in sizes.items()),
        "TextData.sequence_length = 16", "Finetune.lora_rank = 2",
        "Finetune.lora_targets = ('layers/query', 'layers/value')", "Finetune.lora_alpha = 4.0",
        "Mesh.data = -1", "Mesh.fsdp = 1", "Mesh.tensor = 1", "Mesh.simulated_devices = 0",
    ])  # fmt: skip
    return config, compose(config, layouts.layout(config)).setup


def read_adapter(folder: Path) -> None:
    from jaxtrain.run.huggingface.adapters import read_adapter

    read_adapter(str(folder), *_lora_program())
