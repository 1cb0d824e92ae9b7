"""The neighbouring relation of a guarantee."""

from enum import StrEnum

from dpgrad import _validate

__all__ = ["Relation", "declared"]


class Relation(StrEnum):
    """The neighbouring relation: which pairs of datasets must be hard to tell apart. The privacy unit is one row.

    ``ADD_REMOVE``: one row more or less. Sampling rate, steps, batch size and delta are constants, not read from data.
    ``ZERO_OUT``: the number of rows is public; one row's contribution is replaced by nothing.
    ``REPLACE_ONE``: the number of rows is public; one row is replaced by any other.

    >>> Relation("zero-out").value
    'zero-out'
    """

    ADD_REMOVE = "add-remove"
    ZERO_OUT = "zero-out"
    REPLACE_ONE = "replace-one"

    @property
    def reach(self) -> int:
        """How far a sum of rows of norm at most 1 moves between neighbours: 2 where a row is exchanged, else 1.

        >>> [relation.reach for relation in Relation]
        [1, 1, 2]
        """
        return 2 if self is Relation.REPLACE_ONE else 1


def declared(value: Relation) -> Relation:
    """The relation of that name; refuse any other."""
    _validate.one_of([relation.value for relation in Relation], relation=value)
    return Relation(value)
