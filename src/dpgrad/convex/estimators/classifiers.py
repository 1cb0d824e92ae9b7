"""Private linear classifiers for scikit-learn."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_expit, log_softmax, logsumexp
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import accuracy_score
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from dpgrad import _validate
from dpgrad.accounting.events import Event, together
from dpgrad.accounting.guarantee import ORDINARY
from dpgrad.accounting.ledger import Ledger
from dpgrad.convex import chunked
from dpgrad.convex.design import quiet
from dpgrad.convex.estimators import extras, rows, solvers
from dpgrad.convex.estimators.privacy import (
    FitPrivacy,
    PrivacyWarning,
    Reported,
    charging,
    delta_for,
    exact_delta,
    guarantee,
    not_covered,
    relation_of,
    warn_of_steps,
)
from dpgrad.convex.losses import Array, HuberSvm, Logistic, RowLoss, Softmax
from dpgrad.convex.opened import blockwise, in_memory
from dpgrad.convex.solvers import auto
from dpgrad.convex.solvers.solved import Statistic
from dpgrad.convex.weighted import Joint, Weighted
from dpgrad.errors import DataError, OptionError
from dpgrad.mechanism.keys import Key

__all__ = ["BALANCED", "DPLinearSVC", "DPLogisticRegression", "LinearClassifier"]

_LARGEST_LABEL = 2**53
BALANCED = "balanced"  # weights by class counts, which are released


class LinearClassifier(Reported, ClassifierMixin, BaseEstimator, ABC):  # type: ignore[misc]
    """What private linear classifiers share: the arguments, the fit, and the scores."""

    _title: ClassVar[str]

    @_validate.keywords(rows.sklearn_option)
    def __init__(
        self,
        epsilon: float = 1.0,
        *,
        delta: float | None = None,
        relation: str = "replace-one",
        data_norm: float | str | None = None,
        classes: ArrayLike | None = None,
        class_weight: Mapping[Any, float] | str | None = None,
        inference_share: float | None = None,
        fit_intercept: bool = True,
        solver: str = "auto",
        max_iter: int | None = None,
        kappa: float | None = None,
        learning_rate: float | None = None,
        clip: float | None = None,
        l2: float | None = None,
        momentum: float | None = None,
        sampling_rate: float | None = None,
        batch_size: int | None = None,
        noise: str = ORDINARY,
        random_state: Any = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.relation = relation
        self.data_norm = data_norm
        self.classes = classes
        self.class_weight = class_weight
        self.inference_share = inference_share
        self.fit_intercept = fit_intercept
        self.solver = solver
        self.max_iter = max_iter
        self.kappa = kappa
        self.learning_rate = learning_rate
        self.clip = clip
        self.l2 = l2
        self.momentum = momentum
        self.sampling_rate = sampling_rate
        self.batch_size = batch_size
        self.noise = noise
        self.random_state = random_state
        self.ledger = ledger

    @abstractmethod
    def _loss(self, classes: int) -> Logistic | HuberSvm | Softmax | Joint:
        """The loss of that many classes."""

    @_validate.keywords(rows.unweighted, absent=("sample_weight",))
    @quiet
    def fit(self, X: Any, y: Any) -> Self:
        """Learn within the budget. Rows are counted, and nothing else is read from them without noise.

        Guarantee: `privacy_`, once fitted. A ``ledger`` is charged before anything is released.
        """
        warn_of_steps(self)
        epsilon, relation = rows.budget_checked(self.epsilon), relation_of(self.relation)
        secure = rows.secure_checked(self.noise)
        radius = rows.radius_of(self.data_norm)
        fit_intercept = rows.flag_checked(fit_intercept=self.fit_intercept)
        X, y = rows.validated(self, X, y=y, dtype=rows.NUMBERS)
        delta = delta_for(self.delta, X.shape[0])
        if self.classes is None:  # where they are named `_encoded` refuses all else, and scikit-learn warns by y
            check_classification_targets(y.different() if isinstance(y, chunked.Labels) else y)
            _validate.warn(
                "classes were read from y, which the guarantee does not cover: name them, classes=[...]", PrivacyWarning
            )
        labels, targets = _encoded(y, self.classes)
        share = extras.share_checked(inference_share=self.inference_share)
        if share and self.class_weight is not None:
            raise OptionError(extras.WEIGHTED)
        balance = isinstance(self.class_weight, str) and self.class_weight == BALANCED
        exact = exact_delta(delta, secure)
        split = extras.Shares(epsilon, exact, relation, extras.COUNTS_SHARE if balance else 0.0, share, secure)
        charge = charging(self.ledger, relation, type(self).__name__, delta)
        key = rows.key_of(self.random_state, type(self).__name__)
        loss, before = self._weighed(targets, labels, split, charge, key)
        task = solvers.SolverTask(
            loss, len(labels), epsilon, exact, relation, radius, fit_intercept, charge, secure=secure
        )
        options = {name: value for name in solvers.OPTIONS if (value := getattr(self, name)) is not None}
        outcome = extras.solved(self.solver, rows.narrowed(X), targets, task, options, key, split)
        found = outcome.found
        self.classes_, self.radius_, self.one_vs_rest_ = labels, radius, found.coef.shape[1] > loss.outputs
        self.coef_, self.intercept_, self.n_iter_ = found.coef.T, found.intercept, found.steps
        self.cut_, self.inference_ = found.cut, outcome.inference
        self.privacy_ = self._told(X, labels, split, outcome, before, key, delta)
        if found.unsettled:
            _validate.warn(found.unsettled, ConvergenceWarning)
        return self

    def _weighed(
        self, targets: NDArray[np.int64], labels: NDArray[Any], split: extras.Shares, charge: Callable[[Event], None],
        key: Key,
    ) -> tuple[RowLoss, tuple[tuple[Event, Statistic], ...]]:  # fmt: skip
        """The loss with the weights of its classes, and the release of class counts where these are balanced."""
        plain = self._loss(len(labels))
        if not split.counts:
            return _weighted(plain, self.class_weight, labels), ()
        if self.solver in solvers.BINARY:
            raise OptionError(solvers.unweighted(str(self.solver)))
        plan = split.counts_plan(len(labels))
        charge(plan.event)
        made = extras.balanced(extras.class_counts(targets, len(labels)), plan, key)
        release = Statistic("class counts", plan.sensitivity, plan.std, split.counts)
        return Weighted(plain, made), ((plan.event, release),)

    def _told(
        self, X: Any, labels: NDArray[Any], split: extras.Shares, outcome: extras.Outcome,
        before: tuple[tuple[Event, Statistic], ...], key: Key, delta: float,
    ) -> FitPrivacy:  # fmt: skip
        """What the fit says of itself."""
        inferred = ("the labels that occur, read from y",) if self.classes is None else ()
        named = () if self.classes is None else (f"the {len(labels)} classes, and that no label lies beyond them",)
        event = together(*(made for made, _ in before), outcome.event)
        return FitPrivacy(
            guarantee(event, split.relation, delta),
            (*(release for _, release in before), *outcome.releases),
            (*rows.shape_facts(X, self.radius_), *named, "every argument of the estimator"),
            (*inferred, *not_covered(self.ledger, split.secure)),
            key.reproducible,
            f"{self._title}, solver {self.solver}",
            rows.prepared_by(self.radius_, bool(self.fit_intercept)),
            rows.schema_of(self, X, classes=None if self.classes is None else labels.tolist()),
            () if outcome.found.unsettled is None else (outcome.found.unsettled,),
        )

    @blockwise
    def decision_function(self, X: Any) -> Array:
        """The scores of raw rows, clipped or normalised as those of the fit were: (n,) for two classes, else (n, K)."""
        check_is_fitted(self)
        X = rows.canonical(rows.validated(self, X, reset=False))
        scores = solvers.design(X, self.radius_).scores(self.coef_.T) + self.intercept_
        return np.asarray(scores[:, 0] if len(self.classes_) == 2 else scores)

    @blockwise
    def predict(self, X: Any) -> NDArray[Any]:
        """The class with the largest score."""
        scores = self.decision_function(X)
        places = (scores > 0).astype(np.int64) if scores.ndim == 1 else scores.argmax(axis=1)
        return np.asarray(self.classes_[places])

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The accuracy of the predictions. These rows are not protected; lazy labels and predictions are computed."""
        truth, found, weights = in_memory(y, self.predict(X), sample_weight)
        return float(accuracy_score(truth, found, sample_weight=weights))

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


class DPLogisticRegression(extras.Inferred, LinearClassifier):
    """Logistic regression with differential privacy; softmax for more than two classes.

    The default solver, ``"auto"``, has nothing to tune (`dpgrad.convex.auto`). ``"gd"`` and ``"sgd"`` are DP-GD and
    DP-SGD of Yu et al. (2020), with ``max_iter`` steps, ``learning_rate``, ``clip``, ``l2`` and ``momentum``. Left at
    None these come from public numbers, and the second half of the iterates is averaged (`dpgrad.convex.pace`); with a
    ``learning_rate`` they are the paper's plain descent: 100 steps, no momentum, the last iterate.
    ``"output"``, ``"objective"`` and ``"amp"`` perturb the result or the objective. An option that a solver does not
    take is refused.

    ``data_norm`` bounds the norm of a row: a number R, to which longer rows are clipped, or None (``"normalize"``), by
    which every row is normalised. Prediction does the same to its rows, and ``coef_`` applies to rows so treated.
    ``classes`` are all labels that could occur; where they are not named they are read from ``y`` with a warning.
    ``delta`` is 1/n² unless given, and below 1/n. ``class_weight`` names public weights, relative to the largest, or is
    ``"balanced"``: weights by class counts, which are released with noise for 5 % of the budget. ``inference_share`` is
    the share of the budget that pays for `confidence_intervals` (docs/scikit_learn.md says of which solvers).
    ``noise`` is the source of noise and samples: ``"ordinary"``, or ``"secure"`` for models that are released
    (docs/secure_noise.md), which ``"objective"`` and ``"amp"`` do not take.
    With ``random_state`` a fit can be repeated, by anyone who guesses it: not for release. ``ledger``, a
    `dpgrad.Ledger`, adds up all fits that share it, also those of a grid search; one with a file also across
    processes. Sample weights and warm starts are not offered.

    **What ``"auto"`` is for.** Its gradients are clipped well below what the loss allows, which keeps noise small and
    predictions good, and biases the model at any n and ε: ``coef_`` is too large where rows follow a logistic model,
    the more so the less the columns tell, and so is `decision_function`. `predict` is hardly touched. `predict_proba`
    allows for it where the fit released a second moment (``privacy_`` lists it: few columns for the rows and ε);
    elsewhere its probabilities may be too sure of themselves, or, where the budget cut the descent short, not sure
    enough. Calibrate them on public rows. To read coefficients or odds use ``"gd"``, ``"sgd"`` or ``"objective"``,
    which clip nothing.

    **Reading coefficients.** ``"gd"`` comes within 5 % of the coefficients without privacy where the budget allows it:
    100,000 rows of 10 columns in [0, 1], with ``data_norm`` √10, at ε = 1. Where they had not settled a
    ``ConvergenceWarning`` says so: they are then too small, or mostly noise. It is decided from the iterates, which are
    released, and costs nothing. ``"objective"`` always solves its problem, whose ridge and noise shrink with n and ε.

    ``data_norm`` is best about as long as most rows are: noise is for rows as long as it allows. ``"output"`` has a
    learning rate that is safe for such rows: with a norm ten times too generous it stays near zero.

    A fit sets ``classes_``, ``coef_``, ``intercept_``, ``n_iter_`` and ``privacy_``; ``one_vs_rest_`` says whether the
    scores of several classes were learned apart, as ``"objective"`` and ``"amp"`` do, and ``cut_`` is the number
    that corrects probabilities, or None.

    Guarantee: `privacy_` holds (ε, δ) for neighbours under ``relation``, every release, what is assumed public, and
    what is not covered. Rows are read in float32; sums over them, which the bounds are for, run in float64.

    >>> random = np.random.default_rng(7)
    >>> X = random.standard_normal((2000, 2))
    >>> y = np.where(X @ [2.0, 1.0] > 0, "yes", "no")
    >>> model = DPLogisticRegression(epsilon=1.0, classes=["no", "yes"], random_state=7).fit(X, y)
    >>> bool(model.score(X, y) > 0.9), model.predict_proba(X).shape
    (True, (2000, 2))
    >>> print(model.privacy_.guarantee)
    ε = 1 at δ = 2.5e-07 for datasets of the same public size that differ in one row (full batch, exact accountant)
    """

    _title = "logistic regression"

    def _loss(self, classes: int) -> Logistic | HuberSvm | Softmax | Joint:
        return Logistic() if classes == 2 or self.solver in solvers.BINARY else Softmax(classes)

    @blockwise
    def predict_proba(self, X: Any) -> Array:
        """The probability of each class: (n, K); see `predict_log_proba`."""
        return np.asarray(np.exp(self.predict_log_proba(X)))

    @blockwise
    def predict_log_proba(self, X: Any) -> Array:
        """The logarithm of the probability of each class: (n, K).

        Those of the scores, by the logistic function or the softmax; of a fit by ``"auto"`` that released a second
        moment, those that allow for the clipping of its gradients (`dpgrad.convex.auto.fitted_chances`). The most
        probable class is the one of the largest score.
        """
        scores = self.decision_function(X)
        if scores.ndim == 1:
            found = np.column_stack([log_expit(-scores), log_expit(scores)])
        elif self.one_vs_rest_:
            found = log_expit(scores) - logsumexp(log_expit(scores), axis=1, keepdims=True)
        else:
            found = log_softmax(scores, axis=1)
        return np.asarray(found) if self.cut_ is None else auto.fitted_chances(found, self.cut_, len(self.coef_))


class DPLinearSVC(LinearClassifier):
    """A linear support vector machine with differential privacy, by the Huber loss: a hinge with a rounded corner.

    More than two classes are separated each from the rest, in one descent (`dpgrad.convex.weighted.Joint`). Arguments
    are those of `DPLogisticRegression`.

    Guarantee: as for `DPLogisticRegression`.

    >>> random = np.random.default_rng(7)
    >>> X = random.standard_normal((2000, 2))
    >>> y = (X @ [2.0, 1.0] > 0).astype(int)
    >>> model = DPLinearSVC(epsilon=1.0, classes=[0, 1], random_state=7).fit(X, y)
    >>> bool(model.score(X, y) > 0.9)
    True
    """

    _title = "linear support vector machine"

    def _loss(self, classes: int) -> Logistic | HuberSvm | Softmax | Joint:
        return HuberSvm() if classes == 2 or self.solver in solvers.BINARY else Joint(HuberSvm(), classes)


def _encoded(y: Any, classes: ArrayLike | None) -> tuple[NDArray[Any], Any]:
    """The classes in order, and the place of each row's label among them; no label is repeated in an error.

    Guarantee: the place of a label depends on that label and the classes alone. Whole numbers of 2⁵³ and more are
    refused as classes: one label that is not whole makes all of them floats, which cannot tell such numbers apart.
    """
    if classes is None:
        found = y.different() if isinstance(y, chunked.Labels) else y
        present, places = _ordered(found, "y holds labels that cannot be put in order: use text or numbers alone")
        if len(present) < 2:
            raise DataError("y holds one class: at least 2 are needed; name all that could occur, classes=[...]")
        _refuse_large(present, "y holds labels")
        return present, y.mapped(partial(_placed, known=present)) if isinstance(y, chunked.Labels) else places
    refused = f"classes must be a list of at least 2 different labels, text or numbers, got {_validate.shown(classes)}"
    known, _ = _ordered(np.asarray(classes), refused)
    if np.ndim(classes) != 1 or len(known) != np.size(classes) or len(known) < 2:
        raise DataError(refused)
    _refuse_large(known, "classes holds numbers")
    found = chunked.applied(partial(_placed, known=known), y)
    return known, found.tested() if isinstance(found, chunked.Labels) else found


def _placed(y: NDArray[Any], known: NDArray[Any]) -> NDArray[np.int64]:
    """The place of each label among the classes."""
    numbers = {label: number for number, label in enumerate(known.tolist())}
    if y.dtype == object:  # labels of several kinds have no order
        found = np.array([numbers.get(label, -1) if isinstance(label, Hashable) else -1 for label in y.tolist()])
    else:
        present, places = np.unique(y, return_inverse=True)
        found = np.array([numbers.get(label, -1) for label in present.tolist()])[places]
    if (found < 0).any():
        raise DataError(f"y holds labels that are not among the {len(known)} classes: name all that could occur")
    return found


def _refuse_large(labels: NDArray[Any], told: str) -> None:
    """Refuse numbers that floats cannot tell from their neighbours."""
    if any(isinstance(label, int | float) and abs(label) >= _LARGEST_LABEL for label in labels.tolist()):
        raise DataError(f"{told} of 2^53 or more, which floats cannot tell apart: use text, str(label)")


def _ordered(labels: NDArray[Any], refused: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The different labels in order and the place of each."""
    try:
        return np.unique(labels, return_inverse=True)
    except TypeError:
        raise DataError(refused) from None


def _weighted(
    loss: Logistic | HuberSvm | Softmax | Joint, class_weight: Mapping[Any, float] | str | None, labels: NDArray[Any]
) -> RowLoss:
    """The loss with the weights of the classes, 1 where none is given, divided by the largest."""
    if class_weight is None:
        return loss
    if not isinstance(class_weight, Mapping):
        raise OptionError(
            f"class_weight must be a dict of public weights or {BALANCED!r}, got {_validate.shown(class_weight)}"
        )
    known: list[Hashable] = labels.tolist()
    if unknown := [label for label in class_weight if label not in known]:
        raise OptionError(f"class_weight names {_validate.shown(unknown[0])}, which is not among the classes")
    for weight in class_weight.values():
        _validate.non_negative(**{"class_weight": weight})
    weights = [float(class_weight.get(label, 1.0)) for label in known]
    if not (largest := max(weights)):
        raise OptionError("class_weight must have a positive weight, got 0 for every class")
    return Weighted(loss, tuple(weight / largest for weight in weights))
