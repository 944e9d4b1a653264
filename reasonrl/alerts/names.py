"""Names of other trainers' metrics -> names of this project: one table, used by log readers and callbacks.

Covers TRL (also Unsloth, ms-swift and their HTML tables), verl, OpenRLHF, tinker-cookbook and slime, and the usual
home-made spellings. Traps: `actor/ppo_kl` is KL to the sampling policy, not to the reference; TRL's `reward_std` is
within groups while `rewards/x/std` is over the batch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping

from reasonrl.alerts.spellings import is_step, read_benchmark, read_words
from reasonrl.metrics import METRICS

# Within a line the first name wins when a log has several.
TABLE: dict[str, str] = {
    "reward/total": "reward reward/total critic/score/mean env/all/reward/total reward/mean rollout/raw_reward "
    "rollout/reward_mean reward_mean mean_reward reward_overall avg_reward total_reward score mean_score "
    "critic/rewards/mean rewards/mean rollout/rewards rollout/reward objective/scores reward_avg episode_reward",
    "reward/std": "reward/std reward_std group_reward_std reward/group_std",
    "entropy/mean": "entropy/mean entropy entropy_mean mean_entropy policy/entropy actor/entropy actor/entropy_loss "
    "optim/entropy entropy_loss policy_entropy rollout/entropy policy/entropy_avg token_entropy entropy_avg",
    "kl/ref": "kl/ref kl kl_mean mean_kl kl_divergence kl_ref ref_kl actor/kl_loss critic/kl kl_loss objective/kl "
    "actor/kl_divergence kl_to_ref policy/kl",
    "shift/kl_old": "shift/kl_old actor/ppo_kl ppo_kl kl_sample_train_v1 optim/kl_sample_train_v1 approx_kl "
    "policy/approxkl_avg policy/approx_kl",
    "shift/ratio_mean": "shift/ratio_mean ratio_mean policy_ratio mean_ratio val/ratio importance_ratio",
    "shift/first_ratio_error": "shift/first_ratio_error",
    "clip/fraction": "clip/fraction clip_ratio/region_mean clip_ratio actor/pg_clipfrac ppo_clip_ratio pg_clipfrac "
    "clipfrac clip_fraction clip_frac policy/clipfrac_avg loss/clip_fraction actor/clipfrac",
    "clip/low": "clip/low clip_ratio/low_mean",
    "clip/high": "clip/high clip_ratio/high_mean",
    "length/mean": "length/mean completions/mean_length completion_length completion_len mean_length length_mean "
    "response_length/mean response_length ac_tokens_per_turn env/all/ac_tokens_per_turn rollout/response_len "
    "rollout/response_len/mean mean_completion_length avg_completion_length avg_response_length "
    "mean_response_length response_len gen_len completion_len_mean completion_length_mean",
    "length/truncated": "length/truncated completions/clipped_ratio clipped_ratio response_length/clip_ratio "
    "truncated rollout/truncated rollout/truncated_ratio truncated_ratio truncation_rate truncated_frac "
    "completions/clip_ratio frac_truncated",
    "groups/flat": "groups/flat frac_reward_zero_std frac_zero_std zero_std_group_ratio zero_std_ratio "
    "zero_advantage_ratio zero_adv_ratio frac_zero_advantage zero_std_frac",
    "groups/all_right": "groups/all_right by_group/frac_all_good env/all/by_group/frac_all_good frac_all_correct "
    "frac_all_right all_correct_ratio",
    "groups/all_wrong": "groups/all_wrong by_group/frac_all_bad env/all/by_group/frac_all_bad frac_all_wrong "
    "frac_all_incorrect all_wrong_ratio",
    "optim/grad_norm": "optim/grad_norm grad_norm actor/grad_norm actor_grad_norm gradient_norm",
    "optim/lr": "optim/lr learning_rate lr actor/lr actor_lr optim/learning_rate",
    "loss/total": "loss/total loss training_loss policy_loss actor/pg_loss actor/loss pg_loss loss/policy "
    "policy_gradient_loss",
    "advantage/mean": "advantage/mean critic/advantages/mean advantages/mean adv_mean",
    "advantage/std": "advantage/std advantages/std adv_std",
    "advantage/max": "critic/advantages/max",
    "advantage/min": "critic/advantages/min",
    "text/repetition": "text/repetition repetition repetition_rate repetition_ratio",
    "entropy/low_share": "entropy/low_share",
    "reward/accuracy": "accuracy acc train_accuracy correctness correct_rate pass_rate",
    "reward/format": "format format_rate format_acc",
}  # fmt: skip
DIRECT: dict[str, tuple[str, int]] = {
    name: (ours, place) for ours, names in TABLE.items() for place, name in enumerate(names.split())
}
STEP_NAMES = (
    "step", "global_step", "train/global_step", "training/global_step", "trainer/global_step", "rollout/step",
    "progress/batch", "_step", "iteration", "iter", "training_step", "train_step",
)  # fmt: skip
LAST = 1000  # rank of a spelling that no table lists
OURS = re.compile(
    r"(reward|advantage|groups|entropy|shift|clip|kl|length|text|loss|optim|data|time|speed|eval)/[\w.@-]+(/[\w.@-]+)*"
)
HELD_OUT = re.compile(r"(?:eval|validation|valid|val|test|dev|heldout|held_out)(?:_\d+)?[/_]+(.+)")
CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
# Known, and nothing a rule reads.
USELESS = re.compile(
    r"epoch|num_tokens|total_flos|_runtime|_timestamp|.*(?:^|[/_])(?:time|timing|timing_s|runtime|seconds|secs?|memory|mem|"
    r"gb|mfu|throughput|tokens_per_s|per_second|samples_per_second|steps_per_second|tflops|gpu|cpu|flos)(?:$|[/_]).*|"
    r"(?:perf|profiling|system|timing_s|timing_per_token_ms|global_seqlen|prompt_length|num_turns)/.*|"
    r"rewards/.+/std|completions/(?:min|max)_length|completions/(?:min_|max_|mean_)terminated_length|"
    r"(?:response_length|critic/(?:score|rewards|advantages|returns|values))/(?:min|max|mean|std)|"
    r"clip_ratio/(?:low_min|high_max)|critic/.*|actor/pg_clipfrac_lower|val-aux/.*|sampling/.*|"
    r"train_(?:samples|steps)_per_second|train_loss|progress/.*|kl_coef|advantages?|returns?|values?|"
    r"clip_ratio_(?:low|high)|env/all/(?:by_group/.*|.*(?:tokens|turns|episodes).*)"
)


def normalise(name: str) -> str:
    """Lower case, without the blanks an HTML table puts around slashes: 'rewards / x / mean' -> 'rewards/x/mean'."""
    return re.sub(r"\s+", "_", re.sub(r"\s*/\s*", "/", name.strip())).lower()


@functools.cache
def translate(name: str) -> tuple[str, int] | None:
    """Return (our name, rank among the spellings of it; lower wins), or None when the name is unknown.

    A name that is known but of no use to any rule comes back as ('', 0).
    """
    plain = normalise(name)
    for prefix in ("train/", "train_", "training/"):
        if plain.startswith(prefix) and plain not in DIRECT:
            inner = translate(plain.removeprefix(prefix))
            if inner is not None:
                return inner
    if plain in DIRECT:
        return DIRECT[plain]
    if plain.startswith("eval/"):
        return _held_out(plain.removeprefix("eval/"))
    core = re.fullmatch(r"val-core/(.+)/(?:acc|score|reward)/(mean|best|maj)@(\d+)(/mean|/std)?", plain)
    if core:
        return (f"eval/{core[1]}", 0) if core[2] == "mean" and core[4] is None else ("", 0)
    score = re.fullmatch(r"val/test_score/(.+)", plain)
    if score:
        return f"eval/{score[1]}", 0
    if re.fullmatch(USELESS, plain):
        return "", 0
    held_out = HELD_OUT.fullmatch(plain)
    if held_out:
        return _held_out(held_out[1])
    if plain in METRICS:
        return plain, 0
    by_words = read_words(plain)
    if by_words:
        return by_words, LAST
    part = _part(plain)
    if part:
        return part, 0
    benchmark = read_benchmark(plain)
    if benchmark:
        return benchmark, 0
    if OURS.fullmatch(plain):
        return plain, 0
    words = CAMEL.sub("_", name)  # last, because benchmarks have such names too
    return translate(words) if words != name else None


def _part(plain: str) -> str | None:
    """A reward part: TRL rewards/NAME/mean, tinker env/all/NAME and reward/NAME, or NAME_reward."""
    match = (
        re.fullmatch(r"rewards/(.+?)(?:/mean)?", plain)
        or re.fullmatch(r"env/all/(.+)", plain)
        or re.fullmatch(r"(?:rollout/)?rewards?_?/(?!std$|min$|max$)([^/]+)(?:/mean)?", plain)
        or re.fullmatch(r"((?:[a-z0-9]+_)*[a-z0-9]+)_reward(?:_func)?(?:_mean|/mean)?", plain)
        or re.fullmatch(r"reward_((?!std|min|max|var)[a-z0-9_]+)", plain)
    )
    return f"reward/{match[1].replace('/', '_')}" if match else None


def _held_out(rest: str) -> tuple[str, int]:
    """A held-out number: eval_reward -> eval/reward, eval_rewards/NAME/mean -> eval/NAME, others keep their name."""
    rest = re.sub(r"^env/all/", "", rest).removesuffix("/mean")
    inner = DIRECT.get(rest)
    if inner and inner[0] == "reward/total":
        return "eval/reward", inner[1]
    part = re.fullmatch(r"rewards/(.+)", rest)
    return f"eval/{part[1] if part else rest}", 0


def translate_row(row: Mapping[str, float]) -> dict[str, float]:
    """Return a row under our names; unknown ones keep theirs. Of several spellings of one name the first wins."""
    out: dict[str, float] = {}
    ranks: dict[str, int] = {}
    for name, value in row.items():
        found = translate(name)
        ours, rank = found if found and found[0] else (name, 0)
        if ours not in out or rank < ranks[ours]:
            out[ours], ranks[ours] = value, rank
    if "clip/fraction" not in out and "clip/high" in out:
        out["clip/fraction"] = out.get("clip/low", 0.0) + out["clip/high"]
    return out


def unknown(names: Iterable[str]) -> list[str]:
    """The names that mean nothing here, in the order given, step columns left out."""
    return [name for name in names if not counts_steps(name) and translate(name) is None]


def counts_steps(name: str) -> bool:
    """True for a column that numbers the rows."""
    plain = normalise(name)
    return plain in STEP_NAMES or is_step(plain) or is_step(normalise(CAMEL.sub("_", name)))
