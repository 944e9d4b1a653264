"""From a results folder to a figure, its numbers and a paired difference, in a few lines.

python -m analysis.examples.compare_two_arms results/clip_ablation out/
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from analysis import figures, load, stats
from analysis.style import drawing, new_figure, save


def main(folder: str, out: str) -> None:
    """Draw two figures of the sweep in `folder` into `out` and print one comparison."""
    results = load(folder)
    for note in results.notes:
        print("note:", note)

    # A figure of the collection: finished, with the numbers in it.
    figure, numbers = figures.FIGURES["accuracy_entropy"].draw(results, "single")
    save(figure, Path(out) / "accuracy_entropy")
    numbers.to_csv(Path(out) / "accuracy_entropy.csv", index=False)

    # A figure of one's own: any recorded metric, one panel each.
    with drawing():
        own = new_figure("double", height=2.4)
        figures.curve_figure(results, own, ["length/mean", "groups/flat"])
    save(own, Path(out) / "length_and_flat_groups", ["png"])

    # A number of one's own: the last accuracy of two arms, paired by seed.
    final = results.runs[results.runs["parent"] == ""].pivot_table(index="seed", columns="arm", values="final_accuracy")
    if len(results.arms) > 1 and set(results.arms[:2]) <= set(final.columns):
        base, other = results.arms[:2]
        paired = stats.paired_difference(final[other], final[base], np.random.default_rng(0))
        span = f"95 % {paired.t.low:+.3f} to {paired.t.high:+.3f}" if paired.t else "no interval"
        print(f"{other} minus {base}: {paired.mean:+.3f} ({span}, {paired.n} seeds)")
    print("written to", out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
