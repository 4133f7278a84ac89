"""Train Hugging Face's Whisper by FSDP2: an encoder of sound and a decoder of text.

torchrun --nproc-per-node 4 benchmarks/jobs/whisper_fsdp2.py

The shape is Whisper-medium (arXiv:2212.04356). Sound and weights are random.
"""

import argparse
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import WhisperConfig, WhisperForConditionalGeneration

VOCABULARY, MELS, FRAMES = 51865, 80, 3000


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=24, help="of encoder and of decoder")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=224, help="tokens of text")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=MELS,
        d_model=args.width,
        encoder_layers=args.depth,
        decoder_layers=args.depth,
        encoder_attention_heads=args.width // 64,
        decoder_attention_heads=args.width // 64,
        encoder_ffn_dim=4 * args.width,
        decoder_ffn_dim=4 * args.width,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        model = WhisperForConditionalGeneration(config)
    model.train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in [*model.model.encoder.layers, *model.model.decoder.layers]:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    torch.manual_seed(dist.get_rank())
    sound = torch.randn(args.batch, MELS, FRAMES, device="cuda")
    words = torch.randint(0, VOCABULARY, (args.batch, args.length), device="cuda")
    events = StepEvents()
    for _ in range(args.steps):
        events.begin_step()
        loss = model(input_features=sound, labels=words).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    events.report()
    dist.destroy_process_group()


main()
