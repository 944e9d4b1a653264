"""From a command to runs: arms, seeds, searches and stages, and every reason to refuse a plan."""

from __future__ import annotations

import functools
import io
import itertools
import json

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf
from rich.console import Console

from reasonrl.config import from_dict, run_key
from reasonrl.errors import ConfigError
from sweeps.compose import Composer, make_loader, typed_config
from sweeps.plan import make_plan
from sweeps.show import duration, flat_share, num_runs, print_plan
from sweeps.speed import SpeedBook, num_slots
from sweeps.types import Plan

ARMS = {"a": ["loss.high=0.2"], "b": ["loss.high=0.28"]}
COUNT = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conf")
    (folder / "sweep").mkdir()
    return folder


@pytest.fixture(scope="module")
def loader(folder):
    return make_loader(extra=str(folder))


@pytest.fixture(scope="module")
def plan(loader, folder):
    """Plans overrides; keyword arguments are the sections of a sweep file, `file` its `sweep` section."""

    @functools.cache
    def compose(*overrides: str) -> Plan:
        mode = {"config_name": "config", "run_mode": RunMode.MULTIRUN, "validate_sweep_overrides": False}
        cfg = loader.load_configuration(overrides=list(overrides), **mode)
        return make_plan(cfg, loader, list(overrides), cfg.hydra)

    def make(*overrides: str, file: dict | None = None, **sections) -> Plan:
        if file is None:
            return compose(*overrides)
        name = f"mine{next(COUNT)}"
        body = {"hydra": {"mode": "MULTIRUN"}, "sweep": {"name": "mine", **file}, **sections}
        text = "# @package _global_\n" + OmegaConf.to_yaml(OmegaConf.create(body))
        (folder / "sweep" / f"{name}.yaml").write_text(text)
        return compose(f"+sweep={name}", *overrides)

    return make


@pytest.fixture
def mistakes(plan):
    def find(*overrides: str, **sections) -> str:
        with pytest.raises(ConfigError) as error:
            plan(*overrides, **sections)
        return str(error.value)

    return find


def shown(plan: Plan, results) -> str:
    out = io.StringIO()
    print_plan(plan, results, Console(file=out, width=200))
    return out.getvalue()


# -- arms and seeds -----------------------------------------------------------------------------------------


def test_a_sweep_file_is_arms_times_seeds_with_one_key_each(plan):
    made = plan("+sweep=clip_ablation")
    assert made.arms == ["symmetric", "clip_higher", "textbook"] and made.seeds == [0, 1, 2]
    assert [(run.arm, run.seed) for run in made.runs[:4]] == [
        ("symmetric", 0), ("clip_higher", 0), ("textbook", 0), ("symmetric", 1),
    ]  # fmt: skip
    assert len({run.key for run in made.runs}) == 9
    assert {run.config["loss"]["high"] for run in made.runs if run.arm == "textbook"} == {0.3}
    assert made.baseline == "symmetric" and str(made.directory) == "results/clip_ablation"


def test_every_run_keeps_the_settings_of_the_sweep_file(plan, loader):
    # Composing a trial without repeating `+sweep=` would silently fall back to the defaults.
    made = plan("+sweep=gspo_vs_grpo", "steps=7")
    for run in made.runs:
        assert run.steps == run.config["steps"] == 7
        assert run.config["model"]["noise"] == 0.08 and run.config["optim"]["lr"] == 1e-5
        assert run.config["seed"] == run.seed
        assert not {"sweep", "study", "engine", "plan", "results", "hydra"} & set(run.config)


@pytest.mark.parametrize(
    ("text", "gpus", "part"),
    [
        ("distributed_type: FSDP", 1, "Set engine.per_trial_gpus=2"),
        (None, 2, "is no configuration of accelerate"),
        ("- a list", 2, "names no distributed_type"),
        ("{: }: [", 2, "is no configuration of accelerate"),
        ("distributed_type: 'NO'", 2, "must have distributed_type: FSDP, DEEPSPEED or MULTI_GPU"),
        ("distributed_type: MEGATRON_LM", 2, "accelerate=Megatron-LM"),
        ("{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 4}}", 2, "zero_stage=4: must be 0, 1, 2 or 3"),
        ("{distributed_type: FSDP, fsdp_config: {fsdp_offload_params: true}}", 2, "fsdp_offload_params=true"),
    ],
)
def test_a_file_for_accelerate_is_read_before_anything_starts(mistakes, tmp_path, text, gpus, part):
    file = tmp_path / "accelerate.yaml"
    if text is not None:
        file.write_text(text)
    found = mistakes("+sweep=clip_ablation", f"engine.accelerate_config={file}", f"engine.per_trial_gpus={gpus}")
    assert "engine.accelerate_config" in found and part in found


def test_a_run_has_the_key_of_the_same_run_elsewhere(plan):
    run = plan("+sweep=clip_ablation").runs[1]
    assert run.key == run_key(from_dict(run.config))
    ladder = {run.key for run in plan("+sweep=sick_run").runs}
    assert run.key in ladder, "the same configuration and seed in another sweep is the same run"


def test_swept_values_on_the_command_line_become_arms_and_seeds(plan):
    made = plan("loss=symmetric,clip_higher", "seed=0,1,2")
    assert made.arms == ["symmetric", "clip_higher"] and made.seeds == [0, 1, 2] and len(made.runs) == 6
    assert {run.config["loss"]["high"] for run in made.runs if run.arm == "clip_higher"} == {0.28}
    assert plan("seed=range(3,6)").seeds == [3, 4, 5]
    crossed = plan("loss.high=0.2,0.3", "optim.lr=1e-5,2e-5")
    assert crossed.arms == ["high=0.2,lr=1e-05", "high=0.2,lr=2e-05", "high=0.3,lr=1e-05", "high=0.3,lr=2e-05"]


def test_seeds_on_the_command_line_replace_those_of_the_sweep_file(plan):
    assert plan("+sweep=clip_ablation", "seed=7").seeds == [7]
    assert plan("+sweep=clip_ablation", "seed=7,8").seeds == [7, 8]


def test_a_swept_key_crosses_the_arms_of_a_sweep_file(plan):
    made = plan("+sweep=clip_ablation", "optim.lr=2e-5,4e-5", "seed=0")
    assert len(made.runs) == 6 and "textbook,lr=2e-05" in made.arms
    assert made.baseline == "symmetric,lr=2e-05"
    assert sorted({run.config["optim"]["lr"] for run in made.runs if "textbook" in run.arm}) == [2e-5, 4e-5]


def test_an_unnamed_sweep_keeps_its_folder_when_seeds_and_values_are_added(plan):
    first = plan("loss=symmetric,clip_higher", "seed=0", "optim.lr=2e-5").name
    assert plan("loss=symmetric,clip_higher,gspo", "seed=0,1", "optim.lr=2e-5").name == first
    assert plan("loss=symmetric,clip_higher", "seed=0", "optim.lr=3e-5").name != first
    assert plan("loss=symmetric,clip_higher", "optim.lr=2e-5", "engine.slots=1", "plan=true").name == first


def test_the_base_of_a_sweep_lies_below_the_command_line(plan):
    made = plan("steps=4", file={"base": ["optim.lr=1e-5", "steps=9"], "arms": ARMS})
    assert {(run.config["optim"]["lr"], run.steps) for run in made.runs} == {(1e-5, 4)}


def test_a_plan_survives_its_file_and_still_makes_the_same_runs(plan):
    made = plan("+sweep=clip_ablation")
    text = made.to_json()
    read = Plan.from_json(text)
    assert read == made
    assert len(json.loads(text)["configs"]) == 3, "configs that differ only in the seed are stored once"
    params = {"optim.lr": 2e-5, "loss": "gspo"}
    assert read.make_run(params, 4, "kl") == made.make_run(params, 4, "kl")


# -- making runs while a sweep goes on ----------------------------------------------------------------------


def test_suggested_values_and_group_choices_make_a_run(plan):
    made = plan("+sweep=lr_search")
    run = made.make_run({"optim.lr": 2e-5, "kl": "k3", "kl.coef": 0.01}, 3, "kl_lr")
    assert (run.config["optim"]["lr"], run.config["kl"]["kind"], run.config["kl"]["coef"]) == (2e-5, "k3", 0.01)
    assert run.config["seed"] == 3 and run.name == "kl_lr/lr=2e-05,kl=k3,coef=0.01-s3"
    assert run.overrides == ["optim.lr=2e-05", "kl=k3", "kl.coef=0.01"]
    assert run.key == run_key(from_dict(run.config))


def test_values_in_place_equal_a_full_composition(loader):
    composer = Composer(loader, ["+sweep=clip_ablation"])
    texts = ["optim.lr=3e-5", "loss=gspo", "data.kind=dynamic_sampling", "sampling.temperature=1", "task.limit=null"]
    whole = loader.load_configuration("config", ["+sweep=clip_ablation", *texts], run_mode=RunMode.RUN)
    composed = Composer(loader, ["+sweep=clip_ablation", *texts]).config()
    assert composer.apply(texts) == composed
    assert type(composer.apply(texts)["sampling"]["temperature"]) is float, "stored as the schema stores it"
    assert typed_config(composed) == from_dict(composed)
    assert whole.loss.kind == "gspo"


def test_many_trials_cost_no_further_compositions(plan, loader, monkeypatch):
    made = plan("+sweep=lr_search")
    made.make_run({"optim.lr": 1e-5}, 0)
    calls = []
    load = loader.load_configuration
    monkeypatch.setattr(loader, "load_configuration", lambda *a, **k: (calls.append(1), load(*a, **k))[1])
    runs = [made.make_run({"optim.lr": 1e-5 + index * 1e-8}, index % 3) for index in range(300)]
    assert len({run.key for run in runs}) == 300 and not calls


def test_a_suggestion_that_is_not_valid_is_explained(plan):
    made = plan("+sweep=lr_search")
    with pytest.raises(ConfigError, match="sampling.group_size"):
        made.make_run({"sampling.group_size": 1}, 0)
    with pytest.raises(ConfigError, match="optim.lr"):
        made.make_run({"optim.lr": "fast"}, 0)
    with pytest.raises(ConfigError, match="Did you mean optim.lr"):
        made.make_run({"optim.lrr": 1}, 0)


def test_a_fork_has_its_own_key_and_names_its_parent(plan):
    made = plan("+sweep=clip_ablation")
    parent = next(run for run in made.runs if run.arm == "textbook")
    child = made.make_child(parent, ["optim.lr=1e-5", "loss=clip_higher"], 20)
    assert (child.parent, child.parent_step, child.seed, child.arm) == (parent.key, 20, parent.seed, "textbook")
    assert child.key != parent.key
    assert child.key not in {run.key for run in made.runs}
    # The group choice acts although the arm sets loss.low and loss.high as values, which Hydra would keep.
    assert (child.config["loss"]["low"], child.config["loss"]["high"]) == (0.2, 0.28)
    assert parent.config["loss"]["high"] == 0.3, "the parent is left alone"
    assert made.make_child(parent, ["optim.lr=1e-5", "loss=clip_higher"], 10).key != child.key


# -- refusals -----------------------------------------------------------------------------------------------


def test_a_clip_ablation_with_one_update_per_rollout_is_refused_with_the_reason(mistakes):
    text = mistakes("+sweep=clip_ablation", "optim.minibatches=1", "optim.inner_epochs=1")
    assert "clip_higher" in text and "textbook" in text and "the ratio is 1" in text


def test_an_arm_that_changes_nothing_is_refused(mistakes):
    text = mistakes(file={"arms": {"base": [], "same": ["entropy.target=0.4"]}})
    assert "same" in text and "entropy.target has no effect" in text and "entropy.kind=none" in text
    assert "both set the same values" in mistakes("loss.high=0.2,0.20")


def test_an_override_without_effect_inside_a_working_arm_is_refused(mistakes):
    text = mistakes(file={"arms": {"base": [], "b": ["loss.high=0.3", "entropy.rho=0.4"]}})
    assert "b: entropy.rho=0.4" in text and "has no effect" in text


def test_an_arm_outside_the_declared_factors_is_refused(mistakes):
    text = mistakes(file={"arms": {"base": [], "b": ["loss.high=0.3", "optim.lr=1e-5"]}, "factors": ["loss"]})
    assert "confounded" in text and "optim.lr" in text and "does not list" in text


def test_two_factors_at_once_need_saying_so(plan, mistakes):
    arms = {"base": [], "b": ["loss.high=0.3", "optim.lr=1e-5"]}
    text = mistakes(file={"arms": arms})
    assert "2 factors at once (loss, optim)" in text
    assert "2 factors at once" in mistakes(file={"arms": arms, "factors": ["loss", "optim.lr"]})
    assert len(plan(file={"arms": arms, "factors": ["loss+optim.lr"]}).runs) == 2


def test_a_preset_counts_as_one_factor(plan):
    assert len(plan("algo=dapo,gspo").runs) == 2
    assert len(plan(file={"arms": {"a": ["algo=dapo"], "b": ["algo=gspo"]}, "factors": ["algo"]}).runs) == 2


def test_an_unknown_factor_or_baseline_is_refused(mistakes):
    assert "sweep.factors=lss" in mistakes(file={"arms": ARMS, "factors": ["loss", "lss"]})
    assert "the arms are a, b" in mistakes(file={"arms": ARMS, "baseline": "c"})


def test_a_typed_choice_beats_the_sweep_file_and_a_typed_value_beats_both(plan):
    body = {"optim": {"lr": 3e-5, "minibatches": 2}, "loss": {"aggregation": "constant"}}
    made = plan("optim=large_model", "optim.minibatches=8", file={"arms": {"a": [], "b": ["loss=gspo"]}}, **body)
    a, b = made.runs
    assert {run.config["optim"]["lr"] for run in made.runs} == {1e-6}, "the choice of the command line"
    assert {run.config["optim"]["minibatches"] for run in made.runs} == {8}, "its value"
    assert (a.config["loss"]["aggregation"], b.config["loss"]["aggregation"]) == ("constant", "sequence_mean")
    assert made.make_run({"loss": "gspo"}, 0).config["loss"] == b.config["loss"]
    kept = plan("loss.aggregation=token_mean", file={"arms": {"a": [], "b": ["loss=gspo"]}}, **body)
    assert {run.config["loss"]["aggregation"] for run in kept.runs} == {"token_mean"}


def test_a_preset_sets_its_pieces_over_a_sweep_file_but_not_over_typed_pieces(plan):
    body = {"data": {"kind": "plain"}, "overlong": {"kind": "soft"}}
    (run,) = plan("algo=dapo", "overlong=none", file={"arms": {"a": []}}, **body).runs
    assert (run.config["data"]["kind"], run.config["overlong"]["kind"]) == ("dynamic_sampling", "none")


def test_a_sampler_typed_beside_a_sweep_file_is_the_one_used(plan):
    assert plan("+sweep=lr_search", "study=random").study["sampler"] == "random"


def test_a_typed_value_that_every_arm_sets_over_is_refused(mistakes):
    assert "loss.high=0.5: has no effect: every arm sets it" in mistakes("loss.high=0.5", file={"arms": ARMS})


def test_a_typed_value_of_a_searched_key_is_refused_with_the_way_to_narrow_the_search(plan, mistakes):
    text = mistakes("+sweep=lr_search", "optim.lr=1e-4")
    assert "optim.lr=1e-4: has no effect: the search sets it" in text
    assert '"optim.lr=interval(LOW,HIGH)"' in text
    (entry,) = plan("+sweep=lr_search", "optim.lr=interval(1e-5,2e-5)").space
    assert (entry.low, entry.high) == (1e-5, 2e-5)


def test_a_mapping_that_every_arm_or_the_search_sets_over_is_refused(mistakes):
    assert "loss={high:0.5}: has no effect: every arm sets it" in mistakes("loss={high:0.5}", file={"arms": ARMS})
    assert "optim={lr:1e-5}: has no effect: the search sets it" in mistakes("+sweep=lr_search", "optim={lr:1e-5}")


def test_a_typed_value_without_effect_under_the_chosen_kinds_is_refused(plan, mistakes):
    text = mistakes("model.path=/x", "loss.cap=4", file={"arms": ARMS})
    assert "model.path=/x: has no effect with model.kind=tiny" in text and "loss.cap=4: has no effect" in text
    arms = {"a": [], "b": ["loss=cispo"]}
    assert plan("loss.cap=4", file={"arms": arms}).arms == ["a", "b"], "one of the arms heeds it"


def test_several_values_of_a_key_are_not_lost_beside_stages(mistakes):
    text = mistakes("+sweep=priority", "data.prompts_per_step=8,16", "optim.lr=interval(1e-5,1e-4)")
    assert "data.prompts_per_step=8,16: several values belong into a stage" in text
    assert "sweep.space=optim.lr: belongs into a stage" in text


def test_what_is_no_setting_of_a_run_differs_between_no_runs(mistakes):
    arms = {"a": [], "b": ["engine.slots=1"], "c": ["hydra.run.dir=/x"], "d": ["seed=3"]}
    text = mistakes(file={"arms": arms})
    for part in ("b: engine.slots=1", "c: hydra.run.dir=/x", "d: seed=3"):
        assert f"{part}: cannot differ between the runs of a sweep" in text
    space = {"seed": "choice(1,2)", "optim.lr": "choice(1e-5,1e-4)"}
    text = mistakes(file={"space": space}, study={"sampler": "random", "trials": 2})
    assert "cannot differ between the runs of a sweep" in text


def test_a_value_given_twice_is_refused(mistakes):
    text = mistakes("optim.lr=1e-4", "optim.lr=1e-5", file={"arms": ARMS})
    assert "optim.lr=1e-5: was given before, as optim.lr=1e-4" in text


def test_seeds_given_twice_are_refused(mistakes):
    assert "seed: was given together with sweep.seeds=[2,3]" in mistakes("seed=1", "sweep.seeds=[2,3]")


def test_a_wrong_baseline_does_not_hide_a_wrong_factor(mistakes):
    text = mistakes(file={"arms": ARMS, "baseline": "c", "factors": ["los"]})
    assert "sweep.baseline=c: no such arm; the arms are a, b" in text
    assert "sweep.factors=los: is no key" in text


def test_mistakes_of_all_arms_and_of_the_sweep_come_at_once(mistakes):
    arms = {"a": ["loss.hih=0.3"], "b": ["optim.lr=-1"], "c": ["loss=clip_highr"]}
    text = mistakes(
        file={"arms": arms, "seeds": [0, 0], "schedule": "width", "budget": {"minutes": -3}},
        study={"sampler": "tpee"},
    )
    for part in (
        "a: loss.hih=0.3", "Did you mean loss.high", "b: optim.lr=-1", "c: loss=clip_highr",
        "Did you mean loss=clip_higher", "study.sampler=tpee", "names 0 twice", "sweep.schedule=width",
        "sweep.budget.minutes=-3",
    ):  # fmt: skip
        assert part in text, (part, text)


def test_a_mistake_all_arms_share_is_said_once(mistakes):
    text = mistakes("sampling.group_size=1", file={"arms": ARMS})
    assert text.count("sampling.group_size=1") == 1 and "1 mistake" in text


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "..", "a b"])
def test_a_sweep_name_cannot_leave_the_results_folder(mistakes, name):
    assert "names a folder" in mistakes(file={"arms": ARMS, "name": name})


def test_seeds_must_be_whole_numbers(mistakes):
    assert "whole numbers" in mistakes("seed=-1,2", file={"arms": ARMS})
    assert "enumerated" in mistakes("seed=interval(0,3)", file={"arms": ARMS})


# -- searches and stages ------------------------------------------------------------------------------------


def test_a_search_from_the_command_line(plan):
    made = plan("study=random", "study.trials=5", "optim.lr=tag(log,interval(1e-5,1e-3))", "loss=symmetric,gspo")
    assert made.searched and not made.runs and num_runs(made) == 5
    assert [(entry.key, entry.kind, entry.log) for entry in made.space] == [
        ("optim.lr", "float", True), ("loss", "choice", False),
    ]  # fmt: skip


def test_an_interval_of_a_whole_number_key_is_whole(plan):
    made = plan("study=random", "sampling.group_size=interval(4,16)")
    assert made.space[0].kind == "int"


def test_a_command_line_range_replaces_the_one_of_the_sweep_file(plan):
    made = plan("+sweep=lr_search", "optim.lr=interval(1e-5,2e-5)")
    assert [(entry.low, entry.high, entry.log) for entry in made.space] == [(1e-5, 2e-5, False)]


def test_a_grid_is_enumerated_with_its_conditions(plan):
    space = {"kl": "choice(off, k3)", "kl.coef": {"choices": [0.001, 0.01], "when": {"kl": "k3"}}}
    made = plan("study=grid", file={"space": space, "seeds": [0, 1]})
    assert made.arms == ["kl=off", "kl=k3,coef=0.001", "kl=k3,coef=0.01"] and len(made.runs) == 6
    assert made.runs[1].params == {"kl": "k3", "kl.coef": 0.001}
    assert not made.searched


def test_zip_lists_make_arms(plan):
    made = plan(file={"zip": {"sampling.group_size": [4, 8], "data.prompts_per_step": [64, 32]}})
    assert [(r.config["sampling"]["group_size"], r.config["data"]["prompts_per_step"]) for r in made.runs] == [
        (4, 64), (8, 32),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "file", "reason"),
    [
        ([], {"space": {"optim.lr": "interval(1e-5,1e-3)"}}, "cannot search optim.lr"),
        (["optim.lr=interval(1e-5,1e-3)"], None, "cannot search optim.lr"),
        (["study=grid", "optim.lr=interval(1e-5,1e-3)"], None, "needs a step"),
        (["study=tpe"], None, "nothing to search"),
        (["study=tpe", "study.trials=0", "optim.lr=interval(1e-5,1e-3)"], None, "study.trials"),
        (["study=tpe", "optim.lr=interval(1e-5,1e-3)"], {"arms": ARMS}, "no arms"),
        (["study=tpe"], {"space": {"optim.lrr": "interval(1e-5,1e-3)"}}, "Did you mean optim.lr"),
        (["study=tpe", "optim.lr=interval(-1,1)"], None, "optim.lr=-1"),
        (["study=tpe"], {"space": {"loss": "choice(symmetric, gsp)"}}, "Did you mean loss=gspo"),
        (["study=tpe", "optim.lr=tag(lg, interval(1e-5,1e-3))"], None, "unknown tag lg"),
    ],
)
def test_a_search_that_cannot_work_is_refused(mistakes, overrides, file, reason):
    assert reason in mistakes(*overrides, file=file)


def test_the_priority_stages_split_the_budget_and_count_their_runs(plan):
    made = plan("+sweep=priority")
    assert [stage.name for stage in made.stages] == ["data", "clipping", "kl_lr", "sampling"]
    assert sum(stage.share for stage in made.stages) == pytest.approx(1)
    # per seed: 3 + 3 + 12 + 6 configurations and four times the default
    assert num_runs(made) == 2 * (3 + 3 + 12 + 6 + 4)
    assert Plan.from_json(made.to_json()).stages == made.stages


def test_mistakes_inside_a_stage_are_found_before_the_first_stage_runs(mistakes):
    stages = [{"name": "one", "arms": {"a": ["loss.high=0.3"]}}, {"name": "two", "arms": {"b": ["loss.hih=0.3"]}}]
    text = mistakes(file={"stages": stages, "arms": ARMS})
    assert "two/b: loss.hih" in text and "belongs into a stage" in text


# -- what plan=true prints ----------------------------------------------------------------------------------


def test_the_plan_shows_every_run_its_cost_and_writes_nothing(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    made = plan("+sweep=clip_ablation", "engine.slots=3")
    text = shown(made, tmp_path / "results")
    for run in made.runs:
        assert run.key in text
    assert "loss.low=0.1 loss.high=0.3" in text
    assert "9 runs, 450 rollout steps, 3 at a time" in text and "a guess" in text and "GPU-hours" in text
    assert "43% at p=0.1, 1% at p=0.5, 43% at p=0.9" in text
    assert list(tmp_path.iterdir()) == []


def test_groups_of_two_are_warned_about(plan, tmp_path):
    text = shown(plan("sampling.group_size=2,4"), tmp_path)
    assert "82% at p=0.1, 50% at p=0.5" in text
    assert "Warning: group_size=2: sampling.group_size=2 gives at most half of the groups a signal" in text


def test_settings_that_will_probably_disappoint_are_warned_about_with_whom_they_concern(plan, tmp_path):
    both = plan("loss.kind=gspo", "seed=0,1")
    assert len(both.warnings) == 1 and both.warnings[0].startswith("loss.low=0.2 loss.high=0.2 are bounds for token")
    one = plan("loss.kind=clip,gspo")
    assert [warning.split(":")[0] for warning in one.warnings] == ["gspo"] or one.warnings[0].startswith("kind=gspo")
    stage = {"name": "clip", "arms": {"sequence": ["loss.kind=gspo"]}}
    staged = plan(file={"stages": [stage]})
    assert staged.warnings[0].startswith("clip/sequence: ")
    searched = plan("study=random", "study.trials=2", "sampling.group_size=choice(2,8)")
    assert searched.warnings[0].startswith("sampling.group_size=2: ")


def test_overrides_that_repeat_the_base_are_no_differences_and_no_line_ends_in_spaces(plan, tmp_path):
    lines = shown(plan("+sweep=clip_ablation"), tmp_path).splitlines()
    table = [line.split("s  ", 1)[1] for line in lines if " s  " in line and not line.startswith("key")]
    assert table[:3] == ["-", "loss.high=0.28", "loss.low=0.1 loss.high=0.3"]
    assert [line for line in lines if line != line.rstrip()] == []
    presets = shown(plan("algo=grpo,dapo,gspo"), tmp_path)
    assert "algo=dapo\n" in presets and "algo=gspo\n" in presets


def test_flat_share_is_p_to_the_g_plus_its_complement():
    assert flat_share(0.5, 8) == pytest.approx(2 / 256)
    assert flat_share(0.1, 2) == pytest.approx(0.01 + 0.81)


def test_a_plan_of_stages_and_of_a_search_says_what_will_be_tried(plan, tmp_path):
    text = shown(plan("+sweep=priority"), tmp_path)
    assert "Stage 3 kl_lr: 12 configurations by tpe and the default" in text and "40% of the budget" in text
    assert "kl.coef: 0.0001 to 0.1, log   when kl in k3_unbiased" in text
    text = shown(plan("+sweep=lr_search", "sweep.budget.minutes=30"), tmp_path)
    assert "20 configurations by tpe" in text and "optim.lr: 1e-06 to 0.001, log" in text
    assert "Budget: minutes 30" in text


def write_log(folder, config, seconds):
    folder.mkdir(parents=True)
    rows = [{"type": "start", "config": config}]
    rows += [{"type": "step", "step": i, "metrics": {"time/step": s}} for i, s in enumerate(seconds, 1)]
    text = "\n".join(json.dumps(row) for row in rows) + '\n{"type": "step", "st'
    (folder / "events.jsonl").write_text(text)


def test_the_estimate_comes_from_recorded_runs_where_there_are_any(plan, tmp_path):
    config = plan("+sweep=clip_ablation").runs[0].config
    write_log(tmp_path / "old" / "runs" / "k1", config, [2.0, 2.0, 3.0])
    write_log(tmp_path / "single" / "k2", config, [4.0, 4.0, 9.0])
    (tmp_path / "old" / "runs" / "k3").mkdir()
    (tmp_path / "old" / "runs" / "k3" / "events.jsonl").write_text('{"type": "start", "config": {}}\nnonsense\n')
    book = SpeedBook(tmp_path)
    speed = book.estimate(config)
    assert speed is not None and speed.seconds == 3.0 and speed.source == "recorded (2 runs like this)"
    lighter = plan("+sweep=clip_ablation", "optim.inner_epochs=2").runs[0].config
    speed = book.estimate(lighter)
    assert speed is not None and speed.seconds == 1.5 and "scaled by work" in speed.source


def test_nothing_is_guessed_for_a_model_never_run_here(plan, tmp_path):
    data = tmp_path / "x.jsonl"
    data.write_text('{"question": "1+1", "answer": "2"}\n')
    made = plan("model=hf", "model.path=some/model", "task=records", f"task.path={data}", "loss=symmetric,gspo")
    assert SpeedBook(tmp_path).estimate(made.runs[0].config) is None
    assert "no recorded speed" in shown(made, tmp_path)


def test_slots_follow_the_engine_section(plan, monkeypatch):
    engine = plan("loss=symmetric,gspo").engine
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,GPU-12ab")
    assert num_slots(engine) == 3
    assert num_slots({**engine, "trials_per_gpu": 2}) == 6
    assert num_slots({**engine, "per_trial_gpus": 2}) == 1
    assert num_slots({**engine, "slots": 5}) == 5


def test_durations_are_readable():
    assert [duration(s) for s in (42, 400, 9000, 400000)] == ["42 s", "7 min", "2.5 h", "4.6 d"]


def test_a_long_plan_is_printed_in_full(plan, tmp_path):
    made = plan("loss=symmetric,clip_higher", "seed=range(0,250)")
    text = shown(made, tmp_path)
    assert sum(run.key in text for run in made.runs) == 500


def test_hydra_still_reads_what_the_plan_writes(plan):
    parser = OverridesParser.create()
    for run in plan("+sweep=dapo_ladder").runs:
        parser.parse_overrides(run.overrides)
