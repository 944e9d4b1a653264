"""Metric names that no table lists, read by their words: `policy/mean_token_entropy` is the entropy.

A name counts only when every word in it is understood; one word more (`entropy_coef`, `prompt_length`) and it stays
unknown, because a metric taken for another one costs a run.
"""

from __future__ import annotations

import re

FILLER = frozenset(
    """
    mean avg average train training trainer actor policy ppo grpo gspo dapo rl rollout batch objective metrics stats
    step env current model losses ema smoothed
    """.split()  # noqa: SIM905
)
SAME = {
    word: ours
    for ours, words in {
        "reward": "rewards rew score scores return returns",
        "text": "response responses completion completions output outputs generation generated gen generate sequence "
        "sequences seq resp answer answers sample samples rollouts",
        "length": "lengths len lens",
        "token": "tokens tok",
        "share": "fraction frac ratio rate percentage percent pct proportion portion perc",
        "group": "groups prompts prompt problems questions",
        "grad": "gradient gradients grads",
        "norm": "gnorm gradnorm",
        "clip": "clipped clipping clipfrac clips",
        "cut": "truncated truncation trunc truncate overlong cutoff",
        "advantage": "advantages adv advs",
        "std": "stddev deviation variance var stdev",
        "repetition": "rep repeat repeated repetitions repetitive",
        "right": "correct solved good success successful",
        "wrong": "incorrect failed bad unsolved",
        "accuracy": "acc correctness",
        "flat": "degenerate uniform dead uninformative",
        "ref": "reference base",
        "entropy": "ent entropies",
    }.items()
    for word in words.split()
}
# Each line: our name, then the sets of words that mean it.
MEANINGS = """
reward/total: reward | raw reward | overall reward | total reward | episode reward | ep reward | cumulative reward
reward/std: reward std | group reward std | group std | within group std | within group reward std | intra group std
reward/std: intra group reward std | reward std dev | group reward std dev
entropy/mean: entropy | token entropy | approx entropy | logits entropy | logit entropy | entropy loss | entropy nats
entropy/mean: text entropy | all entropy | per token entropy
kl/ref: kl | kl loss | kl div | kl divergence | kl penalty | reward kl penalty | ref kl | ref kl loss | reverse kl
kl/ref: k3 | k3 kl | kl est | kl estimate | kl to ref | token kl | ref kl divergence | ref kl div | kl div loss
kl/ref: per token kl
shift/kl_old: approx kl | approxkl | old kl | kl to old
clip/fraction: clip | clip share | pg clip | pg clip share
clip/low: clip share low | clip share lower | clip low | pg clip low
clip/high: clip share high | clip share higher | clip high | pg clip high | pg clip higher | pg clip share higher
length/mean: length | text length | text token | num text token | token per text | token per text num
length/mean: text token count | text length token
length/truncated: cut | cut share | text cut | text cut share | is cut | clip share text | clip text length
length/truncated: clip share text length | clip share length | hit max length | hit max length share
length/truncated: max length share | text max length share
groups/flat: flat | flat group | flat group share | flat share | zero std | zero std share | zero std group
groups/flat: zero std group share | zero reward std | zero reward std share | zero reward std group
groups/flat: zero reward std group share | zero advantage | zero advantage share | zero advantage group
groups/flat: zero advantage group share | zero grad group share | no signal share | flat reward group share
groups/all_right: all right | all right share | all right group | all right group share
groups/all_wrong: all wrong | all wrong share | all wrong group | all wrong group share
optim/grad_norm: norm | grad norm | global grad norm | total grad norm | raw grad norm | optim grad norm | optim norm
optim/grad_norm: optimizer grad norm | global norm | grad norm before clip | pre clip grad norm
optim/lr: lr | learning share | optim lr | optimizer lr
loss/total: loss | pg loss | total loss | surrogate loss
advantage/std: advantage std
text/repetition: repetition share | ngram repetition | ngram repetition share | text repetition
reward/accuracy: accuracy | solve share | right share | pass share | pass@1 | pass at 1 | right | accuracy share
reward/accuracy: solve | exact match | right reward share | verifiable right share | text accuracy
"""
READ: dict[frozenset[str], str] = {
    frozenset(words.split()): ours
    for ours, sets in (line.split(": ") for line in MEANINGS.strip().split("\n"))
    for words in sets.split("|")
}
BENCHMARK = re.compile(
    r"(?:gsm8k|gsm_8k|math_?\d{2,3}|aime\d*|amc\d*|olympiad(?:bench)?|minerva|gpqa|mmlu|humaneval|mbpp|livecodebench|lcb|"
    r"ifeval|arc_c|hmmt|svamp|countdown)"
)
TESTS = "eval|evaluation|validation|valid|val|test|testing|dev|heldout|held_out|holdout|greedy|bench|benchmark"
GRADES = frozenset("acc accuracy pass score em rate pct percent pass@1 mean avg at 1".split())  # noqa: SIM905
STEP_WORDS = frozenset(
    """
    step steps global training train trainer rollout iteration iterations iter update updates num n optimizer optim opt
    gradient grad current policy id batch index idx no number
    """.split()  # noqa: SIM905
)
STEP_CORE = ("step", "steps", "iteration", "iterations", "iter", "update", "updates")


def words_of(plain: str) -> list[str]:
    """The words of a normalised name, split at slashes, underscores, dashes, dots, brackets, % and blanks."""
    return [word for word in re.split(r"[/_\-.\s()\[\]:%]+", plain) if word]


def read_words(plain: str) -> str | None:
    """Our name for a train metric spelled in any order of known words, else None."""
    given = words_of(plain.removeprefix("env/all/"))
    if "kl" in given and {"ppo", "old", "approx", "behavior", "behaviour"} & set(given):
        return "shift/kl_old"
    if "kl" in given and {"rollout", "mismatch", "infer", "vllm", "sglang", "gen"} & set(given):
        return None
    averaged = not {"mean", "avg", "average", "per"}.isdisjoint(given)
    known = frozenset(SAME.get(word, word) for word in given if word not in FILLER)
    if known in ({"token"}, {"token", "num"}):  # a counter, unless it is said to be an average
        return "length/mean" if averaged else None
    return READ.get(known)


def read_benchmark(plain: str) -> str | None:
    """Our name for a held-out score named after its benchmark (`gsm8k_acc`, `bench/math500`), or with its word last."""
    last = re.fullmatch(rf"(.+?)[/_\-](?!dev|bench)(?:{TESTS})(?:[/_\-](acc|accuracy|score|reward|pass@1))?", plain)
    if last:
        return f"eval/{last[1]}" + (f"_{last[2]}" if last[2] else "")
    first = re.fullmatch(rf"(?:{TESTS})s?[/_\-](.+)", plain)
    if first:
        return f"eval/{first[1]}"
    dashed = plain.replace("-", "_")
    found = BENCHMARK.search(dashed)
    if found is None:
        return None
    rest = words_of(dashed[: found.start()]) + words_of(dashed[found.end() :])
    if all(word in GRADES or word.isdigit() or re.fullmatch(r"(?:mean|avg|pass)?@\d+", word) for word in rest):
        return f"eval/{plain}"
    return None


def is_step(plain: str) -> bool:
    """True when a column of this name counts steps: every word is about steps, and one of them is a step."""
    given = words_of(plain)
    if plain in ("rollout_id", "rollout_idx", "batch", "batch_idx", "timestep", "timesteps", "t"):
        return True
    return bool(given) and all(w in STEP_WORDS for w in given) and any(w in STEP_CORE for w in given)
