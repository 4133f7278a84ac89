"""What a node costs on a GPU: GPU descriptions, operator work, and models from one to another."""

from onerank.annotate.characters import characterise, compute_mask
from onerank.annotate.classes import CLASSES, OpClass, classify, op_class
from onerank.annotate.explain import Explanation, explain
from onerank.annotate.gpu import Gpu, find_gpu, gpu_names, load_gpu, with_figures
from onerank.annotate.learned import LearnedModel
from onerank.annotate.ratio import RatioModel
from onerank.annotate.recost import MODELS, recost
from onerank.annotate.residual import ResidualModel
from onerank.annotate.roofline import RooflineModel
from onerank.annotate.summary import ClassRow, Recosting, UnknownKernel, summarise
from onerank.annotate.what_if import WhatIf

__all__ = [
    "CLASSES",
    "MODELS",
    "ClassRow",
    "Explanation",
    "Gpu",
    "LearnedModel",
    "OpClass",
    "RatioModel",
    "Recosting",
    "ResidualModel",
    "RooflineModel",
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
