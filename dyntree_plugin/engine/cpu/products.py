"""Products on a CPU whose rows have the same bits whatever rows stand beside them.

vLLM multiplies by oneDNN, and by SGLang's kernel with AMX and small weights. Both choose by the
number of rows in which order they sum. Measured with vLLM 0.32 on a Xeon with AMX, with 1 to 2,048
rows and 1 and 2 threads, and with oneDNN limited to AVX-512 and AVX2, rows have the same bits

- of SGLang's kernel, which sums 32 inputs at a time, from 5 rows on;
- of oneDNN's in bfloat16 with AMX up to 32 rows;
- of oneDNN's else from 2 rows on.

So products have at least `LEAST` rows, the second of these at most `MOST_ON_TILES`. On a machine
with other work SGLang's kernel took as long as oneDNN's, and blocks of 32 rows two to five times as
long for a prompt, so that they are for weights that SGLang's kernel does not take.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm._custom_ops as ops
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers import utils
from vllm.utils.torch_utils import direct_register_custom_op

from dyntree_plugin.engine.configuration import tree_plan
from dyntree_plugin.engine.row_bits import Product, check_product

LEAST = 8
MOST_ON_TILES = 32
_ANY = 1 << 62

_stock = utils.dispatch_cpu_unquantized_gemm
_checked: set[tuple[torch.dtype, torch.Size]] = set()


def install() -> None:
    """Let this process's engines with `exactness` bits multiply so, also with later weights."""
    from dyntree_plugin.engine.attention.latent_cpu import LatentNumbaImpl

    LatentNumbaImpl.product_of = staticmethod(product_of)
    module: Any = utils
    module.dispatch_cpu_unquantized_gemm = _dispatch


def _dispatch(layer: Any, remove_weight: bool) -> None:
    config = get_current_vllm_config_or_none()
    plan = None if config is None else tree_plan(config)
    others = config is not None and (plan is None or not plan.same_bits)
    weight: torch.Tensor = layer.weight
    if others or weight.is_meta or weight.ndim != 2:
        _stock(layer, remove_weight)
        return
    layer.cpu_linear = product_of(weight)
    if remove_weight:
        layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)


def product_of(weight: torch.Tensor) -> Product:
    """Return the product with a weight [N, K], which it keeps a packed copy of.

    Raises:
        RuntimeError: if a row has other bits with other rows beside it on this CPU.
    """
    n, k = weight.shape
    on_tiles = weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    if on_tiles and k % 32 == 0 and n % 16 == 0:
        packed = torch.ops._C.convert_weight_packed(weight)

        def product(x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            found: torch.Tensor = torch.ops.dyntree.packed_product(x, packed, bias, n)
            return found
    else:
        handler, most = ops.create_onednn_mm(weight.t()), MOST_ON_TILES if on_tiles else _ANY

        def product(x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            weights = handler.handler_tensor
            found: torch.Tensor = torch.ops.dyntree.onednn_product(x, weights, bias, n, most)
            return found

    if (kind := (weight.dtype, weight.shape)) not in _checked:
        shape, device = weight.shape, weight.device
        check_product(lambda x: product(x, weight, None), shape, weight.dtype, device)
        _checked.add(kind)
    return product


def _packed_product(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, n: int
) -> torch.Tensor:
    rows = _padded(x)
    out = x.new_empty(rows.shape[0], n)
    of_sums = None if bias is None else bias.float()
    torch.ops._C.weight_packed_linear(out, rows, packed, of_sums, True)
    return _of(x, out)


def _onednn_product(
    x: torch.Tensor, handler: torch.Tensor, bias: torch.Tensor | None, n: int, most: int
) -> torch.Tensor:
    rows = _padded(x)
    out = x.new_empty(rows.shape[0], n)
    for some, found in zip(torch.split(rows, most), torch.split(out, most), strict=True):
        torch.ops._C.onednn_mm(found, some, bias, handler)
    return _of(x, out)


def _padded(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    lacking = max(0, LEAST - rows.shape[0])
    return torch.nn.functional.pad(rows, (0, 0, 0, lacking)) if lacking else rows.contiguous()


def _of(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return the rows of x in ``out``, which may have more."""
    shape = x.shape[:-1]
    return out[: shape.numel()].view(*shape, out.shape[1])


def _shaped(
    x: torch.Tensor, _: torch.Tensor, __: torch.Tensor | None, n: int, *most: int
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], n)


_library: Any = torch.library
_LIBRARY = _library.Library("dyntree", "FRAGMENT")
# To compiled models the products are operators, since what they do depends on the number of rows.
direct_register_custom_op(
    "packed_product", _packed_product, [], _shaped, target_lib=_LIBRARY, dispatch_key="CPU"
)
direct_register_custom_op(
    "onednn_product", _onednn_product, [], _shaped, target_lib=_LIBRARY, dispatch_key="CPU"
)
