"""What a node costs on a GPU: GPU descriptions, operator costs, and models that transfer time."""

from onerank.annotate.explain import Explanation, explain
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import find_gpu, gpu_names, load_gpu, with_figures
from onerank.annotate.models.cost_model import MODELS, CostModel
from onerank.annotate.op_costs.node_costs import characterise, compute_mask
from onerank.annotate.op_costs.op_classes import CLASSES, OpClass, classify, op_class
from onerank.annotate.passes.attention.fuse import FusedAttention
from onerank.annotate.passes.attention.unfuse import EagerAttention
from onerank.annotate.passes.fuse_kernels import FuseChains
from onerank.annotate.passes.overlap import MaximizeOverlap, SerializeOverlap
from onerank.annotate.passes.pass_options import PassOptions
from onerank.annotate.passes.resize.resize import Resize
from onerank.annotate.passes.resize.size_change import Change
from onerank.annotate.recost.recost import recost
from onerank.annotate.recost.recosting_summary import (
    ClassRow,
    Recosting,
    UnknownKernel,
    summarise,
)

__all__ = [
    "CLASSES",
    "MODELS",
    "Change",
    "ClassRow",
    "CostModel",
    "EagerAttention",
    "Explanation",
    "FuseChains",
    "FusedAttention",
    "Gpu",
    "MaximizeOverlap",
    "OpClass",
    "PassOptions",
    "Recosting",
    "Resize",
    "SerializeOverlap",
    "UnknownKernel",
    "characterise",
    "classify",
    "compute_mask",
    "explain",
    "find_gpu",
    "gpu_names",
    "load_gpu",
    "op_class",
    "recost",
    "summarise",
    "with_figures",
]
