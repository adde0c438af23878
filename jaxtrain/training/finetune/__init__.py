"""Fine-tuning: LoRA, QLoRA, frozen and unfrozen parameters."""
