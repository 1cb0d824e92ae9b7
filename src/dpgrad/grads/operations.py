"""What each operation of torch does to the place of the rows: one rule for each way an operation treats dimensions.

A rule answers from shapes and arguments that are not tensors, so its answer holds for all values. It raises
`MixedError` where rows may meet, and an operation without a rule raises it too: then nothing is known.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpgrad.grads import shapes
from dpgrad.grads.axes import Layout, even
from dpgrad.grads.calls import Call, FoundAt, dims_of
from dpgrad.grads.layers import unrolled

__all__ = ["OF_CONSTANTS", "RULES", "FollowRule", "rule_of"]


def _pointwise(call: Call) -> FoundAt:
    """Each element from the elements in its place, after broadcasting."""
    out = call.result[0] if isinstance(call.result, tuple | list) else call.result
    found: Layout | None = None
    for tensor in call.tensors:
        layout = call.layout(tensor)
        if layout is not None:
            moved = layout.moved(layout.dim + out.ndim - tensor.ndim)
            if moved.dim < 0 or out.shape[moved.dim] != tensor.shape[layout.dim] or found not in (None, moved):
                raise call.refuse("takes the batch in different dimensions")
            found = moved
    periods = [1] * out.ndim
    for tensor in call.tensors:
        place = call.place(tensor)
        if isinstance(place, Layout):
            continue
        start = out.ndim - tensor.ndim
        if found is not None and found.dim >= start:
            call.aligned(found.moved(found.dim - start), tensor)
        for dim, (length, period) in enumerate(zip(tensor.shape, place, strict=True)):
            if length != 1 and period != 1:
                # Two periods meet in one that both divide; the whole length where they differ.
                known = periods[dim + start]
                periods[dim + start] = period if known in (1, period) else out.shape[dim + start]
    return found or tuple(periods)


def _reduced(call: Call) -> FoundAt:
    """A reduction over dimensions that have no rows."""
    tensor = call.tensors[0]
    place, results = call.place(tensor), call.result if isinstance(call.result, tuple | list) else [call.result]
    if not isinstance(place, Layout):
        return [tuple(each.shape) for each in results] if len(results) > 1 else tuple(results[0].shape)
    for other in call.tensors[1:]:
        if call.layout(other):
            raise call.refuse("takes the batch in several arguments")
    gone = dims_of(call["dim"], tensor.ndim)
    if place.dim in gone:
        raise call.refuse("computes one value from several examples")
    kept = place if call["keepdim"] else place.moved(place.dim - sum(dim < place.dim for dim in gone))
    return [kept] * len(results) if len(results) > 1 else kept


def _along(call: Call) -> FoundAt:
    """Works along one or several dimensions, which must not have the rows, and keeps the others in their places."""
    tensor = call.tensors[0]
    place = call.place(tensor)
    results = call.result if isinstance(call.result, tuple | list) else [call.result]
    if not isinstance(place, Layout):
        return [tuple(each.shape) for each in results] if len(results) > 1 else tuple(results[0].shape)
    named = next((call[name] for name in ("dim", "dims", "dimension") if call[name] is not None), None)
    call.apart_from(place, dims_of(named, tensor.ndim), tensor.ndim)
    for other in call.tensors[1:]:
        if call.layout(other):
            raise call.refuse("takes the batch in several arguments")
    return [place] * len(results) if len(results) > 1 else place


def _last(few: int) -> Callable[[Call], FoundAt]:
    """Works on the last dimensions alone: pools, resampling, padding, matrix functions."""

    def rule(call: Call) -> FoundAt:
        tensor = call.only(*call.arguments)
        place = call.layout(tensor)
        assert place is not None
        call.apart_from(place, range(tensor.ndim - few, tensor.ndim), tensor.ndim)
        if any(call.place(other) != even(other.ndim) for other in call.tensors if other is not tensor):
            raise call.refuse("gives examples different values by their place in the batch")
        return [place] * len(call.result) if isinstance(call.result, tuple | list) else place

    return rule


def _padded(call: Call) -> FoundAt:
    tensor = call.only("self")
    place, pad = call.layout(tensor), list(call["pad"])
    assert place is not None
    touched = [tensor.ndim - 1 - i // 2 for i, length in enumerate(pad) if length]
    return call.apart_from(place, touched, tensor.ndim)


def _normalized(call: Call) -> FoundAt:
    """Layer and root-mean-square norms over the last dimensions."""
    place = call.layout(call.only("input"))
    assert place is not None
    ndim = call["input"].ndim
    call.apart_from(place, range(ndim - len(call["normalized_shape"]), ndim), ndim)
    return [place] * len(call.result)


def _group_norm(call: Call) -> FoundAt:
    place = call.layout(call.only("input"))
    if place is None or place.dim or call["N"] != call["input"].shape[0]:
        raise call.refuse("needs the examples in the first dimension")
    return [place] * 3


def _batch_norm(call: Call) -> FoundAt:
    """With fixed statistics each element for itself; with its own, over all dimensions but the channels'."""
    place = call.layout(call["input"])
    if place is None:
        raise call.refuse("takes the batch in its parameters")
    own = bool(call["training"] or call["use_input_stats"])
    if own != (place.dim == 1):
        raise call.refuse("computes statistics of several examples")
    if not own:
        call.only("input")
    elif isinstance(call["running_mean"], Tensor) or isinstance(call["running_var"], Tensor):
        raise call.refuse("writes statistics of the batch to tensors that were given to it")
    else:  # an instance norm: examples stand among the channels
        call.aligned(place.moved(0), call["weight"], call["bias"])
    return [place] + [None] * (len(call.result) - 1)


def _product(call: Call) -> FoundAt:
    """Matrix products with or without a batch of their own, and something added to them."""
    one, other = call["self" if call.name in ("mm", "bmm", "mv", "dot") else "batch1"], call["mat2"]
    if call.name in ("addmm", "_addmm_activation"):
        one = call["mat1"]
    elif call.name == "addmv":
        one, other = call["mat"], call["vec"]
    elif call.name == "mv":
        other = call["vec"]
    elif call.name == "baddbmm":
        other = call["batch2"]
    out, left, right = call.result, call.layout(one), call.layout(other)
    batch = one.ndim - 2
    if right is not None and other.ndim > 1 and (left is None or left.dim < batch):
        contracted = right.dim == batch
        if left is not None and left != right:
            raise call.refuse("multiplies examples with each other")
        found = right
        if left is None and right.dim < batch:
            call.aligned(right, one)
    elif left is not None and right is None:
        contracted = left.dim == one.ndim - 1
        found = left
        if left.dim < batch:
            call.aligned(left, other)
    else:
        raise call.refuse("multiplies examples with each other")
    if contracted:
        raise call.refuse("computes one value from several examples")
    added = call["self"] if call.name in ("addmm", "_addmm_activation", "baddbmm", "addmv") else None
    start = 0 if added is None else out.ndim - added.ndim
    if added is not None and found.dim >= start:
        call.aligned(found.moved(found.dim - start), added)
    elif call.layout(added):
        raise call.refuse("takes the batch in different dimensions")
    return found


def _linear(call: Call) -> FoundAt:
    place = call.layout(call.only("input"))
    assert place is not None
    return call.apart_from(place, [-1], call["input"].ndim)


def _convolution(call: Call) -> FoundAt:
    data, weight = call.layout(call["input"]), call.layout(call["weight"])
    bias = call["bias"]
    if weight is None and data is not None and data.dim == 0 and call.layout(bias) is None:
        return data
    # Every row with a weight of its own: the rows stand among the channels, one group or several for each.
    if data is None or data.dim != 1 or data.outer != 1 or call["groups"] % call.rows or call["transposed"]:
        raise call.refuse("takes the batch in several arguments, or among the channels")
    each = Layout(0, 1, call.result.shape[1] // call.rows)
    call.aligned(each, call["weight"], bias)
    return each.moved(1)


def _bucketize(call: Call) -> FoundAt:
    """Each element for itself, against boundaries that are all searched."""
    return call.layout(call.only("self"))


def _shuffled(call: Call) -> FoundAt:
    """Works on the second dimension, however many there are after it."""
    place = call.layout(call.only("self"))
    assert place is not None
    return call.apart_from(place, [1], call["self"].ndim)


def _embedding(call: Call) -> FoundAt:
    return call.layout(call.only("indices"))


def _index_select(call: Call) -> FoundAt:
    tensor, index = call["self"], call["index"]
    place, dim = call.layout(tensor), call["dim"] % max(tensor.ndim, 1)
    if call.layout(index) is None:
        assert place is not None
        return call.apart_from(place, [dim], tensor.ndim)
    if place is None:
        found = call.layout(index)
        assert found is not None
        return found.moved(dim)
    raise call.refuse("picks entries of the batch by its values")


def _index(call: Call) -> FoundAt:
    """Indices into a tensor of constants, or constant indices into a tensor of the batch, elsewhere than its rows."""
    tensor, indices = call["self"], call["indices"]
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for _, index in given):
        raise call.refuse("picks entries by truth values")
    dims = [dim for dim, _ in given]
    if dims != list(range(dims[0], dims[0] + len(dims))):
        raise call.refuse("picks entries in dimensions apart from each other")
    shape = torch.broadcast_shapes(*(index.shape for _, index in given))  # type: ignore[no-untyped-call]
    place, carrying = call.layout(tensor), [index for _, index in given if call.layout(index)]
    if place is not None:
        if carrying:
            raise call.refuse("picks entries of the batch by its values")
        call.apart_from(place, dims, tensor.ndim)
        return place if place.dim < dims[0] else place.moved(place.dim - len(dims) + len(shape))
    found: Layout | None = None
    for _, index in given:
        layout = call.layout(index)
        if layout is not None:
            moved = layout.moved(layout.dim + len(shape) - index.ndim)
            if found not in (None, moved) or shape[moved.dim] != index.shape[layout.dim]:
                raise call.refuse("takes the batch in different dimensions")
            found = moved
    assert found is not None
    for _, index in given:
        start = len(shape) - index.ndim
        if not call.layout(index) and found.dim >= start:
            call.aligned(found.moved(found.dim - start), index)
    return found.moved(found.dim + dims[0])


def _gather(call: Call) -> FoundAt:
    """`gather` and `scatter`: along a dimension without rows, everything else in its place."""
    layout = call.layout(call.data)
    assert layout is not None
    tensors = call.tensors
    call.apart_from(layout, [call["dim"]], call["self"].ndim)
    if len({tensor.shape[layout.dim] for tensor in tensors if tensor.ndim > layout.dim}) > 1:
        raise call.refuse("takes examples by their place in the batch")
    return call.aligned(layout, *tensors)


def _loss(call: Call) -> FoundAt:
    """A loss of rows in the first dimension, without reduction."""
    if call["reduction"] != 0:
        raise call.refuse("adds up the losses of several examples: use reduction='none'")
    layout = call.layout(call.data)
    if layout is None or layout.dim:
        raise call.refuse("needs the examples in the first dimension")
    call.aligned(layout, call["self"], call["target"])
    if call.layout(call["weight"]):
        raise call.refuse("takes the batch in its weights")
    return [layout, None]


def _pointwise_loss(call: Call) -> FoundAt:
    if call["reduction"] != 0:
        raise call.refuse("adds up the losses of several examples: use reduction='none'")
    return _pointwise(call)


def _attention(call: Call) -> FoundAt:
    layout = call.layout(call["query"])
    if layout is None or layout.dim:
        raise call.refuse("needs the examples in the first dimension")
    call.aligned(layout, call["key"], call["value"])
    for name in ("attn_mask", "attn_bias"):
        mask = call[name]
        if isinstance(mask, Tensor):
            start = 4 - mask.ndim
            if start <= 0:
                call.aligned(layout, mask)
            elif call.layout(mask):
                raise call.refuse("takes the batch in different dimensions")
    return [layout] + [None] * (len(call.result) - 1)


def _even(call: Call) -> FoundAt:
    """New tensors of one value, or of one distribution."""
    results = call.result if isinstance(call.result, tuple | list) else [call.result]
    return [even(each.ndim) for each in results] if len(results) > 1 else even(results[0].ndim)


def _normal(call: Call) -> FoundAt:
    """Normal numbers about means that are tensors, or, in place, about one number."""
    return _pointwise(call) if isinstance(call["mean"], Tensor) or isinstance(call["std"], Tensor) else _even(call)


def _ctc(call: Call) -> FoundAt:
    layout = call.layout(call["log_probs"])
    if layout != Layout(1) or call["targets"].ndim != 2:
        raise call.refuse("needs the examples in the second dimension")
    call.aligned(Layout(0), call["targets"], call["input_lengths"], call["target_lengths"])
    for lengths in (call["input_lengths"], call["target_lengths"]):
        if not isinstance(lengths, Tensor) and len(set(lengths)) > 1:
            raise call.refuse("gives examples different lengths by their place in the batch")
    return [Layout(0), None]


def _real(call: Call) -> FoundAt:
    """Complex numbers as pairs of numbers, and back: the last dimension comes or goes."""
    place = call.place(call.tensors[0])
    if isinstance(place, Layout):
        return call.apart_from(place, [-1], call["self"].ndim) if call.name == "view_as_complex" else place
    return place[:-1] if call.name == "view_as_complex" else (*place, 2)


def _distances(call: Call) -> FoundAt:
    tensor = call.only("x1", "x2")
    layout = call.layout(tensor)
    assert layout is not None
    if layout.dim != tensor.ndim - 2 or call["x1"].ndim != call["x2"].ndim:
        raise call.refuse("compares examples with each other")
    return layout if tensor is call["x1"] else layout.moved(layout.dim + 1)


def _unrolled(call: Call) -> FoundAt:
    """A recurrent layer over all time steps, which runs along the second dimension."""
    layout = call.layout(call["u"])
    if layout is None or layout.dim:
        raise call.refuse("needs the examples in the first dimension")
    call.aligned(layout, call["hidden"], call["cell"], call["valid"])
    if any(call.layout(call[name]) for name in ("weight", "bias", "projection")):
        raise call.refuse("takes the batch in its weights")
    return [layout if each.ndim > 1 else None for each in call.result]  # others are empty


FollowRule = Callable[[Call], FoundAt]

# The operations of each rule, by the name of their overload packet without the underscore of those in place.
_NAMES: dict[FollowRule, str] = {
    _pointwise: (
        "bernoulli complex copy fill floor_divide float_power hardswish imag isclose log_sigmoid_forward "
        "masked_fill native_dropout polar _prelu_kernel real rrelu_with_noise special_ndtr special_psi zero"
    ),
    shapes.unchanged: (
        "_to_copy alias clone conj _conj contiguous detach lift lift_fresh resolve_conj resolve_neg _neg_view"
    ),
    shapes.reshape: "_unsafe_view reshape view flatten unflatten view_copy",
    shapes.permute: "permute t transpose",
    shapes.unsqueeze: "unsqueeze",
    shapes.squeeze: "squeeze",
    shapes.expand: "expand",
    shapes.repeat: "repeat",
    shapes.select: "select",
    shapes.pieces: "narrow slice split split_with_sizes unsafe_split unsafe_split_with_sizes chunk unsafe_chunk",
    shapes.unbind: "unbind",
    shapes.joined: "cat stack",
    _reduced: (
        "all amax amin aminmax any argmax argmin count_nonzero linalg_vector_norm logsumexp max mean median min mode "
        "nanmedian nansum norm prod std std_mean sum var var_mean kthvalue"
    ),
    _along: (
        "_log_softmax _softmax _safe_softmax argsort cummax cummin cumprod cumsum flip glu logcumsumexp roll sort topk "
        "unfold _fft_c2c _fft_c2r _fft_r2c"
    ),
    _last(1): (
        "avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d max_pool1d_with_indices reflection_pad1d replication_pad1d "
        "upsample_linear1d upsample_nearest1d _upsample_nearest_exact1d"
    ),
    _last(2): (
        "_adaptive_avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d avg_pool2d fractional_max_pool2d "
        "max_pool2d_with_indices mkldnn_max_pool2d mkldnn_adaptive_avg_pool2d reflection_pad2d replication_pad2d tril "
        "triu upsample_bicubic2d _upsample_bicubic2d_aa upsample_bilinear2d _upsample_bilinear2d_aa upsample_nearest2d "
        "_upsample_nearest_exact2d linalg_inv_ex linalg_cholesky_ex linalg_qr _linalg_det _linalg_slogdet "
        "linalg_matrix_exp _linalg_eigh _linalg_svd"
    ),
    _last(3): (
        "_adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d max_pool3d_with_indices replication_pad3d "
        "reflection_pad3d upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d im2col pixel_shuffle "
        "pixel_unshuffle"
    ),
    shapes.diagonal: "diagonal",
    _padded: "constant_pad_nd",
    _normalized: "native_layer_norm _fused_rms_norm",
    _group_norm: "native_group_norm",
    _batch_norm: (
        "_native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm native_batch_norm "
        "_batch_norm_impl_index batch_norm_with_update _batch_norm_with_update _batch_norm_no_update miopen_batch_norm"
    ),
    _product: "_addmm_activation addmm addmv baddbmm bmm mm mv",
    _linear: "linear",
    _convolution: "convolution mkldnn_convolution _convolution cudnn_convolution",
    _bucketize: "bucketize",
    _shuffled: "channel_shuffle native_channel_shuffle",
    _embedding: "embedding",
    _index_select: "index_select",
    _index: "index _unsafe_index",
    _gather: "gather scatter scatter_add scatter_reduce",
    _loss: "multi_margin_loss multilabel_margin_loss_forward nll_loss2d_forward nll_loss_forward",
    _pointwise_loss: (
        "binary_cross_entropy binary_cross_entropy_with_logits huber_loss mse_loss smooth_l1_loss soft_margin_loss"
    ),
    _attention: (
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_fused_attention_overrideable"
    ),
    _even: (
        "cauchy empty empty_like empty_permuted empty_strided exponential full full_like geometric log_normal "
        "new_empty new_empty_strided new_full new_ones new_zeros ones ones_like rand rand_like "
        "randint randint_like randn randn_like random scalar_tensor uniform zeros zeros_like"
    ),
    _normal: "normal",
    _ctc: "_ctc_loss",
    _real: "view_as_complex view_as_real",
    _distances: "_cdist_forward",
}
RULES: dict[str, FollowRule] = {name: rule for rule, names in _NAMES.items() for name in names.split()}


# Those that also say what becomes of a tensor that does not descend from the batch.
OF_CONSTANTS = {
    _even, _normal, _pointwise, shapes.diagonal, shapes.expand, shapes.permute, shapes.pieces, shapes.repeat,
    shapes.reshape, shapes.select, shapes.squeeze, shapes.unbind, shapes.unchanged, shapes.unsqueeze,
}  # fmt: skip


def rule_of(func: Any) -> FollowRule | None:
    """The rule of an operation; None where it has none, as those of other libraries, whatever their names and tags."""
    if func is unrolled.operation:
        return _unrolled
    if func.namespace != "aten":
        return None
    if torch.Tag.pointwise in func.tags:
        return _pointwise
    return RULES.get(func.overloadpacket.__name__.removesuffix("_"))
