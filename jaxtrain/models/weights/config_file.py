"""Published config.json: a typed reader, rows of keys, and the key tables that all families share.

A row has keys of a config.json and our settings. It is used in both directions, so that an import
and an export cannot disagree: `whole("hidden_size", "embed_dim")` reads the key into the setting
and writes the setting as the key.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jaxtrain.config.key_table import KeyTable, Only, ignore_keys, only, read_keys
from jaxtrain.config.values import LARGEST
from jaxtrain.models.weights.formats import awq, float8, mxfp4

_MOST_LISTED = 10_000
_LONGEST = 80  # characters of a value in a message
_LISTED = ("layer", "layers", "experts")


class ConfigFile:
    """A config.json, or an object in it; errors are collected rather than raised.

    Attributes:
      content: all keys.
      reasons: a clause for each unsupported value.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self.reasons: list[str] = []

    def integer(self, key: str, default: int | None = None) -> int:
        """Read an integer; required without a default."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            return self._validate(key, value, "a whole number", 1)
        # Layers and experts are enumerated before anything else can notice that there are not
        # as many.
        most = _MOST_LISTED if key.endswith(_LISTED) else LARGEST
        return value if abs(value) <= most else self._validate(key, value, f"at most {most:,}", 1)

    def number(self, key: str, default: float | None = None) -> float:
        """Read a number; required without a default."""
        value = self._value(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        return self._validate(key, value, "a number", 1.0)

    def flag(self, key: str, default: bool) -> bool:
        """Read a boolean."""
        value = self._value(key, default)
        if isinstance(value, bool):
            return value
        return self._validate(key, value, "true or false", default)

    def table(self, key: str) -> "ConfigFile":
        """Read a nested object, empty if missing; its reasons are this one's."""
        value = self.content.get(key)
        if value is not None and not isinstance(value, dict):
            value = self._validate(key, value, "an object", {})
        return self.inner(value or {})

    def inner(self, content: Mapping[str, Any]) -> "ConfigFile":
        """Wrap an object that shares this one's reasons."""
        found = ConfigFile(content)
        found.reasons = self.reasons
        return found

    def only(self, key: str, allowed: Iterable[Any], *, default: Any) -> None:
        """Reject other values than these; None, or no such key, means the default."""
        value, allowed = self._value(key, default), list(allowed)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool)
                   for one in allowed):  # fmt: skip
            self._validate(key, value, " or ".join(map(repr, allowed)), None)

    def reject(self, reason: str) -> None:
        """Add a reason, unless it is there already."""
        if reason not in self.reasons:
            self.reasons.append(reason)

    def _value(self, key: str, default: Any) -> Any:
        value = self.content.get(key)
        return default if value is None else value

    def _validate(self, key: str, value: Any, allowed: str, instead: Any) -> Any:
        shown = repr(value)
        shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
        found = f"{key} is missing" if value is None else f"{key} = {shown}"
        self.reject(f"{found}; it must be {allowed}")
        return instead


def _nothing(_: Any) -> Mapping[str, Any]:
    return {}


class Row(NamedTuple):
    """Some keys of a config.json and the settings that they correspond to.

    Attributes:
      keys: the entry of each key in the family's key table.
      read: returns the settings of a config.json; collects values that are not
        supported.
      write: returns the keys of a model's config.json; None: it is not of this family.
    """

    keys: KeyTable = {}
    read: Callable[[ConfigFile], Mapping[str, Any]] = _nothing
    write: Callable[[Any], Mapping[str, Any] | None] = _nothing


def integer(key: str, setting: str, default: int | None = None, *, null: bool = False) -> Row:
    """Return the row of an integer.

    Args:
      key: in config.json.
      setting: of our sizes.
      default: the value of a missing key; None: the key is required.
      null: whether null is read as None, and a missing key with default None too.
    """
    return _value(ConfigFile.integer, key, setting, default, null=null)


def number(key: str, setting: str, default: float | None = None, *, null: bool = False) -> Row:
    """Return the row of a number; the arguments are those of `integer`."""
    return _value(ConfigFile.number, key, setting, default, null=null)


def flag(key: str, setting: str, default: bool) -> Row:
    """Return the row of a boolean; the arguments are those of `integer`."""
    return _value(ConfigFile.flag, key, setting, default, null=False)


def _value(
    read: Callable[[ConfigFile, str, Any], Any], key: str, setting: str, default: Any, *, null: bool
) -> Row:
    def read_value(config: ConfigFile) -> Mapping[str, Any]:
        is_null = null and config.content.get(key, default) is None
        return {setting: None if is_null else read(config, key, default)}

    return Row(read_keys(key), read_value, lambda model: {key: getattr(model, setting)})


_FIRST = object()


def constant(key: str, value: Any, *others: Any, default: Any = _FIRST) -> Row:
    """Return the row of a key that has the same value in all models of the family.

    Args:
      key: in config.json.
      value: the written value.
      others: values that are read as well.
      default: the value that a missing key means; left out: `value`.
    """
    entry = Only((value, *others), value if default is _FIRST else default)
    return Row({key: entry}, write=lambda _: {key: value})


def ignore(reason: str, *keys: str) -> Row:
    """Return the row of keys that change nothing; `reason` says why."""
    return Row(ignore_keys(reason, *keys))


def write_only(**content: Any) -> Row:
    """Return the row of keys that are written with these values; their entries are elsewhere."""
    return Row(write=lambda _: content)


def derive(
    key: str,
    expected: Callable[[ConfigFile], Any],
    write: Callable[[Any], Any] | None = None,
    *,
    default: Any = None,
) -> Row:
    """Return the row of a key that follows from others; another value is rejected.

    Args:
      key: in config.json.
      expected: the value that follows from the other keys.
      write: the value for a model; None: the key is not written.
      default: the value that a missing key means; None: `expected`.
    """

    def read(config: ConfigFile) -> Mapping[str, Any]:
        value = expected(config)
        config.only(key, [value], default=value if default is None else default)
        return {}

    return Row(
        read_keys(key), read, _nothing if write is None else lambda model: {key: write(model)}
    )


def holds(**settings: Any) -> Row:
    """Return the row of settings that all models of the family share and that have no key."""
    shared = settings.items()
    return Row(
        read=lambda _: settings,
        write=requires(lambda model: all(getattr(model, k) == v for k, v in shared)).write,
    )


def requires(is_member: Callable[[Any], bool]) -> Row:
    """Return a row without keys that writes only models for which `is_member` is true."""
    return Row(write=lambda model: {} if is_member(model) else None)


def read_rows(rows: Iterable[Row], config: ConfigFile) -> dict[str, Any]:
    """Return the settings of all rows; a later row overrides an earlier one."""
    return {name: value for row in rows for name, value in row.read(config).items()}


def write_rows(rows: Iterable[Row], model: Any) -> dict[str, Any] | None:
    """Return the keys of all rows; None: the model is not of the family."""
    content: dict[str, Any] = {}
    for row in rows:
        own = row.write(model)
        if own is None:
            return None
        content |= own
    return content


def _read_classes(config: ConfigFile) -> Mapping[str, Any]:
    names = config.table("id2label").content
    # Two if neither key is set, as in transformers.
    return {"num_classes": len(names) if names else config.integer("num_labels", 2)}


def _write_classes(model: Any) -> Mapping[str, Any]:
    names = {str(number): f"LABEL_{number}" for number in range(model.num_classes)}
    return {"id2label": names, "label2id": {name: int(n) for n, name in names.items()}}


# A classifier's labels; `CLASSIFIER` has the entries.
CLASSES = Row(read=_read_classes, write=_write_classes)


# -- key tables that all families share, and of its quantization_config ----------------------------
# The keys are those of transformers' `PreTrainedConfig`, and further ones of published files.

# Entry of config.json for the files of sentence-transformers.
SENTENCES_KEY = "sentence_transformers"
DROPOUT = (
    "attention_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob", "hidden_dropout",
    "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate", "dropout",
)  # fmt: skip
# For any head.
COMMON: KeyTable = {
    **read_keys("architectures", "model_type", "quantization_config"),
    # Read for tokenization and generation.
    **read_keys("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    **ignore_keys(
        "it records who wrote the file, and with which version",
        "transformers_version", "_name_or_path", "name_or_path", "_commit_hash",
        "unsloth_fixed", "unsloth_version", "transformers.js_config", "model_name",
    ),
    **ignore_keys("Python files of a folder are never run", "auto_map", "custom_pipelines"),
    **ignore_keys("each tensor of a file has its own dtype", "dtype", "torch_dtype"),
    **ignore_keys(
        "it changes what transformers returns or how it computes, but not the logits",
        "return_dict", "use_return_dict", "output_hidden_states", "output_attentions",
        "tie_last_hidden_states", "use_cache", "output_past", "chunk_size_feed_forward",
        "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
        "_attn_implementation_internal", "experts_implementation", "_experts_implementation",
        "_experts_implementation_internal", "_flash_attn_2_enabled", "use_flash_attention",
        "gradient_checkpointing", "torchscript", "use_bfloat16", "tf_legacy_loss",
        "cache_implementation", "pretraining_tp",
    ),
    **ignore_keys(
        "it is a default of pipelines and of heads that are not imported",
        "finetuning_task", "task_specific_params", "prefix", "tokenizer_class",
        "sep_token_id", "cls_token_id", "mask_token_id", "classifier_dropout",
    ),
    **ignore_keys("it is used only for random initialization",
                 "initializer_range", "initializer_factor"),
    **ignore_keys(
        "dropout acts only in training, and this package's own settings set it", *DROPOUT
    ),
    **ignore_keys(
        "transformers ignores settings of generation in config.json; generation_config.json has "
        "them",
        "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids",
        "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
        "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "epsilon_cutoff",
        "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id",
        "forced_eos_token_id", "length_penalty", "max_length", "min_length",
        "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
        "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
        "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
        "suppress_tokens", "target_lookbehind", "temperature", "top_k", "top_p", "typical_p",
    ),
    "is_encoder_decoder": only(False),
    "is_decoder": only(False),
    "add_cross_attention": only(False),
    "cross_attention_hidden_size": only(None),
    "tie_encoder_decoder": only(False),
    "pruned_heads": Only(({},), default={}, reason="heads are removed from its tensors"),
    "per_layer_config": Only((None, {}), reason="all layers have the same settings"),
}  # fmt: skip
# For models without classes.
_NO_CLASSES = ignore_keys(
    "it describes classes, which this architecture does not have",
    "id2label", "label2id", "num_labels", "_num_labels", "problem_type",
)  # fmt: skip
# For language models: "is_decoder" means causal attention.
LANGUAGE: KeyTable = {
    **COMMON,
    **_NO_CLASSES,
    **ignore_keys("attention is causal anyway", "is_decoder"),
    **ignore_keys("the architecture has its own head, not the embeddings", SENTENCES_KEY),
}
# For encoders without a head.
ENCODER: KeyTable = {**COMMON, **_NO_CLASSES, **read_keys(SENTENCES_KEY)}
# For classifiers.
CLASSIFIER: KeyTable = {
    **COMMON,
    **read_keys("id2label", "num_labels"),
    **ignore_keys("id2label says the same", "label2id"),
    **ignore_keys("id2label or num_labels gives the number of classes", "_num_labels"),
    **ignore_keys("the architecture has its own head, not the embeddings", SENTENCES_KEY),
    "problem_type": only(None, "single_label_classification"),
}

_SHARED_QUANTIZATION: KeyTable = {
    **read_keys("quant_method"),
    **ignore_keys(
        "whether a tensor is quantized is read from the tensors themselves",
        "modules_to_not_convert", "modules_to_convert", "ignored_layers", "quantization_status",
    ),
    **ignore_keys("weights are read as floats here, whatever its value", "dequantize"),
}  # fmt: skip
QUANTIZATION: Mapping[str, KeyTable] = {
    awq.METHOD: {
        **_SHARED_QUANTIZATION,
        **ignore_keys("the tensors say it", "group_size", "q_group_size", "sym"),
        **ignore_keys(
            "it records how the codes were chosen, not which values they encode",
            "tokenizer", "dataset", "damp_percent", "act_group_aware", "true_sequential", "meta",
            "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block",
            "batch_size", "pad_token_id", "max_input_length", "cache_block_outputs",
            "modules_in_block_to_quantize",
        ),
        **ignore_keys(
            "it chooses kernels of other packages and does not change values",
            "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config",
        ),
        "bits": only(4),
        "w_bit": only(4),
        "zero_point": only(True),
        "version": only("gemm", "GEMM"),
        "format": only("gemm", "GEMM"),
        "desc_act": only(False),
    },
    float8.METHOD: {
        **_SHARED_QUANTIZATION,
        **read_keys("weight_block_size"),
        "activation_scheme": only("dynamic"),
        "fmt": only("e4m3"),
        # ue8m0 in files with float32 scales is of activations, which are floats here; scales of
        # one byte are rejected by their dtype.
        "scale_fmt": only("float", "ue8m0"),
        "expert_dtype": only("fp8"),
    },
    mxfp4.METHOD: _SHARED_QUANTIZATION,
}  # fmt: skip


def apply_aliases(content: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return a config.json with each key by its family's name, as transformers assigns them.

    Args:
      content: of the file.
      aliases: another name of a key -> the family's; where a file has both, the other name wins.
    """
    found = dict(content)
    for other, name in aliases.items():
        value = found.pop(other, None)
        if value is not None:
            found[name] = value
    return found
