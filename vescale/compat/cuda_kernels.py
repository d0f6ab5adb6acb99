"""Compiling CUDA C++ at run time (NVRTC), where this build of torch can, and native CUDA ops without a public name."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from vescale.compat.devices import default_generator_of
from vescale.errors import CudaError


def compile_kernel(source: str, name: str) -> Callable[..., None]:
    """A launcher ``kernel(blocks, threads, *arguments)``, on the current stream of the current device.

    ``arguments`` are ctypes values in the order of the kernel's parameters; they are copied at the launch. ``source``
    includes nothing: ``torch.cuda._compile_kernel`` asks for the headers of a CUDA toolkit, which a machine with only
    PyTorch's wheels lacks, so NVRTC is called directly here; its launcher takes no structures, so the driver is, too.
    Raises whatever is missing: no NVRTC, an unknown architecture, a torch without a loader.
    """
    from torch.cuda import _utils

    loaded: Any = _utils._cuda_load_module(_compiled(source, name), [name])
    function = loaded[name].func
    driver = _utils._get_gpu_runtime_library()

    def launch(blocks: int, threads: int, *arguments: Any) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        code = driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None)
        if code != 0:
            raise CudaError(f"CUDA driver error {code} launching {name} with {blocks} blocks of {threads} threads")

    return launch


def _compiled(source: str, name: str) -> bytes:
    """The machine code of an ``extern "C"`` kernel for the current device. Raises RuntimeError with NVRTC's log."""
    from torch.cuda import _utils

    find = getattr(_utils, "_get_gpu_rtc_library", None) or _utils._get_nvrtc_library
    nvrtc = find()
    major, minor = torch.cuda.get_device_capability()
    options = [f"--gpu-architecture=sm_{major}{minor}".encode()]
    program = ctypes.c_void_p()

    def check(code: int) -> None:
        if code != 0:
            raise CudaError(f"NVRTC error {code} compiling {name}:\n{log()}")

    def log() -> str:
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(max(size.value, 1))
        nvrtc.nvrtcGetProgramLog(program, text)
        return text.value.decode(errors="replace")

    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None))
    try:
        check(nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)))
        size = ctypes.c_size_t()
        check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        check(nvrtc.nvrtcGetCUBIN(program, code))
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def fused_dropout(
    source: torch.Tensor, keep: float, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, mask): ``native_dropout`` of a device, with a generator, by the probability to keep. On CUDA the mask is of
    uint8."""
    result: tuple[torch.Tensor, torch.Tensor]
    if source.device.type == "cuda":
        result = torch.ops.aten._fused_dropout.default(source, keep, generator)
        return result
    default = default_generator_of(source.device)
    assert default is not None
    before = default.get_state()
    try:
        if generator is not None:
            default.set_state(generator.get_state())
        result = torch.native_dropout(source, 1.0 - keep, True)
        if generator is not None:
            generator.set_state(default.get_state())
    finally:
        if generator is not None and generator is not default:
            default.set_state(before)
    return result
