"""What Python's methods and functions of tensors do with fake ones, and with their storages."""

import copy
import functools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from onerank.capture.fake_tensors import as_subclass, is_combined
from onerank.capture.no_device.operators.fake_operators import FakeOperators
from onerank.capture.no_device.operators.operator_calls import is_cuda_device
from onerank.capture.no_device.operators.zero_patterns import ZERO_PATTERN
from onerank.capture.no_device.tensor_values import Known, Storages, UnknownValues
from onerank.capture.patches import untraced

_torch: Any = torch

# The `__torch_function__` of a subclass is not called: a lazy module's parameter refuses most.
_without_function: Any = _torch._C.DisableTorchFunctionSubclass

TENSOR_FACTORIES = ("tensor", "as_tensor")
"""Functions of torch that create tensors from Python's numbers."""


def creates_parameter(fake: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return a replacement of `nn.Parameter.__new__`, which creates fake parameters.

    Args:
        fake: returns a fake tensor like a real one.
    """
    new_parameter = nn.Parameter.__new__

    def parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        # Exactly a tensor: a fake one or a subclass is left as it is.
        if type(data) is Tensor:
            data = fake(data)
        elif is_combined(data):
            # A module that moves makes one of a parameter of a subclass, whose `detach` has
            # not its class (bitsandbytes' `Params4bit`). On a GPU it sets the data instead.
            with _without_function():
                data = as_subclass(data.detach(), Tensor)
        if cls is not nn.Parameter and type(data) is FakeTensor:
            # torch keeps the class of a tensor's subclass, which a fake one is, and drops `cls`.
            return as_subclass(data.detach(), cls).requires_grad_(requires_grad)
        return new_parameter(cls, data, requires_grad)

    return parameter


def makes_subclass(fake: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return a replacement of `Tensor._make_subclass`; `fake` as for `creates_parameter`."""
    subclass_of = _torch.Tensor._make_subclass

    # The argument's name is that of torch, which ColossalAI uses.
    def make_subclass(cls: Any, data: Any, require_grad: bool = False, **options: Any) -> Any:
        # bitsandbytes makes its weights so. A parameter is fake, whatever its class.
        if issubclass(cls, nn.Parameter) and type(data) is Tensor and not data.is_meta:
            data = fake(data)
        if not isinstance(data, FakeTensor):
            return subclass_of(cls, data, require_grad, **options)
        made = as_subclass(data.detach(), cls)
        with _without_function():
            return made.requires_grad_(require_grad)

    return make_subclass


def storage_functions(storages: Storages) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return replacements of `Tensor.data_ptr`, and of attributes of `UntypedStorage`.

    Args:
        storages: storages of fake tensors, with their addresses and sizes.
    """
    resize, item = torch.UntypedStorage.resize_, torch.UntypedStorage.__getitem__
    from_buffer, share_memory = torch.UntypedStorage.from_buffer, torch.UntypedStorage.share_memory_
    tensor_address, storage_address = Tensor.data_ptr, torch.UntypedStorage.data_ptr

    def address_of_tensor(tensor: Tensor) -> int:
        if not isinstance(tensor, FakeTensor):
            return tensor_address(tensor)
        # Views of one storage differ by their offset, as real addresses do.
        return storages.address(tensor) + int(tensor.storage_offset()) * tensor.element_size()

    def address_of_storage(storage: Any) -> int:
        return storages.address_of_storage(storage) or storage_address(storage)

    def resize_storage(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        storages.resize(storage, size)
        return result

    def item_of_storage(storage: Any, at: Any) -> Any:
        # A fake tensor's storage has no memory of which to take a part.
        if not isinstance(at, slice) or not storages.address_of_storage(storage):
            return item(storage, at)
        return _StoragePart(storages, storage, range(storage.nbytes())[at])

    def share_storage(storage: Any) -> Any:
        # A fake tensor's storage has no memory to share. torch shares none of a GPU's either.
        return storage if storage.device.type == "meta" else share_memory(storage)

    def storage_of_buffer(*args: Any, **kwargs: Any) -> Any:
        # Under a fake mode torch would create a storage without memory. ColossalAI sends objects
        # by torch's `_object_to_tensor`, which makes a tensor of their bytes so.
        with unset_fake_temporarily():
            return from_buffer(*args, **kwargs)

    return address_of_tensor, {
        "from_buffer": staticmethod(storage_of_buffer),
        "resize_": resize_storage,
        "data_ptr": address_of_storage,
        "share_memory_": share_storage,
        "__getitem__": item_of_storage,
    }


@dataclass(frozen=True)
class _StoragePart:
    """A slice of a fake tensor's storage, which shares its memory.

    nanotron gives each gradient a part of one buffer's storage, by `Tensor.set_`.
    """

    storages: Storages
    storage: Any
    places: range  # bytes of the storage

    @property
    def device(self) -> torch.device:
        return self.storages.device_of(self.storage)

    def nbytes(self) -> int:
        return len(self.places)

    size = __len__ = nbytes

    def element_size(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return self.storages.address_of_storage(self.storage) + self.places.start

    def __getitem__(self, at: slice) -> "_StoragePart":
        return _StoragePart(self.storages, self.storage, self.places[at])


def _set(tensor: Any, source: Any = None, *rest: Any, **named: Any) -> Any:
    """Let a tensor use the memory of another, of a storage, or of a part of one."""
    if not isinstance(source, _StoragePart):
        return _set_of_torch(tensor, *([] if source is None else [source]), *rest, **named)
    offset, size, stride = _arguments_of_set(tensor, source, *rest, **named)
    offset += source.places.start // tensor.element_size()
    return _set_of_torch(tensor, source.storage, offset, size, stride)


_set_of_torch: Any = _torch._C.TensorBase.set_


def _arguments_of_set(
    tensor: Any,
    source: _StoragePart,
    storage_offset: int = 0,
    size: Any = None,
    stride: Any = None,
) -> tuple[int, Any, Any]:
    """Return offset, size and strides; without a size, all elements of a part in one dimension."""
    if size is None:
        return storage_offset, (source.nbytes() // tensor.element_size(),), (1,)
    if stride is None:
        stride = [prod(size[axis + 1 :]) for axis in range(len(size))]
    return storage_offset, size, stride


def fake_tensor_methods(operators: FakeOperators, values: UnknownValues) -> dict[str, Any]:
    """Return attributes of `FakeTensor` to replace.

    Args:
        operators: know the numbers of small tensors.
        values: decides what a script reads of unknown ones.
    """

    def numpy(tensor: Any, **_: Any) -> Any:
        numbers = operators.known.get(tensor)
        with unset_fake_temporarily():
            if numbers is None:
                numbers = values.numbers(tensor)
            return numbers.detach().numpy()

    def tolist(tensor: Any) -> Any:
        numbers = operators.known.get(tensor)
        # torch copies the whole tensor to the host; of a subclass it reads every element.
        tensor.cpu()
        with unset_fake_temporarily():
            if numbers is None:
                # By name: the script may have set another default device.
                numbers = torch.full(tensor.shape, values.scalar(tensor), device="cpu")
            return numbers.tolist()

    # Dynamo breaks the graph at these methods, and would then compile their bodies.
    methods = {"numpy": numpy, "tolist": tolist, "__format__": _format, "__repr__": _repr}
    for method in methods.values():
        untraced(method)
    of_numbers = {"new_tensor": _lifted(_torch._C.TensorBase.new_tensor)}
    attributes = {
        "__new__": staticmethod(_new_fake),
        "as_subclass": as_subclass,
        "data": _data,
        "set_": _set,
        "__deepcopy__": _deepcopy,
        "__setattr__": _set_attribute,
    }
    return {**attributes, **of_numbers, **methods}


class _CallableNumber(int):
    """A number that a script gives a tensor under the name of a method, which it calls.

    Megatron-LM and libraries that descend from it set `bias.stride = 1`. On a GPU C++ reads the
    strides, but of a fake tensor torch's Python code does, by the method.
    """

    tensor: "weakref.ref[Any]"
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(Tensor, self.name)(self.tensor(), *args, **kwargs)

    def __reduce_ex__(self, _: object) -> Any:
        return int, (int(self),)


def _set_attribute(tensor: Any, name: str, value: Any) -> None:
    """Set an attribute; a number in place of a method of tensors stays callable."""
    if type(value) in (int, _CallableNumber) and callable(getattr(Tensor, name, None)):
        value = _CallableNumber(value)
        value.tensor, value.name = weakref.ref(tensor), name
    if name == "__class__" and not issubclass(value, FakeTensor):
        # A fake tensor that is given the class of a library's tensors stays a fake one.
        if value is nn.Parameter:
            tensor._is_param = True
        plain = value in (Tensor, nn.Parameter)
        value = FakeTensor if plain else type(as_subclass(tensor, value))
    _set_attribute_of_torch(tensor, name, value)


_set_attribute_of_torch: Any = FakeTensor.__setattr__

_new_fake_of_torch: Any = FakeTensor.__new__


def _new_fake(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Create a fake tensor, or a parameter for a call with the arguments of `nn.Parameter`."""
    # The class of a fake parameter is FakeTensor. accelerate and diffusers load weights by
    # `type(parameter)(tensor, requires_grad=...)`, and empty them by
    # `type(parameter)(tensor, **parameter.__dict__)`, which holds attributes of the fake tensor.
    if args and isinstance(args[0], Tensor):
        kept = {name: kwargs[name] for name in ("requires_grad",) if name in kwargs}
        return nn.Parameter(*args, **kept)
    return _new_fake_of_torch(cls, *args, **kwargs)


_deepcopy_of_torch: Any = Tensor.__deepcopy__


def _deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy: a tensor with memory of the GPU, or a parameter."""
    # torch would copy the storage, which has no memory here. It would also copy all attributes,
    # among them the fake mode, and the copied mode would keep the memory of the original.
    if not tensor.is_leaf:
        return _deepcopy_of_torch(tensor, memo)
    if id(tensor) in memo:
        return memo[id(tensor)]
    with torch.no_grad():
        copied: Any = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
    else:
        copied.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = copied
    if tensor.grad is not None:
        copied.grad = copy.deepcopy(tensor.grad, memo)
    for name, value in vars(tensor).items():
        if name not in vars(copied):
            setattr(copied, name, copy.deepcopy(value, memo))
    return copied


_tensor_data: Any = _torch._C.TensorBase.data


def _set_data(tensor: Any, value: Any) -> None:
    _tensor_data.__set__(tensor, value)
    # What is known of a fake tensor are attributes, which torch does not replace.
    if isinstance(value, FakeTensor):
        tensor.fake_device = value.fake_device
        for name in (Known.ATTRIBUTE, ZERO_PATTERN):
            vars(tensor).pop(name, None)
            if hasattr(value, name):
                setattr(tensor, name, getattr(value, name))


_data = property(_tensor_data.__get__, _set_data)


def _set_data_of_plain(tensor: Any, value: Any) -> None:
    """Set the data of a tensor that is not fake; with fake data it becomes a fake tensor."""
    if not isinstance(value, FakeTensor) or isinstance(tensor, FakeTensor):
        _tensor_data.__set__(tensor, value)
        return
    fresh: Any = value.detach()
    if isinstance(tensor, nn.Parameter):
        fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
    tensor.__class__ = type(fresh)
    vars(tensor).update(vars(fresh))
    _torch._C._swap_tensor_impl(tensor, fresh)


DATA_OF_PLAIN = property(_tensor_data.__get__, _set_data_of_plain)
"""A replacement of `Tensor.data`: ColossalAI creates parameters without memory, and sets it."""


def _format(tensor: Any, specification: str) -> str:
    """Format the number of a 0-d tensor, as torch does for tensors of no subclass."""
    # A tensor that is traced has no number. AOTAutograd of torch 2.11 formats the metadata of a
    # graph for its log, with the tensors in the subclasses among the graph's inputs.
    traced = _torch._guards.TracingContext.try_get() is not None
    has_number = tensor.dim() == 0 and not traced
    return format(tensor.item() if has_number else repr(tensor), specification)


def _repr(tensor: Any, **_: Any) -> str:
    """Describe a tensor without its values, as torch does on the meta device."""
    size = tuple(tensor.shape)
    return f"tensor(..., device='{tensor.device}', size={size}, dtype={tensor.dtype})"


def one_hot_on_gpu() -> Callable[..., Tensor]:
    """Return a replacement of `functional.one_hot` with the operators of a GPU.

    torch compares a fake tensor with all classes, and writes ones into zeros on a GPU (`one_hot` in
    aten/src/ATen/native/Onehot.cpp). torch.compile traces the comparison on a GPU, too.
    """
    by_torch: Any = nn.functional.one_hot

    @functools.wraps(by_torch)
    def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
        if num_classes <= 0 or not tensor.is_cuda or torch.compiler.is_compiling():
            return by_torch(tensor, num_classes)
        zeros = torch.zeros((*tensor.shape, num_classes), dtype=tensor.dtype, device=tensor.device)
        return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)

    return one_hot


def ctc_loss_with_lengths(known: Known) -> Callable[..., Tensor]:
    """Return a replacement of `torch.ctc_loss` that takes lengths on the host as numbers.

    C++ does that too (`ctc_loss` in LossCTC.cpp), but not under a dispatch mode: there it divides
    losses on the GPU by lengths on the host.
    """
    by_torch: Any = _torch.ctc_loss

    @functools.wraps(by_torch)
    def ctc_loss(
        log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *args: Any
    ) -> Tensor:
        lengths: list[Any] = [input_lengths, target_lengths]
        if all(isinstance(each, Tensor) and each.device.type == "cpu" for each in lengths):
            numbers = [known.get(each) for each in lengths]
            if all(each is not None for each in numbers):
                lengths = [each.tolist() for each in numbers if each is not None]
            else:
                lengths = [each.to(log_probs.device) for each in lengths]
        return by_torch(log_probs, targets, *lengths, *args)

    return ctc_loss


def tensor_factory(name: str) -> Callable[..., Any]:
    """Return a replacement of a function of torch that creates tensors from Python's numbers.

    Args:
        name: `tensor` or `as_tensor`.
    """
    create = _lifted(getattr(torch, name))

    @functools.wraps(create)
    def create_on_default_device(*args: Any, **kwargs: Any) -> Any:
        # torch applies a default device to a set of functions, which it collects by name. Under
        # this name it collects the replacement, but it looks up its own function in the set.
        if kwargs.get("device") is None and is_cuda_device(default := _default_device()):
            kwargs["device"] = default
        return create(*args, **kwargs)

    return create_on_default_device


def _default_device() -> torch.device | None:
    """Return the device of the innermost context; `torch.get_default_device` creates a tensor."""
    modes: list[Any] = _torch.overrides._get_current_function_mode_stack()
    contexts = _torch.utils._device.DeviceContext
    return next((mode.device for mode in reversed(modes) if isinstance(mode, contexts)), None)


def _lifted(create: Any) -> Callable[..., Any]:
    """Return a replacement of a function or method that creates tensors from Python's numbers."""

    @functools.wraps(create)
    def create_on_thread(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("pin_memory"):
            # C++ pins the numbers before it dispatches an operator, and needs a driver for it.
            kwargs["pin_memory"] = False
        # Without this flag of the thread, C++ copies the new tensor to its device, and no mode sees
        # the copy. FakeTensorMode sets it in the thread that enters the mode; the threads of a
        # backward do not enter it.
        lifts = _torch._C._only_lift_cpu_tensors()
        _torch._C._set_only_lift_cpu_tensors(True)
        try:
            if is_cuda_device(kwargs.get("device")) and _is_below_autograd():
                # Within a fake implementation nothing decomposes the move to the device, and torch
                # would run it on the numbers.
                numbers = create(*args, **kwargs | {"device": "cpu"})
                return _torch.ops.aten._to_copy.default(numbers, device=kwargs["device"])
            return create(*args, **kwargs)
        finally:
            _torch._C._set_only_lift_cpu_tensors(lifts)

    return create_on_thread


def _is_below_autograd() -> bool:
    """Return whether the calling code is an operator's kernel, below autograd."""
    key = _torch._C.DispatchKey.AutogradFunctionality
    return bool(_torch._C._dispatch_tls_is_dispatch_key_excluded(key))


_swap_real = torch.utils.swap_tensors

_module: Any = nn.Module

_move_module = _module._apply


def swap(first: Any, second: Any) -> None:
    """Exchange two tensors, as `torch.utils.swap_tensors` does, weak references or not."""
    if not isinstance(first, FakeTensor):
        _swap_real(first, second)
        return
    caller: Any = sys._getframe(1)
    moves = caller.f_code is _move_module.__code__
    if moves and _torch._has_compatible_shallow_copy_type(first, second):
        # torch moves a fake parameter by a swap, and a real one by its data. A swap would lose the
        # hooks of the parameter: DDP and ZeRO reduce gradients in them.
        first.data = second.data
        return
    # torch refuses to swap a tensor with weak references. Those of this process (of modules,
    # optimizers) mean the object, which stays the parameter. It keeps its attributes, too.
    fresh, replaced = dict(vars(second)), dict(vars(first))
    vars(first).pop(Known.ATTRIBUTE, None)
    vars(first).update(fresh)
    vars(second).clear()
    vars(second).update(replaced)
    _torch._C._swap_tensor_impl(first, second)
