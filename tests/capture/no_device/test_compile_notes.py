"""What Dynamo compiles without a device, and notes on what ran eager under torch.compile."""

from notes import has_note, note_of
from without_device import captured

TRAINING = """
    import torch
    from torch import nn
    from torch.nn.attention.flex_attention import flex_attention
    from torch.utils.checkpoint import checkpoint
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64, device="cuda")
        def attend(self, x):
            q = self.linear(x).view(1, 1, -1, 64)
            return flex_attention(q, q, q).view(-1, 64).relu()
        def forward(self, x):
            {forward}
    model = torch.compile(Block(){options})
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(4):
        model(torch.randn(128, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
LOOP = """
            for limit in (1, 2):
                kept = torch.where(torch.arange(4, device="cuda") > limit)[0]
                x = self.linear(x) * kept.numel()
            return x
"""
CHECKPOINT = "return checkpoint(self.attend, x, use_reentrant=False) * 2"


def _notes(directory, forward, options=""):
    text = TRAINING.format(forward=forward.strip(), options=options)
    return captured(directory, text).job.measurement.notes


def test_an_impossible_graph_break_in_a_loop_has_a_note(tmp_path):
    notes = _notes(tmp_path, LOOP)
    assert has_note(notes, "compile-graph-unbroken")
    assert not has_note(notes, "compile-failed")


def test_flex_attention_in_a_compiled_checkpoint_has_a_note(tmp_path):
    notes = _notes(tmp_path, CHECKPOINT, ", fullgraph=True")
    assert has_note(notes, "compile-checkpoint-eager")
    assert not has_note(notes, "flex-attention-unfused")


PROPERTIES = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    model = torch.nn.Linear(16, 16, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(x):
        for _ in range(2):
            multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
            x = (model(x) * multiprocessors).relu()
        return x.flatten().repeat(1 << 10).cumsum(0)  # long enough for a kernel of its own

    run = torch.compile(run, fullgraph=True)
    for step in range(5):
        run(torch.randn(8, 16, device="cuda")).sum().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_properties_of_the_gpu_are_constants_of_a_graph(tmp_path):
    """Under torchrun Dynamo is imported before `torch.cuda` answers for the emulated GPU."""
    graph = captured(tmp_path, PROPERTIES, "--torchrun", "--dp", 2)
    notes = graph.job.measurement.notes
    assert not has_note(notes, "compile-graph-unbroken")
    note_of(notes, "inductor-as-scheduled", "2 graphs")


DDP = """
    import torch
    import torch.distributed as dist
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))
        def forward(self, x):
            for layer in self.layers:
                x = layer(x).relu()
            return x

    dist.init_process_group("nccl")
    wrapped = nn.parallel.DistributedDataParallel(Model().cuda(), bucket_cap_mb=1)
    model = torch.compile(wrapped)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model(torch.randn(8, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_compiled_ddp_module_has_a_graph_for_each_bucket(tmp_path):
    """Buckets of 1 MiB have four of the eight layers; each has a forward and a backward graph."""
    notes = captured(tmp_path, DDP, "--torchrun", "--dp", 2).job.measurement.notes
    note_of(notes, "inductor-as-scheduled", "4 graphs")
    assert not has_note(notes, "compile-failed")
    assert not has_note(notes, "compile-graph-unbroken")


SCALED = """
    import torch
    from torch import nn
    from torch._functorch._aot_autograd import graph_compile

    class Scaled(torch.Tensor):
        "A tensor in float8 with a scale."
        @staticmethod
        def __new__(cls, data, scale):
            return torch.Tensor._make_wrapper_subclass(
                cls, data.shape, dtype=torch.bfloat16, device=data.device
            )
        def __init__(self, data, scale):
            self.data_of, self.scale = data, scale
        def __repr__(self):
            return f"Scaled({self.scale})"
        def __tensor_flatten__(self):
            return ["data_of", "scale"], None
        @staticmethod
        def __tensor_unflatten__(tensors, _, *__):
            return Scaled(tensors["data_of"], tensors["scale"])
        @classmethod
        def __torch_dispatch__(cls, operator, types, args, kwargs=None):
            args = [a.data_of.bfloat16() * a.scale if isinstance(a, Scaled) else a for a in args]
            return operator(*args, **(kwargs or {}))

    log_graphs = graph_compile._log_fw_bw_graphs

    def log_formatted(forward, backward, subclasses, metadata, *rest):
        str(metadata)  # torch 2.11 does this itself
        return log_graphs(forward, backward, subclasses, metadata, *rest)

    graph_compile._log_fw_bw_graphs = log_formatted
    data = torch.zeros(64, 64, device="cuda").to(torch.float8_e4m3fn)
    scaled = Scaled(data, torch.ones((), device="cuda", dtype=torch.bfloat16))
    model = nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile
    def run(x, weight):
        return torch.mm(model(x).relu(), weight).sum()

    print(f"the scale is {scaled.scale:.1f}")
    for step in range(3):
        run(torch.randn(8, 64, device="cuda", dtype=torch.bfloat16), scaled).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_compiled_function_of_a_subclass_that_formats_its_scale(tmp_path):
    notes = captured(tmp_path, SCALED).job.measurement.notes
    note_of(notes, "inductor-as-scheduled", "2 graphs")
    assert not has_note(notes, "compile-failed")
