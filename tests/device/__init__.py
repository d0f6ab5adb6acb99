"""A simulated accelerator, with streams, poisoned memory and NCCL's semantics: see docs/internals/device.md.

``register()`` makes the device type ``sim`` and the module ``torch.sim`` known to PyTorch; it cannot be undone in a process.
"""

from tests.device._build import build
from tests.device._module import BACKEND, DEVICE, register
from tests.device.current import default_device, device_type, everywhere, on_cpu, runs_everywhere, set_device_type

__all__ = [
    "BACKEND",
    "DEVICE",
    "build",
    "default_device",
    "device_type",
    "everywhere",
    "on_cpu",
    "register",
    "runs_everywhere",
    "set_device_type",
]
