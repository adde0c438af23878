"""Names of settings in other libraries, mapped to ours.

The names are those of transformers' `TrainingArguments` and `config.json`, nanoGPT, Lightning,
torchtitan, Megatron-LM, PyTorch and Keras. A target is written as a binding, or as an option of the
command line. Its section is `@model`, `@data` or `@rule` where the configuration names it:
`Train.model`, `Train.data`, `Optimizer.name`.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from jaxtrain.config.errors import nearest
from jaxtrain.config.values import settings_of

# The settings that name a section, by the target's section.
CHOSEN = {"@model": ("Train", "model"), "@data": ("Train", "data"), "@rule": ("Optimizer", "name")}

# Sections as other libraries call them.
SECTIONS = {
    "model": "@model",
    "net": "@model",
    "network": "@model",
    "data": "@data",
    "dataset": "@data",
    "dataloader": "@data",
    "trainer": "Train",
    "training": "Train",
    "trainingarguments": "Train",
    "optim": "Optimizer",
    "scheduler": "Schedule",
    "lrscheduler": "Schedule",
    "parallelism": "Mesh",
    "parallel": "Mesh",
    "deadlines": "Timeouts",
    "timeout": "Timeouts",
    "lora": "Finetune",
    "peft": "Finetune",
}


@dataclasses.dataclass(frozen=True)
class Synonym:
    """Names of one or more settings in other libraries.

    Attributes:
      words: those names, separated by spaces; case, `_` and `-` do not count. A name with a
        section, such as `Checkpoint.every`, applies in that section alone.
      targets: the settings here.
      unit: how the value differs from the other library's.
    """

    words: str
    targets: tuple[str, ...]
    unit: str = ""


def _same(words: str, *targets: str, unit: str = "") -> Synonym:
    return Synonym(words, targets, unit)


SYNONYMS = (
    _same("lr peak_lr max_lr base_lr init_lr initial_lr eta step_size", "Optimizer.learning_rate"),
    _same("wd decay l2_regularization", "Optimizer.weight_decay"),
    _same(
        "max_grad_norm max_norm grad_clip gradient_clip gradient_clipping gradient_clip_val "
        "clip_grad clip_grad_norm grad_norm_clip clip",
        "Optimizer.clip_norm",
    ),
    _same("optim optimizer opt optimizer_type", "Optimizer.name"),
    _same("ema ema_decay use_ema", "Optimizer.average_decay"),
    _same("beta1 adam_beta1", "@rule.b1"),
    _same("beta2 adam_beta2", "@rule.b2"),
    _same("betas", "@rule.b1", "@rule.b2"),
    _same("eps adam_epsilon adam_eps", "@rule.epsilon"),
    _same("lr_scheduler lr_scheduler_type scheduler lr_schedule lr_decay_style", "Schedule.name"),
    _same("warmup num_warmup_steps warmup_iters lr_warmup_steps", "Schedule.warmup_steps"),
    _same("warmup_ratio", "Schedule.warmup_steps", unit="in steps"),
    _same(
        "min_lr min_lr_ratio end_lr final_lr eta_min",
        "Schedule.final_fraction",
        unit="as a fraction of Optimizer.learning_rate",
    ),
    _same("lr_decay_iters decay_iters lr_decay_steps", "Schedule.decay_steps"),
    _same(
        "max_steps num_steps total_steps train_steps training_steps num_train_steps max_iters "
        "num_iters iters iterations train_iters n_steps max_train_steps",
        "Train.steps",
    ),
    _same(
        "epochs epoch num_epochs n_epochs max_epochs num_train_epochs",
        "Train.steps",
        unit="in steps: epochs x training examples / Train.global_batch_size",
    ),
    _same("batch batch_size bs train_batch_size total_batch_size", "Train.global_batch_size"),
    _same(
        "per_device_train_batch_size per_device_batch_size device_batch_size local_batch_size "
        "micro_batch_size train_micro_batch_size_per_gpu mini_batch_size",
        "Train.global_batch_size",
        unit="over all devices and Train.accumulation",
    ),
    _same(
        "gradient_accumulation_steps gradient_accumulation grad_accum grad_accumulation "
        "grad_accum_steps accumulate_grad_batches accum_steps accumulation_steps",
        "Train.accumulation",
    ),
    _same("random_seed random_state manual_seed data_seed", "Train.seed"),
    _same("logging_steps log_interval log_steps log_every_n_steps print_every", "Train.log_every"),
    _same(
        "eval_steps eval_interval eval_freq val_interval val_check_interval validate_every "
        "validation_steps test_every",
        "Train.eval_every",
    ),
    _same("eval_iters limit_val_batches max_eval_batches val_batches", "Train.eval_batches"),
    _same(
        "save_steps save_interval save_freq checkpoint_every checkpoint_interval ckpt_every "
        "ckpt_interval Checkpoint.every Checkpoint.interval Checkpoint.save_every "
        "Checkpoint.steps Checkpoint.freq",
        "Train.save_every",
    ),
    _same("save_total_limit max_to_keep keep_last save_top_k", "Checkpoint.keep"),
    _same("async_save async_checkpointing", "Checkpoint.asynchronous"),
    _same(
        "pretrained pretrained_model init_from model_name model_name_or_path load_from checkpoint "
        "checkpoint_path ckpt_path",
        "Train.start_from",
    ),
    _same(
        "output_dir out_dir log_dir save_dir checkpoint_dir resume resume_from "
        "resume_from_checkpoint workdir default_root_dir",
        "--workdir",
    ),
    _same("early_stopping early_stopping_patience", "Best.patience"),
    _same("metric_for_best_model monitor load_best_model_at_end", "Best.metric"),
    _same("greater_is_better Best.mode", "Best.order"),
    _same("report_to logger wandb use_wandb mlflow wandb_log", "Tracker.name"),
    _same("wandb_project project_name experiment experiment_name", "Tracker.project"),
    _same("wandb_run_name wandb_name", "Tracker.run_name"),
    # Precision and memory.
    _same("bf16 bfloat16 use_bf16", "Precision.compute = 'bfloat16'"),
    _same("fp16 float16 half", "Precision.compute = 'float16'", "Precision.loss_scale = 'dynamic'"),
    _same("fp32 float32", "Precision.compute = 'float32'"),
    _same("fp8 float8 use_fp8", "Precision.matmul = 'float8'"),
    _same("tf32 allow_tf32", "Precision.float32_products = 'tf32'"),
    _same("mixed_precision amp autocast dtype torch_dtype precision", "Precision.compute"),
    _same("param_dtype params_dtype weight_dtype", "Precision.params"),
    _same(
        "gradient_checkpointing activation_checkpointing checkpoint_activations recompute "
        "recompute_granularity remat use_remat",
        "Remat.policy",
    ),
    _same("cpu_offload offload_optimizer optimizer_offload", "Offload.optimizer_state"),
    _same("offload_param offload_params param_offload", "Offload.parameters"),
    _same(
        "flash flash_attn flash_attention use_flash_attn use_flash_attention attn_implementation "
        "attention_impl attn_impl sdpa",
        "Attention.kernel",
    ),
    _same("label_smoothing_factor smoothing", "Loss.label_smoothing"),
    _same("z_loss z_loss_weight", "Loss.z_weight"),
    _same("scan_layers unroll", "Scan.layers_per_iteration"),
    # Parallelism.
    _same(
        "tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree model_parallel "
        "tensor_model_parallel_size model_parallel_size Mesh.model",
        "Mesh.tensor",
    ),
    _same(
        "dp dp_size ddp data_parallel data_parallel_size dp_replicate hsdp "
        "data_parallel_replicate_degree",
        "Mesh.data",
    ),
    _same("dp_shard fsdp_size data_parallel_shard_degree", "Mesh.fsdp"),
    _same(
        "pp pp_size pipeline pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
        "pipeline_model_parallel_size num_stages Mesh.stage",
        "Mesh.pipe",
    ),
    _same("ep ep_size expert_parallel expert_parallel_size expert_model_parallel_size",
          "Mesh.expert"),
    _same("cp cp_size context_parallel_size context_parallel_degree", "Mesh.context"),
    _same("sp sp_size sequence_parallel_size", "Sharding.sequence_parallel", "Mesh.context"),
    _same("zero_stage zero_optimization fsdp_stage sharding_strategy", "Sharding.zero"),
    _same("use_distributed_optimizer distributed_optimizer", "Sharding.masters"),
    _same("grad_reduce_in_fp32 accumulate_allreduce_grads_in_fp32 grad_accum_dtype "
          "gradient_accumulation_dtype reduce_dtype", "Precision.gradients"),
    _same("num_microbatches n_microbatches", "Pipeline.microbatches"),
    _same("pipeline_schedule pp_schedule", "Pipeline.schedule"),
    _same("num_devices n_devices cpu_devices", "--simulate-devices"),
    # Fine-tuning.
    _same("lora_r lora_dim Finetune.r Finetune.rank use_lora lora", "Finetune.lora_rank"),
    _same("target_modules lora_target_modules lora_modules", "Finetune.lora_targets"),
    _same("use_dora dora", "Finetune.lora_magnitudes"),
    _same("use_rslora rslora", "Finetune.lora_scale = 'sqrt_rank'"),
    _same("load_in_8bit", "Finetune.quantize_bits = 'int8'"),
    _same("load_in_4bit qlora", "Finetune.quantize_bits = 'nf4'"),
    _same("frozen freeze_layers requires_grad trainable", "Finetune.freeze"),
    # Models.
    _same(
        "n_embd n_embed d_model hidden_size dim hidden_dim embed_size embedding_size "
        "embedding_dim emb_dim emb_size model_dim n_embedding feature_dim",
        "@model.embed_dim", "@model.width", "@model.widths", "@model.hidden",
    ),
    _same(
        "n_layer n_layers layers num_hidden_layers num_blocks n_blocks "
        "num_encoder_layers num_decoder_layers",
        "@model.num_layers", "@model.depth",
    ),
    _same("n_head n_heads heads num_attention_heads", "@model.num_heads"),
    _same(
        "n_kv_heads n_kv_head num_key_value_heads kv_heads num_query_groups num_kv_groups",
        "@model.num_kv_heads",
    ),
    _same("d_head d_kv head_size kv_channels", "@model.head_dim"),
    _same(
        "intermediate_size ffn_dim d_ff d_inner dim_feedforward n_inner ffn_hidden_size "
        "mlp_size ffn_size mlp_hidden_size feed_forward_dim ff_dim mlp_ratio",
        "@model.mlp_dim",
    ),
    _same(
        "block_size max_position_embeddings n_positions n_ctx ctx_len context_window "
        "max_seq_len max_seq_length max_sequence_length seq_len seq_length sequence_len "
        "max_length max_len context_size",
        "@model.context_length", "@data.sequence_length",
    ),
    _same("n_vocab vocab vocabulary_size padded_vocab_size", "@model.vocab_size"),
    _same("rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon",
          "@model.norm_eps"),
    _same("rope_base rotary_base", "@model.rope_theta"),
    _same("tie_word_embeddings weight_tying tie_weights share_embeddings",
          "@model.tie_embeddings"),
    _same("attention_bias", "@model.qkv_bias"),
    _same("window_size", "@model.sliding_window"),
    _same("n_experts num_local_experts n_routed_experts moe_num_experts", "@model.num_experts"),
    _same("num_experts_per_tok moe_top_k top_k_experts top_k", "@model.experts_per_token"),
    _same("router_aux_loss_coef aux_loss_weight moe_aux_loss_coeff", "@model.balance_weight"),
    _same(
        "n_classes num_labels n_labels nclass num_class classes",
        "@model.num_classes", "@data.num_classes",
    ),
    _same("in_channels num_channels in_chans input_channels", "@model.channels", "@data.channels"),
    _same("img_size resolution input_size", "@model.image_size", "@data.image_size"),
    _same("drop dropout_rate dropout_p attention_dropout resid_pdrop attn_dropout",
          "@model.dropout"),
    _same("d_state ssm_state_size", "@model.state_dim"),
    _same("d_conv conv_kernel", "@model.conv_width"),
    # Data.
    _same(
        "dataset dataset_name dataset_path data_path train_data train_path train_file "
        "training_file path",
        "@data.source", "@data.data_dir",
    ),
    _same(
        "val_data val_path val_file eval_file eval_dataset validation_file test_file",
        "@data.heldout_source", "@data.heldout_fraction",
    ),
    _same("val_split val_fraction validation_split test_size eval_fraction",
          "@data.heldout_fraction"),
    _same("tokenizer_name tokenizer_path tokenizer_file", "@data.tokenizer"),
    _same("text_column text_key", "@data.text_field"),
    _same("num_workers dataloader_num_workers n_workers", "@data.workers"),
    _same("pack pack_sequences sample_packing", "@data.packing"),
)  # fmt: skip


# Names of the targets if the configuration does not say which model, data or rule it has.
EXAMPLES = {"@model": "GPT", "@data": "TextData", "@rule": "AdamW"}


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


_BY_WORD = {_plain(word): one for one in SYNONYMS for word in one.words.split()}


def suggest_setting(
    section: str | None, word: str, used: Mapping[str, type], chosen: Mapping[str, type]
) -> str:
    """Return `; did you mean 'Optimizer.learning_rate'?` for an unknown setting's name; '' if
    unknown.

    Args:
      section: what was written before the dot; None: there was no dot.
      word: what was written after it.
      used: the configuration's sections, and the written one if it exists.
      chosen: the sections that the configuration names, by the keys of CHOSEN.
    """
    entry = _BY_WORD.get(_plain(f"{section}.{word}")) or _BY_WORD.get(_plain(word))
    found = _targets(entry, section, used, chosen) if entry else []
    unit = f" ({entry.unit})" if entry and entry.unit else ""
    if not found:
        found, unit = _same_name(section, word, [*used.values(), *chosen.values()]), ""
    return f"; did you mean {', '.join(map(repr, found))}{unit}?" if found else ""


def suggest_option(option: str) -> str:
    """Return the binding to write in place of an option: `; write -b 'Train.steps=VALUE'`."""
    entry = _BY_WORD.get(_plain(option))
    if entry is None:
        return ""
    target = _targets(entry, None, {}, {})[0]
    option = target if target.startswith("-") else f"-b {_with_value(target)!r}"
    return f"; write {option}{f' ({entry.unit})' if entry.unit else ''}"


def suggest_section(section: str, chosen: Mapping[str, type]) -> str | None:
    """Return our name of another library's section, or None."""
    found = SECTIONS.get(_plain(section))
    if found in CHOSEN:
        return chosen[found].__name__ if found in chosen else None
    return found


def _with_value(target: str) -> str:
    return target if "=" in target else f"{target}=VALUE"


def _targets(
    entry: Synonym, section: str | None, used: Mapping[str, type], chosen: Mapping[str, type]
) -> list[str]:
    """Return the settings for a name that this configuration can have."""
    found = []
    for target in entry.targets:
        owner, _, setting = target.partition(".")
        if owner not in CHOSEN:
            found.append(target)
        elif section in used and setting in settings_of(used[section]):
            return [f"{section}.{setting}"]
        elif owner not in chosen:
            found.append(f"{EXAMPLES[owner]}.{setting}")
        elif setting in settings_of(chosen[owner]):
            found.append(f"{chosen[owner].__name__}.{setting}")
    return found


def _same_name(section: str | None, word: str, classes: Iterable[type]) -> list[str]:
    """Return the settings of that name in any section; without a section, similar names too."""
    known = {
        f"{cls.__name__}.{setting}": setting for cls in classes for setting in settings_of(cls)
    }
    exact = [name for name, setting in known.items() if _plain(setting) == _plain(word)]
    if exact or section is not None:
        return exact
    close = nearest(word, set(known.values()), cutoff=0.8)
    return [name for name, setting in known.items() if setting == close]
