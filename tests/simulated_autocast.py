"""Which operators of the simulated device compute in half precision under `torch.autocast`: those that do on CUDA.

torch brings no such rules for a device that is written in Python, only the place to register them. The lists are those
of torch's `ATen/autocast_mode.h`, which CUDA uses. As there, float64 and integers are left as they are, and so are
operators that write in place. Unlike there no cast is kept for the next operator (`cache_enabled`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

KEY = "AutocastPrivateUse1"

# Products: in half precision.
LOWER = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm
    bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
"""
# What loses digits or overflows: in full precision.
FULL = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
"""
# The same, by their argument `dtype`, if the program has not set it.
FULL_BY_DTYPE = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
# The same, of two operators whose variants with a `dtype` have names of their own.
FULL_BY_NAME = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
# In full precision if one of the arguments is.
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
# Refused: the gradient of such a loss overflows.
REFUSED = "binary_cross_entropy"


def register(library: torch.library.Library, ours: Callable[[Any], bool]) -> None:
    """Register the rules for tensors of which `ours` is true. Operators that this version of torch has not are left."""
    on_cuda = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))

    def eligible(a: Any) -> bool:
        return ours(a) and a.is_floating_point() and a.dtype != torch.float64

    def cast(given: Any, dtype: torch.dtype) -> Any:
        return tree_map(lambda a: a.to(dtype) if eligible(a) else a, given)

    def lower(op: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = cast((args, kwargs), _half())
        return op(*args, **kwargs)

    def full(op: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = cast((args, kwargs), torch.float32)
        return op(*args, **kwargs)

    def by_dtype(op: Any, args: Any, kwargs: Any) -> Any:
        if eligible(args[0]) and kwargs.get("dtype") is None:
            names = [a.name for a in op._schema.arguments]
            args, kwargs = args[: names.index("dtype")], {**kwargs, "dtype": torch.float32}
        return op(*args, **kwargs)

    def by_name(op: Any, args: Any, kwargs: Any) -> Any:
        if eligible(args[0]):
            name = FULL_BY_NAME[op._schema.name.removeprefix("aten::") + "." + op._schema.overload_name]
            defaults = [a.default_value for a in op._schema.arguments]
            return _named(name)(*args, *defaults[len(args) :], dtype=torch.float32)
        return op(*args, **kwargs)

    def widest(op: Any, args: Any, kwargs: Any) -> Any:
        found = [a.dtype for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor) and eligible(a)]
        args, kwargs = cast((args, kwargs), torch.float32 if torch.float32 in found else _half())
        return op(*args, **kwargs)

    def refused(op: Any, args: Any, kwargs: Any) -> Any:
        raise RuntimeError(f"{op}: unsafe under autocast, as on CUDA; use binary_cross_entropy_with_logits")

    told = (lower, LOWER), (full, FULL), (by_dtype, FULL_BY_DTYPE), (widest, WIDEST), (refused, REFUSED)
    for rule, names in (*told, (by_name, " ".join(FULL_BY_NAME))):
        for name in names.split():
            if f"aten::{name}" in on_cuda:
                library.impl(name, _kernel(rule, _named(name)), KEY)


def _half() -> torch.dtype:
    return torch.get_autocast_dtype(torch._C._get_privateuse1_backend_name())


def _named(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _kernel(rule: Callable[..., Any], op: Any) -> Callable[..., Any]:
    key = torch._C.DispatchKeySet(torch._C._parse_dispatch_key(KEY))  # type: ignore[arg-type]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):  # what an operator is made of is not cast again
            return rule(op, args, kwargs)

    return kernel
