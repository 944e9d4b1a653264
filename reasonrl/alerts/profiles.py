"""The tables of rules: `graded` (the default) and, from `textbook`, the literal one. A new rule is one line here."""

from __future__ import annotations

from reasonrl.alerts.length_rules import all_truncated, length_collapse, length_growth, repetition
from reasonrl.alerts.policy_rules import (
    clip_fraction,
    entropy_collapse,
    entropy_surge,
    kl_growth,
    low_entropy_tokens,
    no_update,
    non_finite,
    off_policy,
    sampler_mismatch,
)
from reasonrl.alerts.reward_rules import destroyed, flat_groups, format_only, no_learning, overfit, reward_collapse
from reasonrl.alerts.textbook import TEXTBOOK
from reasonrl.alerts.types import Rule

CODES = tuple(f"A{number:02d}" for number in range(1, 20))
REWARD = "reward/total"
MOVED = ("shift/kl_old", "kl/ref", "clip/fraction")

GRADED: tuple[Rule, ...] = (
    Rule("A01", "non-finite numbers", non_finite, ("any",), warmup=0, confirm=1,
         limits={"rows": 2}, intervention=("optim.lr / 3", "optim.max_grad_norm=1.0")),
    Rule("A02", "no update", no_update, ("reward/std", "optim/grad_norm", MOVED), ("groups/flat", "kl/ref"),
         limits={"rows": 3, "flat": 0.6}, warmup=0, confirm=1),
    Rule("A03", "entropy collapse", entropy_collapse, ("entropy/mean",), ((REWARD, "eval"), "groups/flat"),
         limits={"ratio": 0.5, "stop_ratio": 0.1, "stop_nats": 0.05, "stalled": 0.5, "flat_growth": 0.15, "fall": 0.3},
         intervention=("loss=clip_higher", "entropy=thermostat")),
    Rule("A04", "entropy surge", entropy_surge, ("entropy/mean",), (REWARD,),
         limits={"ratio": 3.0, "nats": 1.0, "fall": 0.3, "garbage_nats": 2.0, "garbage_ratio": 10.0},
         intervention=("overlong=filter", "loss.high / 2", "optim.lr / 2"), warmup=0, confirm=2),
    Rule("A05", "flat groups", flat_groups, (("groups/flat", "groups/all_wrong", "reward/std"),),
         ("groups/all_wrong", "groups/all_right", "eval"),
         limits={"share": 0.3, "growth": 0.15, "all_wrong": 0.9, "steps": 30, "surely": 0.97, "patience": 60},
         intervention=("data=dynamic_sampling",)),
    Rule("A06", "length growth", length_growth, (("length/mean", "length/truncated"),), ("length/truncated", REWARD),
         limits={"ratio": 3.0, "idle_ratio": 2.0, "points": 0.5, "fall": 0.3},
         intervention=("overlong=soft", "sampling.max_new_tokens * 2")),
    Rule("A07", "length collapse", length_collapse, ("length/mean",), (REWARD,),
         limits={"ratio": 0.25, "fall": 0.3}, intervention=("reward.parts.format.weight / 2", "optim.lr / 2")),
    Rule("A08", "all truncated", all_truncated, ("length/truncated", REWARD), ("reward/std",),
         limits={"rows": 3, "first_rows": 10, "share": 0.98, "mostly": 0.85},
         intervention=("sampling.max_new_tokens * 4",), warmup=0, confirm=1),
    Rule("A09", "KL growth", kl_growth, ("kl/ref",), (REWARD, "eval"),
         limits={"level": 0.001, "growth": 1.2, "stop_growth": 1.5, "far": 0.5, "fall": 0.3, "fall_creeping": 0.5},
         intervention=("kl=k3_unbiased", "kl.coef * 2")),
    Rule("A10", "held-out score falls", overfit, ("eval",), (REWARD,),
         limits={"evals": 2, "known": 5, "gain_lost": 0.5}, intervention=("kl=k3_unbiased",), confirm=1),
    Rule("A11", "reward collapse", reward_collapse, (REWARD,), ("clip/fraction", "optim/grad_norm", "entropy/mean"),
         limits={"fall": 0.4, "fall_with_damage": 0.3, "flag_with_damage": 0.25, "windows": 1.0,
                 "clip_growth": 5.0, "grad_growth": 4.0, "entropy_growth": 2.5}, intervention=("optim.lr / 2",)),
    Rule("A11", "policy destroyed", destroyed, (REWARD, "groups/flat", ("entropy/mean", "length/truncated")),
         limits={"rows": 5, "first_rows": 30, "truncated": 0.98, "entropy": 0.15, "jump": 1.0},
         intervention=("optim.lr / 10",), warmup=0, confirm=1, name="A11-destroyed"),
    Rule("A12", "format only", format_only, ("parts",),
         limits={"flag_steps": 25, "stop_steps": 60, "progress": 0.05, "near_floor": 0.25, "stop_floor": 0.02},
         intervention=("advantage=gdpo", "reward.parts.format.weight / 2"), warmup=0),
    Rule("A13", "repetition", repetition, ("text/repetition", "length/truncated"), (REWARD,),
         limits={"growth": 0.1, "points": 0.1, "fall": 0.3},
         intervention=("overlong=soft", "reward.parts.repetition.weight=0.5")),
    Rule("A14", "clip fraction", clip_fraction, ("clip/fraction",), ("optim/lr",),
         limits={"ratio": 5.0, "level": 2e-3}, intervention=("optim.inner_epochs / 2", "optim.lr / 2")),
    Rule("A15", "off-policy", off_policy, (("shift/kl_old", "shift/ratio_q99", "shift/ratio_mean"),),
         (REWARD, "shift/ratio_q01"), limits={"kl": 0.1, "ratio": 4.0, "mean": 0.5, "fall": 0.3},
         intervention=("optim.inner_epochs / 2",)),
    Rule("A16", "low-entropy tokens", low_entropy_tokens, ("entropy/low_share",),
         limits={"share": 0.9}, intervention=("entropy=top_mask",)),
    Rule("A17", "sampler and trainer disagree", sampler_mismatch, ("shift/first_ratio_error",),
         limits={"tolerance": 0.05, "first_rows": 10}, warmup=0, confirm=2),
    Rule("A19", "no learning", no_learning, (REWARD,), ("eval",),
         limits={"rows": 60, "steps": 100, "change": 0.3, "z": 3.0}),
)  # fmt: skip

PROFILES: dict[str, tuple[Rule, ...]] = {"graded": GRADED, "textbook": TEXTBOOK, "off": ()}
