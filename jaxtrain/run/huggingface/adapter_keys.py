"""Key table of PEFT's adapter_config.json: what is read, ignored and rejected of a LoRA adapter."""

from jaxtrain.config.key_table import KeyTable, Only, irrelevant, only, used

_CHANGES_BASE = (
    "other ways also change the base weights when PEFT loads the adapter; let PEFT convert it: "
    "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
)
KEYS: KeyTable = {
    **used("peft_type", "r", "lora_alpha", "use_rslora", "use_dora"),
    **irrelevant(
        "it names where the adapter comes from, or who wrote it",
        "task_type", "peft_version", "base_model_name_or_path", "revision", "auto_mapping",
        "inference_mode",
    ),
    **irrelevant("the tensors of the file say which weights have adapters",
                 "target_modules", "exclude_modules", "layers_pattern"),
    **irrelevant("the architecture says how a weight is stored", "fan_in_fan_out"),
    **irrelevant("dropout acts in training alone; Finetune.lora_dropout sets it", "lora_dropout"),
    **irrelevant("it says how values were drawn before training",
                 "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    **irrelevant("it says where and how PEFT computes, and changes no value",
                 "runtime_config", "megatron_config", "megatron_core", "merge_weights"),
    **irrelevant("use_qalora is false", "qalora_group_size"),
    "init_lora_weights": only(
        True, False, "gaussian", "eva", "orthogonal", "mica", reason=_CHANGES_BASE
    ),
    "bias": only("none"),
    "modules_to_save": Only((None, [])),
    "rank_pattern": Only((None, {}), reason="all adapters have one rank"),
    "alpha_pattern": Only((None, {}), reason="all adapters have one alpha"),
    "layers_to_transform": Only((None, []), reason="all layers have adapters"),
    "layer_replication": Only((None, []), reason="layers are not repeated"),
    "trainable_token_indices": Only((None, [], {})),
    "target_parameters": Only((None, [])),
    "alora_invocation_tokens": only(None, reason="adapters act on every token"),
    "lora_bias": only(False),
    "use_qalora": only(False),
    "use_bdlora": only(None, False),
    "ensure_weight_tying": only(False),
    "enable_lora": only(None),
    **dict.fromkeys(
        ("arrow_config", "kasa_config", "monteclora_config", "velora_config"), only(None)
    ),
}  # fmt: skip
