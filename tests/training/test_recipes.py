"""Every recipe against its algorithm written out line by line: plain loops over examples, the same draws, no engine."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spread
from dpgrad.accounting.events import Gaussian, Leaf, leaves
from dpgrad.grads.history import InnerMomentum
from dpgrad.grads.scaling import Automatic, Hard, Psac, Psasc
from dpgrad.mechanism import sampling, schedules
from dpgrad.mechanism.keys import Key
from dpgrad.randomness import noise
from dpgrad.training.fit import Fitted
from dpgrad.training.plan import make
from dpgrad.training.private import Observed, PrivateGradient
from dpgrad.training.recipes import RECIPES, Recipe, parse_learning_rate, recipe

ROWS, LOT, STEPS, SIGMA, SEED = 24, 8, 6, 0.7, 5
# Factors are shortened by less than 1e-11 in float64, and six steps do not enlarge that a hundredfold.
CLOSE = {"rtol": 0.0, "atol": 1e-9}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 3, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(3, (ROWS,), generator=generator)


def fitted(method: str | Recipe, **options: Any) -> Fitted:
    settings: dict[str, Any] = {
        "steps": STEPS,
        "batch_size": LOT,
        "noise_multiplier": SIGMA,
        "delta": 1e-3,
        "seed": SEED,
    }
    if recipe(method).full_batch:
        del settings["batch_size"]
    return spread.fit(network(), rows(), method=method, **settings | options)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def sampled(k: int) -> Any:
    """The examples of iteration k: each by a coin of its own, with probability L/N."""
    return sampling.Poisson(LOT / ROWS).draw(ROWS, k, Key.from_seed(SEED))


def standard_normal(model: nn.Module, k: int) -> Tensor:
    """N(0, I) of iteration k, over all parameters."""
    key = Key.from_seed(SEED)
    return torch.cat([noise.gaussian(p, 1.0, key, k, name).flatten() for name, p in model.named_parameters()])


def gradient(model: nn.Module, i: int) -> Tensor:
    """∇f(w, d_i), of one example alone."""
    inputs, targets = rows()
    loss = nn.functional.cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1])
    return torch.cat([found.flatten() for found in torch.autograd.grad(loss, list(model.parameters()))])


def moved(model: nn.Module, by: Tensor) -> None:
    """w ← w + by."""
    start = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()


def abadi(C: float, eta: float, sigma: float = SIGMA) -> nn.Module:
    """Algorithm 1 of Abadi et al.; the sum is divided by the lot size L."""
    w = network()
    for t in range(STEPS):
        total = torch.zeros_like(weights(w))
        for i in sampled(t):
            g = gradient(w, i)
            g_bar = g / max(1.0, float(g.norm()) / C)
            total += g_bar
        g_tilde = (total + sigma * C * standard_normal(w, t)) / LOT
        moved(w, -eta * g_tilde)
    return w


def yu_2018(C: float, eta: float, c: float, shrinking: bool, T: int = STEPS) -> nn.Module:
    """Algorithm 1 of Yu et al. (2018): noise of a fixed size σ = C·σ̃; the sum is divided by the expected size."""
    theta = network()
    m = torch.zeros_like(weights(theta))
    sigma, C_t = C * SIGMA, C
    for t in range(STEPS):
        total = torch.zeros_like(m)
        for i in sampled(t):
            g = gradient(theta, i)
            total += g / max(1.0, float(g.norm()) / C_t)
        b_t = sigma * standard_normal(theta, t)
        g_tilde = (total + b_t) / LOT
        m = c * m + g_tilde
        if shrinking:
            C_t = C / min(2, 1 + (t + 1) / T)
        moved(theta, -eta * m)
    return theta


Weight = Callable[[float], float]


def huang_1(weight: Weight, sensitivity: float, eta: float) -> nn.Module:
    """Algorithm 1 of Huang et al., and Eqs. 3 and 5, which differ from it in the weight; lots by Poisson sampling."""
    w = network()
    for k in range(STEPS):
        g_hat = torch.zeros_like(weights(w))
        for i in sampled(k):
            g = gradient(w, i)
            g_hat += weight(float(g.norm())) * g
        g_hat += SIGMA * sensitivity * standard_normal(w, k)
        moved(w, -eta / LOT * g_hat)
    return w


def huang_2(C: float, s: float, r: float, gamma: float, eta: float) -> nn.Module:
    """Algorithm 2: m_0 = g_0, m updated before it is scaled, the sum divided by N."""
    w = network()
    m: dict[int, Tensor] = {}
    for k in range(STEPS):
        g_k = torch.zeros_like(weights(w))
        for i in range(ROWS):
            g = gradient(w, i)
            m[i] = g if k == 0 else gamma * g + (1 - gamma) * m[i]
            n = float(m[i].norm())
            g_k += C * m[i] / (s * n + r / (n + r))
        g_hat = g_k + C * SIGMA / s * standard_normal(w, k)
        moved(w, -eta / ROWS * g_hat)
    return w


def huang_3(
    C: float, s: float, r: float, gamma_0: float, gamma_1: float, K_0: int, eta: float, inner: str
) -> nn.Module:
    """Algorithm 3: up to K₀+1 terms, not normalised, from the present iterate on or from the one before it."""
    w = network()
    M = torch.zeros_like(weights(w))
    iterates: list[nn.Module] = []
    for k in range(STEPS):
        iterates.insert(0, copy.deepcopy(w))
        g_k = torch.zeros_like(M)
        for i in sampled(k):
            m_i = torch.zeros_like(M)
            used = iterates if inner == "current" else iterates[1:]
            for j, iterate in enumerate(used[: K_0 + 1]):
                m_i += gamma_0**j * gradient(iterate, i)
            n = float(m_i.norm())
            g_k += C * m_i / (s * n + r / (n + r))
        M = (1 - gamma_1) * M + g_k + C * SIGMA / s * standard_normal(w, k)
        moved(w, -eta / LOT * M)
    return w


def yu_2020(C: float, eta: float) -> nn.Module:
    """DP-GD of Yu et al. (2020) with clipping: every row at every step, the sum divided by n."""
    w = network()
    for t in range(STEPS):
        total = torch.zeros_like(weights(w))
        for i in range(ROWS):
            g = gradient(w, i)
            total += g * min(1.0, C / float(g.norm()))
        moved(w, -eta * (total + SIGMA * C * standard_normal(w, t)) / ROWS)
    return w


def self_scaled(C: float, c: float) -> nn.Module:
    """Method auto: Abadi's noisy mean, and the formulas of `SelfScaled` with the rate of the rule, falling to 0."""
    w, w_0 = network(), weights(network())
    eta = min(0.1, 50 / math.sqrt(STEPS * w_0.numel()))
    D, m, v, log_s = torch.zeros_like(w_0), torch.zeros_like(w_0), torch.zeros_like(w_0), 0.0
    for t in range(STEPS):
        total = torch.zeros_like(w_0)
        for i in sampled(t):
            g = gradient(w, i)
            total += g * min(1.0, C / float(g.norm()))
        g = (total + SIGMA * C * standard_normal(w, t)) / LOT
        if t:
            z = float(g @ D) / (float(D.norm()) * math.sqrt(float(v.mean()) / (1 - 0.99**t)))
            log_s -= 0.015 * min(3.0, max(-3.0, z))
        v, m = 0.99 * v + 0.01 * g.square(), c * m + (1 - c) * g
        D = D - eta * (1 - t / STEPS) * (m / (1 - c ** (t + 1))) / (v / (1 - 0.99 ** (t + 1))).sqrt()
        moved(w, w_0 + math.exp(log_s) * D - weights(w))
    return w


def psasc(C: float, s: float, r: float) -> Weight:
    return lambda n: C / (s * n + r / (n + r))


# The constants are written out again here: a default that is not the paper's must fail. At C = 12 no gradient of this
# network is clipped, so the recipes of Yu et al. run a second time at C = 0.3, below.
WRITTEN_OUT: dict[str, Callable[[], nn.Module]] = {
    "auto": lambda: self_scaled(C=0.1, c=0.9),
    "dpsgd": lambda: abadi(C=12.0, eta=0.02),
    "dpsgd-momentum": lambda: yu_2018(C=12.0, eta=0.02, c=0.6, shrinking=False),
    "dpsgd-dynamic": lambda: yu_2018(C=12.0, eta=0.02, c=0.0, shrinking=True),
    "dpsgd-amended": lambda: yu_2018(C=12.0, eta=0.02, c=0.6, shrinking=True),
    "autos": lambda: huang_1(lambda n: 1 / (n + 1e-4), sensitivity=1.0, eta=0.24),
    "psac": lambda: huang_1(lambda n: 0.3 / (n + 1e-4 / (n + 1e-4)), sensitivity=0.3, eta=0.8),
    "psasc": lambda: huang_1(psasc(0.3, 0.9, 1e-4), sensitivity=0.3 / 0.9, eta=0.8),
    "psasc-momentum": lambda: huang_3(0.3, 0.9, 1e-4, gamma_0=0.5, gamma_1=0.4, K_0=2, eta=0.32, inner="current"),
    "dpgd": lambda: yu_2020(C=1.0, eta=1.0),
    "psasc-gd": lambda: huang_2(0.3, 0.9, 1e-4, gamma=0.3, eta=3.0),
}
METHODS = sorted(RECIPES)


def test_every_recipe_is_written_out() -> None:
    assert set(WRITTEN_OUT) == set(RECIPES)
    assert all(name == made.name and made.title and made.citation for name, made in RECIPES.items())


@pytest.mark.parametrize("method", METHODS)
def test_a_recipe_does_what_its_algorithm_says(method: str) -> None:
    found, wanted = weights(fitted(method).model), weights(WRITTEN_OUT[method]())
    assert float((wanted - weights(network())).norm()) > 1e-2  # it moves
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("method", ["dpsgd", "dpsgd-momentum", "dpsgd-dynamic", "dpsgd-amended"])
def test_a_recipe_of_yu_where_the_clip_bound_binds(method: str) -> None:
    made = RECIPES[method]
    wanted = yu_2018(C=0.3, eta=0.5, c=made.momentum, shrinking=made.clip_schedule is not None)
    found = fitted(method, clip=0.3, learning_rate=0.5)
    torch.testing.assert_close(weights(found.model), weights(wanted), **CLOSE)


@pytest.mark.parametrize("inner", ["current", "past"])
def test_inner_momentum_from_the_present_or_the_past_iterate(inner: str) -> None:
    wanted = huang_3(0.2, 0.5, 0.01, gamma_0=0.8, gamma_1=0.3, K_0=1, eta=0.5, inner=inner)
    found = fitted(
        "psasc-momentum", clip=0.2, s=0.5, r=0.01, gamma=0.8, length=1, momentum=0.7, learning_rate=0.5, inner=inner
    )
    torch.testing.assert_close(weights(found.model), weights(wanted), **CLOSE)


@pytest.mark.parametrize("method", ["psac", "psasc", "psasc-momentum", "psasc-gd"])
def test_clip_and_rate_are_one_number(method: str) -> None:
    """(C, η) and (1, C·η) make the same weights."""
    rate = RECIPES[method].learning_rate
    one = fitted(method, clip=0.3, learning_rate=rate)
    other = fitted(method, clip=1.0, learning_rate=0.3 * rate)
    torch.testing.assert_close(weights(one.model), weights(other.model), **CLOSE)


def test_psasc_at_s_one_is_psac() -> None:
    one, other = fitted("psasc", s=1.0), fitted("psac")
    torch.testing.assert_close(weights(one.model), weights(other.model), **CLOSE)
    assert one.plan.mechanism == other.plan.mechanism


def test_psasc_is_psac_with_another_r_inside_and_a_rate_divided_by_s() -> None:
    """C/(s·n + r/(n+r)) = (1/s)·C/(n + (r/s)/(n+r)): the identity of the specification, on the algorithm itself."""
    C, s, r, eta = 0.3, 0.5, 0.01, 0.8
    inner = huang_1(lambda n: C / (n + (r / s) / (n + r)), sensitivity=C, eta=eta / s)
    found = fitted("psasc", clip=C, s=s, r=r, learning_rate=eta)
    torch.testing.assert_close(weights(found.model), weights(inner), **CLOSE)


def multiplier(leaf: Leaf) -> float:
    return leaf.noise_multiplier if isinstance(leaf, Gaussian) else leaf.event.noise_multiplier  # type: ignore[union-attr]


@pytest.mark.parametrize("method", METHODS)
def test_clip_noise_and_charge_agree_at_every_step(method: str) -> None:
    """What was clipped to and added, read off the step itself, has the ratio for which the step was charged."""
    options = {} if RECIPES[method].full_batch else {"batch_size": LOT}
    plan = make(method, rows=ROWS, parameters=4, steps=STEPS, noise_multiplier=SIGMA, delta=1e-3, **options)
    made, seen = plan.recipe, []
    model = network()
    charged: list[Leaf] = []

    def observe(observed: Observed) -> None:
        step = observed.step
        unit = noise.gaussians(dict(model.named_parameters()), dict.fromkeys(observed.noisy, 1.0), private.key, step)
        added = [
            (observed.noisy[name] * plan.mechanism.divisor - observed.clipped_sum[name]) / unit[name] for name in unit
        ]
        std = torch.cat([one.flatten() for one in added])
        assert float(std.std()) < 1e-6 * float(std.mean())  # one standard deviation for all coordinates
        seen.append((float(observed.clip), float(std.mean())))
        assert bool((observed.factors * observed.norms <= observed.clip).all())

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    private = PrivateGradient(
        model, loss, plan.mechanism, rule=made.scaling(), inner_momentum=made.inner_momentum, average=made.average,
        seed=SEED, observe=observe, charge=lambda step: charged.append(plan.mechanism.step_event(step)),  # type: ignore[arg-type]
    )  # fmt: skip
    for _ in range(STEPS):
        private.step(rows())
    assert len(seen) == len(charged) == STEPS
    for step, ((clip, std), leaf) in enumerate(zip(seen, charged, strict=True)):
        assert clip == plan.mechanism.clip_at(step)
        assert std == pytest.approx(plan.mechanism.std_at(step), rel=1e-6)
        assert std / clip == pytest.approx(multiplier(leaf), rel=1e-6)
    assert private.ledger == plan.mechanism.event()
    if made.clip_schedule:
        assert len({clip for clip, _ in seen}) == STEPS
        assert len({multiplier(leaf) for leaf in leaves(private.ledger)}) == STEPS


@pytest.mark.parametrize("method", METHODS)
def test_plan_and_ledger_are_equal_at_the_end(method: str) -> None:
    done = fitted(method)
    assert done.event == done.plan.mechanism.event()
    assert done.guarantee == done.plan.guarantee == done.plan.mechanism.guarantee(1e-3)


class TestOptions:
    def test_unknown_methods_are_refused_with_the_nearest(self) -> None:
        with pytest.raises(ValueError, match=r"method must be .* got 'dp-sgd': did you mean dpsgd"):
            recipe("dp-sgd")
        with pytest.raises(ValueError, match="did you mean psasc-momentum"):
            recipe("PSASC_momentum")

    def test_a_recipe_of_ones_own_is_taken(self) -> None:
        own = RECIPES["psac"].with_options(clip=1.0)
        assert recipe(own) is own

    @pytest.mark.parametrize(
        ("method", "options", "message"),
        [
            ("dpsgd", {"s": 0.5}, "method dpsgd has no s"),
            ("dpsgd", {"r": 0.5}, "method dpsgd has no r: .*autos"),
            ("autos", {"clip": 0.5}, "method autos has no clip"),
            ("autos", {"clip_schedule": "linear"}, "method autos has no clip bound that could follow"),
            ("psasc", {"length": 3}, "method psasc has no length"),
            ("psac", {"gamma": 0.5}, "method psac has no gamma"),
            ("psasc", {"s": 0.0}, "s must be positive"),
            ("psasc", {"r": 1e-20}, "r must be at least"),
            ("psasc-gd", {"gamma": 2.0}, r"gamma must lie in \[0, 1\]"),
            ("dpsgd", {"momentum": 1.0}, r"momentum must lie in \[0, 1\)"),
            ("dpsgd", {"clip": -1.0}, "clip must be positive"),
            ("dpsgd", {"clip": schedules.constant(1.0), "clip_schedule": "linear"}, "clip is a schedule already"),
        ],
    )
    def test_what_a_method_does_not_have_is_refused(self, method: str, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            RECIPES[method].with_options(**options)

    def test_values_that_no_paper_prints_are_named_until_they_are_given(self) -> None:
        assert RECIPES["psasc"].chosen == ("learning_rate",)
        assert RECIPES["psasc-momentum"].with_options(momentum=0.5, gamma=0.1).chosen == ("learning_rate", "length")

    def test_a_clip_schedule_of_ones_own_is_the_bound_itself(self) -> None:
        bound = schedules.geometric(2.0, ratio=0.9, floor=1.0)
        made = RECIPES["dpsgd-dynamic"].with_options(clip=bound)
        assert made.clip_over(100) is bound
        assert made.clip_schedule is None

    def test_rules_and_bounds(self) -> None:
        assert RECIPES["dpsgd"].scaling() == Hard()
        assert RECIPES["autos"].scaling() == Automatic(r=1e-4)
        assert RECIPES["psac"].scaling() == Psac(r=1e-4)
        assert RECIPES["psasc"].with_options(s=0.5).scaling() == Psasc(s=0.5, r=1e-4)
        assert RECIPES["autos"].bound == 1.0
        assert RECIPES["psasc"].with_options(clip=0.2, s=0.5).bound == 0.4
        assert RECIPES["psasc-momentum"].inner_momentum == InnerMomentum(0.5, 2)
        assert RECIPES["psasc-momentum"].average is None
        assert RECIPES["psasc-gd"].average == 0.3

    def test_recipes_go_to_json(self) -> None:
        import json

        for made in RECIPES.values():
            assert json.loads(json.dumps(made.to_dict()))["name"] == made.name


class TestRateSchedules:
    def test_shapes(self) -> None:
        assert parse_learning_rate("constant", 0.5, 100, 10)(99) == 0.5
        straight = parse_learning_rate("linear:0.2", 0.5, 100, 10)
        assert [straight(t) for t in (0, 50, 100)] == pytest.approx([0.5, 0.3, 0.1])
        wave = parse_learning_rate("cosine", 0.5, 100, 10)
        assert [wave(t) for t in (0, 50, 100)] == pytest.approx([0.5, 0.25, 0.0])
        held = parse_learning_rate("decay-then-hold:0.52:3", 0.1, 100, 10)  # Abadi et al.: from 0.1 to 0.052
        assert [held(t) for t in (0, 15, 30, 99)] == pytest.approx([0.1, 0.076, 0.052, 0.052])
        assert parse_learning_rate("decay-then-hold", 0.1, 1000, 10)(100) == pytest.approx(0.05)
        ramp = parse_learning_rate("warmup:4+cosine", 0.5, 100, 10)
        assert ramp(0) == pytest.approx(0.125)
        assert ramp(50) == pytest.approx(0.25)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("cosin", "learning_rate_schedule must be constant, .* got 'cosin': did you mean cosine"),
            ("cosine:x", "not a number"),
            ("cosine:2", r"share of learning_rate_schedule cosine must lie in \[0, 1\]"),
            ("cosine:0.1:2", "learning_rate_schedule must be"),
            ("warmup:4", "learning_rate_schedule must be"),
            ("warmup:1.5+cosine", "learning_rate_schedule must be"),
            ("warmup:inf+constant", "learning_rate_schedule must be .* got 'warmup:inf"),
            ("warmup:nan+constant", "learning_rate_schedule must be .* got 'warmup:nan"),
            ("warmup:0+constant", "steps must be a whole number of at least 1"),
            ("warmup:1e300+constant", "steps must be at most"),
            ("warmup:2+warmup:2+constant", "or one warmup:STEPS\\+ before"),
            ("warmup:2+" * 3000 + "constant", "learning_rate_schedule must be"),
            ("decay-then-hold:0.5:1e308", "steps must be at most"),
            ("decay-then-hold:0.5:inf", "epochs of decay-then-hold must be positive and finite"),
            ("cosine+linear", "learning_rate_schedule must be"),
            ("decay-then-hold:0.5:0", "epochs of decay-then-hold must be positive"),
        ],
    )
    def test_refusals(self, text: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            parse_learning_rate(text, 0.5, 100, 10)


def test_draws_are_those_of_the_key() -> None:
    """The transcriptions above would agree with anything if no example were drawn or the lots were all alike."""
    lots = [tuple(sampled(k)) for k in range(STEPS)]
    assert len(set(lots)) == STEPS
    assert sum(map(len, lots)) > STEPS
    norms = [float(gradient(network(), i).norm()) for i in range(ROWS)]
    assert min(norms) > 0.3  # the bound of the second round binds for all rows at the start
    assert max(norms) < 6  # and the first bound binds for none
