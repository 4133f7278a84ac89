"""Record six steps of vLLM on a CPU: python record.py DIRECTORY (vLLM 0.32.0 for CPUs)."""

import json
import sys
import tempfile
from pathlib import Path

from vllm import LLM, SamplingParams

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def main(directory: str) -> None:
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(LLAMA))
        engine = LLM(
            model=model,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=512,
            max_num_batched_tokens=64,
            max_num_seqs=8,
            enable_prefix_caching=False,
            profiler_config={
                "profiler": "torch",
                "torch_profiler_dir": directory,
                "torch_profiler_with_stack": False,
                "torch_profiler_record_shapes": True,
                "detailed_trace_annotation": True,
                "ignore_frontend": True,
            },
        )
    prompts = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (20, 100, 7)]
    sampling = [
        SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, detokenize=False)
        for n in (6, 4, 3)
    ]
    engine.generate(prompts, sampling, use_tqdm=False)
    engine.start_profile()
    engine.generate(prompts, sampling, use_tqdm=False)
    engine.stop_profile()


if __name__ == "__main__":
    main(sys.argv[1])
