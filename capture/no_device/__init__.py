"""Capture a script without a device: fake tensors, and a CUDA that only answers questions.

- `cuda_stubs`: what torch's C++ code needs to treat a tensor as one on a GPU.
- `cuda_api`: `torch.cuda` as on the GPU that the capture stands for.
- `fake_operators`: the dispatch mode that runs operators on shapes and records them.
- `values`: what a script reads from a tensor that has no numbers.
- `event_log`: the recorded operators, module calls and allocations, written as raw traces.
- `steps`: which steps are recorded.
"""
