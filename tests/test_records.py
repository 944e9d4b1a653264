"""Task records: every usual file is read alike, unusable rows are counted and named, mistakes are said at once."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reasonrl.errors import ConfigError, DataError
from reasonrl.tasks import TaskConfig, load_task
from reasonrl.tasks.filters import compile_filter
from reasonrl.tasks.records import RecordsTask, mistakes, render

ROWS = [{"question": f"What is {n} and {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(40)]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Write rows, or raw lines where a row is a text or bytes."""
    lines = [
        row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode() for row in rows
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def records(path: Path | str, **settings: Any) -> RecordsTask:
    """Load the task of a file."""
    task = load_task(TaskConfig(kind="records", path=str(path), **settings))
    assert isinstance(task, RecordsTask)
    return task


def _jsonl(path: Path) -> Path:
    return write_jsonl(path / "rows.jsonl", ROWS)


def _gzip(path: Path) -> Path:
    (path / "rows.jsonl.gz").write_bytes(gzip.compress(_jsonl(path).read_bytes()))
    return path / "rows.jsonl.gz"


def _json_list(path: Path) -> Path:
    (path / "rows.json").write_text(json.dumps(ROWS))
    return path / "rows.json"


def _json_lines(path: Path) -> Path:
    return _jsonl(path).rename(path / "rows.json")


def _json_data(path: Path) -> Path:
    (path / "rows.json").write_text(json.dumps({"version": 1, "data": ROWS}))
    return path / "rows.json"


def _json_columns(path: Path) -> Path:
    columns = {key: [row[key] for row in ROWS] for key in ROWS[0]}
    (path / "rows.json").write_text(json.dumps(columns))
    return path / "rows.json"


def _csv(path: Path, name: str = "rows.csv", delimiter: str = ",") -> Path:
    with (path / name).open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["question", "answer"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)
    return path / name


def _tsv(path: Path) -> Path:
    return _csv(path, "rows.tsv", "\t")


def _parquet(path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), path / "rows.parquet")
    return path / "rows.parquet"


def _shards(path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (path / "set" / "data").mkdir(parents=True)
    for shard, rows in enumerate((ROWS[:25], ROWS[25:])):
        pq.write_table(pa.Table.from_pylist(rows), path / "set" / "data" / f"train-0000{shard}-of-00002.parquet")
    return path / "set"


def _saved_by_datasets(path: Path) -> Path:
    """The layout of `Dataset.save_to_disk`: an Arrow stream beside two descriptions."""
    import pyarrow as pa

    folder = path / "set"
    folder.mkdir()
    table = pa.Table.from_pylist(ROWS)
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


FORMS = [_jsonl, _gzip, _json_list, _json_lines, _json_data, _json_columns, _csv, _tsv, _parquet, _shards]


@pytest.mark.parametrize("form", [*FORMS, _saved_by_datasets])
def test_every_form_of_file_gives_the_same_problems(tmp_path: Path, form: Callable[[Path], Path]) -> None:
    task = records(form(tmp_path))
    found = sorted((p.prompt, p.gold) for p in [*task.train, *task.held])
    assert found == sorted((row["question"], row["answer"].split("#### ")[1]) for row in ROWS)
    assert task.notes == [] and task.size == 36 and len(task.heldout(1000)) == 4


def test_split_is_fixed_whatever_the_order_of_the_file(tmp_path: Path) -> None:
    one = records(write_jsonl(tmp_path / "a.jsonl", ROWS))
    two = records(write_jsonl(tmp_path / "b.jsonl", ROWS[::-1]))
    assert [p.prompt for p in one.held] == [p.prompt for p in two.held]
    assert [p.prompt for p in one.heldout(2)] == [p.prompt for p in one.held[:2]]
    assert one.train_problem(3) == records(tmp_path / "a.jsonl").train_problem(3)


def test_equal_questions_never_stand_on_both_sides(tmp_path: Path) -> None:
    doubled = [*ROWS, *({**row, "question": row["question"].upper() + " "} for row in ROWS)]
    task = records(write_jsonl(tmp_path / "a.jsonl", doubled), heldout_fraction=0.3)
    assert not {p.prompt.strip().lower() for p in task.train} & {p.prompt.strip().lower() for p in task.held}
    other = write_jsonl(tmp_path / "held.jsonl", ROWS[:10])
    task = records(tmp_path / "a.jsonl", heldout_path=str(other))
    assert (task.size, len(task.held)) == (60, 10)
    assert task.notes == ["20 training rows were left out: their question is held out too."]


def test_splits_of_a_folder_and_of_a_column(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "set" / "train.jsonl", ROWS[:30])
    write_jsonl(tmp_path / "set" / "test.jsonl", ROWS[30:])
    task = records(tmp_path / "set", split="train", heldout_split="test")
    assert (task.size, len(task.held)) == (30, 10)
    with pytest.raises(DataError, match=r"task.split=dev: .* has the splits test, train"):
        records(tmp_path / "set", split="dev")
    rows = [{**row, "split": "test" if n < 10 else "train"} for n, row in enumerate(ROWS)]
    task = records(write_jsonl(tmp_path / "one.jsonl", rows), split="train", heldout_split="test")
    assert (task.size, len(task.held)) == (30, 10)
    task = records(write_jsonl(tmp_path / "plain.jsonl", ROWS), split="train", heldout_split="test")
    assert (task.size, len(task.held)) == (36, 4)


def test_unusable_rows_are_counted_and_named_and_the_rest_is_used(tmp_path: Path) -> None:
    odd: list[Any] = [
        {"question": "no number", "answer": "see the picture"},
        "{not json",
        b'{"question": "\xff", "answer": "1"}',
        [1, 2],
        {"question": "", "answer": "3"},
        {"question": "nothing", "answer": None},
        {"question": "truth", "answer": True},
        {"answer": "5"},
        {"question": "infinite", "answer": float("inf")},
    ]
    task = records(write_jsonl(tmp_path / "odd.jsonl", [*odd, *ROWS, '{"question": "torn', ""]))
    assert task.size == 36
    (note,) = task.notes
    assert note.startswith(
        f"10 of 50 rows of {tmp_path / 'odd.jsonl'} were left out: odd.jsonl:1 has no numeric answer"
    )
    for text in ("odd.jsonl:2 is not JSON", "odd.jsonl:3 is not UTF-8", "odd.jsonl:4 is a list", "and 5 more"):
        assert text in note


def test_cells_that_do_not_fit_the_header_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    good = "\n".join(f'"How many,\nis {n}?",{n}' for n in range(20))
    path.write_text(f"question,answer\nbroken,1,2\n{good}\n")
    task = records(path)
    assert task.size == 18 and "a.csv:2 has 3 cells where the header has 2" in task.notes[0]
    assert {p.id for p in [*task.train, *task.held]} == {f"a.csv:{2 * n + 3}" for n in range(20)}


@pytest.mark.parametrize(
    ("answer", "gold"),
    [(42, "42"), (42.0, "42"), (0.5, "1/2"), ("70,000", "70000"), (["7"], "7"), ("so the answer is: 180.", "180")],
)
def test_gold_of_any_type_is_reduced_once(tmp_path: Path, answer: Any, gold: str) -> None:
    task = records(write_jsonl(tmp_path / "a.jsonl", [*ROWS, {"question": "this", "answer": answer}]), limit=None)
    assert next(p for p in [*task.train, *task.held] if p.prompt == "this").gold == gold


def test_keys_reach_into_nested_rows_and_chat_messages(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"q{n}"}],
            "reward_model": {"ground_truth": str(n)},
            "extra": {"ability": ["MATH"]},
        }
        for n in range(10)
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    keys = {"question_key": "prompt", "answer_key": "reward_model.ground_truth", "domain_key": "extra.ability.0"}
    task = records(path, **keys, prompt="{question} Put it in \\boxed{}.")
    problem = next(p for p in [*task.train, *task.held] if p.id == "a.jsonl:1")
    assert (problem.prompt, problem.gold, problem.domain) == ("q0 Put it in \\boxed{}.", "0", "MATH")


def test_choices_are_lettered_and_an_index_is_a_letter(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "options": ["x", "y", "z"], "answer": n % 3} for n in range(10)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    task = records(path, choices_key="options", verifier="choice", prompt="{question}\n{choices}")
    problem = next(p for p in [*task.train, *task.held] if p.id == "a.jsonl:2")
    assert problem.prompt == "q1\nA. x\nB. y\nC. z" and problem.gold == "B"
    assert task.score(problem, "The answer is (B).", "stop").value == 1.0
    assert task.score(problem, "A, B, C", "stop").value == 0.0


def test_missing_keys_list_the_keys_found_all_at_once(tmp_path: Path) -> None:
    rows = [{"problem": row["question"], "solution": row["answer"], "level": 1} for row in ROWS]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError) as caught:
        records(path, domain_key="kind", filter="leval == 1", prompt="{hint} {question}")
    text = str(caught.value)
    assert "5 mistakes" in text
    for part in (
        "task.question_key=question: no row",
        "the keys found are problem, solution, level",
        "Did you mean problem?",
        "task.answer_key=answer",
        "Did you mean solution?",
        "task.domain_key=kind",
        "task.prompt ({hint})=hint",
        "task.filter (leval)=leval",
        "Did you mean level?",
    ):
        assert part in text, text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file holds no rows"),
        ('{"question": "a", "answer": "no"}\n', "no row can be used. 1 of 1 rows"),
        ("garbage\nmore\n", "no row can be used. 2 of 2 rows"),
    ],
)
def test_file_without_a_usable_row_is_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        records(tmp_path / "a.jsonl")


def test_missing_files_are_found_before_any_work_and_neighbours_are_named(tmp_path: Path) -> None:
    _jsonl(tmp_path)
    config = TaskConfig(
        kind="records",
        path=str(tmp_path / "row.jsonl"),
        heldout_path=str(tmp_path / "no" / "x.csv"),
        verifier="numbers",
        heldout_fraction=1.5,
        limit=0,
        filter="__import__('os').getcwd()",
        prompt="Solve: \\boxed{answer}",
        timeout_s=0,
        percent=True,
    )
    found = "\n".join(str(mistake) for mistake in mistakes(config))
    assert f"task.path={tmp_path / 'row.jsonl'}: there is no such file or folder" in found
    assert f"Did you mean {tmp_path / 'rows.jsonl'}?" in found
    for key in ("heldout_path", "verifier", "heldout_fraction", "limit", "filter", "prompt", "timeout_s", "percent"):
        assert f"task.{key}=" in found
    with pytest.raises(ConfigError, match="10 mistakes"):
        load_task(config)


def test_damaged_files_name_the_file_and_not_a_library(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.arrow", "a.json"):
        (tmp_path / name).write_bytes(b"PAR1 this is none of them")
        with pytest.raises(DataError, match=name):
            records(tmp_path / name)
    (tmp_path / "a.xlsx").write_bytes(b"x")
    with pytest.raises(DataError, match="files ending in .xlsx are not read"):
        records(tmp_path / "a.xlsx")


def test_hub_name_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        records("somebody/some-set")


def test_template_keeps_other_braces_and_never_shows_the_gold(tmp_path: Path) -> None:
    assert render("{question} \\frac{1}{2} {{x}} {}", {"question": "q"}) == "q \\frac{1}{2} {x} {}"
    path = _jsonl(tmp_path)
    with pytest.raises(ConfigError, match="must not show the gold answer"):
        records(path, prompt="{question} \\boxed{answer}")
    task = records(path, prompt="{question} \\boxed{{answer}}")
    assert task.train_problem(0).prompt.endswith("\\boxed{answer}")


def test_filter_and_limit_choose_rows_and_an_empty_choice_is_an_error(tmp_path: Path) -> None:
    path = _jsonl(tmp_path)
    task = records(path, filter="'1' in question and not question.startswith('What is 1 ')", limit=5)
    assert task.size == 5 and all("1" in p.prompt for p in task.train)
    assert [p.id for p in task.train] == sorted((p.id for p in task.train), key=lambda name: int(name.split(":")[1]))
    with pytest.raises(DataError, match="keeps none of the 40 rows"):
        records(path, filter="len(question) > 1000")


@pytest.mark.parametrize(
    "text",
    [
        "open('x')",
        "a.b",
        "[x for x in a]",
        "lambda: 1",
        "a if b else c",
        "a ** b",
        "a := 1",
        "f'{a}'",
        "a b",
        "",
        "a.format()",
    ],
)
def test_filter_language_allows_nothing_but_looking_at_the_row(text: str) -> None:
    with pytest.raises(ConfigError, match="task.filter"):
        compile_filter(text)


def test_filter_that_cannot_judge_a_row_leaves_it_out_and_says_so(tmp_path: Path) -> None:
    rows = [{**row, "level": "high" if n == 0 else n} for n, row in enumerate(ROWS)]
    task = records(write_jsonl(tmp_path / "a.jsonl", rows), filter="level > 3")
    assert "a.jsonl:1 cannot be filtered (TypeError" in task.notes[0]


def test_long_prompts_are_dropped_and_counted_never_cut(tmp_path: Path) -> None:
    rows = [*ROWS, *({"question": "very " * 100 + str(n), "answer": str(n)} for n in range(20))]
    task = records(write_jsonl(tmp_path / "a.jsonl", rows))
    dropped = task.drop_long_prompts(lambda problem: len(problem.prompt.split()), 20)
    assert dropped == 20 and task.size + len(task.held) == 40
    assert "their prompt is longer than 20 tokens" in task.notes[-1]
    with pytest.raises(DataError, match="all .* prompts are longer"):
        task.drop_long_prompts(lambda problem: 1000, 20)


def test_scores_say_why_and_many_equal_one_by_one(tmp_path: Path) -> None:
    task = records(_jsonl(tmp_path))
    problem = next(p for p in [*task.train, *task.held] if p.gold == "42")
    texts = [
        ("#### 42 \nso 7", "stop"),
        ("42 dollars", "stop"),
        ("#### 41", "stop"),
        ("hm", "stop"),
        ("so 42", "length"),
    ]
    one_by_one = [task.score(problem, text, finish) for text, finish in texts]
    assert [v.reason for v in one_by_one] == ["correct", "correct", "wrong", "not_extracted", "not_extracted"]
    assert task.score_many([(problem, text, finish) for text, finish in texts]) == one_by_one
    assert task.answer("#### 84/2") == "42" and task.answer("hm") is None
    assert task.format_ok("<think>6*7</think>42") and not task.format_ok("42")
