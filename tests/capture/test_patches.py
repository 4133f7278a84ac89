"""The registry of patches: every symbol exists, every installation is registered, in order."""

import ast
import re
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from onerank.capture import patches
from onerank.capture.patch_registry import INSTALLED_ELSEWHERE, PATCHES, Patch
from onerank.capture.patches import patched, replaced, resolve
from onerank.capture.verify import threaded_world

CAPTURE = Path(patches.__file__).parent


@pytest.mark.parametrize(
    "patch", [*PATCHES, *INSTALLED_ELSEWHERE], ids=lambda patch: f"{patch.owner}:{patch.names[:1]}"
)
def test_every_symbol_exists_in_this_version(patch: Patch):
    if find_spec(patch.owner.partition(".")[0]) is None:
        pytest.skip(f"{patch.owner}: not installed")
    owner = resolve(patch.owner)
    if not patch.in_cuda_builds or torch.backends.cuda.is_built():
        assert [name for name in patch.names if not hasattr(owner, name)] == []
    assert patch.why.endswith(".")


def test_entries_for_all_names_of_an_owner_come_last():
    """`patched` takes the first entry that matches."""
    for place, patch in enumerate(PATCHES):
        later = [other.names for other in PATCHES[place + 1 :] if other.owner == patch.owner]
        assert patch.names or later == [], patch.owner


def test_subscribers_are_modules_that_patch():
    for patch in PATCHES:
        for module in patch.by:
            source = (CAPTURE / f"{module.replace('.', '/')}.py").read_text()
            assert re.search(r"\b(patched|rebound|after_backward)\(", source), module


def test_patches_installed_elsewhere_name_their_modules():
    for patch in INSTALLED_ELSEWHERE:
        for module in patch.by:
            source = (CAPTURE / f"{module.replace('.', '/')}.py").read_text()
            assert all(name in source for name in patch.names), module
    listed = {(resolve(patch.owner), name) for patch in INSTALLED_ELSEWHERE for name in patch.names}
    assert set(threaded_world._PATCHED) <= listed


def test_no_module_assigns_to_a_library():
    """Attributes of torch, transformers or os are set by the registry alone."""
    libraries = {"torch", "nn", "dist", "c10d", "transformers", "os", "subprocess", "Optimizer"}
    found = []
    for path in CAPTURE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                root = target
                while isinstance(root, ast.Attribute):
                    root = root.value
                if target is not root and isinstance(root, ast.Name) and root.id in libraries:
                    found.append(f"{path.name}:{node.lineno}: {ast.unparse(target)}")
    # verification puts torch's own method back while it compares models, inside of `patched`;
    # settings of torch's backends are no patches
    allowed = ("nn.Module.__call__", "torch.backends.")
    assert [place for place in found if not any(name in place for name in allowed)] == []


def test_a_symbol_or_module_outside_the_registry_is_refused():
    with pytest.raises(AssertionError), patched("torch.nn.Module", {"__repr__": repr}):
        pass
    with pytest.raises(AssertionError), patched("torch.autograd", {"grad": None}):
        pass  # this module is no subscriber
    assert callable(torch.autograd.grad)


def test_later_subscribers_wrap_earlier_ones(monkeypatch):
    patch = Patch("torch.autograd", ("grad",), "A test.", ("first", "second"))
    monkeypatch.setattr(patches, "PATCHES", (patch,))

    def install(module: str):
        return patches._patched("torch.autograd", {"grad": len}, f"onerank.capture.{module}")

    original = torch.autograd.grad
    with install("first"), install("second"):
        assert torch.autograd.grad is len
    with pytest.raises(AssertionError), install("second"), install("first"):
        pass
    assert torch.autograd.grad is original


def test_methods_of_classes_are_put_back_as_they_were():
    class Base:
        @staticmethod
        def step():
            return 1

    class Derived(Base):
        pass

    with replaced(Derived, "step", staticmethod(lambda: 2)):
        assert Derived.step() == 2
    assert "step" not in vars(Derived)
    with replaced(Base, "step", lambda: 3):
        assert Base.step() == 3
    assert isinstance(vars(Base)["step"], staticmethod)


def test_functions_are_rebound_wherever_modules_bound_them(monkeypatch):
    """Also in modules of libraries, whose names are searched once for as long as none is added."""
    library, user = ModuleType("some_library"), ModuleType("some_script")
    part = ModuleType("some_library.part")
    library.__file__ = f"{sysconfig.get_path('purelib')}/some_library.py"
    user.__file__ = "/home/user/some_script.py"
    for module in (library, part, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    first, second = (lambda: True), (lambda: True)
    owner, original = "torch.distributed.distributed_c10d", torch.distributed.is_initialized
    patch = Patch(owner, ("is_initialized",), "A test.", ("first", "second"), everywhere=True)
    monkeypatch.setattr(patches, "PATCHES", (patch,))

    def install(module: str, by: object):
        return patches._rebound(owner, {"is_initialized": by}, f"onerank.capture.{module}")

    library.renamed, user.renamed = original, None
    for _ in range(2):
        with install("first", first):
            assert (library.renamed, torch.distributed.is_initialized) == (first, first)
            with install("second", second):
                assert library.renamed is second
            assert library.renamed is first
        assert library.renamed is torch.distributed.is_initialized is original
    monkeypatch.setitem(sys.modules, part.__name__, None)  # prevents its import
    library.added, user.renamed = original, original
    with install("first", first):
        assert library.added is user.renamed is first
        late = ModuleType("imported_late")
        late.__file__, late.name = library.__file__, first
        monkeypatch.setitem(sys.modules, late.__name__, late)
    assert library.added is user.renamed is late.name is original
