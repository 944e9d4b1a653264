"""Search spaces: what can be written, what it means, and what is refused with which reason."""

from __future__ import annotations

import pytest

from sweeps import overrides as ov
from sweeps.space import cells, from_override, read_space, read_stages, read_zip, stage_cells
from sweeps.types import SpaceEntry


def entry_of(value):
    entries, mistakes = read_space({"optim.lr": value})
    assert not mistakes, [str(mistake) for mistake in mistakes]
    return entries[0]


def reason_for(value):
    entries, mistakes = read_space({"optim.lr": value})
    assert len(mistakes) == 1, (entries, mistakes)
    return str(mistakes[0])


@pytest.mark.parametrize(
    ("written", "kind", "bounds", "log", "step"),
    [
        ("interval(1e-5, 1e-3)", "float", (1e-5, 1e-3), False, None),
        ("interval(1, 4)", "float", (1, 4), False, None),
        ("int(interval(1, 4))", "int", (1, 4), False, None),
        ("tag(log, interval(1e-5, 1e-3))", "float", (1e-5, 1e-3), True, None),
        ({"low": 1e-5, "high": 1e-3, "log": True}, "float", (1e-5, 1e-3), True, None),
        ({"low": 2, "high": 8, "step": 2}, "int", (2, 8), False, 2),
        ({"low": 0, "high": 1, "step": 0.25}, "float", (0, 1), False, 0.25),
        ({"low": 1, "high": 8, "type": "float"}, "float", (1, 8), False, None),
    ],
)
def test_intervals_in_hydra_syntax_and_as_entries(written, kind, bounds, log, step):
    entry = entry_of(written)
    assert (entry.kind, (entry.low, entry.high), entry.log, entry.step) == (kind, bounds, log, step)


@pytest.mark.parametrize("written", ["choice(a, b)", ["a", "b"], {"choices": ["a", "b"]}, "a,b"])
def test_choices_in_every_form(written):
    assert entry_of(written).choices == ("a", "b")


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("intervall(1, 2)", "cannot be read"),
        ("3", "one value, not a range"),
        (3, "write choice"),
        ({"low": 3, "high": 2}, "low 3 must be below high 2"),
        ({"low": 0, "high": 1, "log": True}, "low above 0"),
        ({"low": 1, "high": 2, "step": 3}, "step 3"),
        ({"low": 1, "high": 8, "log": True, "step": 1}, "exclude each other"),
        ({"low": "a", "high": 2}, "must be numbers"),
        ({"low": 1}, "needs low and high"),
        ({"low": 1, "high": 2, "lgo": True}, "unknown entry lgo"),
        ({"low": 1, "high": 2, "type": "real"}, "type real"),
        ([1, 1], "twice"),
        ("tag(lg, interval(1, 2))", "unknown tag lg"),
        ({"choices": []}, "at least one choice"),
    ],
)
def test_a_bad_entry_is_refused_with_its_reason(written, reason):
    assert reason in reason_for(written)


def test_all_bad_entries_are_reported_at_once():
    _, mistakes = read_space({"a": 3, "b": "interval(2, 1)", "c": "choice(1, 2)"})
    assert [mistake.key for mistake in mistakes] == ["sweep.space.a", "sweep.space.b"]


def test_conditions_come_after_the_key_they_ask_for():
    entries, mistakes = read_space(
        {"kl.coef": {"low": 0.1, "high": 1, "step": 0.9, "when": {"kl": "k3"}}, "kl": "choice(off, k3)"}
    )
    assert not mistakes
    assert [entry.key for entry in entries] == ["kl", "kl.coef"]
    assert entries[1].active({"kl": "k3"}) and not entries[1].active({"kl": "off"})


def test_conditions_in_a_circle_are_refused():
    _, mistakes = read_space({"a": {"choices": [1, 2], "when": {"b": 1}}, "b": {"choices": [1, 2], "when": {"a": 1}}})
    assert any("circle" in str(mistake) for mistake in mistakes)
    _, mistakes = read_space({"a": {"choices": [1, 2], "when": {"a": 1}}})
    assert "itself" in str(mistakes[0])


def test_a_grid_asks_for_a_conditional_key_only_where_its_condition_holds():
    entries, _ = read_space({"kl": ["off", "k3"], "kl.coef": {"choices": [0.1, 1], "when": {"kl": "k3"}}})
    assert cells(entries) == [{"kl": "off"}, {"kl": "k3", "kl.coef": 0.1}, {"kl": "k3", "kl.coef": 1}]


def test_grid_steps_do_not_pile_up_rounding_errors():
    entry = SpaceEntry("x", "float", low=0.1, high=0.7, step=0.1)
    assert entry.grid() == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert SpaceEntry("x", "int", low=2, high=5).grid() == [2, 3, 4, 5]


def test_a_grid_over_an_interval_without_step_is_refused():
    with pytest.raises(ValueError, match=r"optim\.lr: a grid over an interval needs a step"):
        cells([SpaceEntry("optim.lr", "float", low=1e-5, high=1e-3)])


def test_zip_lists_move_together_and_cross_the_grid_as_one_axis():
    rows, mistakes = read_zip({"a": [1, 2], "b": [10, 20]})
    assert not mistakes and rows == [{"a": 1, "b": 10}, {"a": 2, "b": 20}]
    crossed = cells([SpaceEntry("c", "choice", choices=("x", "y"))], rows)
    assert crossed == [
        {"c": "x", "a": 1, "b": 10}, {"c": "x", "a": 2, "b": 20},
        {"c": "y", "a": 1, "b": 10}, {"c": "y", "a": 2, "b": 20},
    ]  # fmt: skip


def test_zip_lists_of_unequal_length_are_refused():
    rows, mistakes = read_zip({"a": [1, 2], "b": [10]})
    assert rows == [] and "a: 2, b: 1" in str(mistakes[0])
    assert "at least one value" in str(read_zip({"a": 3})[1][0])


def test_stages_share_what_is_left_of_the_budget():
    space = {"x": [1, 2]}
    stages, mistakes = read_stages([{"name": "a", "share": 0.5, "space": space}, {"space": space}, {"space": space}])
    assert not mistakes
    assert [stage.name for stage in stages] == ["a", "stage2", "stage3"]
    assert [stage.share for stage in stages] == [0.5, 0.25, 0.25]


def test_stage_mistakes_are_collected():
    _, mistakes = read_stages(
        [
            {"name": "a"},
            {"name": "a", "space": {"x": "interval(0.5, 1)"}},
            {"name": "c", "sampler": "tpe", "space": {"x": [1, 2]}},
            {"name": "d", "spce": {}, "arms": {"y": 3}},
            "e",
        ]
    )
    text = "\n".join(map(str, mistakes))
    for reason in (
        "needs a space, a zip list or arms", "needs a step", "sampler tpe needs trials", "spce", "arms.y",
        "a stage is a mapping", "two stages have this name",
    ):  # fmt: skip
        assert reason in text, reason


def test_shares_above_the_whole_budget_are_refused():
    space = {"x": [1, 2]}
    _, mistakes = read_stages([{"share": 0.7, "space": space}, {"share": 0.7, "name": "b", "space": space}])
    assert "1.4" in str(mistakes[0])


def test_an_enumerated_stage_knows_its_cells_and_a_searched_one_does_not():
    stages, _ = read_stages(
        [
            {"name": "grid", "space": {"x": [1, 2]}},
            {"name": "tpe", "sampler": "tpe", "trials": 3, "space": {"x": [1, 2]}},
        ]
    )
    assert stage_cells(stages[0]) == [{"x": 1}, {"x": 2}]
    assert stage_cells(stages[1]) is None


@pytest.mark.parametrize(
    "value",
    [None, True, False, 3, 1e-5, -0.5, "clip_higher", "a b", "it's", "1e-5", "null", "", "a,b", "^x=", "[x]",
     [1, "a b"], {"math": 0, "code": 0.001}, "back\\slash", "${oc.env:HOME}"],
)  # fmt: skip
def test_a_written_value_reads_back_the_same(value):
    read = ov.parse(ov.write("key", value)).value()
    assert read == value and type(read) is type(value)


def test_later_layers_replace_earlier_ones_and_keep_the_appending_plus():
    assert ov.layer(["a=1", "+sweep=x", "b=2"], ["a=3"]) == ["+sweep=x", "b=2", "a=3"]
    assert ov.layer(["+sweep=x"], ["sweep=y"]) == ["+sweep=y"]


def test_overrides_of_an_arm_may_be_a_text_a_list_or_a_mapping():
    assert ov.as_list("loss=gspo") == ["loss=gspo"]
    assert ov.as_list({"loss.high": 0.28, "data.kind": "plain"}) == ["loss.high=0.28", "data.kind=plain"]
    assert ov.as_list(None) == []
    with pytest.raises(ValueError, match="expected a list of overrides"):
        ov.as_list([1, 2])


def test_labels_are_short_but_never_ambiguous():
    assert ov.label({"optim.lr": 3e-5, "loss": "gspo"}) == "lr=3e-05,loss=gspo"
    assert ov.label({"a.kind": 1, "b.kind": 2}) == "a.kind=1,b.kind=2"


def test_a_command_line_choice_becomes_a_choice():
    entry = from_override(ov.parse("loss=symmetric,clip_higher"))
    assert entry == SpaceEntry("loss", "choice", choices=("symmetric", "clip_higher"))
    assert from_override(ov.parse("steps=range(1,4)")).choices == (1, 2, 3)
