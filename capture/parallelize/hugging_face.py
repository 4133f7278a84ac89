"""Classes of transformers, without importing it.

transformers takes seconds to import, and may not work with the installed torch. A script
that does not import it has no Hugging Face models. So nothing here imports it: an object is no
instance of these classes until the script has imported the module that defines them.
"""

import sys
from typing import TYPE_CHECKING, Any

MODELING = "transformers.modeling_utils"
GENERATION = "transformers.generation.utils"
PAGED_CACHE = "transformers.generation.continuous_batching.cache"

if TYPE_CHECKING:
    from transformers.configuration_utils import PretrainedConfig
    from transformers.modeling_utils import PreTrainedModel
    from transformers.pytorch_utils import Conv1D
    from transformers.utils.generic import ModelOutput
else:

    class _NotImported(type):
        """A class that stands for the class of its name in `module`, for `isinstance` only."""

        module: str

        def __instancecheck__(cls, instance: Any) -> bool:
            kind = getattr(sys.modules.get(cls.module), cls.__name__, None)
            return kind is not None and isinstance(instance, kind)

    class PretrainedConfig(metaclass=_NotImported):
        """Configuration of a model."""

        module = "transformers.configuration_utils"

    class PreTrainedModel(metaclass=_NotImported):
        """Base class of models."""

        module = MODELING

    class Conv1D(metaclass=_NotImported):
        """A linear layer whose weight is [in, out], as in GPT-2."""

        module = "transformers.pytorch_utils"

    class ModelOutput(metaclass=_NotImported):
        """Base class of what a model returns."""

        module = "transformers.utils.generic"


__all__ = [
    "GENERATION",
    "MODELING",
    "PAGED_CACHE",
    "Conv1D",
    "ModelOutput",
    "PreTrainedModel",
    "PretrainedConfig",
]
