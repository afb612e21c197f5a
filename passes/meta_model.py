"""A transformers model without memory for its weights, ready to be traced.

It is built on meta tensors; then the buffers that no checkpoint holds (rotary frequencies, normalisers) are
computed for real, and the rest becomes fake tensors on the CPU, so that both may meet in one trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from enginewright.passes.weights import Weight
from enginewright.recipes.errors import CaptureError, EnginewrightError

__all__ = ["build_on_meta", "fake_weights", "fill_buffers", "first_line"]


def build_on_meta(config: Any) -> Any:
    """The transformers model in float32 on meta tensors, set to the hooks where it knows transformers' interfaces."""
    from transformers import AutoModelForCausalLM, PretrainedConfig

    for part in (config, *(value for value in vars(config).values() if isinstance(value, PretrainedConfig))):
        part._experts_implementation_internal = None  # a trace leaves its own here
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    except EnginewrightError:
        raise
    except Exception as error:
        raise CaptureError(
            f"transformers cannot build a {config.model_type} model from this configuration",
            found=first_line(error),
        ) from error
    model.eval()
    return model


def first_line(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def fill_buffers(model: Any) -> None:
    """Compute the buffers that no checkpoint holds, in place, as `from_pretrained` does.

    Each is filled from two different beginnings and kept if both end alike. One that the model does not fill
    stays on meta, and is an error only if the trace uses it.
    """
    persistent = set(model.state_dict())
    owners: dict[Any, list[str]] = {}
    for path, module in model.named_modules():
        for key, value in module._buffers.items():
            if value is not None and _join(path, key) not in persistent:
                owners.setdefault(module, []).append(key)
    for module, keys in owners.items():
        initialise = _owner_model(model, module)._init_weights
        ends = []
        for beginning in (0, 1):
            for key in keys:
                module._buffers[key] = torch.full_like(module._buffers[key], beginning, device="cpu")
            with torch.no_grad():
                initialise(module)
            ends.append({key: module._buffers[key] for key in keys})
        for key in keys:
            if not torch.equal(ends[0][key], ends[1][key]):
                module._buffers[key] = ends[0][key].to("meta")


def _owner_model(model: Any, module: Any) -> Any:
    """The innermost PreTrainedModel that holds a module."""
    from transformers import PreTrainedModel

    owner = model
    for candidate in model.modules():
        if isinstance(candidate, PreTrainedModel) and any(m is module for m in candidate.modules()):
            owner = candidate
    return owner


def fake_weights(model: Any, weights: Mapping[str, Weight]) -> dict[str, torch.Tensor]:
    """Turn meta tensors into fake ones on the CPU, so that real buffers and they may meet; returns the real buffers by path.

    Parameters are shared exactly where their bound weights are: a tie that the checkpoint does not keep is cut.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    made: dict[Any, torch.nn.Parameter] = {}
    buffers = {}
    for path, module in model.named_modules():
        for key, value in module._parameters.items():
            if value is None:
                continue
            bound = weights.get(_join(path, key))
            shared = id(value if bound is None else bound)
            if shared not in made:
                with mode:
                    fake = torch.empty(value.shape, dtype=value.dtype)
                made[shared] = torch.nn.Parameter(fake, requires_grad=False)
            module._parameters[key] = made[shared]
        for key, value in module._buffers.items():
            if value is not None and value.device.type == "meta":
                with mode:
                    module._buffers[key] = torch.empty(value.shape, dtype=value.dtype)
            elif value is not None:
                buffers[_join(path, key)] = value
    return buffers


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
