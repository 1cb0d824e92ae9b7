"""What operations that only change shapes do to the place of the rows."""

from collections.abc import Sequence

from dpgrad.grads.axes import Layout, reshaped
from dpgrad.grads.calls import Call, FoundAt, Where, dims_of

__all__ = [
    "bydims_of", "diagonal", "expand", "joined", "permute", "pieces", "repeat", "reshape", "select", "squeeze",
    "unbind", "unchanged", "unsqueeze",
]  # fmt: skip


def unchanged(call: Call) -> FoundAt:
    """The same elements in the same places."""
    return call.place(call.tensors[0])


def reshape(call: Call) -> FoundAt:
    tensor, new = call.tensors[0], call.result.shape
    place = call.place(tensor)
    if tensor.element_size() != call.result.element_size():  # of another type, so the last dimension changes
        if isinstance(place, Layout):
            raise call.refuse("reads the examples' bytes as another type")
        return tuple(new)
    if not isinstance(place, Layout):
        return reshaped(place, tensor.shape, new)
    found = place.reshaped(tensor.shape, new, call.rows)
    if found is None:
        raise call.refuse("joins the examples with another dimension")
    return found


def bydims_of(call: Call, kept: Sequence[int | None]) -> FoundAt:
    """The result's dimensions are those of the argument with these numbers; None for a new one of even values."""
    tensor = call.tensors[0]
    place = call.place(tensor)
    if isinstance(place, Layout):
        if place.dim not in kept:
            raise call.refuse("takes examples by their place in the batch")
        return place.moved(kept.index(place.dim))
    return tuple(1 if dim is None else place[dim] for dim in kept)


def permute(call: Call) -> FoundAt:
    ndim = call.tensors[0].ndim
    order = list(range(ndim))
    if call.name == "permute":
        order = dims_of(call["dims"], ndim)
    elif ndim > 1:
        one, other = (call["dim0"] % ndim, call["dim1"] % ndim) if call.name == "transpose" else (0, 1)
        order[one], order[other] = order[other], order[one]
    return bydims_of(call, order)


def unsqueeze(call: Call) -> FoundAt:
    ndim = call.tensors[0].ndim
    kept: list[int | None] = list(range(ndim))
    kept.insert(call["dim"] % (ndim + 1), None)
    return bydims_of(call, kept)


def squeeze(call: Call) -> FoundAt:
    tensor = call.tensors[0]
    gone = [dim for dim in dims_of(call["dim"], tensor.ndim) if tensor.ndim and tensor.shape[dim] == 1]
    return bydims_of(call, [dim for dim in range(tensor.ndim) if dim not in gone])


def expand(call: Call) -> FoundAt:
    tensor, out = call.tensors[0], call.result
    place, new = call.place(tensor), out.ndim - tensor.ndim
    if isinstance(place, Layout):
        if out.shape[place.dim + new] != tensor.shape[place.dim]:
            raise call.refuse("repeats the examples")
        return place.moved(place.dim + new)
    kept = [1 if tensor.shape[dim] == 1 else period for dim, period in enumerate(place)]
    return (*([1] * new), *kept)


def repeat(call: Call) -> FoundAt:
    tensor, times = call.tensors[0], list(call["repeats"])
    place, new = call.place(tensor), len(times) - tensor.ndim
    if isinstance(place, Layout):
        return Layout(place.dim + new, place.outer * times[place.dim + new], place.inner)
    return (1,) * new + place


def select(call: Call) -> FoundAt:
    ndim = call.tensors[0].ndim
    return bydims_of(call, [dim for dim in range(ndim) if dim != call["dim"] % ndim])


def pieces(call: Call) -> FoundAt:
    """Pieces along a dimension. Those of the rows' own dimension must hold whole rounds of all rows."""
    tensor = call.tensors[0]
    place, several = call.place(tensor), isinstance(call.result, list | tuple)
    dim = call["dim"] % tensor.ndim
    pieces = list(call.result) if several else [call.result]
    found: list[Where | None] = []
    start = 0 if several or call["start"] is None else _start(call["start"], tensor.shape[dim])
    for piece in pieces:
        length = piece.shape[dim]
        if not isinstance(place, Layout):
            whole = length == tensor.shape[dim] or place[dim] == 1
            found.append(tuple(p if d != dim or whole else length for d, p in enumerate(place)))
        elif place.dim != dim or length == tensor.shape[dim]:
            found.append(place)
        else:
            round_of = call.rows * place.inner
            if start % round_of or length % round_of or not length or call["step"] not in (None, 1):
                raise call.refuse("takes examples by their place in the batch")
            found.append(Layout(dim, length // round_of, place.inner))
        start += length
    return found if several else found[0]


def _start(start: int, length: int) -> int:
    return max(start + length, 0) if start < 0 else min(start, length)


def unbind(call: Call) -> FoundAt:
    ndim = call.tensors[0].ndim
    one = bydims_of(call, [dim for dim in range(ndim) if dim != call["dim"] % ndim])
    return [one] * len(call.result)  # type: ignore[list-item]


def joined(call: Call) -> FoundAt:
    """`cat`, and `stack`, which joins along a new dimension."""
    given = [tensor for tensor in call.tensors if tensor.numel() or tensor.ndim > 1]
    stacked = call.name == "stack"
    dim = call["dim"] % (given[0].ndim + stacked)
    layouts = [layout for layout in map(call.layout, given) if layout]
    if not layouts:
        return tuple(call.result.shape)
    first = layouts[0]
    if stacked:
        for tensor in given:
            call.aligned(first, tensor)
        return first.moved(first.dim + (dim <= first.dim))
    if dim != first.dim:
        for tensor in given:
            call.aligned(first, tensor)
        return first
    # One round of the rows after another.
    if len(layouts) < len(given) or any((each.dim, each.inner) != (dim, first.inner) for each in layouts):
        raise call.refuse("joins the examples with others")
    return Layout(dim, sum(each.outer for each in layouts), first.inner)


def diagonal(call: Call) -> FoundAt:
    """The diagonal of two dimensions, which becomes the last."""
    tensor = call.tensors[0]
    one, other = call["dim1"] % tensor.ndim, call["dim2"] % tensor.ndim
    place = call.place(tensor)
    kept = [dim for dim in range(tensor.ndim) if dim not in (one, other)]
    if isinstance(place, Layout):
        call.apart_from(place, (one, other), tensor.ndim)
        return place.moved(kept.index(place.dim))
    return (*(place[dim] for dim in kept), 1 if place[one] == place[other] == 1 else call.result.shape[-1])
