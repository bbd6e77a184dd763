"""What PyTorch itself makes of a precision.

A half precision is held to PyTorch's autocast, integers to PyTorch's own dynamic quantisation: a
measure of the error that does not come from here.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from engines.evaluator.half import HalfProducts
from engines.runtime.stage import Array
from engines.runtime.torch import TorchStage
from export.precision import INTEGER, Precision, decide
from export.stages import StageSpec
from ldlm.errors import ParityError
from ldlm.model import LDLM


def torchs_own(model: LDLM, spec: StageSpec, precision: Precision) -> Callable[..., Array]:
    """The float32 stage with PyTorch's own means of lowering it to a policy's dtype.

    Raises:
        ParityError: when it is called: nothing was lowered, so that it is no measure.
    """
    if precision.is_integer:
        return TorchStage(model, spec, dynamically_quantised(spec.torch(model), spec, precision))
    dtype = getattr(torch, precision.products)
    stage = TorchStage(model, spec)

    def autocast(*arrays: Array) -> Array:
        with HalfProducts(dtype) as mode:
            output = stage(*arrays)
        if not mode.products:
            raise ParityError("autocast rounded no product", stage=spec.name, got=dtype)
        return output

    return autocast


def dynamically_quantised(module: nn.Module, spec: StageSpec, precision: Precision) -> nn.Module:
    """A copy in which PyTorch quantises the layers that the policy does, weights per channel.

    Raises:
        ExportError: a rule of the policy fits nothing.
    """
    module = copy.deepcopy(module)
    with warnings.catch_warnings():
        # All of torch.ao announces its move to another package; torch is pinned.
        warnings.simplefilter("ignore", (DeprecationWarning, UserWarning))
        from torch.ao.nn.quantized.dynamic import Linear
        from torch.ao.quantization import per_channel_dynamic_qconfig

        for decision in decide(module, spec.component, precision):
            if decision.rule.dtype != INTEGER:
                continue
            own: Any = module.get_submodule(decision.module)
            plain = nn.Linear(own.in_features, own.out_features, own.bias is not None)
            plain.weight, plain.bias = own.weight, own.bias
            plain.__dict__["qconfig"] = per_channel_dynamic_qconfig
            quantise: Callable[[nn.Module], nn.Module] = Linear.from_float
            module.set_submodule(decision.module, quantise(plain))
    return module
