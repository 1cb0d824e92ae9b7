"""Linear equations of a symmetric positive definite map that is known by its products alone."""

from collections.abc import Callable

import numpy as np

from dpgrad.convex.losses import Array

MOST_PRODUCTS = 1000


def conjugate(product: Callable[[Array], Array], target: Array, accuracy: float) -> Array:
    """x with ‖product(x) − target‖ ≤ accuracy·‖target‖, by conjugate gradients: Newton's equations are solved so.

    The answer lies in the span of ``target`` and its products; a Hessian is not formed.

    >>> conjugate(lambda v: np.array([2.0, 4.0]) * v, np.array([2.0, 2.0]), 1e-9).round(6).tolist()
    [1.0, 0.5]
    """
    found, left = np.zeros_like(target), target.copy()
    direction = left.copy()
    square = float(np.vdot(left, left))
    enough = accuracy**2 * square
    for _ in range(MOST_PRODUCTS):
        if square <= enough:
            break
        image = product(direction)
        length = square / float(np.vdot(direction, image))
        found += length * direction
        left -= length * image
        square, last = float(np.vdot(left, left)), square
        direction = left + (square / last) * direction
    return found
