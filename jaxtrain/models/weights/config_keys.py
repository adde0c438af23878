"""Key tables of config.json that all families share, and of its quantization_config.

The keys are those of transformers' `PreTrainedConfig`, and further ones of published files.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.key_table import KeyTable, Only, ignore_keys, only, read_keys
from jaxtrain.models.weights.formats import awq, float8, mxfp4
from jaxtrain.models.weights.sentences import KEY

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
    **ignore_keys("the architecture has its own head, not the embeddings", KEY),
}
# For encoders without a head.
ENCODER: KeyTable = {**COMMON, **_NO_CLASSES, **read_keys(KEY)}
# For classifiers.
CLASSES: KeyTable = {
    **COMMON,
    **read_keys("id2label", "num_labels"),
    **ignore_keys("id2label says the same", "label2id"),
    **ignore_keys("id2label or num_labels gives the number of classes", "_num_labels"),
    **ignore_keys("the architecture has its own head, not the embeddings", KEY),
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
