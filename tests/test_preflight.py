"""What cannot run is rejected before any compile, everything wrong in one message."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.training.preflight.preflight import check
from jaxtrain.training.settings import load_config

GPT = ["Mesh.fsdp = 4", "Mesh.tensor = 2"]
RINGS = ["Sharding.sequence_parallel = True", "Sharding.collective_matmul = True"]


def refused(*bindings: str, name: str = "gpt_quickstart", devices: int = 8) -> str:
    with pytest.raises(UserError) as caught:
        check(load_config(name, bindings), device_count=devices, platform="cpu")
    return str(caught.value)


SIZES = ("vocab_size", "num_layers", "embed_dim", "context_length")
ATTENTION = (*SIZES, "num_heads")
LLAMA = (*ATTENTION, "num_kv_heads", "mlp_dim", "rope_original_context_length")


@pytest.mark.parametrize(
    ("name", "config", "settings"),
    [
        ("GPT", "gpt_quickstart", ATTENTION),
        ("Llama", "llama_1b", LLAMA),
        ("Mixtral", "mixtral_tiny", (*LLAMA, "num_experts")),
        ("LSTM", "lstm_quickstart", SIZES),
    ],
)
@pytest.mark.parametrize("value", [0, -32])
def test_a_size_below_one_is_refused_before_anything_is_built(name, config, settings, value):
    for setting in settings:
        message = refused(f"{name}.{setting} = {value}", name=config)
        assert message == f"{name}.{setting}={value}; use at least 1"


@pytest.mark.parametrize(
    ("binding", "config", "words"),
    [
        ("Scan.layers_per_iteration = -1", "gpt_quickstart", "use 0 or more"),
        ("GPT.norm_eps = -1", "gpt_quickstart", "use a number above 0, such as 1e-05"),
        ("Llama.norm_eps = 0", "llama_1b", "use a number above 0, such as 1e-05"),
        ("Llama.rope_theta = 0", "llama_1b", "use a number above 0, such as 500000.0"),
        ("Mixtral.rope_theta = -1", "mixtral_tiny", "use a number above 0, such as 1000000.0"),
        ("ResNet.norm_eps = 0", "resnet_digits", "use a number above 0, such as 1e-05"),
    ],
)
def test_numbers_that_make_no_model_are_refused(binding, config, words):
    message = refused(binding, name=config)
    assert message.startswith(binding.split(" = ")[0] + "=")
    assert message.endswith(words)


def test_a_way_out_of_a_size_that_does_not_divide_is_a_mesh_of_all_devices():
    """`set Mesh.fsdp=1` alone left 14 of 15 devices idle, which the mesh then rejected."""
    bindings = ["GPT.embed_dim = 128", "Train.global_batch_size = 15", "Mesh.tensor = 1"]

    def said(*mesh):
        config = load_config("gpt_quickstart", [*bindings, *mesh])
        with pytest.raises(UserError) as caught:
            check(config, device_count=15, platform="cpu")
        return str(caught.value)

    for mesh in ("Mesh.fsdp = 15", "Mesh.fsdp = -1"):
        assert said(mesh).endswith("or set Mesh.fsdp=1 and Mesh.data=15")
    way_out = ["Mesh.fsdp = 1", "Mesh.data = 15"]
    check(load_config("gpt_quickstart", [*bindings, *way_out]), device_count=15, platform="cpu")
    # Another axis that is -1 takes what this one leaves.
    assert said("Mesh.fsdp = 15", "Mesh.data = -1").endswith("or set Mesh.fsdp=1")


def test_one_layer_is_at_most_one_stage():
    layer = ["GPT.num_layers = 1", "Mesh.pipe = 2", "Mesh.fsdp = -1"]
    assert refused(*layer).endswith("use GPT.num_layers=2 or at most 1 stage")


def test_the_quickstart_passes():
    check(load_config("gpt_quickstart"), device_count=8, platform="cpu")


@pytest.mark.parametrize(
    ("bindings", "words"),
    [
        (["Mesh.fsdp = 3"], ["Mesh.fsdp=3", "product 6", "8 devices", "set Mesh.fsdp=4"]),
        (
            ["GPT.num_heads = 4", "Mesh.fsdp = 1", "Mesh.tensor = 8"],
            ["GPT.num_heads=4 does not divide over Mesh.tensor=8", "is 8",
             "or set Mesh.tensor=4 and Mesh.data=2"],
        ),
        (
            ["Train.global_batch_size = 30"],
            ["Train.global_batch_size=30", "over the 4 devices", "nearest multiple of 4 is 32"],
        ),
        (
            ["Train.accumulation = 3"],
            [
                "Train.global_batch_size=16", "Train.accumulation=3",
                "multiple of 12 is 12, or set Train.accumulation=2",
            ],
        ),
        (
            ["TextData.sequence_length = 512"],
            ["TextData.sequence_length=512 is longer than GPT.context_length=256"],
        ),
        (["GPT.vocab_size = 128"], ["GPT.vocab_size=128 is smaller than the tokenizer's 256"]),
        (
            ["Scan.layers_per_iteration = 3"],
            ["Scan.layers_per_iteration=3 does not divide GPT.num_layers=4", "nearest is 2"],
        ),
        (["Attention.kernel = 'cudnn'"], ["Attention.kernel='cudnn'", "the nearest kernel"]),
        (
            ["Sharding.sequence_parallel = True", "Mesh.tensor = 1", "Mesh.fsdp = 8"],
            ["Sharding.sequence_parallel=True with Mesh.tensor=1"],
        ),
        (
            ["Sharding.sequence_parallel = True", "TextData.sequence_length = 127"],
            ["TextData.sequence_length=127 does not divide over Mesh.tensor=2", "nearest is 128"],
        ),
        (
            ["GPT.embed_dim = 33", "GPT.num_heads = 3", "Mesh.fsdp = 8", "Mesh.tensor = 1"],
            ["GPT.embed_dim=33 does not divide over Mesh.fsdp=8", "multiple is 32"],
        ),
        (
            ["Mesh.pipe = 2", "Mesh.fsdp = 2", "Pipeline.microbatches = 5"],
            ["times Pipeline.microbatches=5", "nearest multiple of 10 is 20"],
        ),
        (["Mesh.pipe = 8", "Mesh.fsdp = 1", "Mesh.tensor = 1"], ["GPT.num_layers=4", "8 pipeline",
                                              "or at most 4 stages"]),
        (
            ["Mesh.pipe = 4", "Mesh.fsdp = 1", "Pipeline.schedule = 'interleaved'",
             "Pipeline.virtual_stages = 2", "Pipeline.microbatches = 4", "GPT.num_layers = 6"],
            ["num_layers=6", "8 pipeline stages"],
        ),
        (["Pipeline.microbatches = 4"], ["Pipeline.microbatches=4 has no effect with Mesh.pipe=1"]),
        (
            ["Mesh.pipe = 2", "Mesh.context = 2", "Mesh.fsdp = 1", "Pipeline.microbatches = 4",
             "Pipeline.schedule = 'zero_bubble'"],
            ["'zero_bubble' with Attention.context_parallel='ring'", "'1f1b'", "'ulysses'"],
        ),
        (
            ["Mesh.pipe = 2", "Mesh.fsdp = 1", "Pipeline.microbatches = 4", *RINGS,
             "Pipeline.schedule = 'zero_bubble'"],
            ["'zero_bubble' with Sharding.collective_matmul=True", "'1f1b'"],
        ),
        (
            ["Sharding.collective_matmul = True"],
            ["Sharding.collective_matmul=True with Sharding.sequence_parallel=False"],
        ),
        (
            [*RINGS, "Precision.matmul = 'int8'"],
            ["Sharding.collective_matmul=True with Precision.matmul='int8'", "'compute'"],
        ),
        (
            ["Mesh.pipe = 2", "Mesh.fsdp = 2", "Scan.layers_per_iteration = 4"],
            ["Scan.layers_per_iteration=4 does not divide the 2 layers of the longest stage"],
        ),
        (
            ["Mesh.expert = 2", "Mesh.fsdp = 2"],
            ["Mesh.expert=2: GPT has no dimension that this axis could split"],
        ),
    ],
)  # fmt: skip
def test_each_refusal_names_the_setting_and_the_nearest_valid_choice(bindings, words):
    message = refused(*bindings)
    assert [word for word in words if word not in message] == []


def test_experts_that_do_not_fit_are_refused():
    message = refused("Mixtral.num_experts = 6", "Mesh.expert = 4", name="mixtral_tiny")
    assert "Mixtral.num_experts=6 does not divide over Mesh.expert=4" in message
    assert "the nearest multiple is 8; or set Mesh.expert=2" in message
    message = refused(
        "Mixtral.capacity_factor = 1.5", "Mesh.context = 2", "Mesh.expert = 4", "Mesh.fsdp = 1",
        name="mixtral_tiny",
    )  # fmt: skip
    assert "Mixtral.capacity_factor=1.5 with Mesh.context=2" in message


def test_everything_wrong_is_said_at_once():
    message = refused(
        "GPT.num_heads = 1",
        "Train.global_batch_size = 30",
        "TextData.sequence_length = 512",
    )
    lines = message.splitlines()
    for word in ("num_heads=1", "global_batch_size=30", "sequence_length=512"):
        assert sum(word in line for line in lines) == 1, word


def test_a_mesh_that_cannot_be_hides_nothing_that_needs_none():
    message = refused(
        "Mesh.fsdp = 3",
        "Train.accumulation = 3",
        "TextData.sequence_length = 512",
        "Scan.layers_per_iteration = 3",
        "Exchange.period = 4",
        "Corruption.compare_replicas_every = 1",
    )
    for words in (
        "Mesh.fsdp=3, Mesh.tensor=2: the product 6",
        "Train.global_batch_size=16 does not divide over Train.accumulation=3",
        "TextData.sequence_length=512 is longer",
        "Scan.layers_per_iteration=3 does not divide",
        "Exchange.period=4 has no effect",
    ):
        assert sum(words in line for line in message.splitlines()) == 1, words
    assert len(message.splitlines()) == 5


def test_an_axis_that_nothing_uses_hides_no_size_that_does_not_divide():
    message = refused("Mesh.expert = 2", "Mesh.fsdp = 2", "GPT.num_heads = 1")
    assert "Mesh.expert=2: GPT has no dimension" in message
    assert "GPT.num_heads=1 does not divide over Mesh.tensor=2" in message


def test_a_cnn_refuses_the_context_axis_and_a_width_that_tensor_does_not_divide():
    message = refused("Mesh.context = 2", "Mesh.fsdp = 4", name="resnet_mnist5k")
    assert "Mesh.context=2: ResNet has no dimension that this axis could split" in message
    message = refused("Mesh.pipe = 2", "Mesh.fsdp = 4", name="resnet_mnist5k")
    assert "Mesh.pipe=2: ResNet has no dimension that this axis could split" in message
    message = refused("Mesh.tensor = 8", "Mesh.fsdp = 1", "ResNet.width = 4", name="resnet_mnist5k")
    assert "ResNet.width=4 does not divide over Mesh.tensor=8" in message


@pytest.mark.parametrize(
    "binding",
    ["Remat.policy = 'full'", "Scan.layers_per_iteration = 2", "Attention.kernel = 'reference'",
     "Loss.chunk_size = 4"],
)  # fmt: skip
def test_a_cnn_refuses_settings_that_would_do_nothing(binding):
    setting = binding.split(" ")[0]
    assert f"{setting}=" in refused(binding, name="resnet_mnist5k")
    assert "has no effect for ResNet" in refused(binding, name="resnet_mnist5k")


@pytest.mark.parametrize("name", ["transformer_addition", "t5_tiny"])
def test_pairs_refuse_the_context_axis_once_and_name_none_that_they_have_not(name):
    model = {"transformer_addition": "Transformer", "t5_tiny": "T5"}[name]
    assert refused("Mesh.context = 2", "Mesh.fsdp = 4", name=name) == (
        f"Mesh.context=2: {model} reads a source and a target of different lengths, "
        "and a ring cannot pass through both; use Mesh.context=1 and pipe or data or fsdp or "
        "tensor instead"
    )
    assert "context" not in refused("Mesh.expert = 2", "Mesh.fsdp = 4", name=name)


@pytest.mark.parametrize(
    ("name", "bindings", "sentence"),
    [
        ("autoencoder_mnist5k", ["Loss.label_smoothing = 0.1"],
         "Loss.label_smoothing=0.1 has no effect for the objective 'reconstruction'; leave it at "
         "0.0"),
        ("autoencoder_mnist5k", ["Loss.chunk_size = 4"],
         "Loss.chunk_size=4 has no effect for Autoencoder; leave it at None"),
        ("mlp_digits",
         ["MLP.objective = 'regression'", "MLP.widths = (10, 1)", "Loss.z_weight = 1e-4",
          "VectorData.source = 'diabetes'", "VectorData.features = 10",
          "VectorData.num_classes = None"],
         "Loss.z_weight=0.0001 has no effect for the objective 'regression'; leave it at 0.0"),
        ("gru_quickstart",
         ["GRU.objective = 'token_classification'", "Train.data = @LabelledText()",
          "Loss.chunk_size = 8"],
         "Loss.chunk_size=8 has no effect for the objective 'token_classification'; leave it at "
         "None"),
    ],
)  # fmt: skip
def test_an_objective_refuses_settings_of_the_loss_that_it_does_not_read(name, bindings, sentence):
    assert refused(*bindings, "Mesh.fsdp = 8", name=name) == sentence


@pytest.mark.parametrize(
    ("bindings", "sentence"),
    [
        (
            ("Remat.offload = ('mlp_upp',)", "Remat.policy = 'full'"),
            "Remat.offload=('mlp_upp',): no layer names an activation 'mlp_upp'; did you "
            "mean 'mlp_up'?",
        ),
        (
            ("Remat.save = ('mlp_gate',)", "Remat.policy = 'full'"),
            "Remat.save=('mlp_gate',): the layers of GPT name no activation 'mlp_gate'; "
            "did you mean 'mlp_up'?",
        ),
        (
            ("Remat.save = ('attention',)",),
            "Remat.save=('attention',) with Remat.policy='none', which saves all other "
            "activations too; use Remat.policy='full' to save only these, or 'dots'",
        ),
        (
            ("Remat.save = ('query',)", "Remat.offload = ('query',)", "Remat.policy = 'full'"),
            "Remat.save and Remat.offload both have 'query'; leave it in one of them",
        ),
        (
            ("Remat.offload = ('residual',)", "Remat.policy = 'offload'"),
            "Remat.policy='offload' has 'residual' in host memory already; leave it out of "
            "Remat.save and Remat.offload, or use Remat.policy='full'",
        ),
        (
            (
                "Remat.policy = 'offload'", "Pipeline.backward = 'residuals'", "Mesh.pipe = 2",
                "Mesh.fsdp = 2", "Pipeline.microbatches = 2",
            ),
            "Pipeline.backward='residuals' with Remat.policy='offload': the stored residuals of "
            "a stage are in device memory; use Remat.policy='full' or "
            "Pipeline.backward='recompute'",
        ),
    ],
)  # fmt: skip
def test_names_of_activations_that_cannot_be_kept_so_are_refused(bindings, sentence):
    assert refused(*bindings).splitlines() == [sentence]


def test_a_second_derivative_that_experts_have_not_is_refused():
    dropless = "Mixtral.capacity_factor = None"
    assert refused("Optimizer.name = 'sophia_h'", dropless, name="mixtral_tiny") == (
        "Optimizer.name='sophia_h' with the dropless experts of Mixtral: JAX has no second "
        "derivative of their grouped matmuls; use "
        "Mixtral.capacity_factor=1.25 or Optimizer.name='sophia_g'"
    )


@pytest.mark.parametrize(
    "bindings",
    [
        ("Optimizer.sharpness_radius = 0.05",),
        ("Train.noise_scale_every = 10", "Train.accumulation = 2"),
    ],
)
def test_names_of_activations_are_known_where_a_step_is_more_than_a_gradient(bindings):
    kept = "Remat.policy = 'full'", "Remat.save = ('attention',)"
    check(load_config("gpt_quickstart", [*kept, *bindings]), device_count=8, platform="cpu")


def test_a_model_refuses_the_other_kind_of_data(tmp_path):
    file = tmp_path / "run.gin"
    file.write_text(
        "Train.model = @GPT()\nTrain.data = @ImageData()\nTrain.steps = 1\n"
        "Train.global_batch_size = 8\nImageData.source = 'digits'\n"
    )
    message = refused(name=str(file))
    assert (
        "Train.model=@GPT() learns from text, but Train.data=@ImageData() gives images" in message
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizeless:
    """Data of your own, of tokens or of images, that does not say how many there are of what."""

    shape: tuple[int, ...]

    def open(self, *, seed):
        raise AssertionError("nothing is read")

    def abstract_batch(self, global_batch_size):
        def of(shape, dtype):
            return jax.ShapeDtypeStruct((global_batch_size, *shape), dtype)

        if len(self.shape) == 1:
            tokens = of(self.shape, np.int32)
            return Batch(tokens, tokens, of(self.shape, np.float32), tokens, tokens)
        return Batch(of(self.shape, np.float32), of((), np.int32), of((), np.float32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sized(Sizeless):
    """It says it; no tokenizer made its tokens."""

    vocab_size: int = 256
    num_classes: int = 10


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("gpt_quickstart", Sizeless(shape=(64,)), "Train.data=@Sizeless() has no vocab_size, "),
        ("resnet_digits", Sizeless(shape=(8, 8, 1)), "Train.data=@Sizeless() has no num_classes, "),
        ("gpt_quickstart", Sized(shape=(64,), vocab_size=300),
         "GPT.vocab_size=256 is smaller than Sized's 300 tokens; use at least 300"),
        ("gpt_quickstart", Sized(shape=(4096,)),
         "Sized.sequence_length=4096 is longer than GPT.context_length=256; use at most 256"),
        ("resnet_digits", Sized(shape=(8, 8, 1), num_classes=11),
         "ResNet.num_classes=10 is smaller than the data's 11 classes"),
    ],
)  # fmt: skip
def test_data_of_ones_own_say_what_they_are_or_are_told_what_they_lack(name, data, sentence):
    config = load_config(name)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, data=data))
    with pytest.raises(UserError) as caught:
        check(config, device_count=8, platform="cpu")
    assert str(caught.value).startswith(sentence)


def test_images_that_do_not_fit_the_model_are_refused():
    message = refused("ResNet.num_classes = 5", "ResNet.channels = 3", name="resnet_mnist5k")
    assert "ResNet.num_classes=5 is smaller than the data's 10 classes" in message
    assert "ResNet.channels=3, but the images of ImageData have 1" in message


def test_a_batch_of_fewer_rows_than_devices_is_refused_with_a_batch_that_fits():
    message = refused("Train.global_batch_size = 2", "Mesh.fsdp = 8", "Mesh.tensor = 1")
    assert "Train.global_batch_size=2 does not divide over the 8 devices" in message
    assert "the nearest multiple of 8 is 8" in message
    assert "set Train.accumulation" not in message
