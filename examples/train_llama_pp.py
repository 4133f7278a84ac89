"""Pipeline-parallel training of a Llama-shaped model with random weights, in torchrun style.

torchrun --nproc-per-node 2 examples/train_llama_pp.py --shape 8b --layers 8 --seq 2048
torchrun --nproc-per-node 2 examples/train_llama_pp.py --chunks 2      # interleaved 1F1B
capture run examples/train_llama_pp.py --pp 2 --ranks 0,1 -o stages/trace.et

Each rank runs forwards and backwards in the order of its schedule. A send runs on while the rank
computes, a receive is posted where its tensor is needed. Sends of one rank in one direction have a
group, and so an NCCL stream, of their own: none waits for another's receiver.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from train_llama import SHAPES
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss


class Stage(nn.Module):
    """A run of the model's layers, the first with the embedding, the last with head and loss."""

    def __init__(self, config, number, stages):
        super().__init__()
        model = LlamaForCausalLM(config)
        self.trunk, self.vocabulary = model.model, config.vocab_size
        self.first, self.last = number == 0, number == stages - 1
        self.head = model.lm_head if self.last else None
        if not self.first:
            self.trunk.embed_tokens = None
        if not self.last:
            self.trunk.norm = nn.Identity()

    def forward(self, given, labels):
        """Token ids or hidden states in, hidden states or the loss out."""
        named = {"input_ids": given} if self.first else {"inputs_embeds": given}
        hidden = self.trunk(**named, use_cache=False).last_hidden_state
        return ForCausalLMLoss(self.head(hidden), labels, self.vocabulary) if self.last else hidden


class Pipeline:
    """This rank's stages, and what passes between them and those of its neighbours."""

    def __init__(self, stages, like):
        self.stages, self.like = stages, like
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.groups = {}
        for back in (False, True):
            for source in range(self.ranks):
                target = (source + (-1 if back else 1)) % self.ranks
                self.groups[back, source] = dist.new_group(sorted({source, target}))
        self.held, self.sent = {}, []

    def forward(self, micro_batch, chunk, tokens):
        """Run a stage on a micro-batch, and send on what it gives."""
        stage = self.stages[chunk]
        given = tokens if stage.first else self.receive(back=False).requires_grad_()
        out = stage(given, tokens)
        self.held[micro_batch, chunk] = given, out
        if not stage.last:
            self.send(out.detach(), back=False)

    def backward(self, micro_batch, chunk, micro_batches):
        """Run a stage backward, and send on the gradient of what it was given."""
        stage, (given, out) = self.stages[chunk], self.held.pop((micro_batch, chunk))
        if stage.last:
            out.backward(torch.full_like(out, 1 / micro_batches))
        else:
            out.backward(self.receive(back=True))
        if not stage.first:
            self.send(given.grad, back=True)

    def send(self, tensor, *, back):
        """Send to the rank after, or the one before."""
        to = (self.rank + (-1 if back else 1)) % self.ranks
        work = dist.isend(tensor, to, group=self.groups[back, self.rank])
        self.sent.append((work, tensor))

    def receive(self, *, back):
        """Receive from the rank before, or the one after."""
        source = (self.rank + (1 if back else -1)) % self.ranks
        tensor = torch.empty_like(self.like)
        dist.irecv(tensor, source, group=self.groups[back, source]).wait()
        return tensor

    def finish(self):
        """Wait for all that was sent."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()


def actions(schedule, rank, ranks, micro_batches, chunks):
    """Yield what a rank does: whether it is a backward, the micro-batch and the chunk.

    Chunks take turns, `ranks` micro-batches each (Narayanan et al. 2021, figure 4).
    """
    total = micro_batches * chunks
    turn = ranks if chunks > 1 else micro_batches
    ahead = (chunks - 1) * ranks + (2 if chunks > 1 else 1) * (ranks - 1 - rank)
    ahead = total if schedule == "gpipe" else min(ahead, total)

    def action(back, step):
        number, place = divmod(step, turn)
        chunk = number % chunks
        return back, number // chunks * turn + place, chunks - 1 - chunk if back else chunk

    yield from (action(False, step) for step in range(ahead))
    for step in range(total):
        if step + ahead < total:
            yield action(False, step + ahead)
        yield action(True, step)


def main() -> None:
    """Train for a number of steps on random tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--schedule", choices=("1f1b", "gpipe"), default="1f1b")
    parser.add_argument("--chunks", type=int, default=1, help="stages of a rank")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages = ranks * args.chunks
    if args.layers % stages or (args.chunks > 1 and args.micro_batches % ranks):
        parser.error(f"{stages} stages must divide --layers, {ranks} ranks --micro-batches")
    torch.manual_seed(0)  # all ranks draw the same tokens
    config = LlamaConfig(
        num_hidden_layers=args.layers // stages,
        max_position_embeddings=args.seq,
        **SHAPES[args.shape],
    )
    with torch.device(device):
        own = [Stage(config, chunk * ranks + rank, stages) for chunk in range(args.chunks)]
    model = nn.ModuleList(own).to(dtype)
    hidden = torch.empty(args.batch, args.seq, config.hidden_size, device=device, dtype=dtype)
    pipeline = Pipeline(own, hidden)
    order = list(actions(args.schedule, rank, ranks, args.micro_batches, args.chunks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    shape = args.micro_batches, args.batch, args.seq
    for _ in range(args.steps):
        tokens = torch.randint(0, config.vocab_size, shape, device=device)
        optimizer.zero_grad()
        for back, micro_batch, chunk in order:
            if back:
                pipeline.backward(micro_batch, chunk, args.micro_batches)
            else:
                pipeline.forward(micro_batch, chunk, tokens[micro_batch])
        pipeline.finish()
        optimizer.step()


if __name__ == "__main__":
    main()
