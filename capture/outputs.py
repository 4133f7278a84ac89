"""What a model that is sliced returns."""

import functools
from typing import Any

from torch import Tensor

from onerank.ir.errors import SliceError


@functools.cache
def without_logits(kind: Any, why: str) -> Any:
    """Return a subclass of a model's output class that refuses to give logits, and says `why`."""

    class WithoutLogits(kind):
        @property
        def logits(self) -> Tensor:
            raise SliceError(why)

        def __getitem__(self, key: Any) -> Any:
            name = list(self.keys())[key] if isinstance(key, int) else key
            return self.logits if name == "logits" else super().__getitem__(name)

    WithoutLogits.__name__ = WithoutLogits.__qualname__ = kind.__name__
    return WithoutLogits
