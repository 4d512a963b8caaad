"""Train a tiny random Qwen3-MoE of the transformers library expert-parallel, beside the same
training on one process.

    pip install 'tokenyard[transformers]'
    python examples/train_qwen3_moe.py
    torchrun --nproc-per-node 4 examples/train_qwen3_moe.py

Each rank has a batch of its own and its share of the experts; the other weights are sharded by
FSDP2. The process alone has every rank's batch. Both start from the same weights, and their losses
must agree at every step.
"""

import os
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from tokenyard import launch

RANKS, STEPS, SEQUENCES, LENGTH, VOCABULARY = 2, 5, 4, 32, 64


def train(model: torch.nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """``STEPS`` steps on the mean loss of ``batches``; returns that loss at each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(STEPS):
        loss = torch.stack([model(ids, labels=ids).loss for ids in batches]).mean()
        # FSDP2 averages gradients over the ranks, so each rank may take the mean of its own
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def batch_of(rank: int) -> torch.Tensor:
    """Sequences that count up in steps of their own, so that there is something to learn."""
    random = torch.Generator().manual_seed(rank)
    first, step = (torch.randint(1, VOCABULARY, (SEQUENCES, 1), generator=random) for _ in range(2))
    return (first + step * torch.arange(LENGTH)) % VOCABULARY


def main(device: torch.device) -> None:
    """The two trainings on this rank."""
    import transformers
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.distributed import DistributedConfig

    import tokenyard.integrations.transformers  # noqa: F401 (registers ep_implementation="tokenyard")

    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault(
        "LOCAL_RANK", str(device.index or 0)
    )  # from_pretrained takes the GPU of this number
    ranks, rank = dist.get_world_size(), dist.get_rank()
    batches = [batch_of(each).to(device) for each in range(ranks)]
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)  # the same weights on every rank
    alone = Qwen3MoeForCausalLM(config).to(device)
    everywhere = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="tokenyard")
    with TemporaryDirectory() as mine:
        folder = [mine]
        dist.broadcast_object_list(folder)  # that of rank 0, which alone saves
        alone.save_pretrained(folder[0])
        dist.barrier()
        parallel = Qwen3MoeForCausalLM.from_pretrained(folder[0], distributed_config=everywhere)
        dist.barrier()

    expected, losses = train(alone, batches), train(parallel, [batches[rank]])
    if rank == 0:
        print(
            f"{ranks} ranks on {device.type}, {config.num_experts // ranks} of "
            f"{config.num_experts} experts on each"
        )
        print("step  one process  expert-parallel  difference")
    for step, (want, loss) in enumerate(zip(expected, losses, strict=True)):
        dist.all_reduce(loss)
        difference = (loss / ranks - want).abs().item()
        if rank == 0:
            print(f"{step:4}  {want.item():11.6f}  {loss.item() / ranks:15.6f}  {difference:10.1e}")
        assert difference < 1e-4, difference


if __name__ == "__main__":
    device = "cuda" if torch.cuda.device_count() >= RANKS else "cpu"
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = (
            ""  # transformers would take a GPU, and there is not one for each rank
        )
    if launch.under_torchrun():
        with launch.joined_by_launcher(device) as here:
            main(here)
    else:
        launch.spawn(main, RANKS, device=device)
