"""Verifiers: which answers are right, wrong, not found, undecided, or over their limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reasonrl.errors import ConfigError
from reasonrl.verifiers import REASONS, Options, Verifier
from reasonrl.verifiers.extract import boxes, cued, stated
from reasonrl.verifiers.pool import Pool

PROSE = "and that is what the question asked for, as one can check again step by step. " * 6

# (gold, completion); `\n` in a completion is a newline
NUMERIC_RIGHT = r"""
42 | 2+40=42\n#### 42\nPROSE
42 | 2+40=42\n#### 42\n\nPROSE\nPROSE
42 | first #### 17\nno, wait\n#### 42
70000 | 70,000
70000 | $70,000.00
70000 | 70000 dollars
70000 | \$70,000
70000 | \boxed{\$70{,}000}
70000 | \boxed{70,\!000}
70000 | \boxed{70\,000}
70000 | 70 000
70000 | 70'000
70000 | 70k
70000 | $70K
70000 | US$70,000
70000 | €70,000
100000 | 1,00,000
1500000 | 1.5 million
70,000 | 70000
$70,000 | 70000.0
0.13 | .13
13 | 13%
13 | 13 percent
13 | \boxed{13\%}
4 | \boxed{3} ... wait ... \boxed{4}
4 | \boxed{4} and once more \boxed{4}
4 | $\boxed{4}$.
4 | \boxed 4
-5 | −5
-5 | #### –5
-5 | -$5
-5 | $-5
-5 | negative 5
5 | +5
1500 | 1.5e3
1500 | 1.5E+3
1500 | 1.5 \times 10^{3}
1500 | 1.5×10³
0.0015 | 1.5 x 10^-3
1000000 | 10^6
1/2 | \boxed{\dfrac{1}{2}}
1/2 | \boxed{\frac12}
1/2 | \boxed{0.5}
1/2 | ½
-3/4 | \boxed{-\frac{3}{4}}
-3/4 | \boxed{\frac{-3}{4}}
-3/4 | -3/4
3.5 | 3 1/2
3.5 | 3½
3.5 | \boxed{3\frac{1}{2}}
-3.5 | -3 1/2
42 | \boxed{42\text{ apples}}
42 | \boxed{\text{42}}
42 | \boxed{\left(42\right)}
42 | \boxed{x = 42}
42 | 42 km/h
42 | 42 cm²
42 | \boxed{42^\circ}
42 | 42.
42 | #### 42!
42 | #### 42 because 6*7=42
42 | #### 6*7 = 42
42 | #### 42 = 6*7
42 | **Answer:** 42 apples
42 | The final answer is: **42**.
42 | The answer to the question is 42
42 | <answer>42</answer>
42 | <answer>\boxed{42}</answer> and some more words, 7 of them
42 | <think>maybe \boxed{17}</think>42
42 | \boxed{42}\n#### Verification\nWe check 6 times 7.
42 | #### Step 2: multiply\n6 times 7\n#### 42
42 | So she has 42 apples. That is a lot.
18 | She makes 9 * 2 = $18 every day.
42 | The answer is 42 and not 43
42 | ٤٢
42 | ####\n42
42 | the answer is forty-two (42)
42 | Answer: $42$ apples (6*7)
70000 | USD 70,000
300000000 | 3.0 × 10⁸ m/s
2.5 | 2 and 1/2
3/4 | \boxed{\frac{-3}{-4}}
-1/2 | -½
"""

NUMERIC_WRONG = r"""
42 | 2+40=42\n#### 42\nPROSE\n#### 41
0.13 | 13%
4 | \boxed{4} ... wait ... \boxed{3}
3 | \boxed{3}\boxed{4}
4 | \boxed{3}\boxed{4}
4 | \boxed{1} or \boxed{2} or \boxed{3} or \boxed{4}
4 | 1. \boxed{1}\n2. \boxed{2}\n3. \boxed{3}\n4. \boxed{4}
1 | \boxed{1, 2, 3, 4}
4 | \boxed{1, 2, 3, 4}
2 | #### 1 #### 2 #### 3
3 | #### 1\n#### 2\n#### 3
4 | #### 4 or 5
5 | #### 4 or 5
5 | #### 4 5
5 | 1, 2, 3, 4, 5
5 | 1\n2\n3\n4\n5
5 | The answer is 3, 4 or 5
5 | negative 5
5 | -5
1000000000001 | 1000000000000
1/3 | 0.333
10.5 | #### 10 dollars and 50 cents
4 | x = 3, y = 4
100 | 100 miles per hour, or 160 km/h
"""

NUMERIC_UNREAD = r"""
42 | The answer is forty-two.
42 | #### forty-two
42 | I do not know.
15 | 1,5
1.5 | 1,5
5 | 1,5
1234.56 | 1.234,56
3 | 3:30
4 | \boxed{4x}
4 | \boxed{4\pi}
4 | \boxed{4 \pi}
4 | \boxed{4\sqrt{2}}
4 | \boxed{4(x+1)}
5 | \boxed{5i}
40 | \boxed{2+40}
42 | \boxed{2+40}
9 | 9^9^9^9
9 | \boxed{9^{9^{9^9}}}
1 | 1/0
42 | \boxed{42
42 | \boxed{}
1 | 1e999999999
16 | \sqrt{16}
3 | x > 3
10 | 0x10
42 |
"""


def rows(table: str) -> list[tuple[str, str]]:
    """Return (gold, completion) pairs of a table."""
    lines = [line for line in table.strip().splitlines() if line.strip()]
    pairs = [(line.split("|", 1)[0].strip(), line.split("|", 1)[1].strip()) for line in lines]
    return [(gold, text.replace("\\neq", "!=").replace("\\n", "\n").replace("PROSE", PROSE)) for gold, text in pairs]


def reason(verifier: Verifier, gold: str, text: str, finished: bool = True) -> str:
    """Return the reason, after checking that it is a known one and fits the value."""
    read = verifier.read_gold(gold)
    assert read is not None, f"gold {gold!r} was not read"
    verdict = verifier.check(read, text, finished)
    assert verdict.reason in REASONS
    assert verdict.value == (1.0 if verdict.reason == "correct" else 0.0)
    return verdict.reason


@pytest.fixture(scope="module")
def numeric() -> Verifier:
    return Verifier("numeric")


@pytest.mark.parametrize(("gold", "text"), rows(NUMERIC_RIGHT))
def test_right_number_is_recognised_however_it_is_written(numeric: Verifier, gold: str, text: str) -> None:
    assert reason(numeric, gold, text) == "correct"


@pytest.mark.parametrize(("gold", "text"), rows(NUMERIC_WRONG))
def test_other_number_or_a_list_of_candidates_is_wrong(numeric: Verifier, gold: str, text: str) -> None:
    assert reason(numeric, gold, text) == "wrong"


@pytest.mark.parametrize(("gold", "text"), rows(NUMERIC_UNREAD))
def test_what_is_not_one_number_is_not_read_as_its_digits(numeric: Verifier, gold: str, text: str) -> None:
    assert reason(numeric, gold, text) == "not_extracted"


def test_percent_is_a_hundredth_only_when_the_task_says_so() -> None:
    percent = Verifier("numeric", Options(percent=True))
    assert reason(percent, "0.13", "13%") == "correct"
    assert reason(percent, "13%", "0.13") == "correct"
    assert reason(percent, "13", "13%") == "wrong"


@pytest.mark.parametrize("last", range(1, 8))
def test_naming_every_candidate_never_earns_the_reward(numeric: Verifier, last: int) -> None:
    golds = [str(gold) for gold in range(1, 8)]
    orders = [str((place + last) % 7 + 1) for place in range(7)]
    for listing in (
        "".join(f"\\boxed{{{item}}}" for item in orders),
        " or ".join(f"$\\boxed{{{item}}}$" for item in orders),
        " ".join(f"#### {item}" for item in orders),
        "\n".join(f"#### {item}" for item in orders),
        "#### " + ", ".join(orders),
        "\\boxed{" + " \\text{ or } ".join(orders) + "}",
        "The answer is " + ", ".join(orders[:-1]) + " or " + orders[-1],
        " ".join(orders),
    ):
        assert sum(numeric.check(gold, listing).value for gold in golds) == 0, listing


def test_cut_off_text_has_no_answer_unless_it_states_one(numeric: Verifier) -> None:
    assert reason(numeric, "42", "First 6*7 = 42", finished=False) == "not_extracted"
    assert reason(numeric, "42", "#### 42\nand then", finished=False) == "correct"


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("20 % of 185 days is 37 days, and 217 - 37 = 180, so the answer is: 180.", "180"),
        ("He sold 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = 72.\n#### 72", "72"),
        ("We get $x=3$, hence $\\boxed{\\frac{3}{4}}$.", "3/4"),
        ("$80,000", "80000"),
        ("1,5", None),
        ("3 apples and 4 pears", None),
        ("see the picture", None),
        ("He has 20 % of 185 days left, 37 of them in May.", None),
        ("", None),
    ],
)
def test_gold_is_reduced_to_its_final_answer_or_not_read_at_all(numeric: Verifier, text: str, gold: str | None) -> None:
    assert numeric.read_gold(text) == gold


@pytest.mark.parametrize("name", ["numeric", "exact", "choice"])
@pytest.mark.parametrize(
    "piece",
    ["9^", "\\boxed{", "{", "1,", "1 ", "\\frac{", "(", "answer is ", "#### ", "7", "and or ", "\\text{", " ", "-",
     "$", "<answer>", "\\frac12", "\\boxed{1}", "1 apple or ", "\\left", "a-", "1_000", "~", "</answer>",
     "\\boxed{\\boxed{"],
)  # fmt: skip
def test_degenerate_text_of_any_length_gets_a_verdict(name: str, piece: str) -> None:
    """Quadratic rules would take minutes here and meet the suite's time limit."""
    text = piece * (60_000 // len(piece))
    verdicts = [Verifier(name).check("5" if name == "numeric" else "E", t) for t in (text, "\\boxed{" + text + "}")]
    assert [verdict.value for verdict in verdicts] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("\\boxed{a{b}c}", ["a{b}c"]),
        ("\\boxed{\\{1\\}}", ["\\{1\\}"]),
        ("\\boxed{1} so \\boxed{2", ["1", ""]),
        ("in the form \\boxed{ like \\boxed{2}", ["2"]),
        ("\\boxed{\\boxed{3}}", ["\\boxed{3}"]),
        ("\\fbox{5}", ["5"]),
        ("no box", []),
    ],
)
def test_boxes_are_matched_by_their_braces(text: str, wanted: list[str]) -> None:
    assert [span.text for span in boxes(text)] == wanted


def test_last_statement_wins_across_kinds() -> None:
    assert stated("\\boxed{1} then\n#### 2\n") == ["2"]
    assert stated("#### 2\nthen \\boxed{1}") == ["1"]
    assert stated("<answer>3</answer> #### 2 no <answer>4</answer>") == ["4"]
    cue = cued("The answer is 3. No, the answer is 4. Done")
    assert cue is not None and cue[0] == "4."


@pytest.mark.parametrize(
    ("gold", "text", "wanted"),
    [
        ("B", "B", "correct"),
        ("B", "(b)", "correct"),
        ("B", "B) Paris", "correct"),
        ("B", "\\boxed{\\text{(B)}}", "correct"),
        ("B", "\\boxed{\\textbf{(B)} 27}", "correct"),
        ("B", "The correct answer is (B) Paris", "correct"),
        ("B", "A looks good.\n\nAnswer: **B**", "correct"),
        ("1", "B", "correct"),
        ("B", "A, B, C, D", "wrong"),
        ("A", "A or B", "wrong"),
        ("B", "\\boxed{A}\\boxed{B}", "wrong"),
        ("A", "The answer is a mystery", "not_extracted"),
        ("A", "A man walked in", "not_extracted"),
        ("B", "The answer is Bob", "not_extracted"),
    ],
)
def test_choice_reads_one_letter_and_no_article(gold: str, text: str, wanted: str) -> None:
    assert reason(Verifier("choice"), gold, text) == wanted


@pytest.mark.parametrize(
    ("gold", "text", "wanted"),
    [
        ("Paris", "The answer is **paris**.", "correct"),
        ("Paris", "\\boxed{\\text{Paris}}", "correct"),
        ("Rome #### Paris", "<answer> Paris </answer>", "correct"),
        ("Paris", "London, Paris", "wrong"),
        ("Paris", "\\boxed{London}\\boxed{Paris}", "wrong"),
        ("Paris", "Let me think.\nIt may be Paris", "not_extracted"),
    ],
)
def test_exact_folds_case_and_wrapping_only(gold: str, text: str, wanted: str) -> None:
    assert reason(Verifier("exact"), gold, text) == wanted


LONG = " + ".join(f"\\frac{{x^{{{power}}}}}{{{power + 1}}}" for power in range(1, 8))
MATH = [
    ("pi/2", "\\boxed{\\dfrac{\\pi}{2}}", "correct"),
    ("-2*pi", "\\boxed{-2\\pi}", "correct"),
    ("-1+exp(16)", "\\boxed{e^{16}-1}", "correct"),
    ("14.0 + -1.0i", "\\boxed{14 - i}", "correct"),
    (LONG, f"so $\\boxed{{{LONG}}}$", "correct"),
    (LONG, f"so $\\boxed{{{LONG} + 1}}$", "wrong"),
    ("x^2+2x+1", "\\boxed{(x+1)^2}", "correct"),
    ("2\\sqrt2", "\\boxed{\\sqrt{8}}", "correct"),
    ("\\left(\\frac{1}{2},3\\right)", "\\boxed{(0.5,3)}", "correct"),
    ("(1,2)", "\\boxed{(2,1)}", "wrong"),
    ("(-\\infty,3]", "\\boxed{(-\\infty, 3)}", "wrong"),
    ("\\{1,2,3\\}", "\\boxed{3,2,1}", "correct"),
    ("3,4", "\\boxed{4}\\boxed{3}", "correct"),
    ("4", "\\boxed{3}\\boxed{4}", "wrong"),
    ("4", "\\boxed{1,2,3,4}", "wrong"),
    ("4", "\\boxed{3} no: \\boxed{4}", "correct"),
    ("15", "\\boxed{1,5}", "wrong"),
    ("\\text{even}", "\\boxed{even}", "correct"),
    ("\\text{even}", "\\boxed{neve}", "wrong"),
    ("90", "\\boxed{90^\\circ}", "correct"),
    ("3", "\\boxed{x=3}", "correct"),
    ("x^{12}", "\\boxed{x**12}", "correct"),
    ("√2", "\\boxed{\\sqrt{2}}", "correct"),
    ("\\frac{1}{3}", "\\boxed{0.333}", "wrong"),
    ("3^{100}", "\\boxed{515377520732011331036461129765621272702107522001}", "correct"),
    ("3^{100}", "\\boxed{515377520732011331036461129765621272702107522002}", "wrong"),
    ("3x+2", "The answer is $2+3x$.", "correct"),
    ("5", "\\boxed{\\text{five}}", "undecided"),
    ("2", "\\boxed{\\frac{}{}}", "undecided"),
    ("p \\land q", "\\boxed{q}", "undecided"),
    ("2", "no idea at all", "not_extracted"),
    ("1", "\\boxed{9^9^9^9}", "timeout"),
    ("7", "\\boxed{7}", "correct"),
]


def test_math_compares_by_value_and_a_hanging_answer_costs_only_itself() -> None:
    verifier = Verifier("math", Options(timeout_s=2.0))
    golds = [verifier.read_gold(gold) for gold, _, _ in MATH]
    assert None not in golds
    verdicts = verifier.check_many([(gold or "", text, True) for gold, (_, text, _) in zip(golds, MATH, strict=True)])
    found = [(gold, text, verdict.reason) for (gold, text, _), verdict in zip(MATH, verdicts, strict=True)]
    assert found == MATH


def test_expression_of_ten_thousand_characters_is_not_right_and_the_next_answer_is_unaffected() -> None:
    verifier = Verifier("math", Options(timeout_s=2.0))
    long = "\\boxed{" + "1+" * 5000 + "x}"
    first, second = verifier.check_many([("1", long, True), ("x+1", "\\boxed{1+x}", True)])
    assert first.value == 0.0 and first.reason in ("timeout", "undecided", "wrong")
    assert second.reason == "correct"


@pytest.fixture
def odd_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """A pool whose comparisons spin, sleep, crash, eat memory or print, by what the answer says."""
    (tmp_path / "odd_worker.py").write_text(
        "import os, time\n"
        "from reasonrl.verifiers.serving import serve\n"
        "def compare(gold, said):\n"
        "    print('noise that is no answer')\n"
        "    if said == 'spin':\n"
        "        while True: pass\n"
        "    if said == 'sleep': time.sleep(600)\n"
        "    if said == 'crash': os.abort()\n"
        "    if said == 'memory': bytearray(2**40)\n"
        "    if said == 'raise': raise RuntimeError('odd')\n"
        "    return 'correct' if gold == said else 'wrong'\n"
        "if __name__ == '__main__': serve(compare, lambda: None)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = Pool("odd_worker", 0.3, size=2)
    yield pool
    pool.close()


def test_pool_limits_every_comparison_and_replaces_what_it_loses(odd_worker: Pool) -> None:
    answers = ["a", "spin", "a", "sleep", "crash", "memory", "raise", "b", "a"]
    wanted = ["correct", "timeout", "correct", "timeout", "timeout", "timeout", "undecided", "wrong", "correct"]
    assert odd_worker.compare([("a", answer) for answer in answers]) == wanted
    assert odd_worker.compare([("b", "b"), ("a", "spin")]) == ["correct", "timeout"]


def test_verifier_processes_end_with_their_parent_even_when_they_hang(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom reasonrl.verifiers.pool import Pool\n"
        "pool = Pool('reasonrl.verifiers.math_worker', 600.0, size=1)\n"
        "pool.compare([('1', 'x')])\n"
        "print(pool._workers[0].process.pid, flush=True)\n"
        "pool.compare([('1', '9^9^9^9')])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    time.sleep(0.5)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    for _ in range(200):
        try:
            state = Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the verifier process outlived its parent")


def test_every_gsm8k_style_solution_judges_itself_right(numeric: Verifier) -> None:
    solutions = json.loads((Path(__file__).parent / "data" / "gsm8k_style.json").read_text())
    assert len(solutions) >= 10
    for solution in solutions:
        assert reason(numeric, solution, solution + "\n" + PROSE) == "correct"


def test_unknown_verifier_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="choose one of numeric, math, exact, choice"):
        Verifier("maths")
