"""What is generated equals `transformers.generate` token for token, on random weights."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.run.generation.beams import BeamSearch
from jaxtrain.run.generation.decoding import Sampling, adjust_logits, draw
from jaxtrain.run.generation.generate import generate
from jaxtrain.run.tasks.tasks import Pair, scores
from jaxtrain.run.trainer import Trainer

torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
transformers = pytest.importorskip("transformers", reason="transformers is the peer")

END = 3
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "bos_token_id": 0, "eos_token_id": END, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {
    "vocab_size": 61, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "bos_token_id": 0, "eos_token_id": END, "pad_token_id": 0,
}  # fmt: skip
# Transformers' name of the model, its settings, our mesh.
CASES = {
    "gpt2": ("GPT2LMHead", "GPT2", GPT2, ["Mesh.fsdp=2", "Mesh.data=4"]),
    "llama": ("LlamaForCausal", "Llama", {**SIZES, "vocab_size": 62},
              ["Mesh.fsdp=2", "Mesh.data=2", "Mesh.tensor=2"]),
    "mixtral": (
        "MixtralForCausal", "Mixtral",
        {**SIZES, "num_local_experts": 4, "sliding_window": None},
        ["Mesh.fsdp=2", "Mesh.expert=4"],
    ),
    "gemma2": (
        "Gemma2ForCausal", "Gemma2",
        {**SIZES, "num_hidden_layers": 8, "head_dim": 16, "sliding_window": 5,
         "query_pre_attn_scalar": 8,
         "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
        ["Mesh.fsdp=4", "Mesh.data=2"],
    ),
    "gpt_oss": (
        "GptOssForCausal", "GptOss",
        {**SIZES, "head_dim": 8, "sliding_window": 5, "num_local_experts": 4,
         "num_experts_per_tok": 2},
        ["Mesh.fsdp=2", "Mesh.expert=4"],
    ),
}  # fmt: skip
DEEPSEEK = {
    **SIZES, "num_key_value_heads": 4, "vocab_size": 62, "moe_intermediate_size": 16,
    "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}  # fmt: skip
CASES["deepseek"] = (
    "DeepseekV3ForCausal", "DeepseekV3", DEEPSEEK,
    ["Mesh.data=2", "Mesh.tensor=2", "Mesh.expert=2"],
)  # fmt: skip
CASES["qwen2_moe"] = (
    "Qwen2MoeForCausal", "Qwen2Moe",
    {**SIZES, "vocab_size": 62, "num_experts": 4, "num_experts_per_tok": 2,
     "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    ["Mesh.fsdp=2", "Mesh.tensor=2", "Mesh.expert=2"],
)  # fmt: skip
LONG = ("gemma2", "gpt_oss", "deepseek", "qwen2_moe")
PROMPTS = [[5, 17, 9, 30, 2, 44], [8, 1], [60, 11, 23, 40, 12, 7, 52, 33, 20]]
NEW = 14


@pytest.fixture(
    scope="module",
    params=[pytest.param(c, marks=pytest.mark.slow if c in LONG else ()) for c in CASES],
)
def pair(request, tmp_path_factory):
    """A model of transformers with wide random weights, and a trainer that holds it."""
    name, config, settings, mesh = CASES[request.param]
    torch.manual_seed(0)
    suffix = "Model" if name.startswith("GPT2") else "LM"
    there = getattr(transformers, name + suffix)(
        getattr(transformers, f"{config}Config")(**settings)
    )
    with torch.no_grad():
        for key, value in there.named_parameters():
            is_scale = ("norm" in key or "ln_" in key) and key.endswith("weight")
            value.normal_(1.0 if is_scale else 0.0, 0.4)
    folder = tmp_path_factory.mktemp(request.param)
    there.eval().save_pretrained(folder)
    bindings = [*mesh, "Precision.compute='float32'"]
    return there, Trainer.from_huggingface(folder, bindings=bindings)


def theirs(model, prompts, *, with_scores=False, ends=(END,), **settings):
    """New tokens of prompts padded on the left, up to an end, and the model's logits."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False,
        return_dict_in_generate=True, output_logits=True, output_scores=True,
        eos_token_id=list(ends), **settings,
    )  # fmt: skip
    rows = [row.tolist() for row in out.sequences[:, longest:]]
    cut = [list(itertools.takewhile(lambda token: token not in ends, row)) for row in rows]
    scores = (out.sequences_scores.numpy(),) if with_scores else ()
    return cut, torch.stack(out.logits, 1), *scores


def ours(trainer, prompts, sampling, ends=(END,)):
    return generate(
        trainer.program.setup, trainer.config.train.model, trainer.state, prompts,
        max_new_tokens=NEW, sampling=sampling, seed=0, ends=ends,
    )  # fmt: skip


@pytest.mark.slow_cases("mixtral")
def test_greedy_of_a_padded_batch_and_the_log_probabilities(pair):
    there, trainer = pair
    expected, logits = theirs(there, PROMPTS)
    found = ours(trainer, PROMPTS, Sampling(temperature=0.0))
    assert [answer.tokens for answer in found] == expected
    assert len({token for tokens in expected for token in tokens}) > 8
    told = torch.log_softmax(logits.float(), -1)
    for row, answer in enumerate(found):
        assert answer.ended == ("length" if len(answer.tokens) == NEW else "end")
        wanted = [told[row, place, token].item() for place, token in enumerate(answer.tokens)]
        np.testing.assert_allclose(answer.log_probabilities, wanted, atol=2e-4)


def test_repetition_penalty(pair):
    there, trainer = pair
    # Alone: transformers takes the tokens of the padding for tokens of the text.
    for prompt in PROMPTS:
        expected, _ = theirs(there, [prompt], repetition_penalty=1.7)
        sampling = Sampling(temperature=0.0, repetition_penalty=1.7)
        assert ours(trainer, [prompt], sampling)[0].tokens == expected[0]
    plain, _ = theirs(there, PROMPTS)
    penalised = ours(trainer, PROMPTS, sampling)
    assert [answer.tokens for answer in penalised] != plain


# Each strategy with a cache of its own kind: what a search asks of a cache is a row of another.
SEARCHES = {
    "gpt2": {"beams": 3},
    "llama": {"beams": 2, "length_penalty": -2.0, "early_stopping": True},
    "mixtral": {
        "beams": 4, "length_penalty": 1.5, "early_stopping": "never", "repetition_penalty": 1.3,
    },
    "gemma2": {"beams": 3, "length_penalty": 0.5},
    "gpt_oss": {"beams": 2, "length_penalty": 2.0},
    "deepseek": {"beams": 3, "length_penalty": 0.8},
    "qwen2_moe": {"beams": 2, "length_penalty": 0.0},
}  # fmt: skip


def test_beam_search(pair, request):
    there, trainer = pair
    settings = SEARCHES[request.node.callspec.params["pair"]]
    ends = list(range(3, 15))  # so many that beams end all the time
    given = {**settings, "num_beams": settings["beams"], "ends": ends}
    del given["beams"]
    # A penalty alone: transformers takes the tokens of the padding for tokens of the text.
    penalised = "repetition_penalty" in settings
    for prompts in [[one] for one in PROMPTS[:2]] if penalised else [PROMPTS]:
        expected, _, scores = theirs(there, prompts, with_scores=True, **given)
        found = ours(trainer, prompts, BeamSearch(**settings), ends=ends)
        assert [answer.tokens for answer in found] == expected
        np.testing.assert_allclose([answer.score for answer in found], scores, rtol=1e-4)
        for answer in found:
            assert answer.ended == ("length" if len(answer.tokens) == NEW else "end")
            if answer.ended == "length" and not penalised:
                total = sum(answer.log_probabilities)
                power = NEW ** settings.get("length_penalty", 1.0)
                assert answer.score == pytest.approx(total / power, rel=1e-4)


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_log_likelihoods_of_continuations(pair):
    """In batches of unlike lengths; one of a single token, one whose context was cut."""
    there, trainer = pair
    rng = np.random.default_rng(2)
    given = []
    for length, told in ((9, 1), (30, 7), (12, 5), (4, 3), (20, 20)):
        tokens = rng.integers(0, 62, length + 1).tolist()
        given.append(Pair(tokens=tokens[:-1], continuation=tokens[-told:], truncated=False))
    # What is likeliest after a context, and another token after that.
    [answer] = ours(trainer, [given[0].tokens], Sampling(temperature=0.0), ends=())
    for last in (answer.tokens[3], (answer.tokens[3] + 1) % 62):
        continuation = [*answer.tokens[:3], last]
        tokens = [*given[0].tokens, *continuation[:-1]]
        given.append(Pair(tokens=tokens, continuation=continuation, truncated=False))
    found = scores(
        trainer.program.setup, trainer.config.train.model, trainer.state, given, batch_size=4
    )
    for one, score in zip(given, found, strict=True):
        with torch.no_grad():
            logits = there(torch.tensor([one.tokens])).logits[0, -len(one.continuation) :]
        told = torch.log_softmax(logits, -1)[range(len(one.continuation)), one.continuation]
        assert score.log_likelihood == pytest.approx(told.sum().item(), abs=1e-3)
        assert score.greedy == (logits.argmax(-1).tolist() == one.continuation)
    assert [score.greedy for score in found[-2:]] == [True, False]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"top_k": 7}, [("TopKLogitsWarper", 7)]),
        ({"top_p": 0.7}, [("TopPLogitsWarper", 0.7)]),
        ({"min_p": 0.2}, [("MinPLogitsWarper", 0.2)]),
        ({"min_p": 1.0}, [("MinPLogitsWarper", 1.0)]),
        ({"top_k": 99}, [("TopKLogitsWarper", 99)]),
        ({"top_p": 1.0}, [("TopPLogitsWarper", 1.0)]),
        ({"top_p": 1e-46}, [("TopPLogitsWarper", 1e-46)]),
        ({"temperature": 1e38}, [("TemperatureLogitsWarper", 1e38)]),
        ({"temperature": 1e300}, [("TemperatureLogitsWarper", 1e300)]),
        ({"temperature": 0.6}, [("TemperatureLogitsWarper", 0.6)]),
        ({"repetition_penalty": 1.4}, [("RepetitionPenaltyLogitsProcessor", 1.4)]),
        (
            {"repetition_penalty": 0.8, "temperature": 1.3, "top_k": 20, "top_p": 0.9,
             "min_p": 0.05},
            [("RepetitionPenaltyLogitsProcessor", 0.8), ("TemperatureLogitsWarper", 1.3),
             ("TopKLogitsWarper", 20), ("TopPLogitsWarper", 0.9), ("MinPLogitsWarper", 0.05)],
        ),
    ],
)  # fmt: skip
def test_what_is_drawn_from_equals_their_processors(ours, theirs):
    rng = np.random.default_rng(0)
    logits = (2.0 * rng.standard_normal((5, 61))).astype(np.float32)
    text = rng.integers(0, 61, (5, 12))
    expected, ids = torch.from_numpy(logits.copy()), torch.from_numpy(text)
    for name, value in theirs:
        expected = getattr(transformers, name)(value)(ids, expected)
    seen = np.zeros((5, 61), bool)
    seen[np.arange(5)[:, None], text] = True
    found = jax.nn.log_softmax(adjust_logits(logits, seen, Sampling(**ours).drawing()))
    np.testing.assert_allclose(found, expected.log_softmax(-1).numpy(), rtol=1e-5)


@pytest.mark.parametrize("name", ["top_k", "top_p"])
@pytest.mark.parametrize("value", range(1, 10))
def test_tokens_that_are_equally_likely_are_cut_as_by_their_processors(name, value):
    logits = np.array([[0, 2, 1, 2, 0, 2, 1, 1, 3], [1] * 9, [0] * 8 + [-4]], np.float32)
    value = value if name == "top_k" else value / 10
    theirs = getattr(transformers, f"Top{name[-1].upper()}LogitsWarper")(value)
    expected = theirs(None, torch.from_numpy(logits)).log_softmax(-1).numpy()
    found = jax.nn.log_softmax(adjust_logits(logits, None, Sampling(**{name: value}).drawing()))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-45, 1e-300])
@pytest.mark.parametrize("others", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_the_smallest_temperatures_take_the_likeliest_token(temperature, others):
    logits = np.array([[-1, 3, 2.9, 0], [5, 5, -2, 1], [-7, -7, -8, -6]], np.float32)
    expected = torch.from_numpy(logits).double().div(max(temperature, 1e-300)).softmax(-1).numpy()
    drawing = Sampling(temperature=temperature, **others).drawing()
    found = jax.nn.softmax(adjust_logits(logits, None, drawing))
    if others == {"top_p": 0.5}:  # of the two that are equally likely the second alone is enough
        expected[1] = [0, 1, 0, 0]
    np.testing.assert_array_equal(found, expected)
    assert draw(
        adjust_logits(logits, None, drawing), jax.random.split(jax.random.key(0), 3), drawing
    )[jnp.array([0, 2])].tolist() == [1, 3]


@pytest.mark.parametrize("penalty", [1e-300, 1e-38, 1e38, 1e300])
@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1.0])
def test_extreme_penalties_leave_a_distribution(penalty, temperature):
    logits, seen = np.array([[-1, 0, 3, 2.5]], np.float32), np.array([[True, True, False, True]])
    sampling = Sampling(temperature=temperature, repetition_penalty=penalty)
    drawing = sampling.drawing()
    [token] = draw(
        adjust_logits(logits, seen, drawing), jax.random.split(jax.random.key(0), 1), drawing
    )
    assert token == (3 if penalty < 1 else 2)  # 2.5 grows without bound, or vanishes
