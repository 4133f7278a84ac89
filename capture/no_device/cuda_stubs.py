"""Let torch's C++ code handle fake CUDA tensors in a process without CUDA.

A fake CUDA tensor has dispatch keys and a device, but autograd also asks the device's guard for a
stream, and the CUDA hooks whether CUDA is built. A CPU build of torch has no guard for CUDA and
answers no, so `backward` raises. `torch._C._ensureCUDADeviceGuardSet` installs a guard without
effects, but only in a CUDA build. `install` does the same in any build: it copies the CPU's guard
and the CUDA hooks, and replaces the few methods whose answer matters.

A CUDA build registers a timer with which DDP's reducer times the steps of a CUDA model by CUDA
events. `install` removes that timer, so the reducer measures nothing, as in a CPU build.

Both objects are C++ objects whose first word is the address of their table of virtual methods
(Itanium C++ ABI: Linux and macOS). The replaced methods return constants, so a few bytes of machine
code serve them. `install` checks the result with a backward of a fake tensor.
"""

import ctypes
import functools
import mmap
import platform
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from onerank.ir.errors import CaptureError

_Pointer = ctypes.c_void_p
_WORD = ctypes.sizeof(_Pointer)

_MACHINE_CODE = {
    # Functions that return 0; 1, which is also the device cuda:0 in 16 bits (type 1, index 0); and
    # the default stream of the device that the second register holds.
    "x86_64": (b"\x31\xc0\xc3", b"\xb8\x01\x00\x00\x00\xc3", b"\x0f\xb7\xc6\x31\xd2\xc3"),
    "aarch64": (
        b"\x00\x00\x80\x52\xc0\x03\x5f\xd6",
        b"\x20\x00\x80\x52\xc0\x03\x5f\xd6",
        b"\x20\x3c\x00\x12\x01\x00\x80\xd2\xc0\x03\x5f\xd6",
    ),
}

# Order of `c10::impl::DeviceGuardImplInterface` (c10/core/impl/DeviceGuardImplInterface.h), equal
# in torch 2.11 and 2.13.
_TYPE, _EXCHANGE_DEVICE, _GET_DEVICE, _GET_STREAM = 0, 1, 2, 5
_GUARD_METHODS = 22

# `at::AcceleratorHooksInterface`: isBuilt, isAvailable, hasPrimaryContext follow one another. Their
# place differs between versions, so `isBuilt` is found by its effect.
_IS_BUILT_CANDIDATES = range(2, 12)
_HOOK_METHODS = 64
_TABLE_HEADER = 2  # offset to top and type information precede the methods

_CPU, _CUDA = 0, 1  # c10::DeviceType

_MOST_TIMERS = 32  # c10::DeviceType has 22 members
_NO_DEVICE = 127


def _library(name: str) -> ctypes.CDLL:
    suffix = "dylib" if platform.system() == "Darwin" else "so"
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"{name}.{suffix}"))


class _MachineCode:
    """Executable functions that return constants: 0, 1, and the default stream of a device."""

    def __init__(self) -> None:
        functions = _MACHINE_CODE[platform.machine().replace("arm64", "aarch64")]
        executable = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        self._page = mmap.mmap(-1, mmap.PAGESIZE, prot=executable)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        offsets = range(0, 64 * len(functions), 64)
        for offset, function in zip(offsets, functions, strict=True):
            self._page[offset : offset + len(function)] = function
        self.zero, self.one, self.stream = (start + offset for offset in offsets)


class _Methods:
    """A copy of an object's table of virtual methods."""

    def __init__(self, address: int, count: int) -> None:
        table = ctypes.cast(address, ctypes.POINTER(_Pointer))[0] or 0
        source = ctypes.cast(table - _TABLE_HEADER * _WORD, ctypes.POINTER(_Pointer))
        size = count + _TABLE_HEADER
        self._words = (_Pointer * size)(*(source[index] for index in range(size)))

    @property
    def address(self) -> int:
        """Address of the first method."""
        return ctypes.addressof(self._words) + _TABLE_HEADER * _WORD

    def __getitem__(self, method: int) -> int | None:
        return self._words[method + _TABLE_HEADER]

    def __setitem__(self, method: int, function: int | None) -> None:
        self._words[method + _TABLE_HEADER] = function


@functools.cache
def install() -> None:
    """Install the guard and the hooks for the rest of the process.

    It must run before the first backward of the process: autograd starts one thread per device
    then, and none later.

    Raises:
        CaptureError: this machine or this torch is not supported, or a backward has run already.
    """
    try:
        code = _MachineCode()
        _never_free(code)
        _install_guard(code)
        _install_hooks(code)
        remove_ddp_timer(_CUDA)
        _run_backward()
    except (KeyError, OSError, AttributeError, ValueError, RuntimeError) as error:
        # Autograd's assertion that the device has a thread (torch/csrc/autograd/engine.cpp).
        if "device_ready_queues_" in str(error):
            raise CaptureError(
                "this process ran a backward before its capture without a device, so autograd has "
                "no thread for the GPU's work\n  capture in a new process, as "
                "onerank.capture.run(...) does",
                code="no-device-after-backward",
            ) from error
        raise CaptureError(
            f"torch {torch.__version__} on {platform.system()} {platform.machine()} does not run "
            f"fake CUDA tensors ({type(error).__name__}: {error})\n"
            "  capture on Linux with torch 2.11 to 2.13, or without --device",
            code="no-device-unsupported",
        ) from error


def _never_free(stub: object) -> None:
    """Keep an object that torch's C++ code refers to."""
    # Autograd's threads use it until the process ends, after Python's finalization.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(stub))


def _install_guard(code: _MachineCode) -> None:
    registry = (_Pointer * (_CUDA + 1)).in_dll(
        _library("libc10"), "_ZN3c104impl26device_guard_impl_registryE"
    )
    methods = _Methods(registry[_CPU] or 0, _GUARD_METHODS)
    # 1 is both `DeviceType::CUDA` and a `c10::Device` of cuda:0 (a byte of type, a byte of index).
    for method in (_TYPE, _EXCHANGE_DEVICE, _GET_DEVICE):
        methods[method] = code.one
    methods[_GET_STREAM] = code.stream
    guard = (_Pointer * 2)(methods.address, None)
    _never_free(methods)
    _never_free(guard)
    registry[_CUDA] = ctypes.addressof(guard)


def _install_hooks(code: _MachineCode) -> None:
    get_hooks: Any = _library("libtorch_cpu")["_ZN2at6detail12getCUDAHooksEv"]
    get_hooks.restype = _Pointer
    address: int = get_hooks()
    methods = _Methods(address, _HOOK_METHODS)
    _never_free(methods)
    ctypes.cast(address, ctypes.POINTER(_Pointer))[0] = methods.address
    is_built = _find_is_built(methods, code)
    methods[is_built] = code.one
    # This is hasPrimaryContext: where it is true, autograd compares streams.
    methods[is_built + 2] = code.one


def _find_is_built(methods: _Methods, code: _MachineCode) -> int:
    """Return the place of `isBuilt`: with another answer, torch's accelerator changes."""
    before = _has_accelerator()
    for method in _IS_BUILT_CANDIDATES:
        original = methods[method]
        methods[method] = code.zero if before else code.one
        changed = _has_accelerator() != before
        methods[method] = original
        if changed:
            return method
    raise RuntimeError("no method of the CUDA hooks tells whether CUDA is built")


def _has_accelerator() -> bool:
    private: Any = torch._C
    device = private._accelerator_getAccelerator()
    return device is not None and device.type == "cuda"


def remove_ddp_timer(device_type: int) -> bool:
    """Remove the timer that DDP's reducer would create for models on a type of device.

    `c10d::TimerRegistry()` returns a `c10::Registry`, whose first member is an `std::unordered_map`
    from the type of device to a function. A reducer that finds no function for its device times
    nothing. Only Linux has CUDA builds, so the layout is that of libstdc++: the map's third word
    points to the first node, its fourth is the number of nodes, and a node's words are the address
    of the next node and the key, of one byte. The key is replaced by one that no device has.

    Returns:
        Whether there was a timer.

    Raises:
        ValueError: the map has another layout.
    """
    if platform.system() != "Linux":
        return False
    get_registry: Any = _library("libtorch_cpu")["_ZN4c10d13TimerRegistryEv"]
    get_registry.restype = _Pointer
    words = ctypes.cast(get_registry(), ctypes.POINTER(_Pointer))
    node, count = words[2], words[3] or 0
    if count > _MOST_TIMERS:
        raise ValueError(f"the registry of DDP's timers has {count} entries")
    keys: dict[int, int] = {}  # key -> its address
    for _ in range(count):
        if not node:
            raise ValueError(f"the registry of DDP's timers has fewer than {count} entries")
        key = ctypes.c_int8.from_address(node + _WORD)
        keys[key.value] = node + _WORD
        node = ctypes.cast(node, ctypes.POINTER(_Pointer))[0]
    if node or not all(0 <= key <= _NO_DEVICE for key in keys):
        raise ValueError(f"the registry of DDP's timers has the keys {sorted(keys)}")
    if device_type not in keys:
        return False
    ctypes.c_int8.from_address(keys[device_type]).value = _NO_DEVICE
    return True


def _run_backward() -> None:
    """Run a backward of fake CUDA tensors, which needs every stub."""
    with FakeTensorMode():
        weight = torch.empty(2, 2, device="cuda", requires_grad=True)
        (weight @ weight).sum().backward()
        assert weight.grad is not None
