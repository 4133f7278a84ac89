"""What one entry of the registry says."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patch:
    """Symbols of one owner that a capture replaces.

    Attributes:
        owner: module or class, as a dotted path.
        names: attributes of it; empty where a capture looks them up at run time.
        why: what the replacement is for.
        by: modules below `onerank.capture` that install it, in the order of installation.
        everywhere: whether copies are replaced too, as `from torch.distributed import barrier`
            makes them.
        in_cuda_builds: whether a CPU build of torch lacks the names.
    """

    owner: str
    names: tuple[str, ...]
    why: str
    by: tuple[str, ...]
    everywhere: bool = False
    in_cuda_builds: bool = False
