"""Claims of the papers: whose they are, in which direction they point, and when they cannot be told."""

import re

import pytest

from dpgrad.papers import catalogue
from dpgrad.papers.claims import reaches
from dpgrad.papers.experiment import Claim, Outcomes

EXPERIMENTS = catalogue.experiments()
# What the papers at hand have, but for drawings of an idea, code and tables of symbols.
ITEMS = {
    "Abadi et al. 2016": ["Section 3.1", "Section 3.3", "Theorem 1", "Figure 2"],
    "Yu et al. 2018": ["Algorithm 1", *(f"Figure {number}" for number in (1, 2, 3, 4))],
    "Huang et al. 2024": ["Table II", "Table III", *(f"Figure {number}" for number in range(2, 10))],
    "Yu et al. 2020": [*(f"Table {number}" for number in (1, 2, 3, 4)), "Figure 1", "Figure 2"],
}
HUANG_FIGURES = {  # dataset: where the paper shows it
    "Fashion-MNIST": "2(a) 3 8", "MNIST": "4 8", "CIFAR-10": "5 8", "CelebA": "2(b) 6 8", "Imagenette": "7 8",
}  # fmt: skip


def claim(name: str, beginning: str) -> Claim:
    return next(one for one in EXPERIMENTS[name].claims if one.text.startswith(beginning))


def named(item: str) -> set[str]:
    """The tables and figures in a title: "Figures 2(a), 3 and 8" are Figure 2, Figure 3 and Figure 8."""
    found = set(re.findall(r"(?:Table|Section|Theorem|Algorithm) [IVX\d.]*[IVX\d]", item))
    for numbers in re.findall(r"Figures? ((?:\d(?:\([ab]\))?(?:, | and )?)+)", item):
        found |= {f"Figure {number}" for number in re.findall(r"\d", numbers)}
    return found


@pytest.mark.parametrize("paper", ITEMS)
def test_every_table_and_figure_of_a_paper_is_named(paper: str) -> None:
    there = {item for one in EXPERIMENTS.values() if one.paper == paper for item in named(one.item)}
    assert {*ITEMS[paper]} <= there


@pytest.mark.parametrize("dataset", HUANG_FIGURES)
def test_figures_of_huang_show_the_dataset_that_the_paper_shows(dataset: str) -> None:
    (found,) = [
        one
        for name, one in EXPERIMENTS.items()
        if name.startswith("huang-figure") and re.search(rf", {dataset}(?: |$)", one.item)
    ]
    assert re.findall(r"\d(?:\([ab]\))?", found.item.removesuffix("CIFAR-10 on features")) == (
        HUANG_FIGURES[dataset].split()
    )


def test_one_trial_does_not_reach_a_value() -> None:
    found = Outcomes({"one": [{"x": 2.1}], "two": [{"x": 2.1}, {"x": 2.2}]})
    assert reaches(found, "one", "x", 2.0) is None
    assert reaches(found, "two", "x", 2.0) is True
    assert reaches(found, "two", "x", 3.0) is False


def late(*seeds: tuple[float, float]) -> bool | None:
    """The claim that s matters late, for seeds in which s = 0.5 is so much below s = 1, early and late."""
    trials = {"s = 1": [{"curve": [90.0, 91.0, 92.0]} for _ in seeds]}
    trials["s = 0.5"] = [{"curve": [90.0 - early, 91.0, 92.0 - end]} for early, end in seeds]
    trials["s = 0.5, same step"] = [{"curve": [50.0, 91.0, 92.0]} for _ in seeds]
    return claim("huang-s-mnist", "s has little influence early").holds(Outcomes(trials))


def test_whether_s_matters_late_is_judged_by_the_errors_of_several_seeds() -> None:
    assert late((0.1, 1.0), (0.2, 1.1)) is True
    assert late((3.0, 1.0), (3.1, 1.1)) is False
    assert late((0.1, 1.0), (2.0, 1.0)) is None
    assert late((3.0, 1.0)) is None


def test_weights_relative_to_the_noise_are_to_be_smaller_as_equation_7_has_it() -> None:
    found = Outcomes({
        "DP-PSAC": [{"noise_relative_weight": 5.0}, {"noise_relative_weight": 5.1}],
        "DP-PSASC": [{"noise_relative_weight": 3.0}, {"noise_relative_weight": 3.1}],
    })  # fmt: skip
    assert claim("huang-figure4", "relative to its own noise").holds(found) is True
    assert claim("huang-figure4", "no mean weight exceeds").kind == "construction"


def test_the_figure_of_all_budgets_is_judged_at_each() -> None:
    def accuracies(at_least: float) -> Outcomes:
        levels = {"DP-GD": 80.0, "DP-SGD": 79.0, "AMP": 70.0, "Out-SGD": 60.0}
        found = {f"{title}, ε = {e:g}": level for title, level in levels.items() for e in (0.03, 0.1, 0.3, 1.0, 3.0)}
        found["Out-SGD, ε = 0.03"] = at_least
        return Outcomes({arm: [{"accuracy": one}, {"accuracy": one + 0.1}] for arm, one in found.items()})

    ahead = claim("yu2020-figure2-adult", "DP-GD and DP-SGD are more accurate")
    assert ahead.holds(accuracies(60.0)) is True
    assert ahead.holds(accuracies(90.0)) is False


def test_psasc_is_compared_with_every_method_before_it() -> None:
    texts = [one.text for one in EXPERIMENTS["huang-table3-mnist"].claims if one.kind == "paper"]
    for other in ("DP-SGD", "Auto-S", "DP-PSAC"):
        assert f"DP-PSASC is more accurate than {other}" in texts
