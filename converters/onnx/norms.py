"""What ONNX's norms, softmaxes and losses call."""

from onerank.converters.onnx.calls import Argument, Call, call
from onerank.converters.onnx.model import Tensor
from onerank.converters.onnx.site import Rule, Site


def layer_norm(site: Site) -> list[Call]:
    x = site.tensor(0)
    axis = site.attributes.get("axis", -1) % len(x.shape)
    shape = list(x.shape[axis:])
    rows = Tensor(x.shape[:axis], "FLOAT")
    arguments: list[Argument] = [x, shape, site.optional(1), site.optional(2), 1e-5]
    return [call("native_layer_norm", arguments, site.out, rows, rows)]


def rms_norm(site: Site) -> list[Call]:
    x = site.tensor(0)
    axis = site.attributes.get("axis", -1) % len(x.shape)
    rows = Tensor(x.shape[:axis], "FLOAT")
    return [call("_fused_rms_norm", [x, list(x.shape[axis:]), site.optional(1)], site.out, rows)]


def skip_norm(name: str) -> Rule:
    """Return the rule of com.microsoft's residual addition and norm."""

    def rule(site: Site) -> list[Call]:
        x = site.tensor(0)
        rows = Tensor(x.shape[:-1], "FLOAT")
        weight = site.optional(2)
        return [
            call("add", [x, site.tensor(1)], site.out),
            call(name, [site.out, list(x.shape[-1:]), weight], site.out, rows),
        ]

    return rule


def batch_norm(site: Site) -> list[Call]:
    channels = site.tensor(1)
    training = bool(site.attributes.get("training_mode"))
    arguments: list[Argument] = [*site.inputs[:5], training, 0.1, 1e-5]
    return [call("native_batch_norm", arguments, site.out, channels, channels)]


def group_norm(site: Site) -> list[Call]:
    x = site.tensor(0)
    groups = site.attributes.get("num_groups", x.shape[1])
    rows = Tensor((x.shape[0], groups), "FLOAT")
    arguments: list[Argument] = [x, *site.inputs[1:3]]
    return [call("native_group_norm", arguments, site.out, rows, rows)]


def softmax(name: str) -> Rule:
    return lambda site: [call(name, [site.tensor(0), -1, False], site.out)]


def cross_entropy(site: Site) -> list[Call]:
    scores, labels = site.tensor(0), site.tensor(1)
    return [
        call("_log_softmax", [scores, 1, False], scores),
        *_nll(scores, labels, site.optional(2), site.out),
    ]


def nll_loss(site: Site) -> list[Call]:
    return _nll(site.tensor(0), site.tensor(1), site.optional(2), site.out)


def _nll(scores: Tensor, labels: Tensor, weight: Tensor | None, out: Tensor) -> list[Call]:
    return [call("nll_loss_forward", [scores, labels, weight], out, scores.like())]
