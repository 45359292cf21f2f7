"""PyTorch tensors, on the CPU and on CUDA devices."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import Unsupported
from .base import (
    CPU,
    DTYPES,
    Device,
    Library,
    View,
    device,
    numpy_dtype,
    settle,
    unknown_dtype,
)


class Torch(Library):
    """PyTorch tensors and their subclasses; results are plain tensors from torch's allocator."""

    name = "torch"
    root = "torch"

    def __init__(self) -> None:
        self._torch = torch = sys.modules["torch"]
        self._dtypes = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}
        self._from_name = {name: dtype for dtype, name in self._dtypes.items()}
        self._devices: dict[Any, Device] = {torch.device("cpu"): CPU}
        self._torch_devices: dict[Device, Any] = {CPU: torch.device("cpu")}
        # Private, but what Triton and Inductor use: 0.1 us against 4 us of the public call.
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._forward_ad = getattr(torch.autograd, "forward_ad", None)

    def view(self, array: Any, argument: str) -> View:
        try:
            dtype = self._dtypes[array.dtype]
            shape = tuple(array.shape)
            if array.is_neg():  # a lazy minus sign, of the imaginary part of a conjugate
                array = array.resolve_neg()
            strides = settle(shape, array.stride())
            pointer = array.data_ptr()
        except (KeyError, RuntimeError, NotImplementedError) as error:
            raise self._refusal(array, argument, error) from error
        place = self._devices.get(array.device) or self._place(array, argument)
        if not pointer and 0 not in shape:
            raise TypeError(
                f"{argument} is a {type(array).__name__} without memory of its own; "
                "give the plain tensor that it wraps"
            )
        host = self._numpy(array) if place is CPU else None
        return View(pointer, shape, strides, dtype, place, host, array)

    def signature(self, array: Any) -> Any:
        index = array.get_device()
        if index < 0 or type(array) is not self._torch.Tensor or array.is_neg():
            return None
        pointer = array.data_ptr()
        return pointer and (array.shape, array.stride(), array.dtype, index, pointer & 15)

    def pointer(self, array: Any) -> int:
        return array.data_ptr()

    def stream(self, device: Device) -> int:
        if device.kind == "cpu":
            return 0
        if self._raw_stream is not None:
            return self._raw_stream(device.index)
        return self._torch.cuda.current_stream(device.index).cuda_stream

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        place = self._torch_devices.get(device)
        if place is None:
            place = self._torch.device(device.kind, device.index)
            self._torch_devices[device] = place
        return self._torch.empty(shape, dtype=self._from_name[dtype], device=place)

    def cast(self, array: Any, dtype: str) -> Any:
        return array.detach().to(self._from_name[dtype])

    def check_autograd(self, named: Mapping[str, Any]) -> None:
        torch = self._torch
        if torch.is_grad_enabled():
            for argument, array in named.items():
                if array.requires_grad:
                    raise Unsupported(
                        f"{argument} requires grad and grad mode is on, but torch autograd is not "
                        "there yet: call under torch.no_grad(), or use cuflash.attention_vjp or "
                        "cuflash.attention_backward"
                    )
        forward_ad = self._forward_ad
        if forward_ad is not None and getattr(forward_ad, "_current_level", -1) >= 0:
            for argument, array in named.items():
                if forward_ad.unpack_dual(array).tangent is not None:
                    raise Unsupported(
                        f"{argument} is a dual tensor, but forward-mode differentiation is not "
                        "supported; give forward_ad.unpack_dual(tensor).primal"
                    )

    def deterministic(self) -> bool:
        return self._torch.are_deterministic_algorithms_enabled()

    def _place(self, array: Any, argument: str) -> Device:
        where = array.device
        if where.type == "meta":
            raise TypeError(f"{argument} is a meta tensor: it has a shape but holds no values")
        if where.type != "cuda":
            raise Unsupported(
                f"{argument} is on device {where}; cuflash computes on the CPU and on CUDA devices"
            )
        place = self._devices[where] = device("cuda", where.index)
        return place

    def _refusal(self, array: Any, argument: str, error: Exception) -> Exception:
        """Why the tensor cannot be read, found only after reading it has failed."""
        torch = self._torch
        if getattr(array, "is_quantized", False):
            kind, fix = "quantized", "dequantize()"
        elif getattr(array, "is_nested", False):
            kind, fix = "nested", "to_padded_tensor(0.0)"
        elif array.layout is not torch.strided:
            kind, fix = f"sparse ({str(array.layout).removeprefix('torch.')})", "to_dense()"
        elif array.dtype not in self._dtypes:
            return TypeError(unknown_dtype(argument, str(array.dtype).removeprefix("torch.")))
        else:
            return TypeError(
                f"{argument} is a {type(array).__name__} whose memory torch does not show (inside "
                f"torch.func or torch.compile?); give a plain tensor. torch says: {error}"
            )
        return TypeError(f"{argument} is a {kind} tensor; give a dense one: {argument}.{fix}")

    def _numpy(self, array: Any) -> np.ndarray:
        """The memory of a CPU tensor; bfloat16, which torch does not export, goes as int16."""
        if array.requires_grad:
            array = array.detach()
        if array.dtype is self._torch.bfloat16:
            return array.view(self._torch.int16).numpy().view(numpy_dtype("bfloat16"))
        return array.numpy()
