"""Look up kernels that a pass created and nobody measured."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.kernel_db.database_set import library_for
from onerank.annotate.kernel_db.interpolate import Basis
from onerank.annotate.kernel_db.node_durations import best_of, evidence_of
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.cost_model import CostModel
from onerank.annotate.models.features import F64, U8, Kernels, Mask
from onerank.annotate.op_costs.node_costs import Characters
from onerank.annotate.passes.attention.fuse import LookUp, Told
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
