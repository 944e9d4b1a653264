"""The command line: its order, its flags, its mistakes on one screen, and the two ways in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException

from reasonrl.errors import ConfigError, DataError, EngineError
from reasonrl.types import Summary
from sweeps import frontdoor, single
from sweeps.compose import make_loader
from sweeps.config import folder_mistakes
from sweeps.single import _alone_in

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "transformers", "wandb", "matplotlib", "optuna", "pandas", "scipy", "sklearn")


def sweep_py(*argv: str, cwd: Path, code: int = 0, **env: str) -> subprocess.CompletedProcess:
    """Run `python sweep.py` in an empty folder and expect this exit code."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    environment.pop("HYDRA_FULL_ERROR", None)
    done = subprocess.run(
        [sys.executable, str(ROOT / "sweep.py"), *argv], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


# -- the order of the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["+sweep=x", "-m"], ["+sweep=x", "-m"]),
        (["-m", "+sweep=x"], ["+sweep=x", "-m"]),
        (["a=1", "-m", "+sweep=x", "b=2"], ["a=1", "+sweep=x", "b=2", "-m"]),
        (["a=1", "--multirun", "b=-2"], ["a=1", "b=-2", "--multirun"]),
        (["sweep=x", "-m"], ["+sweep=x", "-m"]),
        (["--config-dir", "my", "a=1", "-m", "b=2"], ["a=1", "b=2", "--config-dir", "my", "-m"]),
        (["--", "a=1", "-m"], ["a=1", "-m"]),
        # flags that only show something do not go with -m, and show the first of several values
        (["--cfg", "job", "-m", "+sweep=x", "a=1,2"], ["+sweep=x", "a=1", "--cfg", "job"]),
        (["a=choice(3,4)", "-m", "--help"], ["a=3", "--help"]),
        (["-m", "a=interval(0.5,1)", "--cfg=job"], ["a=0.5", "--cfg=job"]),
        (["--info", "a=1", "-m"], ["a=1", "--info"]),
        (["--info", "defaults", "a=1"], ["a=1", "--info", "defaults"]),
        (["~a", "-m", "a=[1,2]"], ["~a", "a=[1,2]", "-m"]),
    ],
)
def test_overrides_may_stand_anywhere(argv, expected):
    assert frontdoor.normalise(argv) == expected


def test_a_line_being_completed_keeps_its_last_word_last():
    assert frontdoor.normalise_completion("python sweep.py a=1 -m lo") == "python sweep.py -m a=1 lo"
    assert frontdoor.normalise_completion("python sweep.py a=1 -m ") == "python sweep.py -m a=1 "
    assert frontdoor.normalise_completion("python sweep.py") == "python sweep.py"


def test_the_plan_is_the_same_wherever_overrides_stand_and_without_m(tmp_path):
    after = sweep_py("+sweep=gspo_vs_grpo", "-m", "plan=true", "steps=9", cwd=tmp_path).stdout
    both = sweep_py("steps=9", "-m", "+sweep=gspo_vs_grpo", "plan=true", cwd=tmp_path).stdout
    without = sweep_py("+sweep=gspo_vs_grpo", "steps=9", "plan=true", cwd=tmp_path).stdout
    assert after == both == without
    assert "6 runs, 54 rollout steps" in after and list(tmp_path.iterdir()) == []


# -- flags ----------------------------------------------------------------------------------------------------


def test_help_lists_the_groups_and_the_sweeps(tmp_path):
    text = sweep_py("--help", cwd=tmp_path).stdout
    for part in ("loss: cispo, clip_higher", "sweep: clip_ablation", "study: cmaes", "+sweep=clip_ablation -m"):
        assert part in text
    assert list(tmp_path.iterdir()) == []


def test_the_config_is_shown_together_with_m_and_a_sweep_file(tmp_path):
    text = sweep_py("--cfg", "job", "-m", "+sweep=clip_ablation", "loss.high=0.3,0.4", cwd=tmp_path).stdout
    assert "mode_share: 0.04" in text and "high: 0.3\n" in text and "name: clip_ablation" in text


def test_shell_completion_knows_groups_options_keys_and_sweeps(tmp_path):
    def completed(line: str) -> list[str]:
        return sweep_py("-sc", "query=bash", cwd=tmp_path, COMP_LINE=f"python sweep.py {line}").stdout.split()

    assert {"loss=gspo", "loss=clip_higher"} <= set(completed("plan=true -m loss="))
    assert "optim.lr=" in completed("optim.l")
    assert "+sweep=clip_ablation" in completed("+sweep=clip_a")


@pytest.mark.parametrize("argv", [["--help"], ["+sweep=clip_ablation", "-m", "plan=true"], ["plan=true"]])
def test_help_and_plan_load_no_heavy_library(argv, tmp_path):
    # Loading is what takes their time: torch alone needs seconds.
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['sweep.py', *{argv!r}]\n"
        "try:\n    runpy.run_path(sys.argv[0] if False else "
        f"{str(ROOT / 'sweep.py')!r}, run_name='__main__')\n"
        "except SystemExit as leaving:\n    assert not leaving.code, leaving.code\n"
        f"print('LOADED', sorted(set(sys.modules) & set({HEAVY!r})))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "LOADED []" in done.stdout, done.stdout + done.stderr


# -- mistakes -------------------------------------------------------------------------------------------------


def test_all_mistakes_of_a_command_come_at_once_and_nothing_is_written(tmp_path):
    done = sweep_py(
        "optim.lrr=1", "sampling.group_size=1", "lr=3", "loss=clip_highr", "seed=abc", "task.operands=foo",
        "steps=-1", "+reward.parts.format.weight=2", "+foo=2", "model.lora=3", "~loss.low", "data", "kl.coef=[",
        cwd=tmp_path, code=2,
    )  # fmt: skip
    for part in (
        "optim.lrr=1: unknown key. Did you mean optim.lr?",
        "sampling.group_size=1: needs at least 2",
        "lr=3: unknown key. Did you mean optim.lr?",
        "loss=clip_highr: no conf/loss/clip_highr.yaml; known: cispo",
        "Did you mean loss=clip_higher?",
        "seed=abc: must be a whole number",
        "task.operands=foo: must be a list",
        "steps=-1: must be at least 1",
        'Write "+reward.parts={format:{weight:2}}"',
        "foo=2: unknown key",
        "model.lora=3: is a section",
        "cannot be deleted",
        "is not an override",
        "kl.coef=[",
    ):
        assert part in done.stderr, (part, done.stderr)
    assert done.stdout == "" and list(tmp_path.iterdir()) == []
    assert len(done.stderr.splitlines()) < 24, "one screen"


def test_mistakes_of_keys_arms_and_sweep_come_at_once(tmp_path):
    argv = ["optim.lr=fast", "+sweep.arms={a:[],b:['loss.hih=1']}", "sweep.schedule=width", "sweep.seeds=[-1]", "-m"]
    text = sweep_py(*argv, cwd=tmp_path, code=2).stderr
    for part in ("optim.lr=fast: must be a number", "b: loss.hih", "sweep.schedule=width", "sweep.seeds=[-1]"):
        assert part in text, (part, text)


def test_what_is_not_an_override_is_shown_as_one(tmp_path):
    text = sweep_py("+sweep.arms.a=[loss.low=1,loss.high=2]", "-m", cwd=tmp_path, code=2).stderr
    assert "Write \"+sweep.arms.a=['loss.low=1','loss.high=2']\"." in text
    text = sweep_py("loss=symmetric,gspo", "task.operands=4,5", cwd=tmp_path, code=2).stderr
    assert "loss=symmetric,gspo: is several values, so it needs a sweep. Add -m.\n" in text
    assert "write task.operands=[4,5] for a list" in text
    text = sweep_py("loss={low:0.1,hihg:0.3}", cwd=tmp_path, code=2).stderr
    assert "loss.hihg=0.3: unknown key. Did you mean loss.high?" in text


def test_what_one_run_would_lose_is_refused(tmp_path):
    argv = ["sweep.seeds=[1,2]", "engine.slots=4", "study=tpe", "task.path=x.jsonl", "steps=2", "steps=3"]
    text = sweep_py(*argv, cwd=tmp_path, code=2).stderr
    for part in ("sweep.seeds=[1,2]", "engine.slots=4", "study=tpe"):
        assert f"{part}: has no effect on a single run. Add -m" in text
    assert "task.path=x.jsonl: has no effect with task.kind=arithmetic" in text
    assert "steps=3: was given before, as steps=2" in text
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_another_process_trains_is_left_alone(tmp_path):
    run_dir = tmp_path / "r" / "single" / "key"
    script = f"""
import pathlib, time
from sweeps.single import _alone_in
with _alone_in(pathlib.Path({str(run_dir)!r})):
    print("held", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        with pytest.raises(EngineError, match=f"process {holder.pid}"), _alone_in(run_dir):
            pass
        holder.kill()
    with _alone_in(run_dir):
        assert (run_dir / ".lock").read_text() == str(os.getpid())
    assert list(run_dir.iterdir()) == []
    with _alone_in(tmp_path / "other" / "key"):
        pass
    assert not (tmp_path / "other").exists(), "what held nothing leaves nothing"


def test_an_unknown_sweep_name_lists_the_known_ones(tmp_path):
    text = sweep_py("+sweep=clip_ablaton", "-m", cwd=tmp_path, code=2).stderr
    assert "known: clip_ablation, clip_random_reward" in text and "Did you mean sweep=clip_ablation?" in text


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["loss=symmetric,clip_higher"], "Add -m"),
        (["+sweep=clip_ablation", "-m", "optim.minibatches=1", "optim.inner_epochs=1"], "the ratio is 1"),
        (["-m", "sampling.group_size=1,8"], "needs at least 2"),
        (["+sweep=clip_ablation", "-m", "plan=true", "task=records", "model=hf"], "task.path"),
        (["--resolve"], "--resolve flag can only be used"),
        (["+loss.foo=3"], "loss.foo=3: unknown key; loss has"),
        (["alog=grpo"], "alog=grpo: unknown key. Did you mean algo=grpo?"),
        (["loss=null"], "loss=null: is a choice; known: cispo"),
        (["steps="], "steps='': must be a whole number"),
        (["sampling.max_new_tokens=null"], "sampling.max_new_tokens=null: cannot be null"),
        (["steps"], "- steps: is not an override"),
    ],
)
def test_bad_input_ends_with_code_2_a_reason_and_an_empty_folder(argv, reason, tmp_path):
    done = sweep_py(*argv, cwd=tmp_path, code=2)
    assert reason in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_under_a_launcher_is_refused_once(tmp_path):
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    first, second = (
        sweep_py("+sweep=clip_ablation", "-m", cwd=tmp_path, code=2, RANK=rank, **launched) for rank in "01"
    )
    assert "without the launcher" in first.stderr and "engine.per_trial_gpus=2" in first.stderr
    assert second.stderr == "" and list(tmp_path.iterdir()) == []


def test_a_sweep_is_composed_once_and_like_hydra_composes_it(monkeypatch):
    from hydra.types import RunMode

    loader, words = make_loader(), ["+sweep=clip_ablation", "steps=7"]
    composed = []
    compose = loader._load_configuration_impl
    monkeypatch.setattr(loader, "_load_configuration_impl", lambda **asked: composed.append(1) or compose(**asked))
    read_mode = {"config_name": "config", "run_mode": RunMode.MULTIRUN, "validate_sweep_overrides": False}
    only_mode = loader.load_configuration(overrides=words, **read_mode)
    judged = {**read_mode, "validate_sweep_overrides": True}
    assert loader.load_configuration(overrides=words, **judged) is only_mode and len(composed) == 1
    again = loader.load_configuration(overrides=words, **judged)
    assert again == only_mode and again is not only_mode and len(composed) == 2
    loader.load_configuration(overrides=["hydra.verbose=true,false"], **read_mode)
    with pytest.raises(ConfigCompositionException, match="Sweeping over Hydra's configuration"):
        loader.load_configuration(overrides=["hydra.verbose=true,false"], **judged)


def test_a_broken_sweep_file_is_named_with_line_or_key(tmp_path):
    folder = tmp_path / "my" / "sweep"
    folder.mkdir(parents=True)
    (folder / "torn.yaml").write_text("# @package _global_\nhydra: {mode: MULTIRUN}\nsweep: {arms: 3\n")
    (folder / "typo.yaml").write_text("# @package _global_\nhydra: {mode: MULTIRUN}\noptim: {lrr: 3}\n")
    (folder / "kind.yaml").write_text("# @package _global_\nhydra: {mode: MULTIRUN}\nsweep: {arms: 3}\n")
    text = sweep_py("--config-dir", "my", "+sweep=torn", cwd=tmp_path, code=2).stderr
    assert "torn.yaml, line 4" in text and "not YAML" in text
    text = sweep_py("--config-dir", "my", "+sweep=typo", cwd=tmp_path, code=2).stderr
    assert "optim.lrr" in text and "sweep/typo.yaml" in text and "Did you mean optim.lr?" in text
    text = sweep_py("--config-dir", "my", "+sweep=kind", cwd=tmp_path, code=2).stderr
    assert "sweep.arms" in text and "sweep/kind" in text


@pytest.fixture
def sweep_file(tmp_path):
    """Writes my/sweep/NAME.yaml and says how to choose it."""

    def write(name: str, text: str) -> list[str]:
        folder = tmp_path / "my" / "sweep"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text(text)
        return ["--config-dir", str(tmp_path / "my"), f"+sweep={name}", "plan=true"]

    return write


HEAD, MODE, ARMS = "# @package _global_\n", "hydra: {mode: MULTIRUN}\n", "sweep: {arms: {a: [], b: [loss.high=0.4]}}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "sweep=mine: asks nothing"),
        (HEAD + MODE + "loss: gspo\n" + ARMS, "loss: is a section, not the value gspo"),
        (HEAD + MODE + "algo: dapo\n" + ARMS, "defaults: [{override /algo: NAME}]"),
        (HEAD + MODE + "sweep: {arms: [loss=gspo]}\n", "a list stands where names are mapped"),
        (HEAD + MODE + "sweep: {seeds: 3}\n", "sweep.seeds: must be a list"),
        (HEAD + MODE + "sweep: {arms: {off: [], b: [loss.high=0.4]}}\n", "YAML reads this name as False"),
        (HEAD + MODE + "sweep: {arms: {}}\n", "sweep=mine: asks nothing"),
        (HEAD + ARMS, "lacks the line `hydra: {mode: MULTIRUN}`"),
        (MODE + ARMS, "Begin the file with the line `# @package _global_`"),
    ],
    ids=["empty", "section", "algo", "list", "seeds", "off", "no arms", "no mode", "no header"],
)
def test_a_sweep_file_that_would_be_ignored_is_refused_with_the_cure(monkeypatch, capfd, sweep_file, text, said):
    assert enter(monkeypatch, *sweep_file("mine", text)) == 2
    assert said in capfd.readouterr().err


def test_a_sweep_without_a_name_has_that_of_its_file(monkeypatch, capsys, sweep_file):
    assert enter(monkeypatch, *sweep_file("mine", HEAD + MODE + ARMS)) == 0
    assert "Plan of mine -> results/mine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["+sweep=clip_ablation", "sweep.arms={}"], "sweep.arms={}: empties nothing"),
        (["reward.parts={}"], "reward.parts={}: empties nothing: mappings are merged, and correctness stays"),
    ],
    ids=["sweep", "single"],
)
def test_an_empty_mapping_that_would_be_ignored_is_refused(monkeypatch, trained, capfd, argv, said):
    assert enter(monkeypatch, *argv) == 2
    assert said in capfd.readouterr().err and trained.runs == []


@pytest.mark.parametrize("more", [[], ["plan=true"], ["+sweep=clip_ablation"], ["+sweep=clip_ablation", "plan=true"]])
def test_a_results_folder_that_cannot_be_made_is_refused_before_any_work(monkeypatch, trained, capfd, tmp_path, more):
    (tmp_path / "file").write_text("")
    assert enter(monkeypatch, "results=file/x/y", *more) == 2
    text = capfd.readouterr().err
    assert "results=file/x/y: needs the folder file/x/y/" in text
    assert f"{tmp_path / 'file'} is no folder" in text and trained.runs == []


def test_a_folder_that_is_not_writable_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("os.access", lambda place, mode: Path(place) != tmp_path)
    (mistake,) = folder_mistakes("results", "x", tmp_path / "x" / "y")
    assert f"{tmp_path} is not writable" in str(mistake)
    assert not (tmp_path / "x").exists()


# -- the two ways in ------------------------------------------------------------------------------------------


def enter(monkeypatch, *argv: str) -> int:
    """The front door in this process."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(sys, "argv", [str(ROOT / "sweep.py"), *argv])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    import sweep

    try:
        return frontdoor.enter(sweep.main, argv)
    except SystemExit as leaving:
        return int(leaving.code or 0)


def test_a_sweep_goes_to_the_runner_and_its_exit_code_comes_back(monkeypatch, tmp_path):
    plans = []
    monkeypatch.chdir(tmp_path)
    runner = types.ModuleType("sweeps.runner")
    runner.run = lambda plan: plans.append(plan) or 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sweeps.runner", runner)
    assert enter(monkeypatch, "-m", "loss=symmetric,clip_higher", "seed=0,1,2", "results=elsewhere") == 7
    (plan,) = plans
    assert len(plan.runs) == 6 and plan.directory == Path("elsewhere/loss")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """A trainer that notes what it was given and ends as scripted; runs start in an empty folder."""
    calls = types.SimpleNamespace(runs=[], status="finished", reason=None, error=None, press=0)

    def train(config, run_dir, on_event):
        if calls.error:
            raise calls.error
        for _ in range(calls.press):
            os.kill(os.getpid(), signal.SIGINT)
        calls.runs.append((config, Path(run_dir)))
        status = "paused" if on_event({"type": "step"}) == "pause" else calls.status
        return Summary("abc", status, 3, calls.reason, {"eval/accuracy": 0.75}, str(run_dir))

    module = types.ModuleType("reasonrl.train")
    module.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasonrl.train", module)
    monkeypatch.chdir(tmp_path)
    for name in single.QUIET:
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    return calls


def test_no_arguments_is_one_training_run_in_a_folder_of_its_key(monkeypatch, trained, capsys):
    assert enter(monkeypatch, "optim.lr=1e-5", "results=out") == 0
    ((config, run_dir),) = trained.runs
    assert config.optim.lr == 1e-5 and config.steps == 50
    from reasonrl.config import run_key

    assert run_dir == Path("out/single") / run_key(config)
    text = capsys.readouterr().out
    assert "finished at step 3" in text and "eval/accuracy 0.750" in text and "out/single" in text


def test_a_stopped_run_says_why_and_what_to_try(monkeypatch, trained, capsys):
    trained.status = "stopped"
    trained.reason = {"code": "A03", "title": "entropy collapse", "message": "0.02 nats", "intervention": ["loss=gspo"]}
    assert enter(monkeypatch) == 3
    text = capsys.readouterr().out
    assert "A03 entropy collapse: 0.02 nats" in text and "try: python sweep.py loss=gspo" in text


def test_ctrl_c_pauses_after_the_step_and_a_second_one_leaves_at_once(monkeypatch, trained, capsys):
    before = signal.getsignal(signal.SIGINT)
    trained.press = 1
    assert enter(monkeypatch) == 130
    assert "the same command continues it" in capsys.readouterr().out
    trained.press = 2
    assert enter(monkeypatch) == 130
    assert len(trained.runs) == 1, "the second Ctrl-C did not wait for the step"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_finished_run_is_not_repeated_and_a_paused_one_is(monkeypatch, trained, capsys, tmp_path):
    enter(monkeypatch)
    run_dir = trained.runs[0][1]
    run_dir.mkdir(parents=True)
    log = run_dir / "events.jsonl"
    log.write_text('{"type":"start"}\n{"type":"end","status":"paused","step":2}\n')
    assert enter(monkeypatch) == 0 and len(trained.runs) == 2
    log.write_text('{"type":"start"}\n{"type":"end","status":"stopped","step":2}\n')
    assert enter(monkeypatch) == 3 and len(trained.runs) == 2
    assert f"Remove {run_dir}" in capsys.readouterr().out
    log.write_text('{"type":"end","status":"finished","step":2}\n{"type":"start"}\n')
    assert enter(monkeypatch) == 0 and len(trained.runs) == 3


def test_errors_of_data_and_model_are_messages_not_tracebacks(monkeypatch, trained, capfd):
    trained.error = DataError("no such file: problems.jsonl")
    assert enter(monkeypatch) == 2
    captured = capfd.readouterr()
    assert captured.err == "no such file: problems.jsonl\n" and captured.out == ""


def test_an_error_of_ours_keeps_its_traceback(monkeypatch, trained):
    trained.error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        enter(monkeypatch)


def test_a_plan_of_one_run_trains_nothing(monkeypatch, trained, capsys, tmp_path):
    assert enter(monkeypatch, "plan=true") == 0
    text = capsys.readouterr().out
    assert "1 run, 50 rollout steps" in text and "Nothing was run" in text
    assert trained.runs == [] and list(tmp_path.iterdir()) == []


def test_hydras_own_errors_are_explained_even_without_a_known_mistake(capsys):
    assert frontdoor.report(ConfigError([]), []) == 2
    assert frontdoor.report(ValueError("Only one of --run, --cfg can be specified"), []) == 2
    assert "Only one of --run" in capsys.readouterr().err


def test_a_folder_given_with_config_dir_is_searched_first(tmp_path):
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "mine.yaml").write_text("high: 0.5\n")
    assert "mine" in make_loader(extra=str(tmp_path)).get_group_options("loss")
    assert "mine" not in make_loader().get_group_options("loss")
