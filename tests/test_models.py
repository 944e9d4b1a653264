"""Small random models of several families, through the ordinary loader: fast paths against the slow obvious one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from reasonrl.errors import ConfigError, ModelError
from reasonrl.logprobs import completion_logprobs, full_forward_logprobs
from reasonrl.models import LoraConfig, ModelConfig
from reasonrl.models.policy import load_hf, make_reference
from reasonrl.randomness import uniforms
from reasonrl.rollout import SamplingConfig
from reasonrl.rollout.generate import generate
from reasonrl.types import Problem

VOCABULARY = ["<pad>", "<eos>", "<end>", "<unk>", *"abcdefghijklmnop"]
PADDED_VOCABULARY = 24  # rows of the embedding; the last four have no token
PAD, EOS, END = 0, 1, 2
PROMPTS = [[4, 5, 6, 7, 8, 9, 10, 11, 12], [13, 4, 5], [6, 6, 7, 8, 9]]
GROUP, LIMIT = 4, 12
OWNER = torch.arange(len(PROMPTS)).repeat_interleave(GROUP)

UNSET = object()  # a value of COMMON that a family's configuration does not take
COMMON: dict[str, Any] = {
    "vocab_size": PADDED_VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,  # far from uniform, so that a wrong mask or position shows
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}
# hidden states and logits are not one matrix product apart in those marked so
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": False}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    ),
    "gemma2_softcap": (
        "Gemma2Config",
        {
            "final_logit_softcapping": 2.0,
            "attn_logit_softcapping": 5.0,
            "sliding_window": 4,
            "query_pre_attn_scalar": 8,
        },
    ),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 4, "num_hidden_layers": 7}),
    "mistral_sliding": ("MistralConfig", {"sliding_window": 4}),
    "granite_scaled": ("GraniteConfig", {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
    "cohere_scaled": ("CohereConfig", {"logit_scale": 0.5}),
    "phi3": ("Phi3Config", {}),
    "gpt2_learned_positions": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "opt_offset_positions": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.3}),
    "bloom_alibi": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "falcon_alibi": ("FalconConfig", {"alibi": True, "new_decoder_architecture": False, "head_dim": UNSET}),
    "olmo2": ("Olmo2Config", {}),
    "mamba": ("MambaConfig", {"state_size": 4}),
    "mamba2": ("Mamba2Config", {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8}),
    "qwen3_next_linear": (
        "Qwen3NextConfig",
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "lfm2_conv": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "recurrent_gemma": ("RecurrentGemmaConfig", {"attention_window_size": 8, "lru_width": 32}),
}
RECURRENT = {"mamba", "mamba2", "qwen3_next_linear", "lfm2_conv", "recurrent_gemma"}
CACHED = sorted(set(FAMILIES) - RECURRENT)
UNPACKED = RECURRENT | {"gemma2_softcap", "gemma3", "mistral_sliding", "bloom_alibi", "falcon_alibi"}  # windows, ALiBi


def save_tokenizer(folder: Path, **special: Any) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", **special}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, **{name: token for name, token in tokens.items() if token is not None}
    ).save_pretrained(folder)


def save_model(folder: Path, family: str, **overrides: Any) -> None:
    name, extra = FAMILIES[family]
    values = {**COMMON, **extra, **overrides}
    config = getattr(transformers, name)(**{key: value for key, value in values.items() if value is not UNSET})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a saved model of a family, made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            save_model(made[family], family)
            save_tokenizer(made[family])
        return made[family]

    return get


@pytest.fixture
def load(folder_of: Callable[[str], Path]) -> Callable[..., Any]:
    """Load a family with the given model settings."""

    def get(family: str, **settings: Any) -> Any:
        return load_hf(ModelConfig(kind="hf", dtype="float32", **settings), str(folder_of(family)))

    return get


def sample(policy: Any, **settings: Any) -> Any:
    config = SamplingConfig(max_new_tokens=LIMIT, group_size=GROUP, **settings)
    noise = torch.from_numpy(uniforms(len(OWNER), LIMIT, "models"))
    return generate(policy, PROMPTS, GROUP, config, noise)


def slow_logprobs(policy: Any, done: Any, row: int) -> torch.Tensor:
    """One plain forward of the whole model over the row: no cache, no sharing, no split into body and head."""
    prompt, ids = PROMPTS[int(OWNER[row])], done.ids_BT[row, : int(done.lengths_B[row])].tolist()
    logits = policy.model(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    logp = (logits.float() / done.temperature_BT[row, : len(ids)].unsqueeze(-1)).log_softmax(-1)
    return logp.gather(-1, torch.tensor(ids).unsqueeze(-1)).squeeze(-1)


def gradient(policy: Any, loss: torch.Tensor) -> torch.Tensor:
    policy.model.zero_grad()
    loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.trainable()]
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("family", FAMILIES)
def test_sampler_and_trainer_give_the_log_probs_of_a_plain_forward(load, family):
    policy = load(family)
    done = sample(policy, temperature=0.8)
    rows = torch.arange(len(OWNER))
    assert int(done.lengths_B.max()) > 6  # longer than the sliding windows
    with torch.no_grad():
        trained, _ = completion_logprobs(policy, PROMPTS, OWNER, done, rows)
        for row in rows.tolist():
            slow = slow_logprobs(policy, done, row)
            assert done.logprobs_BT[row, : len(slow)].tolist() == pytest.approx(slow.tolist(), abs=1e-4)
            assert trained[row, : len(slow)].tolist() == pytest.approx(slow.tolist(), abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_sampling_without_a_cache(load, family):
    policy = load(family)
    done = sample(policy)
    noise = uniforms(len(OWNER), LIMIT, "models")
    for row in (0, 5, 11):
        ids = done.ids_BT[row, : int(done.lengths_B[row])].tolist()
        prompt = PROMPTS[int(OWNER[row])]
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits[0]
        cumulative = logits[len(prompt) - 1 : -1].softmax(-1).cumsum(-1)
        for t, token in enumerate(ids):
            low = float(cumulative[t, token - 1]) if token else 0.0
            assert low - 1e-4 <= noise[row, t] * float(cumulative[t, -1]) <= float(cumulative[t, token]) + 1e-4


@pytest.mark.parametrize("family", CACHED)
def test_shared_prompts_give_the_gradient_of_whole_rows(load, family):
    policy = replace(load(family), pack_tokens=0)
    assert policy.shares_prompts
    done = sample(policy)
    rows = torch.tensor([0, 1, 5, 9, 10])
    weight = torch.linspace(-1, 2, len(rows))
    shared = gradient(policy, (completion_logprobs(policy, PROMPTS, OWNER[rows], done, rows)[0].sum(-1) * weight).sum())
    slow = sum(w * slow_logprobs(policy, done, row).sum() for w, row in zip(weight, rows.tolist(), strict=True))
    plain = gradient(policy, slow)
    assert (shared - plain).norm() < 1e-4 * plain.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_packed_into_one_where_the_model_obeys_a_mask_and_nothing_changes(load, family):
    policy = load(family)
    assert bool(policy.pack_tokens) == (family not in UNPACKED)
    policy = replace(policy, pack_tokens=1000 * bool(policy.pack_tokens))
    done = sample(policy, temperature=0.8)
    rows = torch.tensor([0, 1, 5, 9, 10])
    weight = torch.linspace(-1, 2, len(rows))
    packed, _ = completion_logprobs(policy, PROMPTS, OWNER[rows], done, rows)
    slow = [slow_logprobs(policy, done, row) for row in rows.tolist()]
    for mine, theirs in zip(packed, slow, strict=True):
        assert mine[: len(theirs)].tolist() == pytest.approx(theirs.tolist(), abs=1e-4)
    plain = gradient(policy, sum(w * one.sum() for w, one in zip(weight, slow, strict=True)))
    assert (gradient(policy, (packed.sum(-1) * weight).sum()) - plain).norm() < 1e-4 * plain.norm()


@pytest.mark.parametrize("family", sorted(RECURRENT))
def test_recurrent_models_never_share_a_prompt(load, family):
    policy = load(family)
    assert not policy.shares_prompts
    done = sample(policy)
    rows = torch.tensor([0, 5, 9])
    fast = gradient(policy, completion_logprobs(policy, PROMPTS, OWNER[rows], done, rows)[0].sum())
    plain = gradient(policy, sum(slow_logprobs(policy, done, row).sum() for row in rows.tolist()))
    assert (fast - plain).norm() < 1e-4 * plain.norm()


def test_a_soft_cap_is_seen_however_small_the_logits_are(tmp_path):
    # tanh bends logits of 0.01 by less than any tolerance; the cap must be found by its form, not by its effect
    save_model(tmp_path, "gemma2_softcap", final_logit_softcapping=30.0, initializer_range=0.01)
    save_tokenizer(tmp_path)
    policy = load_hf(ModelConfig(kind="hf", dtype="float32"), str(tmp_path))
    with torch.no_grad():
        for parameter in policy.model.get_output_embeddings().parameters():
            parameter.mul_(3000)
    done = sample(policy)
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([PROMPTS[0]])).logits
        trained, _ = completion_logprobs(policy, PROMPTS, OWNER, done, torch.arange(len(OWNER)))
        slow = slow_logprobs(policy, done, 0)
    assert logits.abs().max() > 25
    assert trained[0, : len(slow)].tolist() == pytest.approx(slow.tolist(), abs=1e-4)


@pytest.mark.parametrize("family", ["llama_tied", "gemma3", "gpt2_learned_positions", "opt_offset_positions", "mamba"])
def test_gradient_checkpointing_runs_layers_twice_and_gives_the_same_gradient(load, family):
    gradients, calls = [], []
    for checkpointing in (False, True):
        policy = load(family, gradient_checkpointing=checkpointing)
        done = sample(policy)
        loss = completion_logprobs(policy, PROMPTS, OWNER, done, torch.arange(len(OWNER)))[0].sum()
        count = [0]
        for module in policy.model.modules():
            if not list(module.children()) and list(module.parameters(recurse=False)):
                module.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        gradients.append(gradient(policy, loss))
        calls.append(count[0])
    assert calls[0] == 0 < calls[1]  # run again during backward
    assert (gradients[0] - gradients[1]).norm() < 1e-4 * gradients[0].norm()


def perturb(policy: Any) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trainable():
            parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2_learned_positions"])
def test_reference_of_an_adapter_is_the_model_without_it(load, family, dora):
    pytest.importorskip("peft")
    base = load(family)
    policy = load(family, lora=LoraConfig(r=4, dora=dora))
    reference = make_reference(policy)
    assert reference.uses_adapter
    assert sum(p.numel() for p in policy.trainable()) < sum(p.numel() for p in base.trainable()) / 2
    done = sample(policy)
    rows = torch.arange(len(OWNER))
    perturb(policy)
    with torch.no_grad():
        expected, _ = completion_logprobs(base, PROMPTS, OWNER, done, rows)
        with reference.active() as frozen:
            found, _ = completion_logprobs(frozen, PROMPTS, OWNER, done, rows)
        moved, _ = completion_logprobs(policy, PROMPTS, OWNER, done, rows)
        slow = slow_logprobs(policy, done, 0)
    assert (found - expected).abs().max() < 1e-5
    assert (moved - expected).abs().max() > 1e-2
    assert moved[0, : len(slow)].tolist() == pytest.approx(slow.tolist(), abs=1e-4)


def test_adapter_trains_and_leaves_the_base_alone(load):
    pytest.importorskip("peft")
    policy = load("llama", lora=LoraConfig(r=4))
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    done = sample(policy)
    optimizer = torch.optim.SGD(policy.trainable(), lr=0.1)
    completion_logprobs(policy, PROMPTS, OWNER, done, torch.arange(len(OWNER)))[0].sum().backward()
    optimizer.step()
    changed = {name for name, p in policy.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all("lora_" in name for name in changed)


def test_reference_of_full_weights_stays_when_the_policy_moves(load):
    policy = load("qwen3")
    reference = make_reference(policy)
    done = sample(policy)
    rows = torch.arange(len(OWNER))
    perturb(policy)
    with torch.no_grad(), reference.active() as frozen:
        still, _ = completion_logprobs(frozen, PROMPTS, OWNER, done, rows)
        moved, _ = completion_logprobs(policy, PROMPTS, OWNER, done, rows)
    assert (still - done.logprobs_BT).abs().max() < 1e-4
    assert (moved - still).abs().max() > 1e-2


def policy_with(tmp_path: Path, special: dict[str, Any], model: dict[str, Any] | None = None, eos: Any = None) -> Any:
    save_model(tmp_path, "llama", **(model or {}))
    save_tokenizer(tmp_path, **special)
    if eos is not None:
        transformers.GenerationConfig(eos_token_id=eos).save_pretrained(tmp_path)
    return load_hf(ModelConfig(kind="hf", dtype="float32"), str(tmp_path))


def check_ends(policy: Any, done: Any) -> set[int]:
    """Every row stops at its first end token, keeps it, and nothing behind it counts; returns the ends seen."""
    seen = set()
    for row, finish in enumerate(done.finish):
        length = int(done.lengths_B[row])
        ids = done.ids_BT[row].tolist()
        ends = [t for t, token in enumerate(ids[:length]) if token in policy.eos_ids]
        assert ends == ([length - 1] if finish == "stop" else [])
        assert finish == "stop" or length == LIMIT
        seen |= {ids[t] for t in ends}
    return seen


def test_any_of_several_end_tokens_ends_a_row(tmp_path):
    policy = policy_with(tmp_path, {}, eos=[EOS, END])
    assert policy.eos_ids == (EOS, END)
    assert check_ends(policy, sample(policy, temperature=3.0)) == {EOS, END}


def test_end_token_of_the_tokenizer_counts_beside_the_models(tmp_path):
    policy = policy_with(tmp_path, {"eos_token": "<end>"}, eos=EOS)
    assert policy.eos_ids == (EOS, END)


@pytest.mark.parametrize("pad", [None, "<eos>"])
def test_missing_pad_and_pad_equal_to_eos_keep_the_first_end_token(tmp_path, pad):
    policy = policy_with(tmp_path, {"pad_token": pad}, {"pad_token_id": None})
    assert policy.pad_id == EOS
    done = sample(policy, temperature=3.0)
    assert check_ends(policy, done) == {EOS}
    assert len(set(done.lengths_B.tolist())) > 2
    with torch.no_grad():
        trained, _ = completion_logprobs(policy, PROMPTS, OWNER, done, torch.arange(len(OWNER)))
    assert (trained - done.logprobs_BT).abs().max() < 1e-4


def test_model_without_any_end_token_is_refused(tmp_path):
    with pytest.raises(ModelError, match="end-of-sequence"):
        policy_with(tmp_path, {"eos_token": None}, {"eos_token_id": None})


def test_ids_of_vocabulary_padding_decode_to_nothing(load):
    policy = load("llama")
    assert policy.decode([4, PADDED_VOCABULARY - 1, 5]).split() == ["a", "b"]


def test_prompts_go_through_the_template_where_there_is_one(tmp_path):
    problem = Problem("1", "a b", "c")
    turns = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }} {% endfor %}"
    template = turns + "{% if add_generation_prompt %}p{% endif %}"
    policy = policy_with(tmp_path, {"chat_template": template})
    policy.configure_prompts(None, None)
    letter = {name: i for i, name in enumerate(VOCABULARY)}
    assert policy.encode(problem) == [letter[name] for name in ("<unk>", "a", "b", "p")]  # u is no token
    policy.configure_prompts("c", None)
    assert policy.encode(problem) == [letter[name] for name in ("<unk>", "c", "<unk>", "a", "b", "p")]
    policy.configure_prompts(None, False)
    assert policy.encode(problem) == [letter["a"], letter["b"]]


def test_template_and_system_prompt_are_refused_where_the_model_has_no_template(load):
    policy = load("llama")
    policy.configure_prompts(None, None)
    assert policy.encode(Problem("1", "a b", "c")) == [4, 5]
    with pytest.raises(ModelError, match="task.chat=false"):
        policy.configure_prompts(None, True)
    with pytest.raises(ModelError, match="task.system"):
        policy.configure_prompts("c", None)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gemma2_softcap", "mamba"])
def test_slow_reference_of_the_package_equals_a_plain_forward(load, family):
    policy = load(family)
    done = sample(policy)
    ids = done.ids_BT[0, : int(done.lengths_B[0])].tolist()
    with torch.no_grad():
        own, plain = full_forward_logprobs(policy, PROMPTS[0], ids), slow_logprobs(policy, done, 0)
    assert own.tolist() == pytest.approx(plain.tolist(), abs=1e-5)


def write_gguf(path: Path) -> None:
    """Write a small random Llama as a GGUF file with a byte-level tokenizer of single characters."""
    import gguf

    rng = torch.Generator().manual_seed(5)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(VOCABULARY) + 1)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*VOCABULARY, "ab"])
    writer.add_token_types([3, 3, 3, 3] + [1] * (len(VOCABULARY) - 3))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(EOS)
    writer.add_bos_token_id(END)
    shapes = {"token_embd": (21, 32), "output": (21, 32), "output_norm": (32,)}
    for block in ("blk.0", "blk.1"):
        shapes |= {f"{block}.attn_{name}": (32, 32) for name in ("q", "output")}
        shapes |= {f"{block}.attn_{name}": (16, 32) for name in ("k", "v")}
        shapes |= {f"{block}.ffn_gate": (48, 32), f"{block}.ffn_up": (48, 32), f"{block}.ffn_down": (32, 48)}
        shapes |= {f"{block}.attn_norm": (32,), f"{block}.ffn_norm": (32,)}
    for name, shape in shapes.items():
        values = torch.ones(shape) if len(shape) == 1 else 0.25 * torch.randn(shape, generator=rng)
        writer.add_tensor(f"{name}.weight", values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_file_becomes_an_ordinary_model_without_a_word(tmp_path, capfd):
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "small.gguf")
    with pytest.raises(ConfigError, match=r"small\.gguf.*add model\.gguf_file"):
        load_hf(ModelConfig(kind="hf", dtype="float32"), str(tmp_path))
    policy = load_hf(ModelConfig(kind="hf", dtype="float32", gguf_file="small.gguf"), str(tmp_path))
    assert capfd.readouterr() == ("", "")
    assert policy.eos_ids == (EOS,)
    done = sample(policy)
    rows = torch.arange(len(OWNER))
    with torch.no_grad():
        trained, _ = completion_logprobs(policy, PROMPTS, OWNER, done, rows)
        slow = slow_logprobs(policy, done, 0)
    assert trained[0, : len(slow)].tolist() == pytest.approx(slow.tolist(), abs=1e-4)
    policy.model.save_pretrained(tmp_path / "exported")
    policy.tokenizer.save_pretrained(tmp_path / "exported")
    again = load_hf(ModelConfig(kind="hf", dtype="float32"), str(tmp_path / "exported"))
    with torch.no_grad():
        same, _ = completion_logprobs(again, PROMPTS, OWNER, done, rows)
    assert torch.equal(same, trained)
