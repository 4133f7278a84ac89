"""Capture a script without a device: fake tensors, and a CUDA that only answers questions.

- `emulated_process`: the script's process, with everything that is patched in it.
- `fake_tensor_methods`: methods and functions of tensors that read numbers, data or addresses.
- `saved_files`: `torch.save` and `torch.load`.
- `cuda_stubs`: what torch's C++ code needs to treat a tensor as one on a GPU.
- `cuda_api`: `torch.cuda` as on `emulated_gpu`, the GPU that the capture stands for.
- `attention_backends`: the attention kernel that the GPU would choose.
- `operators`: each operator runs on shapes and is recorded.
- `extensions`: C++ extensions of libraries, whose functions are recorded as operators.
- `inductor`: compiled graphs, as Inductor schedules them for the GPU; `generated_kernels` are their
  kernels, `graph_numbers` computes their known integers.
- `tensor_values`: storages, and what a script reads from a tensor that has no numbers.
- `package_files`: which frames lie between a script's line and an operator.
- `generation_ends`: the end of `generate`, whose tokens have no numbers.
- `event_log`: the recorded operators, module calls and allocations; `raw_traces` writes them.
- `recorded_step`: which steps are recorded.
"""
