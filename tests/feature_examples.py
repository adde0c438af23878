"""An example of each feature of the compatibility table, and which pairs of them are rejected.

`python tests/feature_examples.py` checks all pairs and writes those that are rejected to
feature_pairs.csv. To feature_combinations.csv it writes few combinations in which every other pair
occurs, which takes minutes. Look at the difference before it is committed. The first pairs were
written by the checks that stood in 20 files before the table.
"""

import csv
import functools
import itertools
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from jaxtrain.config.errors import UserError
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import Config, load_config

PAIRS = Path(__file__).parent / "feature_pairs.csv"
COMBINATIONS = Path(__file__).parent / "feature_combinations.csv"
DEVICES = 8

Bindings = Mapping[str, str]


def _gin(text: str) -> dict[str, str]:
    return dict(line.split(" = ") for line in text.strip().splitlines())


def _exchange(method: str, **settings: object) -> dict[str, str]:
    more = {f"Exchange.{name}": repr(value) for name, value in settings.items()}
    return {"Mesh.data": "2", "Exchange.method": repr(method), **more}


BASE = _gin("""
Train.model = @GPT()
Train.data = @TextData()
Train.steps = 8
Train.global_batch_size = 32
GPT.vocab_size = 256
GPT.num_layers = 2
GPT.embed_dim = 64
GPT.num_heads = 4
GPT.context_length = 32
TextData.source = 'synthetic'
TextData.sequence_length = 32
Mesh.fsdp = -1
""")
DEEPSEEK = _gin("""
Train.model = @DeepSeek()
DeepSeek.vocab_size = 256
DeepSeek.num_layers = 3
DeepSeek.dense_layers = 1
DeepSeek.embed_dim = 64
DeepSeek.num_heads = 4
DeepSeek.query_rank = 16
DeepSeek.key_value_rank = 16
DeepSeek.plain_dim = 8
DeepSeek.rotary_dim = 8
DeepSeek.value_dim = 16
DeepSeek.mlp_dim = 64
DeepSeek.expert_mlp_dim = 32
DeepSeek.num_experts = 8
DeepSeek.experts_per_token = 2
DeepSeek.expert_groups = 4
DeepSeek.groups_per_token = 2
DeepSeek.bias_speed = 0.01
DeepSeek.context_length = 32
DeepSeek.rope_scaling = 1.0
""")
MIXTRAL = _gin("""
Train.model = @Mixtral()
Mixtral.vocab_size = 256
Mixtral.num_layers = 2
Mixtral.embed_dim = 64
Mixtral.num_heads = 4
Mixtral.num_kv_heads = 2
Mixtral.mlp_dim = 64
Mixtral.num_experts = 4
Mixtral.context_length = 32
""")
T5 = _gin("""
Train.model = @T5()
Train.data = @PairData()
T5.vocab_size = 256
T5.num_layers = 2
T5.embed_dim = 64
T5.num_heads = 4
T5.mlp_dim = 128
PairData.source = 'synthetic'
PairData.source_length = 32
PairData.target_length = 32
""")

# Where things lie and in which order they are computed: the mathematics is that of one device.
LAYOUTS: dict[str, Bindings] = {
    "pipe": {"Mesh.pipe": "2"},
    "context": {"Mesh.context": "2"},
    "ulysses": {"Attention.context_parallel": "'ulysses'", "Mesh.context": "2"},
    "tensor": {"Mesh.tensor": "2"},
    "data": {"Mesh.data": "2"},
    "sequence": {"Sharding.sequence_parallel": "True", "Mesh.tensor": "2"},
    "collective": {
        "Sharding.collective_matmul": "True",
        "Mesh.tensor": "2",
        "Sharding.sequence_parallel": "True",
    },
    "2d": {"Sharding.tensor_layout": "'2d'", "Mesh.tensor": "4"},
    "2.5d": {
        "Sharding.tensor_layout": "'2.5d'",
        "Mesh.tensor": "8",
        "Sharding.tensor_depth": "2",
    },
    "3d": {"Sharding.tensor_layout": "'3d'", "Mesh.tensor": "8"},
    "expert": {**MIXTRAL, "Mesh.expert": "2"},
    "accumulation": {"Train.accumulation": "2"},
    "local_sum": {"Sharding.accumulate": "'local'"},
    "zero1": {"Sharding.zero": "1"},
    "zero2": {"Sharding.zero": "2"},
    "masters": {
        "Sharding.zero": "1",
        "Sharding.masters": "'sharded'",
        "Precision.compute": "'bfloat16'",
    },
    "state_host": {"Offload.optimizer_state": "'host'"},
    "state_disk": {"Offload.optimizer_state": "'disk'"},
    "params_host": {"Offload.parameters": "'host'"},
    "grads_host": {"Offload.gradients": "'host'"},
    "unrolled": {"Scan.layers_per_iteration": "2"},
    "zb": {"Mesh.pipe": "2", "Pipeline.schedule": "'zero_bubble'"},
    "interleaved": {
        "Mesh.pipe": "2",
        "Pipeline.schedule": "'interleaved'",
        "Pipeline.microbatches": "2",
        "Pipeline.virtual_stages": "2",
        "GPT.num_layers": "4",
    },
    "dualpipe": {
        "Mesh.pipe": "2",
        "Pipeline.schedule": "'dualpipe_v'",
        "Pipeline.virtual_stages": "2",
        "GPT.num_layers": "4",
    },
    "residuals": {"Mesh.pipe": "2", "Pipeline.backward": "'residuals'"},
    "remat_offload": {"Remat.policy": "'offload'"},
    "remat_offload_names": {"Remat.offload": "('residual',)", "Remat.policy": "'full'"},
    "fill": {"Train.fill_batch": "True", "Train.global_batch_size": "29"},
    "replay": {"Corruption.replay_every": "10"},
    "compare": {"Corruption.compare_replicas_every": "10"},
}
# What changes the numbers.
OTHERS: dict[str, Bindings] = {
    "sam": {"Optimizer.sharpness_radius": "0.05"},
    "noise": {"Train.noise_scale_every": "2", "Train.accumulation": "2"},
    "noise_alone": {"Train.noise_scale_every": "2", "Train.accumulation": "1"},
    "sophia_h": {"Optimizer.name": "'sophia_h'"},
    "sophia_g": {"Optimizer.name": "'sophia_g'"},
    "schedule_free": {"Optimizer.name": "'schedule_free'"},
    "adam8bit": {"Optimizer.name": "'adam8bit'"},
    "soap": {"Optimizer.name": "'soap'"},
    "adafactor": {"Optimizer.name": "'adafactor'"},
    "muon": {"Optimizer.name": "'muon'"},
    "moments16": {"Optimizer.moments": "'bfloat16'"},
    "average": {"Optimizer.average_decay": "0.9"},
    "skip": {"Guard.policy": "'skip'"},
    "spikes": {"Guard.spike_sigma": "3.0"},
    "dynamic": {"Precision.loss_scale": "'dynamic'", "Precision.compute": "'float16'"},
    "balance": DEEPSEEK,
    "mixtral_capacity": {**MIXTRAL, "Mixtral.capacity_factor": "1.25"},
    "mixtral_dropless": {**MIXTRAL, "Mixtral.capacity_factor": "None"},
    "t5": T5,
    "local_sgd": _exchange("local_sgd", period=2),
    "diloco": _exchange("diloco", period=2),
    "streaming": _exchange("diloco", period=4, fragments=2, delay=1),
    "gossip": _exchange("gossip"),
    "int8": _exchange("int8"),
    "top_k": _exchange("top_k"),
    "sign_sgd": _exchange("sign_sgd"),
    "power_sgd": _exchange("power_sgd"),
    "asynchronous": _exchange("asynchronous"),
    "local": {"Checkpoint.local_directory": "'/dev/shm/run'"},
    "plateau": {"Schedule.plateau_patience": "2"},
    "unfreeze": {"Finetune.unfreeze": "{'layers/*': 2}"},
    "freeze": {"Finetune.freeze": "('layers/*',)"},
    "lora": {"Finetune.lora_rank": "4"},
    "lora_dropout": {"Finetune.lora_rank": "4", "Finetune.lora_dropout": "0.1"},
    "qlora": {"Finetune.lora_rank": "4", "Finetune.quantize_bits": "'int8'"},
    "int8_matmul": {"Precision.matmul": "'int8'"},
    "float8": {"Precision.matmul": "'float8'"},
    "grad16": {"Precision.gradients": "'bfloat16'", "Precision.compute": "'bfloat16'"},
}  # fmt: skip
EXAMPLES: dict[str, Bindings] = {**LAYOUTS, **OTHERS}


def merge(*names: str) -> dict[str, str] | None:
    """The bindings of these features over the base; None where two set one thing otherwise."""
    own: dict[str, str] = {}
    for name in names:
        for key, value in EXAMPLES[name].items():
            if own.setdefault(key, value) != value:
                return None
    return {**BASE, **own}


def config_of(bindings: Bindings) -> Config:
    """The configuration of bindings, without those of models and data that it has not."""
    model, data = bindings["Train.model"][1:-2], bindings["Train.data"][1:-2]
    left_out = {"GPT", "TextData"} - {model, data}
    lines = [f"{k} = {v}" for k, v in bindings.items() if k.split(".")[0] not in left_out]
    return _loaded("\n".join(lines))


@functools.cache
def _loaded(text: str) -> Config:
    with tempfile.NamedTemporaryFile("w", suffix=".gin") as file:
        file.write(text)
        file.flush()
        return load_config(file.name)


def errors(bindings: Bindings) -> list[str]:
    """What is wrong with bindings on eight devices of a CPU."""
    try:
        preflight.check(config_of(bindings), device_count=DEVICES, platform="cpu", reads_data=False)
    except UserError as error:
        return str(error).splitlines()
    return []


def pairs() -> Iterator[tuple[str, str, dict[str, str]]]:
    """All pairs of examples that set nothing otherwise, and their bindings."""
    for first, second in itertools.combinations(EXAMPLES, 2):
        bindings = merge(first, second)
        if bindings is not None:
            yield first, second, bindings


def rejected() -> set[tuple[str, str]]:
    """The pairs in feature_pairs.csv."""
    with PAIRS.open() as file:
        return {(row["first"], row["second"]) for row in csv.DictReader(file)}


# -- combinations ----------------------------------------------------------------------------------

# Their state is on disks, copied or compared between steps, which the loop around it does; pairs of
# rows are in test_t5.py.
_LEFT_OUT = {"state_disk", "replay", "compare", "noise_alone", "t5", "local"}
# Of a kind that another example stands for.
_LEFT_OUT |= {
    "soap", "adafactor", "muon", "spikes", "float8", "grad16", "zero1", "remat_offload_names",
    "2.5d", "3d", "dualpipe", "streaming", "sign_sgd", "top_k", "gossip", "average", "plateau",
    "sequence", "local_sgd", "asynchronous", "moments16", "freeze",
}  # fmt: skip
_NAMES = [name for name in EXAMPLES if name not in _LEFT_OUT]
# Beside those that others bring with them. Of 11 one combination did not compile for CPUs and one
# hung, for reasons nobody found; no pair of them does.
_MOST_AT_ONCE = 9
_ATTEMPTS = 400
# What failed together once, with more than a pair: whole in a combination.
TOGETHER = (("noise", "sophia_g", "params_host"), ("power_sgd", "expert", "mixtral_capacity"))


@functools.cache
def allowed_pairs() -> set[frozenset[str]]:
    """The pairs that some combination has to have."""
    refused = {frozenset(pair) for pair in rejected()}
    return {
        frozenset(pair)
        for pair in itertools.combinations(_NAMES, 2)
        if merge(*pair) is not None and frozenset(pair) not in refused
    }


def combinations() -> list[tuple[str, ...]]:
    """The combinations in feature_combinations.csv."""
    with COMBINATIONS.open() as file:
        return [tuple(row) for row in csv.reader(file)]


@functools.cache
def held(names: tuple[str, ...]) -> frozenset[str]:
    """The features of a combination: those of these names, and those whose bindings they have."""
    own: dict[str, str] = {}
    for name in names:
        own.update(EXAMPLES[name])
    own.setdefault("Mixtral.capacity_factor", "None")  # the model's default
    return frozenset(name for name in _NAMES if EXAMPLES[name].items() <= own.items())


@functools.cache
def brought_by(name: str) -> frozenset[str]:
    """The features whose bindings this one has."""
    own = EXAMPLES[name].items()
    return frozenset(other for other in _NAMES if EXAMPLES[other].items() <= own)


def named(features: Iterable[str]) -> tuple[str, ...]:
    """The names among features that bring all others with them."""
    features = tuple(features)
    brought = {one for other in features for one in brought_by(other) if one != other}
    return tuple(one for one in features if one not in brought)


def pairs_of(features: Iterable[str]) -> set[frozenset[str]]:
    """All pairs of features."""
    return {frozenset(pair) for pair in itertools.combinations(features, 2)}


def covering_array() -> list[tuple[str, ...]]:
    """Few combinations of examples in which every allowed pair occurs.

    The fewest of many attempts. What preflight rejects of three or more, since sizes do not divide,
    the next attempts avoid.
    """
    rejected_together: set[frozenset[str]] = set()
    while True:
        found = min(
            (_attempt(random.Random(seed), rejected_together) for seed in range(_ATTEMPTS)), key=len
        )
        worse = {_fewest_rejected(one) for one in found if errors(merge(*one) or {})}
        if not worse:
            return [named(one) for one in found]
        rejected_together |= worse


def _attempt(rng: random.Random, apart: Iterable[frozenset[str]]) -> list[tuple[str, ...]]:
    """Combinations with every allowed pair, of which none has one of the sets in `apart`."""
    partners: dict[str, set[str]] = {name: set() for name in _NAMES}
    for one, other in itertools.permutations(_NAMES, 2):
        if frozenset((one, other)) in allowed_pairs():
            partners[one].add(other)
    left = {name: set(others) for name, others in partners.items()}

    def fill(chosen: frozenset[str]) -> tuple[float, frozenset[str]]:
        """The features with others as long as one more brings pairs of `left`; how many."""
        new = {one: left[one] & chosen for one in chosen}
        gained = sum(map(len, new.values())) / 2
        while len(named(chosen)) < _MOST_AT_ONCE:
            best = (1.0, chosen)
            for name in _NAMES:
                more = chosen | brought_by(name)
                added = more - chosen
                if not added or any(not more - {one} <= partners[one] for one in added):
                    continue
                gain = sum(len(left[one] & chosen) + len(left[one] & added) / 2 for one in added)
                if gain and not any(one <= more for one in apart):
                    best = max(best, (gain + rng.random(), more), key=lambda found: found[0])
            if best[1] == chosen:
                break
            gained, chosen = gained + int(best[0]), best[1]
        return gained, chosen

    starts = [fill(frozenset().union(*map(brought_by, names))) for names in TOGETHER]
    out: list[tuple[str, ...]] = []
    while starts:
        chosen = max(starts, key=lambda found: found[0])[1]
        out.append(tuple(sorted(chosen)))
        whole = held(out[-1])
        for one in whole:
            left[one] -= whole
        rest = [names for names in TOGETHER if not any(set(names) <= set(one) for one in out)]
        open_pairs = sorted((one, other) for one, others in left.items() for other in others)
        starts = [fill(frozenset().union(*map(brought_by, names))) for names in rest]
        if not starts and open_pairs:
            # Those that go together with fewest others first: at the end each would be alone.
            open_pairs.sort(key=lambda pair: len(partners[pair[0]] & partners[pair[1]]))
            few = open_pairs[:4]
            chosen_pairs = [rng.choice(few) for _ in range(4)]
            starts = [fill(brought_by(one) | brought_by(other)) for one, other in chosen_pairs]
    return out


def _fewest_rejected(names: tuple[str, ...]) -> frozenset[str]:
    """Features that preflight rejects, but not without any one of them."""
    left = list(names)
    for name in names:
        rest = [one for one in left if one != name]
        if errors(merge(*rest) or {}):
            left = rest
    return frozenset(left)


if __name__ == "__main__":
    with PAIRS.open("w") as file:
        file.write("first,second\n")
        for first, second, bindings in pairs():
            if errors(bindings):
                file.write(f"{first},{second}\n")
    lines = [",".join(one) for one in covering_array()]
    COMBINATIONS.write_text("\n".join(lines) + "\n")
