"""What a node costs on a GPU: GPU descriptions, operator work, and models from one to another."""

from onerank.annotate.explain.node import Explanation, explain
from onerank.annotate.gpus.changed import with_figures
from onerank.annotate.gpus.descriptions import find_gpu, gpu_names, load_gpu
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.model import MODELS, CostModel
from onerank.annotate.recosting.recost import recost
from onerank.annotate.recosting.summary import ClassRow, Recosting, UnknownKernel, summarise
from onerank.annotate.what_ifs.attention.fused import FusedAttention
from onerank.annotate.what_ifs.attention.unfused import EagerAttention
from onerank.annotate.what_ifs.fuse import Fuse
from onerank.annotate.what_ifs.overlap.off import NoOverlap
from onerank.annotate.what_ifs.overlap.on import Overlap
from onerank.annotate.what_ifs.sizes.resize import Resize
from onerank.annotate.what_ifs.sizes.sizing import Change
from onerank.annotate.what_ifs.what_if import WhatIf
from onerank.annotate.work.characters import characterise, compute_mask
from onerank.annotate.work.classes import CLASSES, OpClass, classify, op_class

__all__ = [
    "CLASSES",
    "MODELS",
    "Change",
    "ClassRow",
    "CostModel",
    "EagerAttention",
    "Explanation",
    "Fuse",
    "FusedAttention",
    "Gpu",
    "NoOverlap",
    "OpClass",
    "Overlap",
    "Recosting",
    "Resize",
    "UnknownKernel",
    "WhatIf",
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
