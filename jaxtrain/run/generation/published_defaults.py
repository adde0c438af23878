"""Generation defaults of a published model (generation_config.json).

transformers' generate() takes both from generation_config.json, and the ends from config.json where
there is no such file. `jaxtrain generate` does the same for a run that started from the model.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtrain.config.buckets import AnyPath, to_path
from jaxtrain.config.errors import UserError
from jaxtrain.config.key_table import KeyTable, Only, ignore_keys, only, read_keys, validate_keys
from jaxtrain.data.text.chat.conversations import Templated
from jaxtrain.data.text.source import text_of
from jaxtrain.data.tokenization.tokenizer_folder import GENERATION, MODEL_CONFIG, ends_of, read_json
from jaxtrain.models.weights.folder import CARRIED_FOLDER
from jaxtrain.training.settings import Config, TextSource

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


def published_folder(config: Config, workdir: AnyPath | None) -> AnyPath | None:
    """Return the folder with the config.json of the published model that a run started from, if it
    did."""
    start = config.train.start_from
    for one in (workdir, None if start is None else to_path(start)):
        if one is not None:
            for folder in (one / CARRIED_FOLDER, one):
                if (folder / MODEL_CONFIG).is_file():
                    return folder
    return None


def ends_of_run(config: Config, workdir: AnyPath | None) -> tuple[int, ...]:
    """Return the tokens that end an answer of a run's model.

    For a run that started from a published model they are those at which transformers stops, and
    the data's `end_of_text`; for another run, or if the model has none, the tokenizer's
    end-of-text token.
    """
    folder = published_folder(config, workdir)
    found = () if folder is None else end_tokens(folder)
    data = config.train.data
    if isinstance(data, TextSource) and getattr(data, "source", "") != "synthetic":
        named = data if isinstance(data, Templated) else text_of(data)
        if not found or getattr(named or data, "end_of_text", None) is not None:
            end = data.open_tokenizer().end_of_text
            found += () if end is None or end in found else (end,)
    return found


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
