"""Generation defaults of a published model (generation_config.json).

transformers' generate() takes both from generation_config.json, and the ends from config.json where
there is no such file. `jaxtrain generate` does the same for a run that started from the model.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError
from jaxtrain.config.key_table import KeyTable, Only, ignore_keys, only, read_keys, validate_keys
from jaxtrain.config.shipped import MODEL_CONFIG
from jaxtrain.data.tokenization.tokenizer_folder import GENERATION, ends_of, read_json
from jaxtrain.run.generation.answer import published_folder
from jaxtrain.training.settings import Config

TOP_K = 50  # of transformers' sampling, by default
_SUPPRESSES = "the tokens that may be generated are not restricted here"

# Of generation_config.json.
GENERATION_KEYS: KeyTable = {
    **read_keys(
        "eos_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
        "num_beams", "length_penalty", "early_stopping",
    ),
    **ignore_keys(
        "an answer's greatest length is --max-new-tokens", "max_length", "max_new_tokens"
    ),
    **ignore_keys(
        "the run's tokenizer and data make prompts and sources",
        "bos_token_id", "pad_token_id", "decoder_start_token_id",
    ),
    **ignore_keys(
        "it changes how an answer is computed, not the answer",
        "use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config",
        "disable_compile", "prefill_chunk_size", "continuous_batching_config", "low_memory",
    ),
    **ignore_keys(
        "it changes what is returned with an answer, and how many answers",
        "output_attentions", "output_hidden_states", "output_logits", "output_scores",
        "return_dict_in_generate", "num_return_sequences", "return_legacy_cache",
    ),
    **ignore_keys(
        "draft tokens do not change an answer; --draft turns them on",
        "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "use_mtp",
        "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind",
        "target_lookbehind", "prompt_lookup_num_tokens", "max_matching_ngram_size",
        "speculation_type",
    ),
    **ignore_keys(
        "it describes the file",
        "transformers_version", "_from_model_config", "_commit_hash", "_original_object_hash",
    ),
    "assistant_ensemble_weight": only(None, 0.0),
    **dict.fromkeys(
        ("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
        only(0, reason=_SUPPRESSES),
    ),
    **dict.fromkeys(
        ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias",
         "forced_bos_token_id", "forced_eos_token_id", "force_words_ids", "constraints",
         "exponential_decay_length_penalty", "watermarking_config"),
        Only((None, [], {}), reason=_SUPPRESSES),
    ),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty"), only(0.0)),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), only(1.0)),
    **dict.fromkeys(("top_h", "max_time", "dola_layers"), only(None)),
    "penalty_alpha": Only((None, 0.0)),
    "num_beam_groups": only(1),
    "renormalize_logits": only(False),
    "remove_invalid_values": only(False),
    "token_healing": only(False),
    "stop_strings": Only((None, []), reason="give --stop"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Defaults of options of `jaxtrain generate` that are not given.

    Attributes:
      options: by name, such as `temperature`.
      beams: number of beams, ignored with sampling options; None: sampling.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    beams: int | None = None


def end_tokens(folder: AnyPath) -> tuple[int, ...]:
    """Return the tokens at which transformers' generate() ends an answer of a folder's model."""
    if (folder / GENERATION).is_file():
        return ends_of(read_json(folder / GENERATION))
    content = read_json(folder / MODEL_CONFIG)
    inner = content.get("text_config")
    return ends_of(content) or (ends_of(inner) if isinstance(inner, dict) else ())


def published_defaults(config: Config, workdir: AnyPath | None) -> Defaults:
    """Return the defaults of the published model that a run started from; none of another run.

    Raises:
      UserError: its generation_config.json has unsupported settings.
    """
    folder = published_folder(config, workdir)
    if folder is None or not (folder / GENERATION).is_file():
        return Defaults()
    content, where = read_json(folder / GENERATION), str(folder / GENERATION)
    validate_keys(content, GENERATION_KEYS, where=where)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "num_beams",
                 "length_penalty"):  # fmt: skip
        value = content.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(
                f"{where}: {name} = {value!r} is not a number; correct it, or remove it"
            )
    options: dict[str, Any] = {}
    if content.get("repetition_penalty") not in (None, 1):
        options["repetition_penalty"] = float(content["repetition_penalty"])
    beams = int(content.get("num_beams") or 1)
    if beams > 1:
        if content.get("do_sample"):
            raise UserError(
                f"{where}: num_beams = {beams} with do_sample = True, beams that are drawn, are "
                "not supported; give --beams, or remove one of them from the file"
            )
        stopping = {True: "true", False: "false"}.get(
            content.get("early_stopping") or False, "never"
        )
        options |= {"length_penalty": content.get("length_penalty"), "early_stopping": stopping}
        return Defaults(options, beams)
    if content.get("do_sample") is False:
        options["temperature"] = 0.0
    elif content.get("do_sample"):
        top_k = content.get("top_k")
        options["temperature"] = float(content.get("temperature") or 1.0)
        options["top_k"] = (TOP_K if top_k is None else int(top_k)) or None
        options |= {
            name: content[name] for name in ("top_p", "min_p") if content.get(name) is not None
        }
    return Defaults(options)
