"""What a node costs on a GPU: GPU descriptions, operator work, and models from one to another."""

from onerank.annotate.characters import characterise, compute_mask
from onerank.annotate.classes import CLASSES, OpClass, classify, op_class
from onerank.annotate.explain import Explanation, explain
from onerank.annotate.fuse import Fuse
from onerank.annotate.gpu import Gpu, find_gpu, gpu_names, load_gpu, with_figures
from onerank.annotate.model import MODELS, CostModel
from onerank.annotate.overlap import NoOverlap
from onerank.annotate.recost import recost
from onerank.annotate.resize import Resize
from onerank.annotate.sizing import Change
from onerank.annotate.summary import ClassRow, Recosting, UnknownKernel, summarise
from onerank.annotate.unfused import EagerAttention
from onerank.annotate.what_if import WhatIf

__all__ = [
    "CLASSES",
    "MODELS",
    "Change",
    "ClassRow",
    "CostModel",
    "EagerAttention",
    "Explanation",
    "Fuse",
    "Gpu",
    "NoOverlap",
    "OpClass",
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
