"""The classes of the errors that onerank raises for a user's input.

Each message is in the code that raises it: search the source for the printed error code.

    OneRankError                 message: what happened, what was expected, what to do
    ├── FormatError              a file is not what its name or place promises
    │   ├── ChakraError          a Chakra `.et` that cannot be read or written
    │   ├── DatabaseError        a kernel database that cannot be read
    │   ├── OnnxError            an ONNX model that cannot be read, or leaves sizes open
    │   └── TraceError           a Kineto or execution trace that cannot be read or linked
    ├── GraphError               a graph that breaks its own rules (duplicate id, cycle)
    ├── JobError                 parallel sizes that make no world of ranks
    ├── CaptureError             a script that cannot be captured as requested
    │   ├── ScriptError          the script itself failed
    │   ├── SliceError           the model cannot be sliced as requested
    │   └── DepthError           the model cannot be captured with the requested number of layers
    ├── TargetError              an unknown or malformed GPU description
    ├── AnnotateError            a graph that cannot be re-costed as requested
    └── ExportError              a graph that the target simulator does not support

A `CaptureWarning` names a difference between the capture and the real job; the script continues.

`assert` is reserved for bugs in onerank.
"""

import contextlib
from collections.abc import Generator

_LINE = 160


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message (160 characters), or its type's name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:_LINE]


def division(number: int, divisor: int) -> str:
    """Return a division with remainder as text for an error, as in "15 = 2 x 7 + 1"."""
    return f"{number} = {divisor} x {number // divisor} + {number % divisor}"


class OneRankError(Exception):
    """Base of all errors that a user can cause and correct; commands exit with status 2.

    Attributes:
        code: stable name of the error, such as "trace-truncated". Commands print it, and
            tests assert it; the message may change.
    """

    code = "error"

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        if code:
            # In __dict__, so that it survives pickling between processes.
            self.code = code


@contextlib.contextmanager
def errors_at(place: object) -> Generator[None]:
    """Begin the message of an error that the block raises with its place: a file, row or rank."""
    try:
        yield
    except OneRankError as error:
        # Not a new error: subclasses have fields besides the code, such as a script's traceback.
        error.args = (f"{place}: {error}",)
        raise


class FormatError(OneRankError):
    """A file is not what its name or place promises."""


class ChakraError(FormatError):
    """A Chakra `.et` file cannot be read or written."""


class DatabaseError(FormatError):
    """A kernel database cannot be read."""


class OnnxError(FormatError):
    """An ONNX model cannot be read, or leaves sizes open that a step needs."""


class TraceError(FormatError):
    """A Kineto trace or an execution trace cannot be read, or the two cannot be linked."""


class GraphError(OneRankError):
    """A graph breaks its own rules: duplicate id, dangling edge, cycle."""


class JobError(OneRankError):
    """Parallel sizes do not make a world of ranks."""


class CaptureError(OneRankError):
    """A script cannot be captured as requested."""


class CaptureWarning(UserWarning):
    """What a captured script computes differs here from the real job.

    Attributes:
        code: stable name, as of an error; the message may change.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class ScriptError(CaptureError):
    """The captured script itself failed, ended too early, or never stepped.

    Attributes:
        script_traceback: traceback of the script; "" if it raised nothing.
    """

    def __init__(self, message: str, script_traceback: str = "", *, code: str = "") -> None:
        super().__init__(message, code=code)
        self.script_traceback = script_traceback


class SliceError(CaptureError):
    """A model cannot be sliced as requested."""


class DepthError(CaptureError):
    """A model cannot be captured with fewer layers, or its layers cannot be extrapolated."""


class TargetError(OneRankError):
    """A GPU description is unknown or malformed."""


class AnnotateError(OneRankError):
    """A graph cannot be re-costed as requested."""


class ExportError(OneRankError):
    """The target simulator does not support the graph."""
