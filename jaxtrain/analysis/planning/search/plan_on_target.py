"""Plan of a budget's compute-optimal model on a target machine."""

from typing import Any

from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.analysis.planning.plan import plan
from jaxtrain.analysis.planning.result import Plan
from jaxtrain.analysis.planning.search.budget import Budget
from jaxtrain.analysis.planning.whole_run import sentence
from jaxtrain.config.errors import count_of, nearest_multiple
from jaxtrain.training.settings import load_config

# Llama's shape: heads of 128, embed_dim of 128 per layer (7B to 70B have 102 to 128), a gated mlp
# 8/3 as wide, so 12 D^2 parameters per layer.
_HEAD, _WIDTH_PER_LAYER, _PER_LAYER = 128, 128, 12
_LENGTH = 4096


def bindings_for(budget: Budget, devices: int) -> list[str]:
    """Return the bindings, on top of `llama_8b`, of a Llama with the budget's non-embedding
    parameters, and of a batch size that divides over the devices.

    The batch size is from arXiv 2401.02954 (equation 1), B = 0.2920 C^0.3271 tokens.
    """
    width = (budget.params * _WIDTH_PER_LAYER / _PER_LAYER) ** (1 / 3)
    # In large models the number of heads is a multiple of 8, so that `tensor` can shard them.
    unit = 8 if width > 16 * _HEAD else 1
    heads = nearest_multiple(round(width / _HEAD), unit)
    width = heads * _HEAD
    wide = nearest_multiple(round(8 / 3 * width), unit * _HEAD)
    layers = max(round(budget.params / (4 * width**2 + 3 * width * wide)), 1)
    rows = 0.2920 * budget.compute**0.3271 / _LENGTH
    return [
        f"Llama.num_layers={layers}", f"Llama.embed_dim={width}", f"Llama.num_heads={heads}",
        f"Llama.num_kv_heads={heads}", f"Llama.mlp_dim={wide}",
        f"TextData.sequence_length={_LENGTH}", "TextData.separate_documents=False",
        f"Train.global_batch_size={nearest_multiple(round(rows), devices)}",
    ]  # fmt: skip


def plan_on_target(budget: Budget, target: Target, *, price: float | None = None) -> Plan:
    """Return the plan of the model's fastest layout, for all of the budget's tokens.

    Args:
      budget: from `plan_budget`.
      target: the machine, whose speed must be known.
      price: dollars per device-hour.

    Raises:
      UserError: no layout fits there.
    """
    config = load_config("llama_8b", bindings_for(budget, target.devices))
    dcn = target.chip.dcn_bandwidth
    return plan(
        config,
        target.name,
        compile=False,
        search=True,
        price=price,
        tokens=budget.tokens,
        network=None if dcn is None else dcn * 8 / 1e9,
    )


def sentences(budget: Budget, found: Plan) -> list[str]:
    """Return lines that summarize a plan: the model, its layout and the training time."""
    run, time, layout = found.whole_run, found.time, found.found
    assert run is not None, "the machine's speed is known"
    assert time.error_bar is not None
    assert time.mfu is not None
    assert layout is not None
    model: Any = found.config.train.model
    watts = found.target.chip.watts
    shape = bindings_for(budget, found.target.devices)
    return [
        f"On {found.target.name}, a Llama of {count_of(model.num_layers, 'layer')}, "
        f"{model.embed_dim} wide, {found.per_step:,} tokens a batch: {time.seconds:.3g} s a step, "
        f"MFU {time.mfu:.1%}.",
        sentence(run, unit="tokens", error_bar=time.error_bar, watts=watts),
        f"Its layout by 'plan --search': jaxtrain plan llama_8b --target {found.target.name} "
        + " ".join(f'-b "{one}"' for one in [*shape, *layout.candidates[0].bindings]),
    ]
