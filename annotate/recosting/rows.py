"""What the kernel databases tell of kernels that a what-if made, which nobody measured."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.lookup.library import library_for
from onerank.annotate.lookup.look_up import Basis
from onerank.annotate.lookup.nodes import best_of, evidence_of
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.kernels import F64, U8, Kernels, Mask
from onerank.annotate.models.model import CostModel
from onerank.annotate.what_ifs.attention.fused import LookUp, Told
from onerank.annotate.work.characters import Characters
from onerank.ir import Evidence, Graph


def rows_of(
    graph: Graph, target: Gpu, model: CostModel, databases: Sequence[str | Path]
) -> LookUp | None:
    """Return how to look up in the rows of the target; None where the model looks nothing up.

    Nor is anything looked up for a target with figures that are set.

    Raises:
        AnnotateError: a database is of other GPUs.
        DatabaseError: a file is no kernel database.
        OSError: a file cannot be read.
    """
    if not model.has_intervals or target != target.as_described:
        return None
    library = library_for(model, databases, (None, target), graph)
    if library is None:
        return None
    basis = Basis(library, None, target, model.alone, shipped())

    def look_up(
        made: Graph, found: Characters, kernels: Kernels, predicted: tuple[F64, U8], where: Mask
    ) -> Told:
        best = best_of(made, found, kernels, predicted, basis, where=where)
        datasheet = np.full(len(best.rules), Evidence.DATASHEET, dtype=np.uint8)
        evidence = evidence_of(best.rules, datasheet)
        return Told(best.moved_ns, best.rules, evidence, best.doubt, best.notes)

    return look_up
