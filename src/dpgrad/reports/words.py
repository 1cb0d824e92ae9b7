"""A report in words: its facts in the order in which they should be read, and as text."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dpgrad.accounting.guarantee import UNIT, down, plural, several, up

__all__ = ["attack_lines", "facts", "group_lines", "interval", "shown", "text"]

_WIDTH = 100
_RATES, _ORDERS = (0.01, 0.05), (2.0, 8.0, 32.0)  # of attacks, in words; the JSON has more
_MOST_NAMES = 8  # of columns, in a line
_VALUES = {
    "noise_multiplier": "noise multiplier", "clip": "clip bound", "sampling_rate": "sampling rate", "steps": "steps"
}  # fmt: skip
_ALLOWED = {True: "yes, ", False: "NOT FOR RELEASE: ", None: ""}


def facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the report says, each under a name, in the order in which it should be read; all but the plain words."""
    return [
        *_promised(report["guarantee"], report["plan"]),
        *_made(report),
        *(("prepared by", entry) for entry in report.get("preprocessing", ())),
        *(("public", entry) for entry in report["public"]),
        *(("not covered", entry) for entry in report["outside"]),
        *(("note", entry) for entry in report.get("notes", ())),
    ]


def _promised(promise: Mapping[str, Any], plan: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    batches = "" if plan is None else ", batches of {:g} out of {:,} {}".format(*_sizes(plan))
    return [
        ("privacy", promise["statement"]),
        ("ε", interval(promise)),
        ("δ", f"{promise['delta']:g}"),
        ("neighbours", f"{promise['relation']}: {promise['neighbours']}"),
        ("privacy unit", _unit(promise)),
        *(("groups", line) for line in group_lines(promise)),
        *(("attacks", line) for line in attack_lines(promise.get("attacks"))),
        ("sampling", f"{promise['sampling']}{batches}"),
        ("accountant", promise["accountant"]),
    ]


def _made(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """How it was made, whether it may be shared, and what came out."""
    named, result, known = report["method"], report["result"], report.get("values", {})
    yield "method", named["title"] if named["citation"] is None else f"{named['title']} ({named['citation']})"
    if report["plan"] is not None and (why := report["plan"].get("chosen_by_rule")):
        yield "chosen", f"by rule: {why}"
    if values := [f"{label} {known[name]:.6g}" for name, label in _VALUES.items() if known.get(name) is not None]:
        yield "values", ", ".join(values)
    if report.get("noise") is not None:
        yield "noise", _source(report["noise"])
    yield from (("released", _released(one)) for one in report.get("releases", ()))
    if report.get("way") is not None:
        yield "gradients", _said(report["way"])
    yield "release", _ALLOWED[report["release"]["allowed"]] + report["release"]["reason"]
    if result is not None:
        yield "steps", f"{result['steps']:,}, {_STOPPED[report['stopped']]}"
    if report["data"] is not None:
        yield "data", "{name}, preprocessing {preprocessing}; {split}".format(**report["data"])
    if report.get("schema") is not None:
        yield "schema", _columns(report["schema"])
    if report["model"] is not None:
        yield "model", "{name}, {parameters:,} trained parameters".format(**report["model"])
    if result is not None and result["held_out"] is not None:
        yield "held-out", f"{result['metric']} {shown(result['held_out'], result['metric'])}"
    if report.get("environment") is not None:
        yield "made with", _environment(report)


_SOURCES = {
    "ordinary": "ordinary source: floating-point numbers from generators that are not cryptographic",
    "secure": "secure source: ChaCha20, and whole numbers on a grid",
    "secure and ordinary": "secure source (ChaCha20, whole numbers on a grid) for some releases, ordinary for others",
}


def _source(noise: Mapping[str, Any]) -> str:
    """Where the noise came from, in words.

    >>> _source({"source": "secure", "distance": 2.0**-50})
    'secure source: ChaCha20, and whole numbers on a grid; of δ, 8.8818e-16 is for the distance from a Gaussian'
    """
    paid = f"; of δ, {up(noise['distance'])} is for the distance from a Gaussian" if noise["distance"] else ""
    return _SOURCES[noise["source"]] + paid


def _released(one: Mapping[str, Any]) -> str:
    """One release in words.

    >>> _released({"name": "mean", "sensitivity": 0.02, "std": 0.1, "noise_multiplier": 5.0, "sampling_rate": 1.0,
    ...     "count": 2, "share": 0.05})
    'mean, 2 times: sensitivity 0.02, noise 0.1, 5 % of the budget'
    """
    times = "" if one["count"] == 1 else f", {one['count']:,} times"
    told = [
        "" if one["sensitivity"] is None else f"sensitivity {one['sensitivity']:.4g}",
        "" if one["std"] is None else f"noise {one['std']:.4g}",
        "" if one["sampling_rate"] in (None, 1) else f"sampling rate {one['sampling_rate']:.4g}",
        "" if one["share"] is None else f"{100 * one['share']:.3g} % of the budget",
    ]
    said = ", ".join(filter(None, told))
    return f"{one['name']}{times}" + (f": {said}" if said else "")


def _columns(schema: Mapping[str, Any]) -> str:
    """What a schema declares, in one line; the JSON has all of it."""
    listed = schema.get("columns")
    if not isinstance(listed, dict | list):
        return ", ".join(f"{name} {value}" for name, value in schema.items() if isinstance(value, int | float | str))
    names = [one["name"] if isinstance(one, dict) and "name" in one else str(one) for one in listed]
    more = "" if len(names) <= _MOST_NAMES else f", and {len(names) - _MOST_NAMES:,} more"
    return f"{len(names):,} column{'' if len(names) == 1 else 's'}: {', '.join(map(str, names[:_MOST_NAMES]))}{more}"


def _environment(report: Mapping[str, Any]) -> str:
    found = report["environment"]
    packages = [f"{name} {version}" for name, version in found["packages"].items() if version is not None]
    versions = ", ".join([f"dpgrad {report['dpgrad']}", f"Python {found['python']}", *packages])
    return f"{versions}; {found['system']}, {found['machine']}; {report['date']}"


def _plain(told: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if told is not None:
        yield "plain words", told["promise"]
        if told.get("attack") is not None:
            yield "plain words", told["attack"]
        yield from (("not meant", entry) for entry in told["does_not_mean"])


def _said(way: Mapping[str, Any]) -> str:
    """The way in which gradients were computed, in words.

    >>> _said({"name": "lifted", "reason": "sort has no rule", "cost": None})
    'lifted: sort has no rule'
    """
    told = way["name"] if way["reason"] is None else f"{way['name']}: {way['reason']}"
    return told if way["cost"] is None else f"{told}; every batch is checked, which costs {way['cost']}"


def _sizes(plan: Mapping[str, Any]) -> tuple[float, int, str]:
    return plan["batch_size"], plan["dataset_size"], plural(plan.get("unit", UNIT))


def _unit(promise: Mapping[str, Any]) -> str:
    unit = promise["privacy_unit"]
    if unit == several(UNIT, 1):
        return f"{unit}; someone with several rows is protected less"
    return f"{unit}, with all of their rows; several who belong together are protected less"


def group_lines(promise: Mapping[str, Any]) -> list[str]:
    """What groups that change together are promised, one line each; none of a report that does not say.

    >>> group_lines({"privacy_unit": "one row", "delta": 1e-5, "groups": [{"size": 2, "epsilon": 1.23456789}]})
    ['2 rows together: ε at most 1.2346 at δ = 1e-05']
    """
    unit = promise["privacy_unit"].removeprefix("one ")
    return [
        f"{several(unit, group['size'])}{' together' if group['size'] > 1 else ''}: "
        + ("no finite ε" if group["epsilon"] is None else f"ε at most {up(group['epsilon'])}")
        + f" at δ = {promise['delta']:g}"
        for group in promise.get("groups", ())
    ]


def attack_lines(found: Mapping[str, Any] | None) -> list[str]:
    """What no attack can exceed, one line each; none of a report that does not say.

    >>> attack_lines({"membership_advantage": 0.125, "power": [], "belief": [], "mu": None, "rho": None, "renyi": []})
    ['membership advantage at most 0.125 (true positives minus false positives)']
    """
    if found is None:
        return []
    notions = [
        *([] if found["mu"] is None else [f"{up(found['mu'])}-GDP"]),
        *([] if found["rho"] is None else [f"{up(found['rho'])}-zCDP"]),
        *([f"Rényi divergence {listed}"] if (listed := _divergences(found["renyi"])) else []),
    ]
    return [
        f"membership advantage at most {up(found['membership_advantage'])} (true positives minus false positives)",
        *(
            f"{100 * one['false_positives']:g} % false positives: at most {up(100 * one['power'])} % true positives; "
            f"from even odds, a positive answer is right at most {up(100 * one['precision'])} % of the time"
            for one in found["power"]
            if one["false_positives"] in _RATES
        ),
        *(
            f"belief in the truth, from even odds: at most {up(100 * one['belief'])} %, except with probability "
            f"{one['chance']:g}"
            for one in found["belief"]
        ),
        *(["also " + "; ".join(notions)] if notions else []),
    ]


def _divergences(found: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{up(one['divergence'])} at order {one['order']:g}" for one in found if one["order"] in _ORDERS)


_STOPPED = {
    "plan": "as planned",
    "budget": "as many as the budget allowed",
    "interrupted": "interrupted: the guarantee is that of the whole plan",
}


def interval(promise: Mapping[str, Any]) -> str:
    """The certified interval of ε in words; figures are never rounded towards comfort.

    >>> interval({"epsilon": 2.9999991, "epsilon_lower": 2.99991, "reason": None})
    'at most 3, and at least 2.9999 by any proof'
    """
    if promise["epsilon"] is None:
        return f"infinite: {promise['reason']}"
    least = "" if promise["epsilon_lower"] is None else f", and at least {down(promise['epsilon_lower'])} by any proof"
    return f"at most {up(promise['epsilon'])}{least}"


def shown(value: float | None, metric: str) -> str:
    """A figure on held-out rows: a share as per cent, a loss as it is.

    >>> shown(0.9583, "accuracy"), shown(0.25, "squared"), shown(None, "accuracy")
    ('95.8 %', '0.25', '–')
    """
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if metric == "accuracy" else f"{value:.4g}"


def text(report: Mapping[str, Any]) -> str:
    """The report in words, one fact after another: the guarantee and what it means in plain words come first."""
    lines, before = [], ""
    (promise, *others), plain = facts(report), list(_plain(report.get("plain")))
    for name, fact in sorted([promise, *plain, *others], key=lambda entry: entry[0] == "not meant"):
        label = "" if name == before else name
        first, rest = f"{label:<14}", " " * 14
        lines.append(textwrap.fill(fact, _WIDTH, initial_indent=first, subsequent_indent=rest))
        before = name
    return "\n".join(lines) + "\n"
